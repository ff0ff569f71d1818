"""The report as one HTML page: what the terminal shows, and the front of time, memory and cost."""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from claw_plan.cli.pareto_chart import pareto_svg
from claw_plan.cli.report import ReportConsole, print_plan_report
from claw_plan.profiles.files import write_atomic
from claw_plan.profiles.units import format_bytes, format_ns

if TYPE_CHECKING:
    from claw_plan.planner.pareto import Point
    from claw_plan.planner.planning import PlanningResult

WIDTH = 130
"""Columns of the page."""


def write_html(result: PlanningResult, next_command: str, path: Path) -> None:
    """Writes the page; it needs no other file."""
    console = ReportConsole(file=io.StringIO(), record=True, width=WIDTH, highlight=False)
    print_plan_report(result, next_command, console)
    page = console.export_html(inline_styles=True)
    write_atomic(path, page.replace("</body>", f"{_front(result.front)}</body>"))


def _front(points: Sequence[Point]) -> str:
    if not points:
        return ""
    rows = "\n".join(
        f"<tr><td>{escape(point.scored.candidate.short())}</td>"
        f"<td>{format_ns(point.scored.step_time_ns)}</td><td>{format_bytes(point.peak_bytes)}</td>"
        f"<td>{point.nodes}</td></tr>"
        for point in points
    )
    return (
        "<h3>Time, memory and cost: plans that none found beats in all three</h3>\n"
        f"{pareto_svg(points)}\n<table cellpadding='4'>\n"
        "<tr><th>plan</th><th>step</th><th>memory</th><th>nodes paid</th></tr>\n"
        f"{rows}\n</table>\n"
    )

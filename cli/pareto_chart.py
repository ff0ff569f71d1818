"""The front of step time, memory and cost as an SVG: a dot a plan, its colour its nodes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from claw_plan.cli.scatter_chart import COLOURS
from claw_plan.profiles.units import format_bytes, format_ns

if TYPE_CHECKING:
    from claw_plan.planner.pareto import Point

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 360, 90, 50, 30
LEGEND = 150


def pareto_svg(points: Sequence[Point]) -> str:
    """The chart; each dot has its plan as a title."""
    nodes = sorted({point.nodes for point in points})
    colours = {count: COLOURS[index % len(COLOURS)] for index, count in enumerate(nodes)}
    longest = max(point.scored.step_time_ns for point in points) * 1.05
    largest = max(point.peak_bytes for point in points) * 1.05
    body = [*_axes(longest, largest)]
    for point in points:
        x = LEFT + point.scored.step_time_ns / longest * WIDTH
        y = TOP + HEIGHT - point.peak_bytes / largest * HEIGHT
        title = (
            f"{point.scored.candidate.short()}: {format_ns(point.scored.step_time_ns)}, "
            f"{format_bytes(point.peak_bytes)}, {point.nodes} nodes"
        )
        body.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{colours[point.nodes]}">'
            f"<title>{escape(title)}</title></circle>"
        )
    for index, count in enumerate(nodes):
        y = TOP + 16 * index
        body.append(f'<circle cx="{LEFT + WIDTH + 24}" cy="{y}" r="5" fill="{colours[count]}"/>')
        body.append(f'<text x="{LEFT + WIDTH + 36}" y="{y + 4}">nodes: {count}</text>')
    whole = (LEFT + WIDTH + LEGEND, TOP + HEIGHT + BOTTOM)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole[0]} {whole[1]}" '
            f'width="{whole[0]}" height="{whole[1]}" font-family="sans-serif" font-size="11">',
            *body,
            "</svg>",
        ]
    )


def _axes(longest: float, largest: float) -> list[str]:
    """Two axes from zero with five marks each."""
    floor = TOP + HEIGHT
    lines = [
        f'<path d="M{LEFT} {TOP} V{floor} H{LEFT + WIDTH}" fill="none" stroke="black"/>',
        f'<text x="{LEFT}" y="{TOP - 12}">memory of the fullest device</text>',
        f'<text x="{LEFT + WIDTH - 60}" y="{floor + 36}">step time</text>',
    ]
    for mark in range(1, 6):
        x, y = LEFT + WIDTH * mark / 5, floor - HEIGHT * mark / 5
        lines.append(f'<text x="{x:.0f}" y="{floor + 18}">{format_ns(longest * mark / 5)}</text>')
        lines.append(f'<text x="8" y="{y + 4:.0f}">{format_bytes(largest * mark / 5)}</text>')
    return lines

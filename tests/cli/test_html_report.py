"""The page holds the report and the front, and needs no other file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from claw_plan.cli.html_report import write_html
from claw_plan.planner.pareto import Point


def test_the_page_has_the_report_and_the_front(result: Any, tmp_path: Path) -> None:
    result.front = (Point(scored=result.best, nodes=1),)
    write_html(result, "claw-plan run plan.yaml", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("<svg") == 1 and page.rstrip().endswith("</html>")
    for said in ("Best plan", "40.0 ms", "nodes paid", "76.0 GiB", "claw-plan run plan.yaml"):
        assert said in page
    assert "src=" not in page and "href=" not in page


def test_without_a_front_there_is_no_chart(result: Any, tmp_path: Path) -> None:
    result.front = ()
    write_html(result, "next", tmp_path / "page.html")
    assert "<svg" not in (tmp_path / "page.html").read_text(encoding="utf-8")

"""The front as an SVG: a dot a plan, where its figures put it."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Any

from claw_plan.cli.pareto_chart import HEIGHT, LEFT, TOP, WIDTH, pareto_svg
from claw_plan.planner.pareto import Point


def test_dots_lie_where_their_figures_are(result: Any) -> None:
    fast = Point(scored=result.best, nodes=2)
    slow = Point(scored=replace(result.best, step_time_ns=2 * result.best.step_time_ns), nodes=1)
    text = pareto_svg([fast, slow])
    ET.fromstring(text)
    places = re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)" r="6"', text)
    xs = [float(x) - LEFT for x, _ in places]
    assert abs(xs[1] - WIDTH / 1.05) < 0.1 and abs(xs[0] - WIDTH / 2.1) < 0.1
    ys = {float(y) for _, y in places}
    assert ys == {round(TOP + HEIGHT - HEIGHT / 1.05, 1)}
    assert "nodes: 1" in text and "nodes: 2" in text

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console, RenderableType

from claw_plan.cli.report_charts import bar, memory_table, time_table
from claw_plan.planner.memory import StageMemory
from claw_plan.profiles.units import GIB


def text_of(parts: list[RenderableType], width: int = 100) -> str:
    text = io.StringIO()
    Console(file=text, width=width).print(*parts, sep="\n")
    return text.getvalue()


@pytest.mark.parametrize(
    ("fraction", "drawn"),
    [(0.0, "...."), (0.001, "#..."), (0.5, "##.."), (1.0, "####"), (1.7, "####")],
)
def test_a_bar_fills_its_share(fraction: float, drawn: str) -> None:
    assert bar(fraction, 4, ascii_only=True) == drawn


def test_parts_of_time_are_sorted_and_empty_ones_left_out(result: Any) -> None:
    lines = text_of(time_table(result.best, ascii_only=True)).splitlines()
    names = [line.split("  ")[0] for line in lines if "#" in line]
    assert names == [
        "compute",
        "data-parallel communication",
        "pipeline bubble",
        "optimizer",
        "host and step overhead",
    ]
    assert "75 %" in lines[0]


def stage(index: int, peak_gib: int) -> StageMemory:
    return StageMemory(
        stage=index,
        peak_bytes=peak_gib * GIB,
        capacity_bytes=80 * GIB,
        device_bytes=89 * GIB,
        parts={"gradients": GIB, "activations": (peak_gib - 1) * GIB},
    )


def test_stages_that_are_alike_share_a_line() -> None:
    stages = [stage(0, 40), stage(1, 60), stage(2, 60), stage(3, 60), stage(4, 8)]
    lines = text_of(memory_table(stages, ascii_only=True)).splitlines()
    rows = [line.split() for line in lines if line[:1].isdigit()]
    assert [row[0] for row in rows] == ["0", "1-3", "4"]
    assert rows[1][1:8] == ["60.0", "GiB", "80.0", "GiB", "#########...", "25", "%"]
    assert "activations 59.0 GiB, gradients 1.0 GiB" in lines[3]

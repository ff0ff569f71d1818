"""Where a step's time and a device's memory go, as bars beside the usual rules of thumb."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from rich import box
from rich.console import RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from claw_plan.cli.numbers import percent
from claw_plan.profiles.units import format_bytes, format_ns

if TYPE_CHECKING:
    from claw_plan.planner.memory import StageMemory
    from claw_plan.planner.score import Scored

COMPUTE_RULE, COMMUNICATION_RULE, HEADROOM_RULE = 0.85, 0.15, 0.10
"""The usual targets: compute over 85 % of a step, communication under 15 %, 10 % of memory
free. They are the user's own yardsticks, shown beside the figures; nothing decides by them."""

PART_NAMES = {
    "tp_comm_exposed": "tensor-parallel communication",
    "dp_comm_exposed": "data-parallel communication",
    "pp_comm_exposed": "pipeline communication",
    "pp_bubble": "pipeline bubble",
    "recompute": "recomputation",
    "overhead": "host and step overhead",
}
"""What a person reads for the parts whose keys do not speak for themselves."""


def bar(fraction: float, width: int, ascii_only: bool) -> str:
    """A bar that fills `fraction` of `width` columns; something above zero is never empty."""
    filled = min(width, max(1 if fraction > 0 else 0, round(fraction * width)))
    full, empty = ("#", ".") if ascii_only else ("█", "░")
    return full * filled + empty * (width - filled)


def time_table(scored: Scored, ascii_only: bool) -> list[RenderableType]:
    """Parts of the step, longest first, then utilisation beside the rules of thumb."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="green")
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    parts = sorted(scored.parts_ns.items(), key=lambda part: -part[1])
    for name, time_ns in parts:
        share = time_ns / scored.step_time_ns
        if time_ns:
            label = PART_NAMES.get(name, name.replace("_", " "))
            chart = bar(share, 24, ascii_only)
            table.add_row(escape(label), chart, format_ns(time_ns), percent(share))
    return [table, _utilisation(scored), Text(_sources(scored), style="dim")]


def _utilisation(scored: Scored) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    used, shared = scored.compute_utilisation, scored.communication_share
    table.add_row(
        "compute utilisation",
        _judged(used, used >= COMPUTE_RULE),
        f"rule of thumb: over {COMPUTE_RULE * 100:.0f} %",
    )
    table.add_row(
        "communication share",
        _judged(shared, shared <= COMMUNICATION_RULE),
        f"rule of thumb: under {COMMUNICATION_RULE * 100:.0f} %",
    )
    return table


def _sources(scored: Scored) -> str:
    """'kernel and collective times: measured 62 %, analytic 38 %'."""
    shares = sorted(scored.sources.items(), key=lambda share: -share[1])
    return "these times rest on: " + ", ".join(f"{name} {percent(part)}" for name, part in shares)


def _judged(value: float, is_good: bool) -> Text:
    return Text(percent(value), style="green" if is_good else "yellow")


def memory_table(stages: Sequence[StageMemory], ascii_only: bool) -> list[RenderableType]:
    """One line for each run of stages that are alike; headroom beside its rule of thumb."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("stage", no_wrap=True)
    table.add_column("peak", justify="right", no_wrap=True)
    table.add_column("usable", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("free", justify="right", no_wrap=True)
    table.add_column("holds", overflow="fold")
    alike = groupby(stages, key=lambda s: (s.peak_bytes, s.capacity_bytes, tuple(s.parts.items())))
    for _, group in alike:
        first, *rest = group
        label = f"{first.stage}-{rest[-1].stage}" if rest else str(first.stage)
        used = first.peak_bytes / first.capacity_bytes
        table.add_row(
            label,
            format_bytes(first.peak_bytes),
            format_bytes(first.capacity_bytes),
            bar(used, 12, ascii_only),
            percent(1 - used),
            _largest_first(first.parts),
        )
    note = (
        "usable is a device's memory less the headroom kept free "
        f"(rule of thumb: {HEADROOM_RULE * 100:.0f} %)"
    )
    fullest = max(stages, key=lambda stage: stage.peak_bytes / stage.capacity_bytes)
    low, high = fullest.shown.interval_bytes
    risk = (
        f"of the fullest, tools will show {format_bytes(low)} to {format_bytes(high)} (80 %), "
        f"with what the allocator keeps; it runs out with a probability of "
        f"{percent(fullest.out_of_memory_probability)}"
    )
    return [table, Text(note, style="dim"), Text(risk, style="dim")]


def _largest_first(parts: Mapping[str, int]) -> str:
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {format_bytes(size)}" for name, size in ordered if size)

"""What people and scripts get of `claw-plan replay`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from claw_plan.cli.numbers import percent
from claw_plan.cli.report import report_console, section
from claw_plan.profiles.units import format_bytes, format_ns, ms_from_ns

if TYPE_CHECKING:
    from claw_plan.executor.replay import CollectiveRow, Replay
    from claw_plan.executor.resimulate import Resimulation

MOST_ROWS = 20
"""Of collectives that are printed; JSON has all."""

CAUSES = {
    "compute": "it computes longer",
    "input": "its data loader takes longer",
    "communication": "it communicates in another group meanwhile",
    "host": "nothing ran on it that was recorded: its host program, or reading data",
    "late start": "it began the step later",
}


def replay_object(
    found: Replay, predicted: Resimulation | None, said: tuple[str, ...]
) -> dict[str, Any]:
    """What `claw-plan replay --json` prints; `resimulated` stands where it was asked for."""
    begin = min((step.start_ns for step in found.steps), default=0)
    value: dict[str, Any] = {
        "ranks": list(found.ranks),
        "steps": [
            {
                "step": step.number,
                "start_ms": ms_from_ns(step.start_ns - begin),
                "time_ms": ms_from_ns(step.time_ns),
                "time_ms_by_rank": {
                    str(rank): ms_from_ns(ns) for rank, ns in step.by_rank_ns.items()
                },
            }
            for step in found.steps
        ],
        "step_time_ms": ms_from_ns(found.step_time_ns),
        "step_time_range_ms": [ms_from_ns(ns) for ns in found.range_ns],
        "parts_ms": {name: ms_from_ns(ns) for name, ns in found.parts_ns.items()},
        "collectives": [_collective_object(row) for row in found.collectives],
        "stragglers": [
            {
                "rank": one.rank,
                "cause": one.cause,
                "late_ms": ms_from_ns(one.late_ns),
                "share": one.share,
            }
            for one in found.stragglers
        ],
        "warnings": [*found.warnings, *said],
    }
    if predicted is not None:
        value["resimulated"] = {
            "step_time_ms": ms_from_ns(predicted.step_time_ns),
            "unchanged_ms": ms_from_ns(predicted.unchanged_ns),
            "recorded_ms": ms_from_ns(predicted.recorded_ns),
        }
    return value


def _collective_object(row: CollectiveRow) -> dict[str, Any]:
    times = {
        "duration_ms": row.duration_ns,
        "transfer_ms": row.transfer_ns,
        "waiting_ms": row.waiting_ns,
    }
    return {
        "step": row.step,
        "op": row.op,
        "bytes": row.bytes,
        "count": row.count,
        "group_size": row.group_size,
        **{name: None if ns is None else ms_from_ns(ns) for name, ns in times.items()},
    }


def print_replay(
    found: Replay,
    predicted: Resimulation | None,
    said: tuple[str, ...],
    console: Console | None = None,
) -> None:
    """The typical step: its parts, collectives, stragglers, critical path; then the prediction."""
    console = console or report_console()
    section(console, _title(found), _parts(found))
    if found.collectives:
        section(console, "Collectives of the step, on each rank", _collectives(found))
    section(console, "Stragglers", _stragglers(found))
    if found.parts_ns:
        section(console, "Critical path", _critical(found))
    if predicted is not None:
        section(console, "Simulated again", _prediction(predicted))
    warnings = [*found.warnings, *said]
    if warnings:
        section(console, "To know", Text("\n".join(warnings)))


def _title(found: Replay) -> str:
    times = next(s.by_rank_ns for s in found.steps if s.number == found.typical)
    low, high = min(times.values()), max(times.values())
    spread = "" if low == high else f", {format_ns(low)} to {format_ns(high)} over ranks"
    world = f" of {found.world_size}" if found.world_size else ""
    ranks = f"ranks {len(found.ranks)}{world}"
    low_ns, high_ns = found.range_ns
    scatter = "" if low_ns == high_ns else f" of {format_ns(low_ns)} to {format_ns(high_ns)}"
    steps = f"{len(found.steps)} step" + ("s" if len(found.steps) > 1 else "") + scatter
    return f"{ranks}, {steps}; step {found.typical}: {format_ns(found.step_time_ns)}{spread}"


def _parts(found: Replay) -> Table:
    table = _table("part, mean over ranks", "time", "share")
    for name, ns in sorted(found.parts_ns.items(), key=lambda item: -item[1]):
        table.add_row(
            name.replace("_", " "), format_ns(ns), percent(ns / max(1, found.step_time_ns))
        )
    if found.utilisation and found.parts_ns:
        low, high = min(found.utilisation.values()), max(found.utilisation.values())
        table.add_row("", "", "")
        table.add_row("devices compute", "", f"{percent(low)} to {percent(high)}")
    return table


def _collectives(found: Replay) -> Table:
    table = _table("operation", "size", "ranks", "calls", "transfer", "waiting", "seen")
    rows = [row for row in found.collectives if row.step == found.typical] or found.collectives
    for row in rows[:MOST_ROWS]:
        times = [
            "-" if ns is None else format_ns(ns)
            for ns in (row.transfer_ns, row.waiting_ns, row.duration_ns)
        ]
        size = "-" if row.bytes is None else format_bytes(row.bytes)
        group = "-" if row.group_size is None else str(row.group_size)
        table.add_row(row.op, size, group, str(row.count), *times)
    if len(rows) > MOST_ROWS:
        table.add_row(f"and {len(rows) - MOST_ROWS} more", *[""] * 6)
    return table


def _stragglers(found: Replay) -> Text:
    if len(found.ranks) < 2:
        return Text("One rank alone does not show for whom the others wait.")
    lines = [
        f"rank {one.rank}: the others wait {format_ns(one.late_ns)} a step for it "
        f"({percent(one.share)}); {CAUSES[one.cause]}"
        for one in found.stragglers
    ]
    return Text("\n".join(lines) or "none: no rank is regularly later than the others")


def _critical(found: Replay) -> Table:
    from claw_plan.executor.resimulate import critical_parts

    table = _table("what the step's duration consists of", "time", "share")
    parts = critical_parts(found)
    whole = sum(part.ns for part in parts)
    for part in parts[:MOST_ROWS]:
        name = "host (no kernel ran)" if part.kind == "host" else part.kind.replace("_", " ")
        table.add_row(f"rank {part.rank} {name}", format_ns(part.ns), percent(part.ns / whole))
    return table


def _prediction(predicted: Resimulation) -> Table:
    table = Table.grid(padding=(0, 2))
    off = predicted.unchanged_ns / predicted.recorded_ns - 1
    gain = predicted.step_time_ns / predicted.unchanged_ns - 1
    table.add_row("recorded", format_ns(predicted.recorded_ns), "")
    table.add_row(
        "simulated as it was", format_ns(predicted.unchanged_ns), percent(off, sign=True)
    )
    table.add_row("with the change", format_ns(predicted.step_time_ns), percent(gain, sign=True))
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column(escape(first), overflow="fold")
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table

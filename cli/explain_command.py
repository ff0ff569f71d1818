"""`claw-plan explain`: why a plan is what it is, and what would make it better."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from claw_plan.cli.json_output import json_text, split_object
from claw_plan.cli.numbers import percent
from claw_plan.cli.options import FILE, memory_headroom, seconds
from claw_plan.cli.progress import ProgressBar
from claw_plan.cli.report import report_console, section
from claw_plan.cli.streams import stdout_kept_clean
from claw_plan.profiles.units import format_bytes, format_ns, gib, ms_from_ns

if TYPE_CHECKING:
    from claw_plan.planner.explanation import Against, Explanation
    from claw_plan.planner.neighbours import Neighbour
    from claw_plan.planner.what_if import WhatIf


@click.command()
@click.argument("plan_file", metavar="PLAN", type=FILE)
@click.option(
    "--against", type=FILE, metavar="PLAN", help="Another plan: the difference by part of a step."
)
@click.option("--profile", type=FILE, metavar="F", help="Measured times from 'claw-plan learn'.")
@memory_headroom
@click.option(
    "--time-limit",
    type=float,
    callback=seconds,
    metavar="S",
    help="Stop each search on other hardware after so many seconds.",
)
@click.option("--no-replan", is_flag=True, help="Leave out the searches on other hardware.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON (docs/json.md).")
def explain(
    plan_file: Path,
    against: Path | None,
    profile: Path | None,
    memory_headroom: float,
    time_limit: float | None,
    no_replan: bool,
    as_json: bool,
) -> None:
    """Say why PLAN, what binds it, why not its neighbours, and what hardware would buy."""
    with stdout_kept_clean(), ProgressBar() as progress:
        progress("loading", 0.0)
        from claw_plan.planner import explanation

        found = explanation.explain(
            plan_file,
            against=against,
            profile=profile,
            memory_headroom=memory_headroom,
            time_limit_s=time_limit,
            replan=not no_replan,
            progress=progress,
        )
    if as_json:
        click.echo(json_text(explanation_object(found)), nl=False)
    else:
        print_explanation(found)


def explanation_object(found: Explanation) -> dict[str, Any]:
    """What `claw-plan explain --json` prints."""
    binding = found.binding
    return {
        **split_object(found.scored),
        "critical_path_ms": _in_ms(binding.parts_ns),
        "binds": binding.binds,
        "link": binding.link or None,
        "fullest_stage": {"stage": binding.stage, "of_usable": binding.fullest},
        "neighbours": [_neighbour_object(each) for each in found.neighbours],
        "tensor_parallel": list(found.splits),
        "overlapping": list(found.overlapping),
        "what_ifs": [_what_if_object(each) for each in found.what_ifs],
        "against": _against_object(found.against) if found.against else None,
    }


def _in_ms(parts_ns: Any) -> dict[str, float]:
    return {name: ms_from_ns(ns) for name, ns in parts_ns.items()}


def _neighbour_object(each: Neighbour) -> dict[str, Any]:
    return {
        "knob": each.knob,
        "value": each.value,
        "candidate": dataclasses.asdict(each.candidate),
        "step_time_ms": None if each.step_time_ns is None else ms_from_ns(each.step_time_ns),
        "missing_gib": gib(each.missing_bytes),
        "stage": each.stage,
        "refused": each.refused or None,
    }


def _what_if_object(each: WhatIf) -> dict[str, Any]:
    return {
        "change": each.change,
        "candidate": dataclasses.asdict(each.candidate) if each.candidate else None,
        "step_time_ms": None if each.step_time_ns is None else ms_from_ns(each.step_time_ns),
        "gap": each.gap,
    }


def _against_object(other: Against) -> dict[str, Any]:
    return {
        "name": other.name,
        **split_object(other.scored),
        "difference_ms": _in_ms(other.parts_ns),
    }


def print_explanation(found: Explanation, console: Console | None = None) -> None:
    """Prints the whole explanation."""
    console = console or report_console()
    scored = found.scored
    console.print(Text(f"{found.name}: {scored.candidate.short()}", style="bold green"))
    console.print(Text(f"{format_ns(scored.step_time_ns)} a step"))
    section(console, "What binds (critical path)", *_binding(found))
    if found.overlapping:
        section(console, "Steps that overlap", *map(Text, found.overlapping))
    if found.splits:
        section(console, "What tensor parallelism divides", *map(Text, found.splits))
    section(console, "One knob changed alone (re-scored)", _neighbour_table(found))
    if found.what_ifs:
        section(console, "What hardware would buy (planned anew)", _what_if_table(found.what_ifs))
    if found.against:
        section(console, f"Against {found.against.name}", *_difference(found))


def _binding(found: Explanation) -> Iterable[Table | Text]:
    binding, table = found.binding, Table.grid(padding=(0, 2))
    for name, ns in binding.parts_ns.items():
        table.add_row(name, format_ns(ns), percent(ns / found.scored.step_time_ns))
    yield table
    link = f"; of the traffic, {binding.link} counts most" if binding.link else ""
    yield Text(
        f"{binding.binds} binds{link}; stage {binding.stage} fills {percent(binding.fullest)} of "
        "the memory it may use"
    )


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, heading in enumerate(headings):
        is_text = index == 0 or heading == "plan"
        table.add_column(heading, justify="left" if is_text else "right", overflow="fold")
    return table


def _neighbour_table(found: Explanation) -> Table:
    table, own = _table("change", "step", "slower", "memory"), found.scored.step_time_ns
    for each in found.neighbours:
        change = each.change
        if each.step_time_ns is None:
            table.add_row(change, "-", "-", Text(each.refused, style="dim"))
            continue
        short = f"{format_bytes(each.missing_bytes)} short on stage {each.stage}"
        table.add_row(
            change,
            format_ns(each.step_time_ns),
            percent(each.step_time_ns / own - 1, sign=True),
            Text(short, style="red") if each.missing_bytes else "fits",
        )
    return table


def _what_if_table(what_ifs: Iterable[WhatIf]) -> Table:
    table, base = _table("change", "step", "faster", "plan"), None
    for each in what_ifs:
        if each.step_time_ns is None or each.candidate is None:
            table.add_row(each.change, "-", "-", "nothing fits")
            continue
        base = base or each.step_time_ns
        gap = f", not proven: up to {percent(each.gap)} better" if each.gap else ""
        table.add_row(
            each.change,
            format_ns(each.step_time_ns),
            percent(base / each.step_time_ns - 1, sign=True),
            escape(each.candidate.short() + gap),
        )
    return table


def _difference(found: Explanation) -> Iterable[Table | Text]:
    other = found.against
    assert other is not None
    table = Table.grid(padding=(0, 2))
    for name, ns in other.parts_ns.items():
        if ns:
            table.add_row(name, f"{'+' if ns > 0 else '-'}{format_ns(abs(ns))}")
    whole = other.scored.step_time_ns - found.scored.step_time_ns
    table.add_row("together", f"{'+' if whole > 0 else '-'}{format_ns(abs(whole))}", style="bold")
    yield Text(f"{other.scored.candidate.short()}: {format_ns(other.scored.step_time_ns)} a step")
    yield table

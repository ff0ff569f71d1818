"""What people read after `run`, `verify` and `learn`: measured beside predicted."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from claw_plan.cli.numbers import format_count, percent
from claw_plan.cli.report import report_console, section
from claw_plan.profiles.units import GIB, NS_PER_MS, format_bytes, format_ns

if TYPE_CHECKING:
    from claw_plan.executor.learn import Learned
    from claw_plan.executor.run_files import RunResult
    from claw_plan.executor.verify import VerifyResult


def print_run(result: RunResult, console: Console | None = None) -> None:
    """Loss, speed and memory of a run beside what the plan predicted."""
    console = console or report_console()
    section(console, f"{len(result.losses)} steps on {result.data}", _loss_and_speed(result))
    section(console, "Measured against predicted", _against_prediction(result))
    if result.unlike_plan:
        console.print(Text(f"not the plan's steps: {result.unlike_plan}", style="yellow"))
    if result.traffic:
        section(console, "Collectives and messages of a step", _traffic(result))
    if result.parts_ms:
        parts = ", ".join(
            f"{name} {format_ns(part * NS_PER_MS)}" for name, part in result.parts_ms.items()
        )
        section(
            console, "The median recorded step, on the rank that computes longest", Text(parts)
        )
    section(console, "Next", Text(f"claw-plan learn {shlex.quote(result.run)}", style="bold"))


def _loss_and_speed(result: RunResult) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row("loss", f"{result.losses[0]:.4f} at first, {result.losses[-1]:.4f} at last")
    speed = f"{format_count(result.samples_per_s)} samples/s"
    if result.tokens_per_s is not None:
        speed += f", {format_count(result.tokens_per_s)} tokens/s"
    table.add_row("speed", speed)
    table.add_row("record", escape(result.run))
    if result.algorithms:
        used = [
            f"{name} for {format_bytes(int(size))}" for size, name in result.algorithms.items()
        ]
        table.add_row("all-reduces", ", ".join(used))
    if result.checkpoint:
        table.add_row("checkpoint", escape(result.checkpoint))
    return table


def _traffic(result: RunResult) -> Text:
    """What all ranks moved, and the first difference from the plan's prediction."""
    from claw_plan.planner.traffic import count_ranks  # --help must not wait for what it brings

    sent = [row for row in result.traffic if row["op"] != "recv"]
    calls = sum(row["calls"] * count_ranks(row["ranks"]) for row in sent)
    size = sum(row["bytes"] * count_ranks(row["ranks"]) for row in sent)
    moved = f"{calls} calls of all ranks with {format_bytes(size)}"
    found = result.traffic_differences
    if not found:
        return Text(moved)
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    return Text(f"{moved}, not as predicted: {found[0]}{more}", style="yellow")


def _against_prediction(result: RunResult) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("measured", "predicted", "off by"):
        table.add_column(heading, justify="right", no_wrap=True)
    step = result.step_time_ms
    spread = f"{format_ns(step['min'] * NS_PER_MS)} to {format_ns(step['max'] * NS_PER_MS)}"
    predicted = result.predicted_step_time_ms
    table.add_row(
        f"step, median ({spread})",
        format_ns(step["median"] * NS_PER_MS),
        "-" if predicted is None else format_ns(predicted * NS_PER_MS),
        "-"
        if predicted is None or result.unlike_plan
        else percent(predicted / step["median"] - 1, sign=True),
    )
    count = len(result.peak_memory_bytes)
    for rank, size in enumerate(result.peak_memory_bytes):
        stages = result.predicted_memory_gib
        peak = stages[rank * len(stages) // count] if stages else None
        table.add_row(
            f"peak memory, rank {rank}",
            format_bytes(size),
            "-" if peak is None else format_bytes(peak * GIB),
            "-" if peak is None or not size else percent(peak * GIB / size - 1, sign=True),
        )
    return table


def print_verification(result: VerifyResult, console: Console | None = None) -> None:
    """Whether the plan trains like one process, and by how much it differs."""
    console = console or report_console()
    verdict = (
        Text("The plan trains like one process.", style="bold green")
        if result.ok
        else Text(f"The plan differs: {result.first_difference}", style="bold red")
    )
    table = Table.grid(padding=(0, 2))
    table.add_row("losses in fp64", f"differ by at most {result.fp64_max_loss_diff:.1e}")
    table.add_row("parameters in fp64", f"differ by at most {result.fp64_max_param_diff:.1e}")
    table.add_row("losses in fp32", f"differ by at most {result.fp32_max_loss_diff:.1e}")
    console.print(verdict)
    section(console, f"Compared over {result.steps} steps", table)


def print_learned(learned: Learned, console: Console | None = None) -> None:
    """Each run's measured step beside its prediction before and after learning."""
    console = console or report_console()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("plan", overflow="fold")
    for heading in ("measured", "before", "off by", "after", "off by"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in learned.runs:
        errors = [
            "-" if run.unlike_plan else percent(run.error(told_ns), sign=True)
            for told_ns in (run.before_ns, run.after_ns)
        ]
        table.add_row(
            escape(run.knobs),
            format_ns(run.measured_ns),
            format_ns(run.before_ns),
            errors[0],
            format_ns(run.after_ns),
            errors[1],
        )
    section(console, f"Measured against predicted steps, by run: {len(learned.runs)}", table)
    before, after = learned.median_error(after=False), learned.median_error(after=True)
    summary = "No run's steps were its plan's, so that constants stay as they were. "
    if before is not None and after is not None:
        summary = (
            f"The median error was {percent(before)} and is {percent(after)} for these runs. "
        )
    summary += f"{learned.measurements} new measurements are in {learned.profile}."
    section(console, "Learned", Text(summary))
    again = f"plan again with --profile {shlex.quote(str(learned.profile))}"
    section(console, "Next", Text(again, style="bold"))

"""`claw-plan analyze`: what each pipeline stage of a model computes, holds and sends."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from claw_plan.cli.json_output import json_text
from claw_plan.cli.numbers import format_count, percent
from claw_plan.cli.options import COUNT, FILE
from claw_plan.cli.report import report_console, section
from claw_plan.cli.streams import say, stdout_kept_clean
from claw_plan.profiles.units import format_bytes, format_ns
from claw_plan.profiles.work import PRECISIONS

if TYPE_CHECKING:
    from claw_plan.planner.partition_analyzer import PartitionReport


@click.command()
@click.argument("model", type=FILE)
@click.option("--pp", type=COUNT, default=1, show_default=True, help="Pipeline stages.")
@click.option("--tp", type=COUNT, default=1, show_default=True, help="Tensor-parallel degree.")
@click.option("--microbatch-size", type=COUNT, default=1, show_default=True, metavar="N")
@click.option("--seq-len", type=COUNT, metavar="N", help="Tokens of a sample.")
@click.option(
    "--precision", type=click.Choice(list(PRECISIONS)), default="bf16", show_default=True
)
@click.option("--cluster", "-c", metavar="C", help="Adds times and peaks on such devices.")
@click.option("--build", metavar="EXPR", help="Expression that makes the model.")
@click.option("--inputs", metavar="TEXT", help="The forward's inputs.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON (docs/json.md).")
def analyze(model: Path, as_json: bool, **settings: Any) -> None:
    """Show what each stage of MODEL computes, holds and sends, and how uneven the stages are."""
    with stdout_kept_clean():
        from claw_plan.planner import partition_analyzer

        report = partition_analyzer.partition_analyzer(model, **settings).report()
    if as_json:
        click.echo(json_text(dataclasses.asdict(report)), nl=False)
    else:
        print_analysis(report)
        if settings["cluster"] is None:
            say("--cluster C adds times and peaks of memory")


def print_analysis(report: PartitionReport, console: Console | None = None) -> None:
    """Prints a line for each stage, then how uneven they are."""
    from claw_plan.planner.partition_analyzer import unit_ranges

    console = console or report_console()
    console.print(
        Text(
            f"{report.name}: pp={report.pp}, tp={report.tp}, microbatch {report.microbatch_size}",
            style="bold green",
        )
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("stage", overflow="fold")
    for heading in ("parameters", "FLOPs", "kept", "sent", "exchanged", "time", "peak"):
        table.add_column(heading, justify="right", no_wrap=True)
    for stage in report.stages:
        table.add_row(
            f"{stage.stage}: {unit_ranges(stage.units)}",
            format_count(stage.parameters),
            format_count(stage.flops),
            *(format_bytes(b) for b in (stage.kept_bytes, stage.sent_bytes)),
            format_bytes(stage.exchanged_bytes),
            "-" if stage.time_ns is None else format_ns(stage.time_ns),
            "-" if stage.peak_bytes is None else format_bytes(stage.peak_bytes),
        )
    section(console, "One rank, one microbatch", table)
    by = "operations" if report.stages[0].time_ns is None else "time"
    section(
        console,
        "Balance",
        Text(
            f"by {by}: the largest stage is {percent(report.imbalance)} above the mean (stage "
            f"{report.critical_stage}), the coefficient of variation is {report.variation:.3f}"
        ),
    )

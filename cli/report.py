"""The report people read: a `PlanningResult` as text, at any width, in colour on a terminal.

Order: the best plan, the others beside it, where its time goes, where its memory goes, why not
another way, what was assumed, how sure the answer is, and the next command to type.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from claw_plan.cli.numbers import format_count, percent
from claw_plan.cli.report_charts import memory_table, time_table
from claw_plan.profiles.units import format_bytes, format_ns

if TYPE_CHECKING:
    from claw_plan.planner.baseline import Baseline
    from claw_plan.planner.planning import PlanningResult
    from claw_plan.planner.score import Scored
    from claw_plan.planner.search import SearchReport
    from claw_plan.profiles.cluster import Cluster

PIPE_WIDTH = 100
"""Columns when stdout is no terminal: rich would assume 80, which folds more than files need."""


LEAST_WIDTH = 72
"""A narrower terminal wraps the lines; figures that were cut could not be read at all."""


class ReportConsole(Console):
    """A console that leaves a closed pipe to `streams`; rich would exit with 1, "no plan"."""

    def on_broken_pipe(self) -> None:
        """Raised anew, as rich calls this while it handles the BrokenPipeError."""
        raise BrokenPipeError


def report_console() -> Console:
    """The console on stdout; plain text without colour when it is no terminal."""
    console = ReportConsole(highlight=False)
    if not console.is_terminal and "COLUMNS" not in console._environ:
        return ReportConsole(highlight=False, width=PIPE_WIDTH)
    if console.width < LEAST_WIDTH:
        return ReportConsole(highlight=False, width=LEAST_WIDTH)
    return console


def print_plan_report(
    result: PlanningResult, next_command: str, console: Console | None = None
) -> None:
    """Prints the whole report."""
    console = console or report_console()
    console.print(_headline(result))
    console.print(_best_panel(result.best, "Best plan"))
    section(console, "Beside the others", _comparison_table(result))
    if result.given is not None:
        _bullets(console, f"Your setting, {result.given.name}", result.given.notes)
    _print_charts(console, result.best)
    _bullets(console, "Why not another way", result.reasons)
    _bullets(console, "Assumed", result.assumptions)
    section(console, "Search", Text(search_sentence(result.search, result.objective)))
    section(console, "Next", Text(next_command, style="bold"))


def print_simulation(scored: Scored, name: str, console: Console | None = None) -> None:
    """Prints the prediction for one plan."""
    console = console or report_console()
    console.print(_best_panel(scored, f"Prediction for {name}"))
    _print_charts(console, scored)


def _print_charts(console: Console, scored: Scored) -> None:
    section(console, "Time of one step", *time_table(scored, console.options.ascii_only))
    section(
        console,
        "Memory of one device, by pipeline stage",
        *memory_table(scored.memory, console.options.ascii_only),
    )


def section(console: Console, title: str, *content: RenderableType) -> None:
    """Prints a title and, indented, what stands under it."""
    console.print()
    console.print(Text(title, style="bold cyan"))
    for part in content:
        console.print(Padding(part, (0, 0, 0, 2), expand=False))


def _bullets(console: Console, title: str, sentences: Iterable[str]) -> None:
    table = Table.grid(padding=(0, 1))
    for sentence in sentences:
        table.add_row("-", escape(sentence))
    if table.row_count:
        section(console, title, table)


def _headline(result: PlanningResult) -> Text:
    graph = result.graph
    parts = [graph.name, f"{format_count(graph.num_parameters)} parameters"]
    if graph.seq_len is not None:
        parts.append(f"{graph.seq_len} tokens a sample")
    parts.append(f"global batch {result.plan.training.global_batch}")
    parts.append(result.plan.training.precision)
    return Text(f"{', '.join(parts)}\non {describe_cluster(result.cluster)}")


def describe_cluster(cluster: Cluster) -> str:
    """'two-nodes: 2 x dgx-a100-80gb, 16 x A100-SXM4-80GB'."""
    nodes: dict[str, int] = {}
    devices: dict[str, int] = {}
    for node in cluster.nodes:
        nodes[node.type] = nodes.get(node.type, 0) + 1
        devices[node.device.name] = devices.get(node.device.name, 0) + node.device_count
    counted = [f"{count} x {name}" for name, count in [*nodes.items(), *devices.items()]]
    return f"{cluster.name}: {', '.join(counted)}"


def _best_panel(scored: Scored, title: str) -> Panel:
    text = Text()
    text.append(scored.short + "\n", style="bold green")
    text.append(f"{format_ns(scored.step_time_ns)} a step", style="bold")
    text.append(f", {format_count(scored.samples_per_s)} samples/s")
    if scored.tokens_per_s is not None:
        text.append(f", {format_count(scored.tokens_per_s)} tokens/s")
    if scored.mfu is not None:
        text.append(f", MFU {percent(scored.mfu)}")
    fullest = max(scored.memory, key=lambda stage: stage.peak_bytes / stage.capacity_bytes)
    text.append(
        f"\n{scored.num_devices} devices, at most {format_bytes(fullest.peak_bytes)} "
        f"of {format_bytes(fullest.capacity_bytes)} usable on each"
    )
    return Panel(text, title=title, title_align="left", border_style="green")


def _comparison_table(result: PlanningResult) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("plan", ratio=1, overflow="fold")
    for heading in ("step", "slower", "per s", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    _add_scored(table, "best", result.best, result.best)
    for rank, scored in enumerate(result.alternatives, start=2):
        _add_scored(table, str(rank), scored, result.best)
    for name, baseline in result.baselines.items():
        if isinstance(baseline, str):
            table.add_row(escape(name), Text(baseline, style="dim"), "-", "-", "-", "-")
        else:
            _add_scored(table, name, baseline, result.best)
    if result.given is not None:
        _add_given(table, result.given, result.best)
    return table


def _add_given(table: Table, given: Baseline, best: Scored) -> None:
    """The user's own setting, its verdict in place of a time where it does not fit."""
    if given.scored is None:
        table.add_row("yours", Text(given.refused, style="dim"), "-", "-", "-", "-")
    elif given.verdict:
        peak = max(stage.peak_bytes for stage in given.scored.memory)
        split = Text(f"{given.scored.candidate.short()}: {given.verdict}", style="red")
        table.add_row("yours", split, "-", "-", "-", format_bytes(peak))
    else:
        _add_scored(table, "yours", given.scored, best)


def _add_scored(table: Table, name: str, scored: Scored, best: Scored) -> None:
    slower = scored.step_time_ns / best.step_time_ns - 1
    if scored.tokens_per_s is not None:
        rate = f"{format_count(scored.tokens_per_s)} tok"
    else:
        rate = f"{format_count(scored.samples_per_s)} smp"
    table.add_row(
        escape(name),
        escape(scored.short),
        format_ns(scored.step_time_ns),
        "" if scored is best else percent(slower, sign=True),
        rate,
        format_bytes(max(stage.peak_bytes for stage in scored.memory)),
        style="bold" if scored is best else "",
    )


def search_sentence(search: SearchReport, objective: str = "step_time") -> str:
    """How many ways there are, what excluded them, and how sure the answer is."""
    knobs = ", ".join(f"{name} {count}" for name, count in search.space_per_knob.items())
    sure = (
        f"The best is proven: no other way in this space has {_less(objective)}"
        if search.optimal
        else f"Not proven: the best of all ways may be up to {percent(search.gap)} "
        f"{'faster' if objective == 'step_time' else 'better'}, "
        f"{search.left:,} were not looked at"
    )
    return (
        f"{search.space:,} ways ({knobs}). {search.bound_pruned:,} cannot be "
        f"{'faster' if objective == 'step_time' else 'better'}, "
        f"{search.memory_pruned:,} do not fit, {search.simulated:,} were simulated "
        f"in {search.seconds:.1f} s. {sure}."
    )


def _less(objective: str) -> str:
    if objective == "step_time":
        return "a shorter simulated step"
    if objective == "memory":
        return "a shorter simulated step in the memory that is left to it"
    return f"less of the objective {objective!r}, by simulated step times"

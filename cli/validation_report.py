"""Scores of published rows as text: every row, then families, then what could not be expressed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import click
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from claw_plan.cli.report import report_console
from claw_plan.cli.validation_scores import (
    COLLECTIVE,
    HEADLINE,
    KERNEL,
    MEMORY,
    STEP_TIME,
    TIMES,
    UNITS,
    RowScore,
    Scores,
    assumed,
    families,
    flagged,
    memory,
    overall,
    reasons,
)
from claw_plan.profiles.accuracy import Errors

TITLES = {
    STEP_TIME: "Step times",
    KERNEL: "Kernel times",
    COLLECTIVE: "Collective times",
    MEMORY: "Memory",
}

_COLUMNS = ("n", "MAPE", "median", "p90", "bias", "pairs", "right", "regret", "near best")


def print_validation(scores: Scores, console: Console | None = None) -> None:
    """Prints all rows and the tables."""
    console = console or report_console()
    _print_rows(scores.rows)
    for quantity in TIMES:
        if scores.of(quantity):
            console.print(families_table(scores, quantity))
    _print_memory(scores, console)
    _print_flags(scores, console)
    if scores.not_expressed:
        console.print(_not_expressed_table(scores))
        for other in scores.not_expressed:
            click.echo(f"not expressed  {other.id}: {other.reason}")


def _print_rows(rows: Iterable[RowScore]) -> None:
    """One line each: thousands of rows are too many for a table that measures its columns."""
    for row in rows:
        unit = UNITS[row.quantity]
        marks = [] if row.counts == HEADLINE else [row.counts]
        marks += row.flags
        note = "  (" + ", ".join(marks) + ")" if marks else ""
        click.echo(
            f"{row.id}  {row.quantity}  predicted {figure(row.pair.predicted)} {unit}  "
            f"measured {figure(row.pair.measured)} {unit}  {row.error_pct:+.1f} %{note}"
        )


def figure(value: float) -> str:
    """A figure of four digits, without an exponent."""
    magnitude = math.floor(math.log10(abs(value))) if value else 0
    digits = min(6, max(0, 3 - magnitude))
    return f"{value:,.{digits}f}"


def families_table(scores: Scores, quantity: str) -> Table:
    """Errors of one quantity by family, with the totals below."""
    title = f"Errors of {TITLES[quantity].lower()}, in %"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    table.add_column("family", overflow="fold")
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for family, errors in families(scores, (quantity,)).items():
        table.add_row(escape(family), *cells(errors))
    table.add_section()
    for name, errors in totals(scores, quantity):
        table.add_row(name, *cells(errors), style="bold")
    return table


def totals(scores: Scores, quantity: str) -> list[tuple[str, Errors]]:
    """The lines below a table of families."""
    if quantity != STEP_TIME:
        return [("all", overall(scores, (quantity,)))]
    return [
        ("complete, trust A or B", overall(scores, (quantity,))),
        ("something assumed", assumed(scores)),
    ]


def cells(errors: Errors) -> list[str]:
    """The statistics as people read them; '-' where nothing can be said."""
    return [
        str(errors.n),
        number(errors.mape),
        number(errors.median),
        number(errors.p90),
        number(errors.bias, sign=True),
        str(errors.pairs) if errors.pairs else "-",
        number(errors.pairs_right_pct),
        number(errors.regret_pct),
        number(errors.picks_near_best_pct),
    ]


def number(value: float | None, *, sign: bool = False) -> str:
    """A percentage with one digit."""
    return "-" if value is None else f"{value:{'+' if sign else ''}.1f}"


def _print_memory(scores: Scores, console: Console) -> None:
    errors, too_low, verdicts = memory(scores)
    if errors.n:
        console.print(
            f"Memory: {errors.n} figures, MAPE {number(errors.mape)}, median "
            f"{number(errors.median)}, p90 {number(errors.p90)}, bias "
            f"{number(errors.bias, sign=True)} %; more than 5 % too low: {number(too_low)} %"
        )
    if verdicts.out_of_memory or (errors.n and verdicts.ran):
        console.print(
            f"Out of memory: {verdicts.told} of {verdicts.out_of_memory} told, "
            f"{verdicts.false_alarms} false alarms among {verdicts.ran} runs that fitted"
        )


def _print_flags(scores: Scores, console: Console) -> None:
    """How many rows carry which flag; the rows themselves are marked with them."""
    counts = Counter(flag for row in flagged(scores) for flag in row.flags)
    for flag, count in counts.most_common():
        console.print(f"Flagged {escape(flag)}: {count} rows, scored like the others")


def _not_expressed_table(scores: Scores) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="Not expressed", title_justify="left")
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("reason", overflow="fold")
    for reason, count in reasons(scores).items():
        table.add_row(str(count), escape(reason))
    return table

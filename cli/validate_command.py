"""`claw-plan validate`: predicts published measurements and says how far off it is."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from claw_plan.cli.json_output import json_text
from claw_plan.cli.options import FILE, check_can_write
from claw_plan.cli.progress import ProgressBar
from claw_plan.cli.streams import say, stdout_kept_clean
from claw_plan.profiles.errors import InputError, near_matches

if TYPE_CHECKING:
    from claw_plan.cli.validation_scores import Scores
    from claw_plan.profiles.published_rows import Published

# What reads, predicts and counts is imported when the command runs: --help must not wait for it.

Progress = Callable[[str, float], None]


@click.command()
@click.argument("files", nargs=-1, required=True, type=FILE, metavar="FILE...")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON (docs/json.md).")
@click.option("--families", metavar="A,B", help="Only rows of these families.")
@click.option(
    "--rows", multiple=True, metavar="ID", help="Only these rows (repeat it; * stands for any)."
)
@click.option(
    "--trainers", type=FILE, metavar="F", help="Constants of trainers, instead of the program's."
)
@click.option(
    "--write", type=FILE, metavar="MD", help="Write the board with plots, as docs/accuracy.md."
)
def validate(
    files: tuple[Path, ...],
    as_json: bool,
    families: str | None,
    rows: tuple[str, ...],
    trainers: Path | None,
    write: Path | None,
) -> None:
    """Predict published measurements in FILEs and compare.

    A FILE holds training runs, iteration times, kernel times or collective times; its content
    says which. Runs are traced and simulated as 'claw-plan plan' does for a plan of its own.
    """
    check_can_write(write, inputs=(*files, trainers))
    with stdout_kept_clean(), ProgressBar() as progress:
        progress("reading", 0.0)
        from claw_plan.profiles.published import read_published

        kept = _chosen([read_published(path) for path in files], families, rows)
        scores = _scored(kept, trainers, progress)
    if write is not None:
        _write_board(scores, kept, write)
    _print(scores, as_json)


def _print(scores: Scores, as_json: bool) -> None:
    from claw_plan.cli.validation_report import print_validation
    from claw_plan.cli.validation_scores import validation_object

    if as_json:
        click.echo(json_text(validation_object(scores)), nl=False)
    else:
        print_validation(scores)


def _scored(files: Sequence[Published], trainers: Path | None, progress: Progress) -> Scores:
    from claw_plan.cli.validation_scores import joined, score_file
    from claw_plan.profiles.trainers import load_trainers

    constants = load_trainers(trainers)
    total = sum(len(published.training) for published in files)
    scores, done = [], 0
    for published in files:
        predictions: dict[str, Any] = {}
        if published.training:
            from claw_plan.planner.validation_pool import predict_all

            part = _part(progress, done / total, len(published.training) / total)
            predictions = predict_all(published.training, constants, part)
        done += len(published.training)
        scores.append(score_file(published, predictions))
    return joined(scores)


def _part(progress: Progress, start: float, share: float) -> Progress:
    """Progress of one file as that of all."""
    return lambda what, fraction: progress(what, start + share * fraction)


def _chosen(
    files: Sequence[Published], families: str | None, rows: Sequence[str]
) -> list[Published]:
    """The files with only the rows that were asked for; raises InputError when none is left."""
    wanted = [name.strip() for name in families.split(",")] if families else []
    known = {one.family for published in files for one in _all(published)}
    for name in wanted:
        if name not in known:
            raise InputError(f"--families {name!r}: {near_matches(name, known)}")
    ids = [one.id for published in files for one in _all(published)]
    for pattern in rows:
        if not any(_is_called(one, pattern) for one in ids):
            raise InputError(f"--rows {pattern!r}: no row is called so; {_near(pattern, ids)}")

    def keep(row: Any) -> bool:
        in_family = not wanted or row.family in wanted
        return in_family and (not rows or any(_is_called(row.id, one) for one in rows))

    return [
        replace(
            published,
            training=tuple(filter(keep, published.training)),
            kernels=tuple(filter(keep, published.kernels)),
            collectives=tuple(filter(keep, published.collectives)),
            not_expressed=tuple(filter(keep, published.not_expressed)),
        )
        for published in files
    ]


def _all(published: Published) -> list[Any]:
    return [
        *published.training,
        *published.kernels,
        *published.collectives,
        *published.not_expressed,
    ]


def _is_called(name: str, pattern: str) -> bool:
    """Whether a row is the one asked for; in a pattern only * stands for others."""
    return name.strip() == pattern or fnmatch.fnmatchcase(name, pattern.replace("[", "[[]"))


def _near(word: str, ids: Sequence[str]) -> str:
    """Near matches, without listing thousands of rows when there is none."""
    text = near_matches(word, ids)
    return text if text.startswith("did you mean") else f"the first is {ids[0]!r}"


def _write_board(scores: Scores, files: Sequence[Published], path: Path) -> None:
    from claw_plan.cli.accuracy_board import write_board

    for written in write_board(scores, [published.path.name for published in files], path):
        say(f"wrote {written}")

"""Files of published training runs to the text of fitted.yaml.

`python -m claw_plan.profiles.fit training.yaml iterations.csv …` finds `FITTER` through the entry
point group `claw_plan.fitters`. The same files give the same text.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from claw_plan.planner.fit_pool import FitPool
from claw_plan.planner.trainer_fit import Values, fit
from claw_plan.profiles.fit.registry import DataFile, Fitter
from claw_plan.profiles.fitted import FITTED_FILE
from claw_plan.profiles.published import read_published
from claw_plan.profiles.published_iterations import TIME_COLUMN
from claw_plan.profiles.published_training import is_training
from claw_plan.profiles.trainers import load_trainers
from claw_plan.profiles.training_row import TrainingRow

SMALL = 1100
"""Iterations of models of so many hidden units or fewer are launches of kernels, and hundreds of
them are one experiment: each eighth is taken."""

DIGITS = 4
"""Significant figures of a constant: more would not be the same on another machine."""

_HEADER = """\
# What published training runs tell of devices and trainers. Made by
#   python -m claw_plan.profiles.fit {names}
# and not to be edited: the same files give the same constants. Rates are FLOP/s that training
# sustains (`profiles/rates.py`); trainers' constants are those of `profiles/trainer.py`.
"""


def rows_of(files: Sequence[DataFile]) -> list[TrainingRow]:
    """The runs that a fit uses: those with a time, small iterations thinned out."""
    rows: list[TrainingRow] = []
    for file in files:
        found = [row for row in read_published(file.path).training if row.step_time_ns]
        small = [row for row in found if row.trainer == "vtrain" and is_small(row)]
        large = [row for row in found if not (row.trainer == "vtrain" and is_small(row))]
        rows += [*large, *small[::8]]
    return sorted(rows, key=lambda row: row.id)


def is_small(row: TrainingRow) -> bool:
    """Whether a run is of those that are thinned out."""
    return row.dimensions.hidden <= SMALL


def weight_of(row: TrainingRow) -> float:
    """How much a run counts: those whose plan is known in full most, altered models least."""
    if row.trainer == "vtrain":
        return 0.4 if is_small(row) else 1.0
    if row.trust not in ("A", "B"):
        return 0.25
    return 1.0 if row.complete else 0.4


def fitted_text(files: Sequence[DataFile]) -> Mapping[str, str]:
    """The text of fitted.yaml."""
    rows = rows_of(files)
    trainers = load_trainers(with_fitted=False)
    with FitPool(rows, trainers) as pool:
        values, _ = fit(
            rows, [weight_of(row) for row in rows], trainers, pool.simulate, tell=_tell
        )
    return {FITTED_FILE.name: text_of(values, files)}


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def text_of(values: Values, files: Sequence[DataFile]) -> str:
    """The constants as the file has them."""
    names = " ".join(file.path.name for file in files)
    source = ", ".join(file.provenance for file in files)
    lines = [_HEADER.format(names=names), f"source: fitted to {source}", "shared:"]
    lines += [
        f"  {key}: {_figure(value)}"
        for (group, _, key), value in sorted(values.items())
        if group == "shared"
    ]
    for title, group in (("rates", "rate"), ("trainers", "trainer")):
        lines.append(f"{title}:")
        owners = sorted({owner for kind, owner, _ in values if kind == group})
        for owner in owners:
            row = ", ".join(
                f"{key}: {_figure(value)}"
                for (kind, name, key), value in sorted(values.items())
                if (kind, name) == (group, owner)
            )
            lines.append(f"  {owner}: {{{row}}}")
    return "\n".join(lines) + "\n"


def _figure(value: float) -> str:
    # YAML reads 1e+15 as text; a plain decimal it always reads as a number.
    return f"{float(f'{value:.{DIGITS}g}'):.10g}" if value < 1e6 else f"{value:.{DIGITS - 1}e}"


def _recognises(file: DataFile) -> bool:
    is_table = isinstance(file.data, list) and bool(file.data)
    return is_training(file.data) or (is_table and TIME_COLUMN in file.data[0])


FITTER = Fitter(
    kind="training", recognises=_recognises, fit=fitted_text, folder=FITTED_FILE.parent
)

"""fitted.yaml: what published training runs tell of devices and trainers.

`python -m claw_plan.profiles.fit` writes it (`planner.trainer_fitter`); `catalogue` takes devices'
rates from it, `trainers` the constants of training software.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from claw_plan.profiles.files import read_yaml

FITTED_FILE = Path(__file__).with_name("fitted.yaml")

KNOWN, ASSUMED, UNKNOWN = 0.13, 0.22, 0.30
"""Half widths of 90 % intervals, as shares: nine in ten errors of runs whose group was left out of
the fit lie within 12.5 % where the source prints the plan in full and within 21.5 % where it does
not; where the whole trainer or every run on the GPU was left out, within 29 and 30 %
(bench/cross_validate.py, docs/accuracy/cross_validation.json)."""

Numbers = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Constants with the files they were fitted to.

    `rates[device][rate]` are FLOP/s that training sustains, by the names of `rates.RATES`;
    `trainers[trainer][constant]` and `shared[constant]` as `trainer.Trainer` has them.
    """

    source: str = "nothing"
    rates: Numbers = field(default_factory=dict)
    trainers: Numbers = field(default_factory=dict)
    shared: Mapping[str, float] = field(default_factory=dict)


@cache
def fitted(path: Path = FITTED_FILE) -> Fitted:
    """The file's constants; none where there is no such file (before the first fit)."""
    if not path.is_file():
        return Fitted()
    data = read_yaml(path).data
    return Fitted(
        source=str(data.get("source", "")),
        rates=_numbers(data.get("rates")),
        trainers=_numbers(data.get("trainers")),
        shared=_row(data.get("shared")),
    )


def _numbers(table: Mapping[str, Mapping[str, float]] | None) -> Numbers:
    return {str(name): _row(row) for name, row in (table or {}).items()}


def _row(row: Mapping[str, float] | None) -> Mapping[str, float]:
    return {str(key): float(value) for key, value in (row or {}).items()}

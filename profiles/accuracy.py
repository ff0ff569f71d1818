"""How right predictions are: pairs of predicted and measured figures to a few numbers.

`claw-plan validate`, the fits and the board of docs/accuracy.md all count through here. An error
is predicted / measured - 1. Besides the errors themselves it counts what a planner needs most:
whether of two plans the faster is told, and how much slower than the best the chosen one is.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from claw_plan.profiles.training_row import TrainingRow

APART = 0.05
"""Runs measured closer than this are not ordered: two real clusters differ as much."""

NEAR_BEST = 0.02
"""A pick within this of the best measured plan is as good as the best."""

MUCH_TOO_LOW = 0.05
"""Memory predicted lower than measured by more than this is counted: such a plan may not fit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One predicted and one measured figure, in the same unit.

    `group` is equal for runs that differ only in their plan, and `plan` tells these apart; None
    where there is nothing to choose from.
    """

    predicted: float
    measured: float
    group: Hashable = None
    plan: Hashable = None

    @property
    def error(self) -> float:
        """Signed, relative to the measured figure."""
        return self.predicted / self.measured - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Statistics of some pairs, in percent; None where nothing can be said."""

    n: int
    mape: float | None = None
    median: float | None = None
    p90: float | None = None
    bias: float | None = None
    pairs: int = 0
    pairs_right_pct: float | None = None
    picks: int = 0
    regret_pct: float | None = None
    picks_near_best_pct: float | None = None


def errors_of(pairs: Iterable[Pair]) -> Errors:
    """The statistics of some pairs.

    `mape`, `median` and `p90` are of the absolute errors, `bias` is the mean of the signed ones.
    """
    known = list(pairs)
    if not known:
        return Errors(n=0)
    signed = 100.0 * np.array([pair.error for pair in known])
    size = np.abs(signed)
    ordered, right = _ordered(known)
    regrets = _regrets(known)
    near = sum(regret <= NEAR_BEST for regret in regrets)
    return Errors(
        n=len(known),
        mape=float(size.mean()),
        median=float(np.median(size)),
        p90=float(np.percentile(size, 90)),
        bias=float(signed.mean()),
        pairs=ordered,
        pairs_right_pct=100.0 * right / ordered if ordered else None,
        picks=len(regrets),
        regret_pct=100.0 * math.fsum(regrets) / len(regrets) if regrets else None,
        picks_near_best_pct=100.0 * near / len(regrets) if regrets else None,
    )


def _groups(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """Runs to choose from: of each group those with different plans."""
    groups: dict[Hashable, list[Pair]] = defaultdict(list)
    for pair in pairs:
        if pair.group is not None:
            groups[pair.group].append(pair)
    return [group for group in groups.values() if len({pair.plan for pair in group}) > 1]


def _ordered(pairs: Sequence[Pair]) -> tuple[int, int]:
    """How many pairs of plans were measured apart, and how many of them are told right."""
    apart = right = 0
    for group in _groups(pairs):
        for one, other in itertools.combinations(group, 2):
            slow, fast = sorted((one, other), key=lambda pair: -pair.measured)
            if one.plan == other.plan or slow.measured <= (1 + APART) * fast.measured:
                continue
            apart += 1
            right += slow.predicted > fast.predicted
    return apart, right


def _regrets(pairs: Sequence[Pair]) -> list[float]:
    """Of each group how much slower the plan predicted fastest is than the fastest one."""
    regrets = []
    for group in _groups(pairs):
        pick = min(group, key=lambda pair: pair.predicted)
        best = min(pair.measured for pair in group)
        regrets.append(pick.measured / best - 1.0)
    return regrets


def plan_group(row: TrainingRow) -> Hashable:
    """Equal for runs of one model, software, GPU, count and batch."""
    release = row.facts.get("release", "")
    software = (row.family, row.trainer, release)
    run = (row.dimensions, row.device_name, row.cluster.num_devices, row.plan.global_batch)
    return (*software, *run, row.optimizer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """Runs that ran out of memory and runs that did not, and what was said of them."""

    out_of_memory: int = 0
    told: int = 0
    ran: int = 0
    false_alarms: int = 0


def verdicts_of(runs: Iterable[tuple[bool, bool]]) -> Verdicts:
    """Counts (really out of memory, said to be)."""
    known = list(runs)
    return Verdicts(
        out_of_memory=sum(really for really, _ in known),
        told=sum(really and said for really, said in known),
        ran=sum(not really for really, _ in known),
        false_alarms=sum(said and not really for really, said in known),
    )


def share_too_low(pairs: Iterable[Pair]) -> float | None:
    """The share, in percent, of figures predicted more than `MUCH_TOO_LOW` below the measured."""
    known = list(pairs)
    if not known:
        return None
    return 100.0 * sum(pair.error < -MUCH_TOO_LOW for pair in known) / len(known)

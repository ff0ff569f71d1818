"""`Choices`: a problem that cannot be enumerated, as variables with finite options and one score.

The searchers of `samplers` see nothing else. A score is a time and how many bytes are missing;
assignments that fit come before those that do not, then the faster, and of those that do not fit
the one that misses least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from claw_plan.planner.errors import PlanError
from claw_plan.simulator.task_graph import Int

Assignment = tuple[int, ...]
"""The option of each variable."""

Features = NDArray[np.float32]
"""[variable, option, feature]; what a policy that has seen other problems goes by."""

MISSING_WEIGHT = 4.0
"""Of missing memory in `Evaluations.cost`: a percent of the capacity too much costs as much as
4 % of the start's time, so that what fits wins in all but the most lopsided exchanges."""

MOST_ENUMERATED = 1_000_000
"""Assignments that `exhaustive` tries at most."""


class Scores(NamedTuple):
    """Of several assignments: step times, and bytes above what the fullest rank may use."""

    time_ns: Int
    excess_bytes: Int


class Choices(Protocol):
    """What a searcher is given.

    Options of a variable are ordered by the memory they take, least first. `start` is one
    assignment that fits if any simple one does.
    """

    @property
    def sizes(self) -> tuple[int, ...]:
        """How many options each variable has."""

    @property
    def start(self) -> Assignment:
        """Where a search without better knowledge starts."""

    @property
    def capacity_bytes(self) -> int:
        """What a rank may use, the scale of `excess_bytes`."""

    @property
    def features(self) -> Features:
        """What is known of each option."""

    def scores(self, assignments: Int) -> Scores:
        """The scores of assignments [row, variable]."""

    def solve(self) -> Assignment | None:
        """The best of all, by an exact method of the problem's own; None without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The best assignment that was looked at, found within so many evaluations."""

    assignment: Assignment
    time_ns: int
    excess_bytes: int
    evaluations: int

    @property
    def fits(self) -> bool:
        """Whether no memory is missing."""
        return self.excess_bytes == 0


def size_of(choices: Choices) -> int:
    """How many assignments there are."""
    return prod(choices.sizes)


def rank(scores: Scores) -> Int:
    """Row numbers, best first; equal ones in their order."""
    return np.lexsort((scores.time_ns, scores.excess_bytes))


class Evaluations:
    """Scores assignments until the budget is spent, and keeps the best. Ties go to the first."""

    def __init__(self, choices: Choices, budget: int) -> None:
        self.choices, self.left, self.spent = choices, budget, 0
        self._found: list[Answer] = []
        self._scale_ns = 1

    @property
    def best(self) -> Answer:
        """The best so far."""
        return self.best_after(self.spent)

    def best_after(self, evaluations: int) -> Answer:
        """The best of the first so many."""
        found = [answer for answer in self._found if answer.evaluations <= evaluations]
        if not found:
            raise PlanError("a search needs a budget of at least one evaluation")
        return found[-1]

    @property
    def best_cost(self) -> float:
        """`cost` of the best so far."""
        best = self.best
        scores = Scores(np.array([best.time_ns]), np.array([best.excess_bytes]))
        return float(self.cost(scores)[0])

    def ask(self, assignments: Sequence[Assignment] | Int) -> Scores:
        """Scores as many of the rows as the budget allows, in order."""
        rows = np.asarray(assignments, np.int64).reshape(-1, len(self.choices.sizes))[: self.left]
        scores = self.choices.scores(rows)
        if not len(rows):
            return scores
        if not self.spent:
            self._scale_ns = max(1, int(scores.time_ns[0]))
        self.left -= len(rows)
        self.spent += len(rows)
        first = int(rank(scores)[0])
        found = int(scores.excess_bytes[first]), int(scores.time_ns[first])
        last = self._found[-1] if self._found else None
        if last is None or found < (last.excess_bytes, last.time_ns):
            answer = Answer(
                assignment=tuple(rows[first].tolist()),
                time_ns=found[1],
                excess_bytes=found[0],
                evaluations=self.spent,
            )
            self._found.append(answer)
        return scores

    def cost(self, scores: Scores) -> NDArray[np.float64]:
        """Time over the first one's, with a penalty for what does not fit: for searchers that
        know no constraints.
        """
        missing = scores.excess_bytes / max(1, self.choices.capacity_bytes)
        return scores.time_ns / self._scale_ns + MISSING_WEIGHT * missing


def enumerate_all(choices: Choices) -> Int:
    """Every assignment, the last variable fastest; raises PlanError where there are too many."""
    count = size_of(choices)
    if count > MOST_ENUMERATED:
        raise PlanError(
            f"--search exhaustive tries at most {MOST_ENUMERATED:,} assignments, but there are "
            f"{_about(count)}; use --search auto"
        )
    return np.stack(np.unravel_index(np.arange(count), choices.sizes), axis=1).astype(np.int64)


def _about(count: int) -> str:
    return f"{count:,}" if count < 10**12 else f"more than 10^{len(str(count)) - 1}"

"""Branches of the time search, seen through an objective: their bounds become bounds of values.

`search_space` orders every branch but the outermost by devices first, so the number of devices
under it is known and its time bound becomes a value bound. The outermost, runs of groups on any
number of devices, take the least value that any number in the space has at that time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.objective import Objective
from claw_plan.planner.search import Branch, Evaluated
from claw_plan.planner.stage_path import Cuts

Choice = tuple[Candidate, Cuts]
Opened = Iterable[Branch[Choice]] | Evaluated[Choice]


class Valued:
    """Turns branches of times into branches of values, and remembers the times."""

    def __init__(self, objective: Objective, devices: Sequence[int]) -> None:
        self._objective = objective
        self._any = cache(partial(_least, objective, tuple(devices)))
        self.times_ns: dict[Choice, int] = {}

    def value(self, choice: Choice, time_ns: int) -> int:
        """The value of a candidate whose time is known."""
        self.times_ns[choice] = time_ns
        return self._objective.value(*choice, time_ns)

    def branch(self, branch: Branch[Choice]) -> Branch[Choice]:
        """The branch under its bound of values."""
        if branch.order:
            devices = branch.order[0]
            assert isinstance(devices, int), "branches are ordered by devices first"
            bound = self._objective.bound(branch.bound_ns, devices)
        else:
            bound = self._any(branch.bound_ns)
        return Branch(bound, branch.order, branch.size, partial(self._opened, branch.open))

    def _opened(self, opens: Callable[[], Opened]) -> Opened:
        result = opens()
        if not isinstance(result, Evaluated):
            return [self.branch(branch) for branch in result]
        if result.time_ns is None or result.item is None:
            return result
        return Evaluated(result.item, self.value(result.item, result.time_ns), result.size)


def _least(objective: Objective, devices: Sequence[int], time_ns: int) -> int:
    return min(objective.bound(time_ns, count) for count in devices)

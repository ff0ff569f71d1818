"""How long the passes of a model's units take under one layout and another, on idle links.

Units of one structure take alike, so that each structure's times are made once; a large space
asks for those of hundreds of layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.data_bound import floor_ns
from claw_plan.planner.pass_time import INPUTS, WEIGHTS, PassTime
from claw_plan.planner.placement import groups_of, tp_nodes
from claw_plan.planner.problem import Problem, variant_of
from claw_plan.planner.schedules import schedule_of
from claw_plan.planner.side_by_side import in_halves
from claw_plan.planner.stage_path import UnitTime

WORTH_A_PROCESS = 32
"""Layouts whose times take longer to make than a process, some 20 ms."""


def pass_floor_ns(time: PassTime) -> int:
    """The least a pass can take: its kernels, and its exchanges on idle links."""
    return time.compute_ns + sum(floor_ns(cost) for _, cost in time.steps if cost is not None)


@dataclass(frozen=True)
class UnitTimes:
    """The times of one problem's units by structure, in the order of the chain; kept."""

    problem: Problem
    _floors: dict[tuple[object, ...], dict[int, UnitTime]] = field(default_factory=dict)

    def floors(self, candidate: Candidate) -> dict[int, UnitTime]:
        """The least that the passes can take."""
        key = self._key(candidate)
        if key not in self._floors:
            self._floors[key] = self.of(candidate, pass_floor_ns)
        return self._floors[key]

    def prepare(self, candidates: Sequence[Candidate]) -> None:
        """Makes the floors of many candidates, on two cores where there are."""

        def floors(some: Sequence[Candidate]) -> list[dict[int, UnitTime]]:
            return [self.of(candidate, pass_floor_ns) for candidate in some]

        new = {self._key(c): c for c in candidates if self._key(c) not in self._floors}
        found = in_halves(floors, [*new.values()], takes_long=len(new) >= WORTH_A_PROCESS)
        self._floors.update(zip(new, found, strict=True))

    def adopt(self, other: UnitTimes) -> None:
        """Takes over what is known of a problem that differs in nothing but the batch."""
        self._floors.update(other._floors)

    def of(self, candidate: Candidate, figure: Callable[[PassTime], int]) -> dict[int, UnitTime]:
        """A figure of the passes of each structure of units."""
        problem = self.problem
        size = (variant_of(candidate), candidate.microbatch_size, candidate.tp)
        groups = groups_of(candidate, problem.devices_per_node)
        splits = schedule_of(candidate.schedule).splits_backward and candidate.recompute == "none"
        found: dict[int, UnitTime] = {}
        last = len(problem.graph.units) - 1
        for index, structure in self._structures:
            up, down = (
                figure(problem.pass_time(index, *size, backward, groups))
                for backward in (False, True)
            )
            inputs = figure(problem.part_time(index, *size, INPUTS, groups)) if splits else down
            weights = figure(problem.part_time(index, *size, WEIGHTS, groups)) if splits else 0
            again = 0
            if candidate.recompute != "none" and 0 < index < last:
                mode = candidate.recompute
                again = figure(problem.recompute_time(index, *size, mode, groups))
            found[structure] = UnitTime(up, down, inputs, weights, again)
        return found

    @cached_property
    def _structures(self) -> list[tuple[int, int]]:
        """The first unit of each structure, and its number."""
        first: dict[int, int] = {}
        for index, unit in enumerate(self.problem.graph.units):
            first.setdefault(unit.structure, index)
        return [(index, structure) for structure, index in first.items()]

    def _key(self, candidate: Candidate) -> tuple[object, ...]:
        """What the times depend on."""
        return (
            candidate.tp, tp_nodes(candidate, self.problem.devices_per_node),
            candidate.sequence_parallel, candidate.microbatch_size, candidate.recompute,
            schedule_of(candidate.schedule).splits_backward,
        )  # fmt: skip

"""A lower bound of the step of a kind of device alone with a share of the batch.

A share is divided evenly, so it decides how many data-parallel ranks there can be: 1,040 samples
on 256 devices leave 48 idle, or cut a chain of blocks into more stages than it has equal ones.
Bounded is what the busiest device computes, its memory and all waiting left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.members import divisors
from claw_plan.planner.pinned import MOST_MICROBATCHES
from claw_plan.planner.problem import Problem
from claw_plan.planner.schedules import SCHEDULES
from claw_plan.planner.space import Space
from claw_plan.planner.unit_times import UnitTimes
from claw_plan.profiles.units import NS_PER_S

MOST_UNEVEN = 32
"""Microbatches up to which every size has a bound of its own, as tiles fill unevenly."""


@dataclass(frozen=True)
class ShareBounds:
    """Bounds of one kind's shares, with what they have in common kept."""

    problem: Problem
    _work: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict, init=False)
    _least_rates: dict[int, tuple[float, float]] = field(default_factory=dict, init=False)
    _least: dict[int, int] = field(default_factory=dict, init=False)

    @cached_property
    def times(self) -> UnitTimes:
        """Of the kind's units, whatever the batch."""
        return UnitTimes(self.problem)

    @cached_property
    def samples_per_s(self) -> float:
        """What one device would compute if it held the whole model and never waited."""
        return NS_PER_S / max(self._rates(1)[0], 1e-9)

    def sample_ns(self, microbatch: int) -> float:
        """What one device needs for a sample of such a microbatch if it held the whole model."""
        return self._pass_ns(microbatch, 1)[0] / microbatch

    def least_ns(self, share: int) -> int:
        """No plan of the kind takes a step of so many samples in less."""
        if share not in self._least:
            self._least[share] = self._find(share) + self.problem.step_overhead_ns()
        return self._least[share]

    def _find(self, share: int) -> int:
        space, devices = Space(self.problem, {}), self.problem.cluster.num_devices
        blocks, stages = len(self.problem.graph.blocks), space.most_stages
        least = float("inf")
        for tp in space.tp_degrees():
            for dp in divisors(share):
                ranks = min(stages, devices // (tp * dp))
                if not ranks:
                    break
                most = -(-blocks // ranks)  # some rank has so many
                for size in divisors(share // dp):
                    count = share // (dp * size)
                    if count <= MOST_MICROBATCHES:
                        whole, block = self._pass_ns(size, tp)
                        least = min(least, count * max(-(-whole // ranks), most * block))
        return int(least) if np.isfinite(least) else 0

    def _pass_ns(self, size: int, tp: int) -> tuple[int, int]:
        """A microbatch's way through the model and through its quickest block, both ways."""
        if size > MOST_UNEVEN:
            whole, block = self._rates(tp)
            return int(size * whole), int(size * block)
        return self._known_pass(size, tp)

    def _rates(self, tp: int) -> tuple[float, float]:
        """The least of the same for one sample, of all sizes."""
        if tp not in self._least_rates:
            sizes = _microbatches(self.problem.training.global_batch)
            passes = [(size, *self._known_pass(size, tp)) for size in sizes]
            whole = min(whole / size for size, whole, _ in passes)
            self._least_rates[tp] = whole, min(block / size for size, _, block in passes)
        return self._least_rates[tp]

    def _known_pass(self, size: int, tp: int) -> tuple[int, int]:
        if (size, tp) not in self._work:
            self._work[size, tp] = self._find_pass(size, tp)
        return self._work[size, tp]

    def _find_pass(self, size: int, tp: int) -> tuple[int, int]:
        graph = self.problem.graph
        inner = {block.structure for block in graph.blocks}
        wholes, quickest = [], []
        is_whole = tp > 1 and tp not in graph.partial
        for sequence in (False, True) if is_whole and not graph.no_sequence_parallel else (False,):
            for schedule in ("1F1B", *_SPLIT):
                candidate = Candidate(
                    tp=tp, sequence_parallel=sequence, microbatch_size=size, schedule=schedule
                )
                times = self.times.floors(candidate)
                work = {key: time.balanced(candidate) for key, time in times.items()}
                wholes.append(sum(work[unit.structure] for unit in graph.units))
                quickest.append(min(work[structure] for structure in inner))
        return min(wholes), min(quickest)


_SPLIT = tuple(name for name, schedule in SCHEDULES.items() if schedule.splits_backward)[:1]
"""A schedule whose backwards run in two parts: their passes are those of all such."""


def _microbatches(batch: int) -> list[int]:
    """Every small size, and of the larger ones each twice the last."""
    large = 2 * MOST_UNEVEN
    doubled = [large << k for k in range((batch // large).bit_length())]
    return [*range(1, min(batch, MOST_UNEVEN) + 1), *doubled]

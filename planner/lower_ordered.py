"""Replicas whose buckets the next forward waits for one by one: the step they repeat, as tasks.

With `candidate.bucket_order` no step ends with all buckets: each unit of the next forward waits
for those it needs first, and updates their parameters (`executor.next_forward`). What repeats is
the time from one last backward to the next. Nothing crosses its beginning, since a forward has
waited for every bucket before its backward, so that step is lowered alone, in this order:

    last backward, launching buckets | loss | forward, unit by unit: wait, update, run | ...

Its makespan is how far apart steps are in a run that goes on.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from claw_plan.planner.averaging_buckets import buckets_by_use
from claw_plan.planner.lower_whole import Whole

CALL_NS = 60_000
"""Of the host for one more call of torch.optim.AdamW.step (torch 2.13, a 2-core EPYC: 144
parameters in 24 calls instead of one take 1.6 ms longer, in 144 calls 7.9 ms)."""


class Ordered(Whole):
    """Every rank holds all parameters; a step begins with its last backward."""

    _carried: dict[int, list[tuple[list[int], int]]]
    """By unit of the next forward: tasks with which buckets arrive, and their elements."""

    _needed: Sequence[int] = ()
    """The unit of the next forward that needs each bucket first, in the order they leave."""

    @override
    def begin_backward(self, units: Sequence[int], is_last: bool) -> None:
        super().begin_backward(units, is_last)
        if not is_last:
            return
        held = [(p, self._held(p)) for p in self._trained()]
        by_use = buckets_by_use(held, self._candidate.buckets)
        self._needed = [by_use[number].unit for number in self._candidate.bucket_order]
        self._carried = {}
        count = self._candidate.num_microbatches(self._problem.training.global_batch)
        self._has_gradients = count > 1  # of microbatches that this graph has after it

    @override
    def _launch(self, place: int) -> None:
        super()._launch(place)
        arrived, self._pending_reductions = self._pending_reductions, []
        entry = (arrived, self._buckets[place].elements)
        self._carried.setdefault(self._needed[place], []).append(entry)

    @override
    def step_optimizer(self) -> None:
        """The next forward updates; gradients add up anew from its backward on."""
        self.begin_step()

    @override
    def begin_forward(self, units: Sequence[int]) -> None:
        self.by_unit = bool(self._carried)

    @override
    def before_unit(self, unit: int, backward: bool) -> None:
        super().before_unit(unit, backward)
        for arrived, elements in () if backward else self._carried.pop(unit, ()):
            self._streams.wait_for(arrived)
            self._streams.run("optimizer", "call of the optimizer", CALL_NS)
            self._optimize(elements)

    @override
    def end_forward(self) -> None:
        assert not self._carried, "each parameter is needed by some unit"
        self.by_unit = False

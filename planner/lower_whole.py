"""Data-parallel traffic of one stage whose ranks hold all parameters: gradients are averaged.

DistributedDataParallel averages beside the last backward, bucket after bucket, as codec and
algorithm of the candidate say (`averaging`). Under a pipeline all is averaged at the step's end
(`lower_end`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from typing_extensions import override

from claw_plan.planner.averaging import AXIS, Averaging, averaging
from claw_plan.planner.averaging_buckets import AFTER_ALL, buckets_of
from claw_plan.planner.gradient_times import launch_shares
from claw_plan.planner.lower_data import DataParallel
from claw_plan.planner.placement import EXPERT_REPLICATE, tp_nodes
from claw_plan.planner.problem import STORED_BYTES
from claw_plan.planner.stage_streams import Pause


class Whole(DataParallel):
    """Every rank holds all parameters."""

    _shares: tuple[float, ...] = ()
    """Of the unit's backward, after which each bucket leaves; none: after all of it."""

    @override
    def averaged(self, axis: str) -> dict[str, int]:
        if axis == EXPERT_REPLICATE:
            return {p.name: self._held(p) for p in self._trained() if p.shared_by > 1}
        late = axis == AXIS and self._candidate.pp > 1
        return {p.name: self._held(p) for p in self._trained() if p.shared_by == 1} if late else {}

    def begin_step(self) -> None:
        """The gradients that have added up are used: the next ones begin at nothing."""
        self._has_gradients = False

    @override
    def begin_backward(self, units: Sequence[int], is_last: bool) -> None:
        replicated = self._candidate.dp_replicate > 1
        self.by_unit = replicated and is_last and self._candidate.pp == 1
        if self.by_unit:
            held = [
                (parameter, self._held(parameter))
                for parameter in self._trained()
                if parameter.shared_by == 1
            ]
            own = range(self._start, self._stop)
            optimizer = self._problem.training.optimizer
            self._buckets = buckets_of(held, own, self._candidate, optimizer)
            self._shares = launch_shares(held, self._candidate, self._problem.graph.ready_shares)
            self._left = 0

    @override
    def after_backward(self, unit: int, is_last: bool) -> None:
        if self.by_unit:
            self._average(unit)

    @override
    def end_backward(self, is_last: bool) -> None:
        super().end_backward(is_last)
        if self.by_unit:
            self._average(AFTER_ALL)
        self.by_unit = False

    @override
    def before_unit(self, unit: int, backward: bool) -> None:
        if backward and self._shares:
            self._streams.pauses = [
                Pause(share, partial(self._launch, place))
                for place, (bucket, share) in enumerate(
                    zip(self._buckets, self._shares, strict=True)
                )
                if bucket.unit == unit and share < 1
            ]

    def _average(self, unit: int) -> None:
        """The buckets that are full once the unit has run, and not before."""
        for place, bucket in enumerate(self._buckets):
            if bucket.unit == unit and place >= self._left:
                self._launch(place)

    def _launch(self, place: int) -> None:
        """Averages the next bucket."""
        bucket, self._left = self._buckets[place], place + 1
        self._add(averaging(self._problem, self._candidate, bucket.elements, bucket.shapes))
        self._even(bucket.alike)

    def _even(self, elements: int) -> None:
        """The mean over tensor-parallel ranks of what they held alike before it was encoded."""
        if elements:
            candidate, size = self._candidate, STORED_BYTES * elements
            nodes = tp_nodes(candidate, self._problem.devices_per_node)
            cost = self._problem.collective("all_reduce", size, candidate.tp, nodes)
            self._streams.exchange("tp_comm", "momentum made unlike", cost, axis="tp")

    def _add(self, mean: Averaging) -> None:
        if mean.is_waited_for:
            self._add_in_turn(mean)
            return
        needs, last = [self._streams.last_task], len(mean.phases) - 1
        for place, (kernels_ns, cost) in enumerate(mean.phases):
            before_ns = kernels_ns + (mean.last_ns if place == last else 0)
            stream = self._streams.reduce
            task = self._streams.beside(
                stream, "dp_comm", "bucket", cost, before_ns, needs, axis=AXIS
            )
            self._pending_reductions.append(task)
            needs = [task]

    def _add_in_turn(self, mean: Averaging) -> None:
        streams = self._streams
        for kernels_ns, cost in mean.phases:
            if kernels_ns:
                streams.run("dp_comm", "bucket", kernels_ns)
            streams.exchange("dp_comm", "bucket", cost, axis=AXIS)
        if mean.last_ns:
            streams.run("dp_comm", "bucket", mean.last_ns)

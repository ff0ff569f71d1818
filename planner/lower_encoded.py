"""fully_shard's traffic where gradients travel as codes: `lower_data.Sharded` with a codec.

Between replicas shards meet once a step, at its end. Where there are no replicas each reduction
over dp_shard is the first phase of the two-phase mean: encode, exchange, decode and add up. A rank
waits for both; what the executor makes of several calls takes turns with the backward's kernels.
"""

from __future__ import annotations

from typing_extensions import override

from claw_plan.planner.averaging import AXIS, scattering, scatters_codes
from claw_plan.planner.lower_data import Sharded


class EncodedShards(Sharded):
    """Shards whose gradients a codec makes smaller on the wire."""

    @override
    def averaged(self, axis: str) -> dict[str, int]:
        if axis == AXIS and self._candidate.dp_replicate > 1:
            return {p.name: self._held(p) for p in self._trained()}
        return super().averaged(axis)

    @override
    def _all_reduce(
        self, size_bytes: int, name: str, needs: object, *, experts: bool = False
    ) -> None:
        """Nothing beside the backward: see `averaged`."""

    @override
    def _scatter(self, elements: int, name: str, copy_ns: int, axis: str, *on: int) -> list[int]:
        if not scatters_codes(self._candidate):
            return super()._scatter(elements, name, copy_ns, axis, *on)
        mean = scattering(self._problem, self._candidate.codec, elements, *on)
        for kernels_ns, cost in mean.phases:
            self._streams.run("dp_comm", name, copy_ns + kernels_ns)
            self._streams.exchange("dp_comm", name, cost, axis=axis)
        return [self._streams.run("dp_comm", name, mean.last_ns)]

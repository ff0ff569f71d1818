"""From recordings of one model at several batch sizes to `UnitCost`s that are exact at any.

Two sizes give the line, every further one must lie on it; what does not (a loss over all pairs of
samples, experts that get more rows or fewer) is named in a sentence instead of hidden. Operators
are matched by order: the program may not change with the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from claw_plan.planner.errors import TraceError
from claw_plan.planner.graph import Amount, Exchange, Op, UnitCost
from claw_plan.planner.recorder import BACKWARD, FORWARD, RecordedExchange, RecordedOp, Recording

LARGEST_BATCH = 64
"""A peak is the largest of many lines in the batch. It is replaced by the one line through its
values at 1 and here, which lies on or above it in between, for a maximum of lines is convex."""


class Fit:
    """Lines through the numbers of recordings at the batch sizes `sizes`.

    `curved` collects what did not lie on a line, by the operator's name.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.curved: set[str] = set()

    def amount(self, values: Sequence[int], what: str) -> Amount:
        """The line through the first and the last of the values, one for each batch size."""
        if len(self.sizes) == 1:
            return Amount(per_sample=values[0] // self.sizes[0])
        slope = (values[-1] - values[0]) // (self.sizes[-1] - self.sizes[0])
        fixed = values[-1] - slope * self.sizes[-1]
        curved = any(fixed + slope * b != v for b, v in zip(self.sizes, values, strict=True))
        if curved:
            self.curved.add(what)
        if (curved or len(self.sizes) == 2) and min(values) >= 0:  # two sizes show no curve
            if fixed + slope < 0:
                # A curve over all pairs of samples: its chord would be negative at one sample.
                return Amount(per_sample=-(-values[-1] // self.sizes[-1]))
            if slope < 0:
                return Amount(max(values))
        return Amount(fixed, slope)

    def units(self, recordings: Sequence[Recording], count: int) -> list[UnitCost]:
        """The cost of each of the `count` units."""
        ops = [self._ops(recordings, unit, count) for unit in range(count)]
        peaks = self._peaks(recordings, count)
        saved = [
            self.amount([r.saved_bytes(u) for r in recordings], "saved") for u in range(count)
        ]
        leaves = [
            self.amount([r.boundary_bytes.get(u, 0) for r in recordings], "hidden state")
            for u in range(count)
        ]
        return [
            UnitCost(
                forward=ops[unit][0],
                backward=ops[unit][1],
                saved_bytes=saved[unit],
                input_bytes=leaves[unit - 1] if unit else Amount(),
                output_bytes=leaves[unit],
                forward_peak_bytes=peaks[unit, FORWARD],
                backward_peak_bytes=peaks[unit, BACKWARD],
                num_recomputed=recordings[0].num_recomputed(unit),
            )
            for unit in range(count)
        ]

    def _ops(
        self, recordings: Sequence[Recording], unit: int, count: int
    ) -> tuple[tuple[Op | Exchange, ...], tuple[Op | Exchange, ...]]:
        phases = []
        for phase in (FORWARD, BACKWARD):
            rows = [
                [op for op in r.ops if op.unit == unit and op.phase == phase] for r in recordings
            ]
            for one, other in pairwise(rows):
                if [identity(op) for op in one] != [identity(op) for op in other]:
                    raise ProgramChanges(_first_difference(one, other))
            phases.append(tuple(self._op(same) for same in zip(*rows, strict=True)))
        return phases[0], phases[1]

    def _op(self, same: Sequence[RecordedOp | RecordedExchange]) -> Op | Exchange:
        first = same[0]
        if isinstance(first, RecordedExchange):
            sizes = [op.bytes for op in same if isinstance(op, RecordedExchange)]
            size = self.amount(sizes, first.op)
            return Exchange(op=first.op, bytes=size, module=first.module, axis=first.axis)
        works = [op.work for op in same if isinstance(op, RecordedOp)]
        name = f"{first.target} in {first.module or 'the model'}"
        columns = zip(*(work.dims for work in works), strict=True)
        return Op(
            kind=first.work.kind,
            target=first.target,
            module=first.module,
            dims=tuple(self.amount(column, name) for column in columns),
            dtype=first.work.dtype,
            flops=self.amount([work.flops for work in works], name),
            read_bytes=self.amount([work.read_bytes for work in works], name),
            written_bytes=self.amount([work.written_bytes for work in works], name),
        )

    def _peaks(self, recordings: Sequence[Recording], count: int) -> dict[tuple[int, str], Amount]:
        timelines = [recording.timelines() for recording in recordings]
        keys = [(unit, phase) for unit in range(count) for phase in (FORWARD, BACKWARD)]
        return {key: self._peak([line.get(key, [0]) for line in timelines]) for key in keys}

    def _peak(self, timelines: Sequence[Sequence[int]]) -> Amount:
        if len({len(line) for line in timelines}) > 1:  # frees came in another order
            return self.amount([max(0, *line) for line in timelines], "peak")
        lines = {self.amount(same, "memory") for same in zip(*timelines, strict=True)}

        low = max(0, *(line.at(1) for line in lines)) if lines else 0
        high = max(0, *(line.at(LARGEST_BATCH) for line in lines)) if lines else 0
        slope = -(-(high - low) // (LARGEST_BATCH - 1))
        return Amount(low - slope, slope)


class ProgramChanges(TraceError):
    """The operators differ between batch sizes; `trace` catches it and says what it means."""


def identity(op: RecordedOp | RecordedExchange) -> tuple[str, ...]:
    """What the same operator of another recording has in common with this one."""
    if isinstance(op, RecordedExchange):
        return (op.op, op.module, op.axis)
    return (op.work.kind, op.target, op.module, op.work.dtype)


def _first_difference(
    one: Sequence[RecordedOp | RecordedExchange], other: Sequence[RecordedOp | RecordedExchange]
) -> str:
    for a, b in zip(one, other, strict=False):
        if identity(a) != identity(b):
            return f"{identity(a)[0]} of {a.module or 'the model'}"
    longer = max(one, other, key=len)
    return f"{longer[min(len(one), len(other))].module or 'the model'}"

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

LARGEST_MICROBATCH = 64
"""Peaks are the largest of many lines in the batch; they are replaced by the one line through
their values at 1 and here, which lies on or above them in between and equals them if one line."""


class BatchFit:
    """Lines through the numbers of recordings at the batch sizes `sizes`.

    `curved` collects what did not lie on a line, by the operator's name.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        self.curved: set[str] = set()

    def line(self, values: Sequence[int], what: str) -> Amount:
        """The line through the first and last of the values, one value for each batch size."""
        if len(self.sizes) == 1:
            return Amount(per_sample=values[0] // self.sizes[0])
        run = self.sizes[-1] - self.sizes[0]
        slope = (values[-1] - values[0]) // run
        fixed = values[-1] - slope * self.sizes[-1]
        if any(fixed + slope * b != v for b, v in zip(self.sizes, values, strict=True)):
            self.curved.add(what)
        return Amount(fixed=fixed, per_sample=slope)

    def units(self, recordings: Sequence[Recording], count: int) -> list[UnitCost]:
        """The cost of each of the `count` units."""
        ops = [self._ops(recordings, unit, count) for unit in range(count)]
        peaks = self._peaks(recordings, count)
        saved = [self.line([r.saved_bytes(u) for r in recordings], "saved") for u in range(count)]
        leaves = [
            self.line([r.boundary_bytes.get(u, 0) for r in recordings], "hidden state")
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
                if [_identity(op) for op in one] != [_identity(op) for op in other]:
                    raise ProgramChanges(_first_difference(one, other))
            phases.append(tuple(self._op(same) for same in zip(*rows, strict=True)))
        return phases[0], phases[1]

    def _op(self, same: Sequence[RecordedOp | RecordedExchange]) -> Op | Exchange:
        first = same[0]
        if isinstance(first, RecordedExchange):
            sizes = [op.bytes for op in same if isinstance(op, RecordedExchange)]
            return Exchange(op=first.op, bytes=self.line(sizes, first.op), module=first.module)
        works = [op.work for op in same if isinstance(op, RecordedOp)]
        name = f"{first.target} in {first.module or 'the model'}"
        columns = zip(*(work.dims for work in works), strict=True)
        return Op(
            kind=first.work.kind,
            target=first.target,
            module=first.module,
            dims=tuple(self.line(column, name) for column in columns),
            dtype=first.work.dtype,
            flops=self.line([work.flops for work in works], name),
            read_bytes=self.line([work.read_bytes for work in works], name),
            written_bytes=self.line([work.written_bytes for work in works], name),
        )

    def _peaks(self, recordings: Sequence[Recording], count: int) -> dict[tuple[int, str], Amount]:
        timelines = [recording.timelines() for recording in recordings]
        keys = [(unit, phase) for unit in range(count) for phase in (FORWARD, BACKWARD)]
        return {key: self._peak([line.get(key, [0]) for line in timelines]) for key in keys}

    def _peak(self, timelines: Sequence[Sequence[int]]) -> Amount:
        if len({len(line) for line in timelines}) > 1:  # frees came in another order
            return self.line([max(0, *line) for line in timelines], "peak")
        lines = {self.line(same, "memory") for same in zip(*timelines, strict=True)} | {Amount()}
        low = max(line.at(1) for line in lines)
        high = max(line.at(LARGEST_MICROBATCH) for line in lines)
        slope = -(-(high - low) // (LARGEST_MICROBATCH - 1))
        return Amount(fixed=low - slope, per_sample=slope)


class ProgramChanges(TraceError):
    """The operators a model runs differ between batch sizes."""


def _identity(op: RecordedOp | RecordedExchange) -> tuple[str, ...]:
    if isinstance(op, RecordedExchange):
        return (op.op, op.module)
    return (op.work.kind, op.target, op.module, op.work.dtype)


def _first_difference(
    one: Sequence[RecordedOp | RecordedExchange], other: Sequence[RecordedOp | RecordedExchange]
) -> str:
    for a, b in zip(one, other, strict=False):
        if _identity(a) != _identity(b):
            return f"{_identity(a)[0]} of {a.module or 'the model'}"
    longer = max(one, other, key=len)
    return f"{longer[min(len(one), len(other))].module or 'the model'}"

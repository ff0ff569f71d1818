"""The rows of each pipeline schedule, rank by rank, as PyTorch generates them.

Names and orders are those of torch/distributed/pipelining/schedules.py, so that the runtime there
interprets these rows as its own. Three families:

- one stage a rank (GPipe, 1F1B): they differ in how many forwards go ahead of the backwards;
- rounds (Interleaved1F1B, InterleavedZeroBubble): a rank goes round its stages, pp apart, for
  some microbatches at a time; the second delays weight gradients by `rank` backwards;
- a V (ZBVZeroBubble, DualPipeV): rank r holds stages r and 2 pp - 1 - r, so that a microbatch
  goes down the ranks and comes up again.

PyTorch pairs some forwards and backwards of DualPipeV for a user's own overlapped kernel and
otherwise runs one after the other; here they stand one after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np

from claw_plan.planner.actions import (
    BACKWARD,
    FORWARD,
    INPUT_GRADIENT,
    KINDS,
    WEIGHT_GRADIENT,
    Action,
    Rows,
)
from claw_plan.simulator.task_graph import Int

_FORWARD, _BACKWARD, _INPUTS, _WEIGHTS = range(len(KINDS))


def gpipe(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Rows:
    """All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)."""
    return tuple(_one_stage(rank, num_microbatches, num_microbatches) for rank in range(num_ranks))


def one_forward_one_backward(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Rows:
    """Only as many forwards ahead as bring the first backward in time (Schedule1F1B)."""
    return tuple(
        _one_stage(rank, num_microbatches, min(num_microbatches, num_ranks - rank))
        for rank in range(num_ranks)
    )


def _one_stage(stage: int, num_microbatches: int, ahead: int) -> tuple[Action, ...]:
    actions = [Action(stage, FORWARD, index) for index in range(ahead)]
    for index in range(num_microbatches):
        actions.append(Action(stage, BACKWARD, index))
        if ahead + index < num_microbatches:
            actions.append(Action(stage, FORWARD, ahead + index))
    return tuple(actions)


def microbatches_per_round(num_ranks: int, num_microbatches: int) -> int:
    """How many microbatches an interleaved schedule runs on a stage before it goes to the next.

    Only where `num_rounds` divides the microbatches, which the schedules ask for.
    """
    return num_microbatches // num_rounds(num_ranks, num_microbatches)


def num_rounds(num_ranks: int, num_microbatches: int) -> int:
    """Into how many equal rounds the microbatches are divided."""
    return max(1, num_microbatches // num_ranks)


def interleaved(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[Int]:
    """Narayanan et al. 2021 (arXiv 2104.04473, section 2.2; ScheduleInterleaved1F1B)."""
    return [
        _rounds(rank, num_ranks, num_microbatches, stages_per_rank, hops=2)
        for rank in range(num_ranks)
    ]


def interleaved_zero_bubble(
    num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> list[Int]:
    """ZB1P of Qi et al. 2023 (arXiv 2401.10241; ScheduleInterleavedZeroBubble).

    One forward less ahead a hop than the interleaved schedule, since only I is waited for; rank
    r's weight gradients run r backwards late, where others would wait.
    """
    return [
        _split(rank, _rounds(rank, num_ranks, num_microbatches, stages_per_rank, hops=1))
        for rank in range(num_ranks)
    ]


def rows_of(arrays: Sequence[Int]) -> Rows:
    """Actions of each rank from columns of stage, kind (as KINDS numbers them), microbatch."""
    return tuple(
        tuple(
            Action(stage, KINDS[kind], microbatch)
            for stage, kind, microbatch in zip(*columns.tolist(), strict=True)
        )
        for columns in arrays
    )


def arrays_of(rows: Rows) -> list[Int]:
    """The same the other way."""
    number = {kind: index for index, kind in enumerate(KINDS)}
    return [
        np.array([(stage, number[kind], index) for stage, kind, index in row], np.int64).T
        for row in rows
    ]


def _rounds(
    rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int, hops: int
) -> Int:
    """`hops` is the number of forwards that each rank nearer to the front has more ahead."""
    in_round = microbatches_per_round(num_ranks, num_microbatches)
    total = num_microbatches * stages_per_rank
    ahead = min(total, (stages_per_rank - 1) * in_round + hops * (num_ranks - 1 - rank))
    step = np.arange(total)
    turn, place = np.divmod(step, in_round)
    chunk = turn % stages_per_rank
    microbatch = turn // stages_per_rank * in_round + place
    # After those ahead a forward comes before each backward, as long as there are some.
    forward = np.where(step < ahead, step, 2 * step - ahead)
    backward = ahead + np.minimum(step + 1, total - ahead) + step
    columns = np.empty((3, 2 * total), np.int64)
    last = stages_per_rank - 1
    columns[0, forward], columns[0, backward] = chunk, last - chunk
    columns[0] = columns[0] * num_ranks + rank
    columns[1, forward], columns[1, backward] = _FORWARD, _BACKWARD
    columns[2, forward] = columns[2, backward] = microbatch
    return columns


def _split(late: int, columns: Int) -> Int:
    """Each backward as I, and its W after `late` more, or at the end."""
    stage, kind, microbatch = columns
    backwards = np.flatnonzero(kind != _FORWARD)
    behind = np.full(len(backwards), columns.shape[1])
    behind[: max(0, len(backwards) - late)] = backwards[late:]
    place = np.concatenate([np.arange(columns.shape[1]), behind])
    split = np.where(kind == _FORWARD, _FORWARD, _INPUTS)
    weights = np.full(len(backwards), _WEIGHTS)
    # Stable: behind the action at its place, and of those at the end the earlier first.
    order = np.argsort(place, kind="stable")
    return np.stack(
        [
            np.concatenate([stage, stage[backwards]])[order],
            np.concatenate([split, weights])[order],
            np.concatenate([microbatch, microbatch[backwards]])[order],
        ]
    )


class _VRow:
    """A row on the V while it is written: each kind counts its microbatches on each stage."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.down, self.up = rank, 2 * num_ranks - 1 - rank
        self.actions: list[Action] = []
        self.late: list[Action] = []
        """Weight gradients whose I has run."""
        self._count: Counter[tuple[int, bool]] = Counter()

    def forward(self, stage: int) -> None:
        self.actions.append(Action(stage, FORWARD, self._next(stage, forward=True)))

    def backward(self, stage: int, *, splits: bool = False) -> None:
        """The whole backward, or its I with the W left for later."""
        index = self._next(stage, forward=False)
        if splits:
            self.actions.append(Action(stage, INPUT_GRADIENT, index))
            self.late.append(Action(stage, WEIGHT_GRADIENT, index))
        else:
            self.actions.append(Action(stage, BACKWARD, index))

    def weights(self, stage: int | None = None) -> None:
        """The oldest weight gradients that are left (of the stage); nothing when none are."""
        for action in islice(self._left(stage), 1):
            self.late.remove(action)
            self.actions.append(action)

    def input_and_weights(self, stage: int) -> None:
        """I and at once its W."""
        self.backward(stage, splits=True)
        self.actions.append(self.late.pop())

    def has_left(self, stage: int) -> bool:
        """Whether weight gradients of the stage are left."""
        return any(True for _ in self._left(stage))

    def count(self, stage: int, *, forward: bool) -> int:
        """Forwards, or backwards, of the stage so far."""
        return self._count[stage, forward]

    def _left(self, stage: int | None) -> Iterator[Action]:
        return (action for action in tuple(self.late) if stage in (None, action.stage))

    def _next(self, stage: int, *, forward: bool) -> int:
        self._count[stage, forward] += 1
        return self._count[stage, forward] - 1


def _per_rank(write: Callable[[_VRow, int, int, int], None]) -> Callable[[int, int, int], Rows]:
    def rows(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Rows:
        written = []
        for rank in range(num_ranks):
            row = _VRow(rank, num_ranks)
            write(row, rank, num_ranks, num_microbatches)
            written.append(tuple(a for a in row.actions if a.microbatch < num_microbatches))
        return tuple(written)

    return rows


def _write_zbv(row: _VRow, rank: int, num_ranks: int, num_microbatches: int) -> None:
    """ZB-V of Qi et al. 2023, section 6 (ScheduleZBVZeroBubble).

    Written for at least as many microbatches as fill the V; those too many are left out after.
    """
    enough = max(2 * num_ranks - 1, num_microbatches)
    for _ in range(2 * (num_ranks - rank) - 1):
        row.forward(row.down)
    for _ in range(rank):
        row.forward(row.up)
        row.forward(row.down)
    for _ in range(num_ranks - rank):
        row.forward(row.up)
        row.input_and_weights(row.up)
    while row.count(row.up, forward=True) < enough:
        if row.count(row.down, forward=True) < enough:
            row.forward(row.down)
        row.input_and_weights(row.down)
        row.forward(row.up)
        row.input_and_weights(row.up)
    for _ in range(rank):
        row.backward(row.down, splits=True)
        row.backward(row.up, splits=True)
    for _ in range(num_ranks - rank):
        row.backward(row.down, splits=True)
        row.weights(row.down)
    for stage in (row.up, row.down):
        while row.has_left(stage):
            row.weights(stage)


def _write_dual_pipe_v(row: _VRow, rank: int, num_ranks: int, num_microbatches: int) -> None:
    """DualPipe's eight phases on a V (DeepSeek-V3, arXiv 2412.19437; ScheduleDualPipeV)."""
    behind = num_ranks - rank - 1
    for _ in range(2 * behind):
        row.forward(row.down)
    for _ in range(rank + 1):
        row.forward(row.down)
        row.forward(row.up)
    for _ in range(behind):
        row.backward(row.up, splits=True)
        row.weights()
        row.forward(row.up)
    for _ in range(num_microbatches - 2 * num_ranks + rank + 1):
        row.forward(row.down)
        row.backward(row.up)
        row.forward(row.up)
        row.backward(row.down)
    for _ in range(behind):
        row.backward(row.up)
        row.forward(row.up)
        row.backward(row.down)
    # Of the last backwards the second half leaves its weight gradients for the end.
    for index in range(2 * (rank + 1)):
        row.backward((row.up, row.down)[index % 2], splits=index >= rank + 1)
    for _ in range(behind):
        row.weights()
        row.backward(row.down, splits=True)
    for _ in range(rank + 1):
        row.weights()


zbv_zero_bubble = _per_rank(_write_zbv)
dual_pipe_v = _per_rank(_write_dual_pipe_v)

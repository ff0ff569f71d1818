"""A step on idle links, compiled: every pass, message, gather and reduction, and nothing meets.

The rows of a schedule are played as `lower` lays them out: each rank's passes one after the
other, its messages, gathers and reductions each on a stream of its own, `lower_data.Sharded`'s
rules for what waits for what. Only contention is left out, which can only make the step longer,
so the end is a lower bound, and a close one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from claw_plan.planner.actions import KINDS
from claw_plan.planner.schedules import Columns, schedule_columns
from claw_plan.simulator.engine import compiled
from claw_plan.simulator.task_graph import Int

_FORWARD, _BACKWARD, _INPUTS, _WEIGHTS = range(len(KINDS))

NOTHING = -1
"""The column of an action whose work another one does."""

GATHERED, NEAR = range(2)
"""What a rank holds of a group: all of it, or a part from which near ranks gather it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """When each rank's last pass ends, and when each stage's gradients are reduced."""

    end_ns: tuple[int, ...]
    reduced_ns: tuple[int, ...]


class Work(NamedTuple):
    """What the passes of a candidate take.

    `pass_ns` and `kernel_ns` are of each kind of pass and unit, with exchanges and without;
    `column[kind, stage]` is the kind that an action runs. `first[stage]` is a stage's first unit.
    `accumulate_ns` follows every backward of a stage but the first, `send_ns` is the message to
    the next stage, 0 within a rank; a rank's leave one after the other where `sends_in_turn`.
    """

    first: Int
    column: Int
    pass_ns: Int
    kernel_ns: Int
    accumulate_ns: Int
    send_ns: Int
    sends_in_turn: bool = True


class Traffic(NamedTuple):
    """What fully_shard moves, a group an entry: those of the units, then each stage's root.

    `alone_ns` are collectives only, for what computation loses beside them. What a group's
    reduction does on the compute stream is `cast_ns`; `reduce_ns` is over dp_shard, `sum_ns` over
    dp_replicate. After a forward `keep_ns` keeps a part, from which a gather takes `near_ns`.
    `is_beside` says of gathers and of the rest whether they run beside passes. `run` is the group
    of each unit, its first unit; `ends_run` says whether a unit is the last of its group.
    """

    gather_ns: Int
    gather_alone_ns: Int
    cast_ns: Int
    reduce_ns: Int
    sum_ns: Int
    reduce_alone_ns: Int
    near_ns: Int
    near_alone_ns: Int
    keep_ns: Int
    is_beside: NDArray[np.bool_]
    run: Int
    ends_run: NDArray[np.bool_]
    keeps_near: bool
    frees_after_forward: bool
    frees_after_backward: bool
    reduces_always: bool
    loss: float


class _Clock(NamedTuple):
    """Per rank: the end of its last pass and of its other streams; what its next pass waits for.

    `beside` is traffic that has not slowed a pass yet.
    """

    now: Int
    waits: Int
    sends: Int
    gathers: Int
    reduces: Int
    beside: Int


def play(layout: tuple[str, int, int, int], work: Work, traffic: Traffic | None = None) -> Played:
    """Plays a layout: schedule, ranks, microbatches and stages of a rank."""
    rows = schedule_columns(*layout)
    ranks, stages = layout[1], len(rows.home)
    clock = _Clock(*np.zeros((6, ranks), np.int64))
    reduced = np.zeros(stages, np.int64)
    moved = traffic or _no_traffic(work.pass_ns.shape[1], stages)
    _play(rows, work, moved, traffic is not None, layout[2], clock, reduced)
    return Played(end_ns=tuple(clock.now.tolist()), reduced_ns=tuple(reduced.tolist()))


@lru_cache(maxsize=16)
def _no_traffic(units: int, stages: int) -> Traffic:
    nothing = np.zeros(units + stages, np.int64)
    return Traffic(
        gather_ns=nothing,
        gather_alone_ns=nothing,
        cast_ns=nothing,
        reduce_ns=nothing,
        sum_ns=nothing,
        reduce_alone_ns=nothing,
        near_ns=nothing,
        near_alone_ns=nothing,
        keep_ns=nothing,
        is_beside=np.ones(2, np.bool_),
        run=np.arange(units),
        ends_run=np.ones(units, np.bool_),
        keeps_near=False,
        frees_after_forward=False,
        frees_after_backward=False,
        reduces_always=False,
        loss=0.0,
    )


@compiled
def _play(
    rows: Columns,
    work: Work,
    traffic: Traffic,
    moves: bool,
    num_microbatches: int,
    clock: _Clock,
    reduced: Int,
) -> None:
    """Each rank's next actions, up to one whose message has not been sent, until all are done.

    Where nothing `moves`, the units of an action run in one stretch.
    """
    stages = rows.home.size
    stretch_ns = _stretches(work)
    sent = np.full((2, stages, num_microbatches), -1, np.int64)
    has_gradients = np.zeros(stages, np.bool_)
    held = np.zeros((2, traffic.gather_ns.size), np.bool_)
    done = rows.first[:-1].copy()
    going = True
    while going:
        going = False
        for rank in range(clock.now.size):
            while done[rank] < rows.first[rank + 1]:
                action = done[rank]
                kind, stage = rows.kind[action], rows.stage[action]
                index = rows.microbatch[action]
                arrives = _arrival(sent, kind, stage, index, stages)
                if arrives < 0:
                    break
                if moves:
                    is_last = rows.is_last[action]
                    _run(work, traffic, clock, held, reduced, rank, stage, kind, is_last, arrives)
                else:
                    clock.waits[rank] = max(clock.waits[rank], arrives)
                    _pass(clock, rank, stretch_ns[kind, stage])
                if kind == _BACKWARD or kind == _WEIGHTS:
                    if has_gradients[stage]:
                        _pass(clock, rank, work.accumulate_ns[stage])
                    has_gradients[stage] = True
                if kind != _WEIGHTS:
                    _send(rows, work, clock, sent, rank, stage, kind, index)
                done[rank] += 1
                going = True


@compiled
def _stretches(work: Work) -> Int:
    """All passes of each kind of action and stage."""
    stretch_ns = np.zeros(work.column.shape, np.int64)
    for kind in range(work.column.shape[0]):
        for stage in range(work.column.shape[1]):
            column = work.column[kind, stage]
            if column != NOTHING:
                units = work.pass_ns[column, work.first[stage] : work.first[stage + 1]]
                stretch_ns[kind, stage] = units.sum()
    return stretch_ns


@compiled
def _pass(clock: _Clock, rank: int, duration: int) -> None:
    """Kernels on the compute stream; what takes no time is no task and waits for nothing."""
    if duration:
        clock.now[rank] = max(clock.now[rank], clock.waits[rank]) + duration


@compiled
def _arrival(sent: Int, kind: int, stage: int, index: int, stages: int) -> int:
    """When what the action takes is there, -1 where it has not been sent."""
    if kind == _FORWARD and stage:
        return int(sent[0, stage - 1, index])
    if (kind == _BACKWARD or kind == _INPUTS) and stage + 1 < stages:
        return int(sent[1, stage + 1, index])
    return 0


@compiled
def _send(
    rows: Columns,
    work: Work,
    clock: _Clock,
    sent: Int,
    rank: int,
    stage: int,
    kind: int,
    index: int,
) -> None:
    """Notes when the result of an action is at the stage that takes it."""
    goes_on = kind == _FORWARD
    peer = stage + 1 if goes_on else stage - 1
    arrives = clock.now[rank]
    if 0 <= peer < rows.home.size and rows.home[peer] != rank:
        if work.sends_in_turn:
            arrives = max(clock.sends[rank], arrives)
        arrives += work.send_ns[min(stage, peer)]
        clock.sends[rank] = arrives
    sent[0 if goes_on else 1, stage, index] = arrives


@compiled
def _run(
    work: Work,
    traffic: Traffic,
    clock: _Clock,
    held: NDArray[np.bool_],
    reduced: Int,
    rank: int,
    stage: int,
    kind: int,
    is_last: bool,
    arrives: int,
) -> None:
    """The units of an action, each gathered before and reduced after where that is due."""
    units = work.pass_ns.shape[1]
    column, root = work.column[kind, stage], units + stage
    start, stop = work.first[stage], work.first[stage + 1]
    reduces = kind != _FORWARD and (is_last or traffic.reduces_always)
    frees = kind != _FORWARD and (is_last or traffic.frees_after_backward)
    # A gather may start when the run of units two before has run.
    two_back = one_back = clock.now[rank]
    clock.waits[rank] = max(clock.waits[rank], arrives)
    if column != NOTHING:
        _gather(traffic, clock, held, rank, root, two_back)
    for place in range(stop - start):
        unit = start + place if kind == _FORWARD else stop - 1 - place
        group = traffic.run[unit]
        if column != NOTHING:
            _gather(traffic, clock, held, rank, group, two_back)
            beside = min(work.kernel_ns[column, unit], clock.beside[rank])
            clock.beside[rank] -= beside
            lost = max(0, int(traffic.loss * beside) - 2)  # rounded pass by pass, recompute too
            _pass(clock, rank, work.pass_ns[column, unit] + lost)
        if not (traffic.ends_run[unit] if kind == _FORWARD else unit == group):
            continue
        if kind == _FORWARD and traffic.frees_after_forward:
            held[GATHERED, group] = False
            if traffic.keeps_near:
                held[NEAR, group] = True
                _pass(clock, rank, traffic.keep_ns[group])
        two_back, one_back = one_back, clock.now[rank]
        if reduces:
            _reduce(traffic, clock, reduced, rank, stage, group, is_last)
        if frees:
            held[GATHERED, group] = False
    if reduces:
        _reduce(traffic, clock, reduced, rank, stage, root, is_last)
    if frees:
        held[GATHERED, root] = False


@compiled
def _gather(
    traffic: Traffic,
    clock: _Clock,
    held: NDArray[np.bool_],
    rank: int,
    group: int,
    ahead: int,
) -> None:
    """The rank's next pass waits for the group's parameters."""
    if held[GATHERED, group]:
        return
    held[GATHERED, group] = True
    duration, alone = traffic.gather_ns[group], traffic.gather_alone_ns[group]
    if held[NEAR, group]:
        held[NEAR, group] = False
        duration, alone = traffic.near_ns[group], traffic.near_alone_ns[group]
    if traffic.is_beside[0]:
        if duration:
            ends = max(clock.gathers[rank], ahead) + duration
            clock.gathers[rank] = ends
            clock.waits[rank] = max(clock.waits[rank], ends)
            clock.beside[rank] += alone
    else:
        _pass(clock, rank, duration)


@compiled
def _reduce(
    traffic: Traffic,
    clock: _Clock,
    reduced: Int,
    rank: int,
    stage: int,
    group: int,
    is_last: bool,
) -> None:
    """The group's gradients are cast, scattered, and in the last backward summed over replicas."""
    _pass(clock, rank, traffic.cast_ns[group])
    moved = traffic.reduce_ns[group] + (traffic.sum_ns[group] if is_last else 0)
    if not moved:
        return
    if traffic.is_beside[1]:
        clock.reduces[rank] = max(clock.reduces[rank], clock.now[rank]) + moved
        clock.beside[rank] += traffic.reduce_alone_ns[group]
        if is_last:
            clock.beside[rank] += traffic.sum_ns[group]
        reduced[stage] = clock.reduces[rank]
    else:
        _pass(clock, rank, moved)

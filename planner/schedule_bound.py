"""The longest way through a schedule's rows, compiled: all that a step does on idle links.

The rows are played as `lower` lays them out, each rank's passes one after the other and its
messages one after the other, but nothing meets on a link. What is left out (traffic of data
parallelism, contention) can only make the step longer, so the end is a lower bound, and a close
one: the bubbles of a schedule are all in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from claw_plan.planner.actions import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT
from claw_plan.planner.schedules import rank_of_stage, schedule_actions
from claw_plan.simulator.engine import compiled
from claw_plan.simulator.task_graph import Int

KINDS = (FORWARD, BACKWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
_FORWARD, _BACKWARD, _INPUTS, _WEIGHTS = range(len(KINDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """When each rank's last action ends, and when the last action of each stage starts."""

    end_ns: tuple[int, ...]
    last_start_ns: tuple[int, ...]


class Durations(NamedTuple):
    """Of each stage: its passes in the order of KINDS, and what follows a backward.

    `accumulate_ns` is added to every backward but the first, `send_ns` is the message between a
    stage and the next, 0 within a rank.
    """

    pass_ns: Int  # [kind, stage]
    accumulate_ns: Int
    send_ns: Int


class _Rows(NamedTuple):
    """Rows as columns; rank r's actions are entries first[r] to first[r + 1]."""

    first: Int
    kind: Int
    stage: Int
    microbatch: Int
    home: Int


def play(
    schedule: str, num_ranks: int, num_microbatches: int, stages_per_rank: int, some: Durations
) -> Played:
    """Plays the schedule with those durations."""
    rows = _rows(schedule, num_ranks, num_microbatches, stages_per_rank)
    end, last_start = np.zeros(num_ranks, np.int64), np.zeros_like(rows.home)
    _play(rows, some, num_microbatches, end, last_start)
    return Played(end_ns=tuple(end.tolist()), last_start_ns=tuple(last_start.tolist()))


@lru_cache(maxsize=256)
def _rows(schedule: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> _Rows:
    rows = schedule_actions(schedule, num_ranks, num_microbatches, stages_per_rank)
    number = {kind: index for index, kind in enumerate(KINDS)}
    actions = np.array(
        [(number[kind], stage, index) for row in rows for stage, kind, index in row], np.int64
    )
    stages = range(num_ranks * stages_per_rank)
    return _Rows(
        first=np.cumsum([0, *map(len, rows)]),
        kind=actions[:, 0].copy(),
        stage=actions[:, 1].copy(),
        microbatch=actions[:, 2].copy(),
        home=np.array([rank_of_stage(schedule, stage, num_ranks) for stage in stages]),
    )


@compiled
def _play(rows: _Rows, some: Durations, num_microbatches: int, end: Int, last_start: Int) -> None:
    """Each rank's next actions, up to one whose message has not been sent, until all are done."""
    stages = rows.home.size
    sent = np.full((2, stages, num_microbatches), -1, np.int64)
    is_first = np.ones(stages, np.bool_)
    ports = np.zeros(end.size, np.int64)
    done = rows.first[:-1].copy()
    going = True
    while going:
        going = False
        for rank in range(end.size):
            while done[rank] < rows.first[rank + 1]:
                action = done[rank]
                kind, stage = rows.kind[action], rows.stage[action]
                index = rows.microbatch[action]
                arrives = 0
                if kind == _FORWARD and stage:
                    arrives = sent[0, stage - 1, index]
                elif (kind == _BACKWARD or kind == _INPUTS) and stage + 1 < stages:
                    arrives = sent[1, stage + 1, index]
                if arrives < 0:
                    break
                last_start[stage] = max(end[rank], arrives)
                end[rank] = last_start[stage] + some.pass_ns[kind, stage]
                if kind == _BACKWARD or kind == _WEIGHTS:
                    if not is_first[stage]:
                        end[rank] += some.accumulate_ns[stage]
                    is_first[stage] = False
                if kind != _WEIGHTS:
                    _send(rows, some, sent, ports, rank, stage, kind, index, end[rank])
                done[rank] += 1
                going = True


@compiled
def _send(
    rows: _Rows,
    some: Durations,
    sent: Int,
    ports: Int,
    rank: int,
    stage: int,
    kind: int,
    index: int,
    ready: int,
) -> None:
    """Notes when the result of an action is at the stage that takes it."""
    goes_on = kind == _FORWARD
    peer = stage + 1 if goes_on else stage - 1
    arrives = ready
    if 0 <= peer < rows.home.size and rows.home[peer] != rank:
        arrives = max(ports[rank], ready) + some.send_ns[min(stage, peer)]
        ports[rank] = arrives
    sent[0 if goes_on else 1, stage, index] = arrives

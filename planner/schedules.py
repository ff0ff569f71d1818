"""A schedule's name becomes the actions of each pipeline rank, and the ranks of each stage.

plan.yaml keeps `{name, stages_per_rank, num_microbatches}`; here it is expanded to rows of
actions (`actions`). The lowering and the executor both interpret these rows and decide nothing
themselves. `schedule_rows` holds the orders, `schedule_check` what rows must obey.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from claw_plan.planner.actions import KINDS, Rows
from claw_plan.planner.errors import PlanError
from claw_plan.planner.schedule_rows import (
    arrays_of,
    dual_pipe_v,
    gpipe,
    interleaved,
    interleaved_zero_bubble,
    microbatches_per_round,
    num_rounds,
    one_forward_one_backward,
    rows_of,
    zbv_zero_bubble,
)
from claw_plan.profiles.errors import near_matches
from claw_plan.simulator.engine import compiled
from claw_plan.simulator.task_graph import Int

INTERLEAVED = "Interleaved1F1B"

_FORWARD, _BACKWARD, _INPUTS, _WEIGHTS = range(len(KINDS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule by PyTorch's name.

    `write` makes the rows of (ranks, microbatches, stages per rank), or the columns that
    `schedule_rows.rows_of` makes rows of. `fewest_stages` and
    `most_stages` bound the stages a rank may hold; None is no bound but the model's.
    `places_v` where rank r holds stages r and 2 pp - 1 - r, else r, r + pp, …
    `splits_backward` where I and W are actions of their own.
    `runs_rounds` where the microbatches must divide into equal rounds.
    `fills_all` where there must be at least as many microbatches as stages.
    """

    write: Callable[[int, int, int], Rows | list[Int]]
    fewest_stages: int = 1
    most_stages: int | None = 1
    places_v: bool = False
    splits_backward: bool = False
    runs_rounds: bool = False
    fills_all: bool = False


SCHEDULES: dict[str, Schedule] = {
    "1F1B": Schedule(write=one_forward_one_backward),
    "GPipe": Schedule(write=gpipe),
    INTERLEAVED: Schedule(write=interleaved, fewest_stages=2, most_stages=None, runs_rounds=True),
    "InterleavedZeroBubble": Schedule(
        write=interleaved_zero_bubble, most_stages=None, splits_backward=True, runs_rounds=True
    ),
    "ZBVZeroBubble": Schedule(
        write=zbv_zero_bubble,
        fewest_stages=2,
        most_stages=2,
        places_v=True,
        splits_backward=True,
    ),
    "DualPipeV": Schedule(
        write=dual_pipe_v,
        fewest_stages=2,
        most_stages=2,
        places_v=True,
        splits_backward=True,
        fills_all=True,
    ),
}

PIPEDREAM_2BW = "PipeDream2BW"

ASYNCHRONOUS: dict[str, Schedule] = {
    PIPEDREAM_2BW: Schedule(write=one_forward_one_backward, fills_all=True),
}
"""Schedules without a flush, which train with weights of one step before (`asynchronous`). Here
stands what a step is if it is the only one; the search offers them only where they are allowed."""

EVERY_SCHEDULE = SCHEDULES | ASYNCHRONOUS


def schedule_of(name: str) -> Schedule:
    """The schedule of that name; PlanError with the nearest names for an unknown one."""
    if name not in EVERY_SCHEDULE:
        raise PlanError(f"there is no schedule {name!r}; {near_matches(name, EVERY_SCHEDULE)}")
    return EVERY_SCHEDULE[name]


def schedule_refusal(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> str:
    """Why the schedule cannot run with these numbers, with numbers that it can; '' if it can."""
    schedule = schedule_of(name)
    if min(num_ranks, num_microbatches, stages_per_rank) < 1:
        return (
            f"a schedule has ranks, stages and microbatches, at least one of each; got "
            f"{num_ranks=} {stages_per_rank=} {num_microbatches=}"
        )
    fewest, most = schedule.fewest_stages, schedule.most_stages
    if stages_per_rank < fewest or (most is not None and stages_per_rank > most):
        wanted = f"{fewest}" if most == fewest else f"at least {fewest}"
        return f"{name} has {wanted} stages per rank, but got {stages_per_rank=}".replace(
            "1 stages", "1 stage"
        )
    if schedule.runs_rounds:
        rounds = num_rounds(num_ranks, num_microbatches)
        if num_microbatches % rounds:
            return (
                f"{name} runs its microbatches in {rounds} equal rounds, but {num_microbatches} "
                f"do not divide by {rounds}; take a multiple of {num_ranks}, or schedule=1F1B"
            )
    if schedule.fills_all and num_microbatches < num_ranks * stages_per_rank:
        return (
            f"{name} needs at least as many microbatches as stages, but got {num_microbatches} "
            f"for {num_ranks * stages_per_rank} stages; take smaller microbatches, or "
            f"schedule=1F1B"
        )
    return ""


@lru_cache(maxsize=64)
def schedule_actions(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int = 1
) -> Rows:
    """The rows of a schedule by PyTorch's name.

    Raises PlanError for a name that is not known, and for numbers of stages and microbatches
    that the schedule does not take.
    """
    _check(name, num_ranks, num_microbatches, stages_per_rank)
    written = schedule_of(name).write(num_ranks, num_microbatches, stages_per_rank)
    return rows_of(written) if isinstance(written, list) else written


def _check(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> None:
    if why := schedule_refusal(name, num_ranks, num_microbatches, stages_per_rank):
        raise PlanError(why)


class Columns(NamedTuple):
    """Rows as arrays; rank r's actions are entries first[r] to first[r + 1].

    `kind` indexes KINDS, `is_last` marks the backward with which a stage's gradients are
    complete, `home` is the rank of each stage.
    """

    first: Int
    kind: Int
    stage: Int
    microbatch: Int
    is_last: NDArray[np.bool_]
    home: Int


@lru_cache(maxsize=256)
def schedule_columns(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> Columns:
    """The rows of `schedule_actions` as arrays."""
    _check(name, num_ranks, num_microbatches, stages_per_rank)
    written = schedule_of(name).write(num_ranks, num_microbatches, stages_per_rank)
    ranks = written if isinstance(written, list) else arrays_of(written)
    stage, kind, microbatch = np.concatenate(ranks, axis=1)
    stages = num_ranks * stages_per_rank
    completes = np.flatnonzero((kind == _BACKWARD) | (kind == _WEIGHTS))
    last = np.zeros(stages, np.int64)
    last[stage[completes]] = completes  # of several the latest stays
    is_last = np.zeros(len(kind), np.bool_)
    is_last[last] = True
    return Columns(
        first=np.cumsum([0, *(columns.shape[1] for columns in ranks)]),
        kind=kind,
        stage=stage,
        microbatch=microbatch,
        is_last=is_last,
        home=np.array([rank_of_stage(name, index, num_ranks) for index in range(stages)]),
    )


def stages_of_rank(name: str, rank: int, num_ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """The stages that a rank holds, in the order of the chain."""
    if schedule_of(name).places_v:
        return (rank, 2 * num_ranks - 1 - rank)
    return tuple(range(rank, num_ranks * stages_per_rank, num_ranks))


def rank_of_stage(name: str, stage: int, num_ranks: int) -> int:
    """The rank that holds a stage."""
    turn, place = divmod(stage, num_ranks)
    return num_ranks - 1 - place if schedule_of(name).places_v and turn % 2 else place


def least_in_flight(
    name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int
) -> NDArray[np.int64]:
    """How many microbatches each rank holds at some moment, over all its stages, at the least.

    The forwards that a row begins with, before its first backward.
    """
    schedule, ranks = schedule_of(name), np.arange(num_ranks)
    if schedule.places_v:
        down = np.minimum(num_microbatches, 2 * num_ranks - 1 - ranks)
        return down + np.minimum(num_microbatches, ranks + 1)
    if schedule.runs_rounds:
        in_round = microbatches_per_round(num_ranks, num_microbatches)
        hops = 1 if schedule.splits_backward else 2
        ahead = (stages_per_rank - 1) * in_round + hops * (num_ranks - 1 - ranks)
        return np.minimum(num_microbatches * stages_per_rank, ahead + 1)
    return np.minimum(num_microbatches, num_ranks - ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Microbatches that a rank's stages hold when it holds most, stage by stage in order.

    `flights` counts those between their forward and the end of their backward, `late` those of
    them whose gradients of weights wait.
    """

    flights: tuple[int, ...]
    late: tuple[int, ...]


@lru_cache(maxsize=4096)
def held_by_rank(
    name: str,
    rank: int,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int = 1,
    *,
    recomputes: bool = False,
) -> Held:
    """What a rank of the schedule holds at the first moment at which it holds most.

    With `recomputes` every stage but the first runs its whole backward for I. The first runs it
    for W, and until then holds no more than before its I.
    """
    rows = schedule_columns(name, num_ranks, num_microbatches, stages_per_rank)
    start, stop = rows.first[rank : rank + 2]
    held = np.zeros((2, len(rows.home)), np.int64)
    _hold(rows.kind[start:stop], rows.stage[start:stop], recomputes, held)
    own = list(stages_of_rank(name, rank, num_ranks, stages_per_rank))
    return Held(flights=tuple(held[0, own].tolist()), late=tuple(held[1, own].tolist()))


@compiled
def _hold(kinds: Int, stages: Int, recomputes: bool, found: Int) -> None:
    """Writes what is in flight on each stage, and what is late, when most is in flight."""
    now = np.zeros_like(found)
    total = most = 0
    for kind, stage in zip(kinds, stages):  # noqa: B905 - compiled code knows no strict
        splits_here = not recomputes and stage > 0
        if kind == _FORWARD:
            now[0, stage] += 1
            total += 1
        now[1, stage] += kind == _INPUTS and splits_here
        if total > most:
            most = total
            found[:] = now
        ends = _INPUTS if recomputes and stage else _WEIGHTS
        if kind == _BACKWARD or kind == ends:
            now[0, stage] -= 1
            total -= 1
        now[1, stage] -= kind == _WEIGHTS and now[1, stage] > 0

"""Bounds on pipelines whatever their cut, and the cuts that may beat a time, compiled.

Beside `pipeline_bound`, which bounds each pipeline with its evenest cut. Times and sizes are as
there; all bounds are of the path through a pipeline whose messages cost nothing.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from claw_plan.planner.pipeline_bound import (
    AGAIN,
    CUT,
    FORWARD,
    INPUTS,
    KEPT,
    WHOLE,
    WITH_AGAIN,
    WORK,
    Chain,
    Pipelines,
    always_bytes,
    held_bytes,
    stage_ns,
    stage_of,
)
from claw_plan.simulator.engine import compiled
from claw_plan.simulator.task_graph import Int

HALVINGS = 4
"""Of the stretch in which a bound is sought: to a 16th of it."""


def bound_any_cut(chain: Chain, some: Pipelines, limits_ns: Int, least_ns: Int) -> None:
    """Raises the bounds `least_ns` towards the least path of any cut, up to the limits.

    As in `bound_pipelines` a thread does one half.
    """
    half, end = some.pp.size // 2, some.pp.size
    with ThreadPoolExecutor(1) as other:
        done = other.submit(_bound_rows, chain, some, (half, end), limits_ns, least_ns)
        _bound_rows(chain, some, (0, half), limits_ns, least_ns)
        done.result()


@compiled
def _bound_rows(
    chain: Chain, some: Pipelines, rows: tuple[int, int], limits_ns: Int, least_ns: Int
) -> None:
    for row in range(rows[0], rows[1]):
        limit_ns = limits_ns[row]
        if least_ns[row] >= limit_ns or not _may_take(chain, some, row, limit_ns - 1):
            least_ns[row] = max(least_ns[row], limit_ns)
            continue
        low, high = max(least_ns[row], _passage_ns(chain, some, row)), limit_ns
        for _ in range(HALVINGS if low < high else 0):
            middle = (low + high) // 2
            if _may_take(chain, some, row, middle):
                high = middle
            else:
                low = middle + 1
        least_ns[row] = low


@compiled
def _may_take(chain: Chain, some: Pipelines, row: int, path_ns: int) -> bool:
    """Whether it is not ruled out that some cut's path is so short."""
    shared = _can_share(chain, some, row, path_ns)
    return bool(shared and _reaches(chain, some, row, path_ns))


@compiled
def _passage_ns(chain: Chain, some: Pipelines, row: int) -> int:
    """One microbatch on its way through all stages and back, with the largest of first stages.

    Of a backward in two parts only the first stage's whole is waited for.
    """
    times = chain.times_ns[some.times[row]]
    whole, early = times[WHOLE], times[WHOLE]
    if some.splits[row] and not some.is_recomputed[row]:
        early = times[INPUTS]
    least = np.iinfo(np.int64).max
    for edge in chain.edges[1:]:
        least = min(least, whole[edge] + early[-1] - early[edge])
    return int(times[FORWARD, -1] + least)


@compiled
def _reaches(chain: Chain, some: Pipelines, row: int, path_ns: int) -> bool:
    """Whether stages filled from the first, each as far as path and memory allow, reach the end.

    A stage that starts later has waited longer and holds less: what it may add to the wait is a
    part of what it spares m times. So the furthest is the best, and if this does not reach the
    end, no cut does. Of several stages of a rank each is looked at alone.
    """
    times, edges, ends = chain.times_ns[some.times[row]], chain.edges, chain.edges.size - 1
    count, stages = some.microbatches[row], some.pp[row] * some.stages_per_rank[row]
    start = drained = 0
    for stage in range(stages):
        stop, reached = start, times[FORWARD, edges[start]]
        while stop < ends - (stages - 1 - stage):
            span = edges[start], edges[stop + 1]
            forward, backward, early = _least_ns(chain, some, row, stage, *span)
            work = max(count * (forward + backward), count * (forward + early) + drained)
            if reached + work > path_ns or not _has_room(chain, some, row, stage, *span):
                break
            stop += 1
        if stop == start:
            return False
        drained += _drained_ns(chain, some, row, edges[start], edges[stop])
        start = stop
    return start == ends


@compiled
def _least_ns(
    chain: Chain, some: Pipelines, row: int, stage: int, start: int, stop: int
) -> tuple[int, int, int]:
    """`stage_ns`; where some blocks run again, as many of those that take least."""
    if not some.runs_again[row]:
        return stage_ns(chain, some, row, stage, start, stop)
    times = chain.times_ns[some.times[row]]
    blocks = max(0, min(stop, chain.edges[-1] - 1) - max(start, 1))
    again = _least_step(times[AGAIN]) * min(blocks, some.runs_again[row])
    backward = times[WHOLE, stop] - times[WHOLE, start] + again
    early = 0 if some.splits[row] and stage == 0 else backward
    return times[FORWARD, stop] - times[FORWARD, start], backward, early


@compiled
def _drained_ns(chain: Chain, some: Pipelines, row: int, start: int, stop: int) -> int:
    """What a stage adds at least to the time for which gradients pass stages before its last."""
    times = chain.times_ns[some.times[row]]
    if not some.splits[row] or some.is_recomputed[row]:
        return int(times[WHOLE, stop] - times[WHOLE, start])
    total = 0
    for unit in range(start, stop):
        whole = times[WHOLE, unit + 1] - times[WHOLE, unit]
        total += min(whole, times[INPUTS, unit + 1] - times[INPUTS, unit])
    return total


@compiled
def _has_room(chain: Chain, some: Pipelines, row: int, stage: int, start: int, stop: int) -> bool:
    """Whether memory does not rule the stage out."""
    if some.runs_again[row]:
        return True
    need = flight_of(some, row, stage) * held_bytes(chain, some, row, start, stop)
    need += always_bytes(chain, some, row, start, stop)
    return bool(need <= some.capacity_bytes[row])


@compiled
def _can_share(chain: Chain, some: Pipelines, row: int, path_ns: int) -> bool:
    """Whether ranks of several stages have time and room for all the work, as whole blocks.

    A rank waits at least for the blocks that stages before its first must hold.
    """
    times, pp, count = chain.times_ns[some.times[row]], some.pp[row], some.microbatches[row]
    work = times[WORK if some.runs_again[row] else CUT]
    last = work.size - 2
    block = max(1, _least_step(work))
    sizes = _least_sizes(chain, some, row)
    time = blocks = 0
    for rank in range(pp):
        waits = times[FORWARD, chain.edges[rank]]
        if not some.splits[row]:  # and gradients pass them in the end
            waits += times[WHOLE, chain.edges[rank]]
        room = (path_ns - waits) // count
        time += room
        if rank == 0:
            room -= work[1]
        if rank == (0 if some.places_v[row] else pp - 1):
            room -= work[-1] - work[last]
        most = min(room // block, _most_blocks(chain, some, row, rank, sizes))
        if most < some.stages_per_rank[row]:
            return False
        blocks += most
    return bool(time >= work[-1] and blocks >= last - 1)


@compiled
def _least_step(total: Int) -> int:
    """The least that a block adds to a running total over the units."""
    least = total[-1]
    for unit in range(1, total.size - 2):
        least = min(least, total[unit + 1] - total[unit])
    return int(least)


@compiled
def _least_sizes(chain: Chain, some: Pipelines, row: int) -> tuple[int, int]:
    """What a block holds of a microbatch, and whatever runs, at the least."""
    held = chain.held_bytes[some.held[row], WITH_AGAIN if some.is_recomputed[row] else KEPT]
    always = _least_step(chain.stored_bytes[some.stored[row]])
    if some.microbatches[row] > 1:
        always += _least_step(chain.whole_bytes[some.whole[row]])
    return _least_step(held), always


@compiled
def _most_blocks(
    chain: Chain, some: Pipelines, row: int, rank: int, sizes: tuple[int, int]
) -> int:
    """The most blocks that memory does not rule out on a rank of several stages.

    All but one of each stage are counted as if they were on that with the fewest microbatches.
    """
    units, pp, per_rank = chain.edges[-1], some.pp[row], some.stages_per_rank[row]
    held, always = sizes
    fewest, flights = np.iinfo(np.int64).max, 0
    for turn in range(per_rank):
        flight = flight_of(some, row, stage_of(rank, turn, pp, some.places_v[row]))
        fewest = min(fewest, flight)
        flights += flight
    room = some.capacity_bytes[row] - (flights - fewest * per_rank) * held
    if rank == 0:
        room -= always_bytes(chain, some, row, 0, 1)
    if rank == (0 if some.places_v[row] else pp - 1):
        room -= always_bytes(chain, some, row, units - 1, units)
    return int(max(0, room) // max(1, always + fewest * held))


@compiled
def flight_of(some: Pipelines, row: int, stage: int) -> int:
    """How many microbatches a stage holds before its rank's first backward.

    The parts of `schedules.least_in_flight`; where ranks run rounds, forwards go through a rank's
    stages round by round.
    """
    pp, count, per_rank = some.pp[row], some.microbatches[row], some.stages_per_rank[row]
    rank = rank_of(stage, pp, some.places_v[row])
    if some.places_v[row]:
        return int(min(count, 2 * pp - 1 - rank if stage < pp else rank + 1))
    ahead = some.flights[some.layout[row], rank]
    if per_rank == 1:
        return int(ahead)
    in_round = count // max(1, count // pp)
    rounds, rest = ahead // (in_round * per_rank), ahead % (in_round * per_rank)
    return int(rounds * in_round + min(max(0, rest - stage // pp * in_round), in_round))


@compiled
def cuts_below(
    chain: Chain, some: Pipelines, row: int, limit_ns: int, most_steps: int, found: Int
) -> tuple[int, int]:
    """Writes the units at which stages start, and the end, of all cuts that may beat the limit.

    That are those whose path is shorter and whose memory is not ruled out. Returns how many, -1
    where there is no room in `found` for all or finding them takes more than `most_steps`; and
    the steps taken. The last entry of a row of `found` is the path.

    Stages are cut from the first; a rank whose path is too long, or which holds too much, ends a
    branch, as does what is left if it is more than all ranks have time for.
    """
    pp, stages = some.pp[row], some.pp[row] * some.stages_per_rank[row]
    ends, at = chain.edges.size - 1, np.zeros(stages + 1, np.int64)
    zero = np.zeros((10, stages + 1), np.int64)
    state = _Placed(
        zero[0], zero[1], zero[2], zero[3], zero[4], zero[5], zero[6], zero[7], zero[8], zero[9]
    )
    for stage in range(stages):
        state.flights[stage] = flight_of(some, row, stage)
    number = steps = stage = 0
    while stage >= 0:
        rank = rank_of(stage, pp, some.places_v[row])
        _take_back(state, stage, rank)
        at[stage + 1] += 1
        if stage == stages - 1:
            at[stage + 1] = max(at[stage + 1], ends)
        if at[stage + 1] > ends - (stages - 1 - stage):
            stage -= 1
            continue
        steps += 1
        if steps > most_steps:
            return -1, steps
        start, stop = chain.edges[at[stage]], chain.edges[at[stage + 1]]
        takes = _place(chain, some, row, state, stage, rank, start, stop)
        if takes >= limit_ns or state.need[rank] > some.capacity_bytes[row]:
            at[stage + 1] = ends  # a longer stage takes and holds no less
            continue
        if not _have_time(chain, some, row, state, stage, stop, limit_ns - 1):
            continue
        if stage < stages - 1:
            stage += 1
            at[stage + 1] = at[stage]
            continue
        takes = max(takes, state.reached[stages] + state.drained[stages])
        if takes >= limit_ns:
            continue
        if number == len(found):
            return -1, steps
        found[number, : stages + 1] = chain.edges[at]
        found[number, stages + 1] = takes
        number += 1
    return number, steps


class _Placed(NamedTuple):
    """Of stages placed so far their times, sizes, and what comes before each; sums of ranks.

    `longest` is the path so far, `flights` are of all stages.
    """

    forward: Int
    backward: Int
    early: Int
    size: Int
    reached: Int
    drained: Int
    longest: Int
    flights: Int
    work: Int
    need: Int


@compiled
def _take_back(state: _Placed, stage: int, rank: int) -> None:
    """Undoes the last try at a stage, if there was one."""
    state.work[rank] -= state.forward[stage] + state.backward[stage]
    state.need[rank] -= state.size[stage]
    for figures in (state.forward, state.backward, state.early, state.size):
        figures[stage] = 0


@compiled
def _place(
    chain: Chain,
    some: Pipelines,
    row: int,
    state: _Placed,
    stage: int,
    rank: int,
    start: int,
    stop: int,
) -> int:
    """Adds a stage; returns the longest path of a rank and of a stage alone so far."""
    count, pp = some.microbatches[row], some.pp[row]
    forward, backward, early = stage_ns(chain, some, row, stage, start, stop)
    state.forward[stage], state.backward[stage], state.early[stage] = forward, backward, early
    state.size[stage] = state.flights[stage] * held_bytes(chain, some, row, start, stop)
    state.size[stage] += always_bytes(chain, some, row, start, stop)
    state.work[rank] += forward + backward
    state.need[rank] += state.size[stage]
    reached, drained = state.reached[stage], state.drained[stage]
    state.reached[stage + 1] = reached + forward
    state.drained[stage + 1] = drained + (early if stage else backward)
    soon = 0
    for turn in range(some.stages_per_rank[row]):
        other = stage_of(rank, turn, pp, some.places_v[row])
        soon += state.forward[other] + state.early[other]
    longest = state.longest[stage - 1] if stage else 0
    takes = max(count * state.work[rank], count * soon + state.drained[rank])
    longest = max(longest, state.reached[rank] + takes)
    takes = max(count * (forward + backward), count * (forward + early) + drained)
    state.longest[stage] = max(longest, reached + takes)
    return int(state.longest[stage])


@compiled
def _have_time(
    chain: Chain, some: Pipelines, row: int, state: _Placed, stage: int, stop: int, path_ns: int
) -> bool:
    """Whether all ranks together have time for the units behind the stage."""
    total = chain.times_ns[some.times[row], WORK if some.runs_again[row] else CUT]
    room = 0
    for rank in range(some.pp[row]):
        waits = state.reached[min(rank, stage + 1)]
        room += max(0, (path_ns - waits) // some.microbatches[row] - state.work[rank])
    return bool(total[-1] - total[stop] <= room)


@compiled
def rank_of(stage: int, pp: int, places_v: bool) -> int:
    """The rank that holds a stage, as `schedules.rank_of_stage`."""
    turn, place = stage // pp, stage % pp
    return pp - 1 - place if places_v and turn % 2 else place

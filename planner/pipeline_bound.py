"""Bounds on many pipelines at once, compiled: the best cut, the path through it, its memory.

Each row is one way of cutting the chain into stages. Times and sizes come as running totals over
the units, `total[unit]` being that of all units before it, so a stage's is one difference. The
same arithmetic as `stage_cut` and `StagePath.longest_ns` in whole numbers, hence the same cuts
and times; tests hold them equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from claw_plan.simulator.engine import compiled
from claw_plan.simulator.task_graph import Int

FORWARD, WHOLE, INPUTS, WEIGHTS, WORK, CUT, AGAIN = range(7)
"""Columns of `Chain.times_ns`: a forward, a whole backward, its two parts, all of these, that
with what runs again, and what runs again alone."""

KEPT, WITH_AGAIN = range(2)
"""Rows of `Chain.held_bytes`: where nothing runs again, and where all blocks do."""


class Chain(NamedTuple):
    """Running totals over the units, each table with one row a variant.

    `edges` are the units at which a stage may start or end. `held_bytes` are activations of one
    microbatch, without and with recompute, `stored_bytes` what is there all the time,
    `whole_bytes` and `shard_bytes` the gradients that add up over microbatches, whole or sharded.
    """

    edges: Int
    times_ns: Int  # [variant, column, unit]
    held_bytes: Int  # [variant, KEPT or WITH_AGAIN, unit]
    stored_bytes: Int
    whole_bytes: Int
    shard_bytes: Int


class Pipelines(NamedTuple):
    """One entry a pipeline; `times` to `shard` are rows of the chain's tables.

    Of each stage the first `runs_again` blocks count as run again in the times, and the first
    `remakes` in memory; 0 for all that its variant does so. `flights[layout, rank]` is how many
    microbatches a rank holds at least, over all its stages.
    """

    pp: Int
    stages_per_rank: Int
    microbatches: Int
    places_v: NDArray[np.bool_]
    splits: NDArray[np.bool_]
    is_recomputed: NDArray[np.bool_]
    runs_again: Int
    remakes: Int
    capacity_bytes: Int
    times: Int
    held: Int
    stored: Int
    whole: Int
    layout: Int
    flights: Int


@compiled
def cut_evenly(total: Int, edges: Int, first: Int) -> bool:
    """Writes the first unit of each stage, and the end, into `first`: the least largest stage.

    False where there are more stages than legal cuts.
    """
    stages = first.size - 1
    if stages > edges.size - 1:
        return False
    whole = total[edges[-1]]
    low, high = -(-whole // stages), whole
    tried = np.empty_like(first)
    _fill(total, edges, high, first)
    while low < high:
        middle = (low + high) // 2
        if not _fill(total, edges, middle, tried):
            low = middle + 1
            continue
        first[:] = tried
        largest = 0
        for stage in range(stages):
            largest = max(largest, total[first[stage + 1]] - total[first[stage]])
        high = min(middle, largest)
    return True


def even_cuts(
    times_ns: Sequence[int], num_stages: int, may_start: Sequence[int]
) -> tuple[tuple[int, int], ...] | None:
    """`stage_cut.cut_chain` without a limit on memory."""
    first = np.empty(num_stages + 1, np.int64)
    edges = np.array([0, *may_start, len(times_ns)], np.int64)
    if not cut_evenly(np.array([0, *accumulate(times_ns)], np.int64), edges, first):
        return None
    return tuple(pairwise(first.tolist()))


@compiled
def _fill(total: Int, edges: Int, limit: int, first: Int) -> bool:
    """Fills stages from the last, each up to the limit, an edge left for each stage in front."""
    stages = first.size - 1
    stop = edges.size - 1
    first[stages] = edges[stop]
    for stage in range(stages - 1, -1, -1):
        start = stop
        while start > stage and total[edges[stop]] - total[edges[start - 1]] <= limit:
            start -= 1
        if start == stop:
            return False
        first[stage] = edges[start]
        stop = start
    return stop == 0


def bound_pipelines(chain: Chain, some: Pipelines, longest_ns: Int, may_fit: Int) -> None:
    """Writes the path of each pipeline, and whether its memory does not rule it out.

    A thread does one half: compiled code does not hold Python's lock.
    """
    half = some.pp.size // 2
    with ThreadPoolExecutor(1) as other:
        done = other.submit(_bound_rows, chain, some, (half, some.pp.size), longest_ns, may_fit)
        _bound_rows(chain, some, (0, half), longest_ns, may_fit)
        done.result()


@compiled
def _bound_rows(
    chain: Chain, some: Pipelines, rows: tuple[int, int], longest_ns: Int, may_fit: Int
) -> None:
    for row in range(rows[0], rows[1]):
        stages = some.pp[row] * some.stages_per_rank[row]
        first = np.empty(stages + 1, np.int64)
        column = WORK if some.runs_again[row] else CUT
        if not cut_evenly(chain.times_ns[some.times[row], column], chain.edges, first):
            longest_ns[row] = may_fit[row] = -1
            continue
        longest_ns[row] = _path_ns(chain, some, row, first)
        if some.stages_per_rank[row] == 1 and not some.runs_again[row]:
            may_fit[row] = _some_cut_fits(chain, some, row)
        else:
            may_fit[row] = _cut_fits(chain, some, row, first)


@compiled
def _path_ns(chain: Chain, some: Pipelines, row: int, first: Int) -> int:
    """`StagePath.longest_ns` of the cut, with messages that cost nothing."""
    pp, count, stages = some.pp[row], some.microbatches[row], first.size - 1
    forward = np.empty(stages, np.int64)
    backward = np.empty(stages, np.int64)
    early = np.empty(stages, np.int64)
    for stage in range(stages):
        span = first[stage], first[stage + 1]
        forward[stage], backward[stage], early[stage] = stage_ns(chain, some, row, stage, *span)
    longest = reached = drained = 0
    for rank in range(pp):
        soon = work = 0
        for turn in range(some.stages_per_rank[row]):
            stage = stage_of(rank, turn, pp, some.places_v[row])
            soon += forward[stage] + early[stage]
            work += forward[stage] + backward[stage]
        longest = max(longest, reached + max(count * work, count * soon + drained))
        reached += forward[rank]
        drained += early[rank] if rank else backward[rank]
    return longest


@compiled
def stage_ns(
    chain: Chain, some: Pipelines, row: int, stage: int, start: int, stop: int
) -> tuple[int, int, int]:
    """A stage's forward, its backward, and of that what the stage before waits for."""
    times = chain.times_ns[some.times[row]]
    blocks, end = _again(chain, start, stop, some.runs_again[row])
    again = times[AGAIN, end] - times[AGAIN, blocks]
    backward = early = times[WHOLE, stop] - times[WHOLE, start] + again
    if some.splits[row]:
        if stage == 0:
            early = 0
        elif not some.is_recomputed[row]:
            early = times[INPUTS, stop] - times[INPUTS, start]
            backward = min(backward, early + times[WEIGHTS, stop] - times[WEIGHTS, start])
    return times[FORWARD, stop] - times[FORWARD, start], backward, early


@compiled
def _again(chain: Chain, start: int, stop: int, blocks: int) -> tuple[int, int]:
    """The first of a stage's blocks, and the end of those that run again; as `Problem` has it."""
    first = max(start, 1)
    end = max(first, min(stop, chain.edges[-1] - 1))
    return first, min(end, first + blocks) if blocks else end


@compiled
def held_bytes(chain: Chain, some: Pipelines, row: int, start: int, stop: int) -> int:
    """Activations of one microbatch on a stage."""
    held = chain.held_bytes[some.held[row]]
    _, end = _again(chain, start, stop, some.remakes[row])
    if not some.remakes[row]:
        end = stop
    kept = held[KEPT, stop] - held[KEPT, end]
    return int(kept + held[WITH_AGAIN, end] - held[WITH_AGAIN, start])


@compiled
def stage_of(rank: int, turn: int, pp: int, places_v: bool) -> int:
    """The stage that a rank holds in its turn."""
    if places_v and turn % 2:
        return (turn + 1) * pp - 1 - rank
    return turn * pp + rank


@compiled
def always_bytes(chain: Chain, some: Pipelines, row: int, start: int, stop: int) -> int:
    """What a stage holds whatever runs, at the least."""
    stored = chain.stored_bytes[some.stored[row]]
    held = int(stored[stop] - stored[start])
    if some.microbatches[row] > 1:  # gradients that wait for those of other microbatches
        if some.pp[row] > 1:
            sums = chain.whole_bytes[some.whole[row]]
        else:
            sums = chain.shard_bytes[some.stored[row]]
        held += int(sums[stop] - sums[start])
    return held


@compiled
def _some_cut_fits(chain: Chain, some: Pipelines, row: int) -> int:
    """Whether stages filled from the last, each as far as memory allows, reach the front."""
    edges, stop = chain.edges, chain.edges.size - 1
    for stage in range(some.pp[row] - 1, -1, -1):
        flight = some.flights[some.layout[row], stage]
        start = stop
        while start > stage:
            unit = edges[start - 1], edges[stop]
            need = flight * held_bytes(chain, some, row, *unit)
            if need + always_bytes(chain, some, row, *unit) > some.capacity_bytes[row]:
                break
            start -= 1
        if start == stop:
            return 0
        stop = start
    return int(stop == 0)


@compiled
def _cut_fits(chain: Chain, some: Pipelines, row: int, first: Int) -> int:
    """Whether every rank of that cut fits: its microbatches may all be on its smallest stage."""
    pp = some.pp[row]
    for rank in range(pp):
        always, least = 0, np.iinfo(np.int64).max
        for turn in range(some.stages_per_rank[row]):
            stage = stage_of(rank, turn, pp, some.places_v[row])
            start, stop = first[stage], first[stage + 1]
            always += always_bytes(chain, some, row, start, stop)
            least = min(least, held_bytes(chain, some, row, start, stop))
        flight = some.flights[some.layout[row], rank]
        if always + flight * least > some.capacity_bytes[row]:
            return 0
    return 1

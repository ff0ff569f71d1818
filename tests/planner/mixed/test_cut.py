"""The exact least bottleneck against all arrangements."""

from __future__ import annotations

import random
from itertools import accumulate

import numpy as np
import pytest

from claw_plan.planner.mixed.cut import (
    Chain,
    arrangements,
    bottleneck_ns,
    count_arrangements,
    least_bottleneck,
    legal_starts,
)


def random_chain(rng: random.Random) -> Chain:
    """Two or three kinds whose memory allows less, the more stages are behind."""
    kinds, ways, units = rng.choice([2, 3]), rng.choice([1, 2]), rng.randint(4, 8)
    depth = rng.randint(1, 4)
    total = []
    for _ in range(kinds):  # the second way takes longer, unit by unit
        units_ns = np.array([rng.randint(1, 50) for _ in range(units)])
        more = [
            units_ns + way * np.array([rng.randint(0, 9) for _ in range(units)])
            for way in range(ways)
        ]
        total.append([[0, *accumulate(each.tolist())] for each in more])
    lowest = np.zeros((kinds, ways, depth, units + 1), np.int64)
    for kind in range(kinds):
        needs, most = [rng.randint(1, 10) for _ in range(units)], rng.randint(5, 60)
        for way in range(ways):
            has = most * (1 + way)
            for behind in range(depth):
                for stop in range(units + 1):
                    start = stop
                    while start and sum(needs[start - 1 : stop]) * (behind + 1) <= has:
                        start -= 1
                    lowest[kind, way, behind, stop] = start
    may_start = [unit for unit in range(2, units - 1) if rng.random() < 0.8]
    most = np.array([rng.randint(0, 3) for _ in range(kinds)], np.int64)
    return Chain(np.array(total, np.int64), lowest, legal_starts(units, may_start), most)


@pytest.mark.parametrize("seed", range(60))
def test_the_least_bottleneck_is_that_of_all_arrangements(seed):
    chain = random_chain(random.Random(seed))
    every = list(arrangements(chain))
    found = least_bottleneck(chain)
    if not every:
        assert found is None
        return
    assert found is not None
    assert found[0] == min(bottleneck_ns(chain, one) for one in every)
    for state in found[1].ends():
        proposed = found[1].arrangement(state)
        assert bottleneck_ns(chain, proposed) <= found[0]
        assert [run[2:] for run in proposed] in [[run[2:] for run in one] for one in every]


@pytest.mark.parametrize("seed", range(20))
def test_arrangements_are_counted_in_closed_form(seed):
    chain = random_chain(random.Random(seed))
    unlimited = chain._replace(lowest=np.zeros_like(chain.lowest))
    assert count_arrangements(chain) == len(list(arrangements(unlimited)))


def test_a_fast_kind_takes_the_units_that_a_slow_one_cannot():
    """Ten equal units, one kind three times as fast: 15 and 7 or 8 units of work."""
    slow, fast = np.arange(11) * 3, np.arange(11)
    chain = Chain(
        total_ns=np.array([[slow], [fast]], np.int64),
        lowest=np.zeros((2, 1, 2, 11), np.int64),
        legal=legal_starts(10, range(2, 9)),
        most=np.array([1, 1], np.int64),
    )
    found = least_bottleneck(chain)
    assert found is not None and found[0] == 8  # 2 slow units take 6, 8 fast ones 8
    runs = found[1].arrangement(found[1].ends()[0])
    assert {run.kind: run.stop - run.start for run in runs} == {0: 2, 1: 8}


def test_a_stage_starts_with_a_block_or_the_prologue():
    assert legal_starts(6, [2, 4]).tolist() == [0, 2, 2, 4, 4, 6, 6]

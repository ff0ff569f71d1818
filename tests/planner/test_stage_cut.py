"""Stage cuts equal brute force over all cuts, with and without a memory limit."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from claw_plan.planner.stage_cut import cut_chain

TIMES = st.lists(st.integers(1, 20), min_size=3, max_size=9)


def all_cuts(times, num_stages, starts):
    for chosen in combinations(starts, num_stages - 1):
        edges = [0, *chosen, len(times)]
        yield tuple(pairwise(edges))


def slowest(times, cut):
    return max(sum(times[start:stop]) for start, stop in cut)


@given(TIMES, st.integers(1, 4), st.data())
def test_equals_brute_force(times, num_stages, data):
    legal = range(2, len(times) - 1)
    starts = [s for s in legal if data.draw(st.booleans())]
    best = min((slowest(times, cut) for cut in all_cuts(times, num_stages, starts)), default=None)
    found = cut_chain(times, num_stages, starts)
    assert (None if found is None else slowest(times, found)) == best


@given(TIMES, st.integers(1, 3), st.lists(st.integers(1, 6), min_size=3, max_size=3))
def test_equals_brute_force_under_a_limit_of_units_a_stage(times, num_stages, most):
    def fits(stage, start, stop):
        return stop - start <= most[stage]

    starts = range(1, len(times))
    legal = [
        cut
        for cut in all_cuts(times, num_stages, starts)
        if all(fits(stage, *run) for stage, run in enumerate(cut))
    ]
    best = min((slowest(times, cut) for cut in legal), default=None)
    found = cut_chain(times, num_stages, list(starts), fits)
    assert (None if found is None else slowest(times, found)) == best


def test_spare_units_go_to_late_stages():
    """7 equal units over 3 stages: 3 is the least maximum, and the first stage gets the least."""
    assert cut_chain([1] * 7, 3, [1, 2, 3, 4, 5, 6]) == ((0, 1), (1, 4), (4, 7))


def test_more_stages_than_cuts():
    assert cut_chain([1, 1, 1], 3, [1]) is None

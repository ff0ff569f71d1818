"""Schedules played on idle links, against closed forms and by hand."""

from __future__ import annotations

import numpy as np
import pytest

from claw_plan.planner.schedule_bound import NOTHING, Traffic, Work, play

UNITS = 4


def work(stages, *, forward=1, backward=2, accumulate=0, send=0):
    """Units of equal passes over equal stages; I and W are half a backward each."""
    each = np.array([forward, backward, backward // 2, backward - backward // 2])
    passes = np.repeat(each[:, None], UNITS, axis=1)
    column = np.repeat(np.arange(4)[:, None], stages, axis=1)
    column[2, 0], column[3, 0] = NOTHING, 1
    return Work(
        first=np.arange(0, UNITS + 1, UNITS // stages),
        column=column,
        pass_ns=passes,
        kernel_ns=passes,
        accumulate_ns=np.full(stages, accumulate),
        send_ns=np.full(max(stages - 1, 1), send),
    )


def traffic(stages, *, gather=0, reduce=0, total=0, beside=True, **flags):
    """Every unit's group alike, roots empty."""
    on_units = np.array([1] * UNITS + [0] * stages)
    chosen = {
        "near_ns": 0 * on_units,
        "near_alone_ns": 0 * on_units,
        "keep_ns": 0 * on_units,
        "run": np.arange(UNITS),
        "ends_run": np.ones(UNITS, bool),
        "keeps_near": False,
        "frees_after_forward": False,
        "frees_after_backward": False,
        "reduces_always": False,
        "loss": 0.0,
    } | flags
    return Traffic(
        gather_ns=gather * on_units,
        gather_alone_ns=gather * on_units,
        cast_ns=0 * on_units,
        reduce_ns=reduce * on_units,
        sum_ns=total * on_units,
        reduce_alone_ns=reduce * on_units,
        is_beside=np.array([beside, beside]),
        **chosen,
    )


@pytest.mark.parametrize(("ranks", "count"), [(1, 3), (2, 4), (4, 8)])
@pytest.mark.parametrize("name", ["1F1B", "GPipe"])
def test_equal_stages_take_the_closed_form(name, ranks, count):
    """(m + p - 1) (F + B), of both schedules; the first rank ends last."""
    played = play((name, ranks, count, 1), work(ranks, forward=10, backward=20))
    assert max(played.end_ns) == (count + ranks - 1) * 30 * UNITS // ranks == played.end_ns[0]


def test_messages_and_sums_of_gradients_count():
    """Two ranks, one microbatch: a message there and one back; two add one sum a rank."""
    once = play(("1F1B", 2, 1, 1), work(2, send=7, accumulate=100))
    assert once.end_ns == (2 + 7 + 2 + 4 + 7 + 4, 2 + 7 + 2 + 4)
    twice = play(("1F1B", 2, 2, 1), work(2, accumulate=100))
    assert twice.end_ns[0] == 18 + 2 * 100 - 100 + 0 * 2 + 100  # both on the way of rank 0


def test_gathers_run_one_ahead():
    """One rank, a step of one microbatch, gathers of 5 beside forwards of 1: they set the pace.

    The first two start at once, the third with the end of unit 0 and the fourth with unit 1; then
    the backwards, whose parameters are still there.
    """
    played = play(("1F1B", 1, 1, 1), work(1), traffic(1, gather=5))
    assert played.end_ns == (4 * 5 + 1 + 4 * 2,)
    again = play(("1F1B", 1, 1, 1), work(1), traffic(1, gather=5, frees_after_forward=True))
    assert again.end_ns == (4 * 5 + 1 + 4 * 5 + 2,)
    stopped = play(("1F1B", 1, 1, 1), work(1), traffic(1, gather=5, beside=False))
    assert stopped.end_ns == (4 * (5 + 1) + 4 * 2,)


def test_reductions_follow_the_last_backward():
    """Each unit's 10 after its backward of 2, the first at 4 + 2; every microbatch's where so."""
    once = play(("1F1B", 1, 2, 1), work(1), traffic(1, reduce=6, total=4))
    assert once.end_ns == (24,) and once.reduced_ns == (12 + 4 + 2 + 4 * 10,)
    always = play(("1F1B", 1, 2, 1), work(1), traffic(1, reduce=6, reduces_always=True))
    assert always.reduced_ns == (4 + 2 + 8 * 6,)


def test_passes_beside_traffic_are_slowed():
    """Half of 40 beside 40 are lost, less what rounding may have taken."""
    played = play(
        ("1F1B", 1, 1, 1), work(1, forward=40, backward=80), traffic(1, gather=40, loss=0.5)
    )
    assert played.end_ns == (40 + 4 * (40 + 20 - 2) + 4 * 80,)

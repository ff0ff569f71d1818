"""Works in copies of the process: what comes back, and what is left behind."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from claw_plan.planner.side_by_side import in_halves, side_by_side

CORES = "claw_plan.planner.side_by_side.os.sched_getaffinity"


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch):
    monkeypatch.setattr(CORES, lambda process: {0, 1})


def test_results_come_in_order_each_from_a_process_of_its_own():
    def work(index):
        return index, os.getpid()

    found = side_by_side([partial(work, index) for index in range(4)])
    assert [index for index, _ in found] == [0, 1, 2, 3]
    assert found[0][1] == os.getpid()
    assert len({process for _, process in found}) == 4


@pytest.mark.parametrize(("takes_long", "processes"), [(False, 1), (True, 2)])
def test_halves_are_made_by_two_where_it_takes_long(takes_long, processes):
    def work(items):
        return [(item, os.getpid()) for item in items]

    found = in_halves(work, range(5), takes_long=takes_long)
    assert [item for item, _ in found] == [0, 1, 2, 3, 4]
    assert len({process for _, process in found}) == processes


def test_on_one_core_all_is_done_here(monkeypatch):
    monkeypatch.setattr(CORES, lambda process: {0})
    assert side_by_side([os.getpid] * 3) == [os.getpid()] * 3


def test_what_a_copy_changes_is_not_seen_here():
    seen = []
    assert side_by_side([partial(seen.append, 0), partial(seen.append, 1)]) == [None, None]
    assert seen == [0]


def test_errors_are_raised_here_with_their_causes_the_first_one_first():
    def fail(text):
        try:
            raise KeyError(text)
        except KeyError as cause:
            raise ValueError(text) from cause

    with pytest.raises(ValueError, match="second") as caught:
        side_by_side([int, partial(fail, "second"), partial(fail, "third")])
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_copy_that_is_killed_leaves_its_work_to_this_process():
    here = os.getpid()

    def work():
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()

    assert side_by_side([int, work]) == [0, here]


def test_large_results_do_not_block():
    assert [len(r) for r in side_by_side([partial(bytes, 3 << 20)] * 3)] == [3 << 20] * 3


def test_nothing_is_left_when_the_first_work_fails():
    children = f"/proc/{os.getpid()}/task/{os.getpid()}/children"

    def fail():
        raise ValueError("first")

    before = Path(children).read_text()
    with pytest.raises(ValueError, match="first"):
        side_by_side([fail, signal.pause, signal.pause])
    assert Path(children).read_text() == before

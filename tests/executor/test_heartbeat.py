"""Beats in a store of this process: who is silent, who is at fault, what is said."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed import HashStore, Store

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.heartbeat import (
    BEAT_S,
    Beat,
    Heart,
    Watcher,
    beating,
    foreign_line,
    give_reason,
    guilty,
    lost_connection,
    reason_in,
)
from claw_plan.executor.job import Note, Progress
from claw_plan.executor.rendezvous import free_store, own_keys


def beat(store: Store, rank: int, count: int, step: int = 0, where: str = "") -> None:
    store.set(f"beat/{rank}", json.dumps([count, step, "building the model", where]))


def at(rank: int, step: int, where: str = "") -> Beat:
    return Beat(rank=rank, step=step, phase="building the model", where=where)


@pytest.fixture
def store() -> Iterator[Store]:
    kept = free_store()
    yield own_keys(kept)


def test_a_rank_is_silent_after_the_limit_unless_it_took_its_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, now = HashStore(), [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    watcher = Watcher(store, range(3))
    for count in range(4):
        beat(store, 0, count)
        if count < 2:
            beat(store, 1, count, step=7)
            beat(store, 2, count)
        watcher.look()
        now[0] += 1.0
    store.set("bye/2", "")
    assert watcher.silent(1.5) == [1]
    assert watcher.beats[1].when == "at step 7"
    assert watcher.beats[0].when == "while building the model"
    assert watcher.silent(5.0) == []


def test_the_first_reason_stands() -> None:
    store = HashStore()
    assert reason_in(store) is None
    first = Note.of(ExecutionError("first"), 1, 3)
    assert give_reason(store, first) == first
    assert give_reason(store, Note.of(ExecutionError("second"), 2, 3)) == first
    assert reason_in(store) == first


def test_who_is_at_fault() -> None:
    assert guilty({}, [2], False) == ([2], "is gone or stopped")
    assert guilty({0: at(0, 7), 1: at(1, 7)}, [], False) == ([], "")
    stuck = {0: at(0, 7), 1: at(1, 7, "data.py:31 (load)")}
    assert guilty(stuck, [], True) == ([1], "is stuck in data.py:31 (load)")
    assert guilty({0: at(0, 8), 1: at(1, 7)}, [], True) == (
        [1],
        "did not get as far as the others",
    )
    assert guilty({0: at(0, 7), 1: at(1, 7)}, [], True) == ([], "")


def test_errors_that_only_say_that_another_is_gone() -> None:
    assert lost_connection(dist.DistBackendError("NCCL timeout"))
    assert lost_connection(RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed"))
    assert not lost_connection(ValueError("gloo"))
    assert not lost_connection(RuntimeError("out of memory"))


def test_lines_of_torch_and_ours_are_not_somebody_elses() -> None:
    assert foreign_line(None) == ""
    assert foreign_line(sys._getframe()).startswith("test_heartbeat.py:")


def test_a_rank_that_falls_silent_ends_the_others(store: Store) -> None:
    ended: list[Note] = []
    heart = Heart(store, 0, 2, Progress(), 3 * BEAT_S, ended.append)
    beat(store, 1, 1, step=4)
    heart.start()
    heart.join(30.0)
    assert [note.rank for note in ended] == [1]
    assert "rank 1 gave no sign of life for 0.6 s at step 4" in ended[0].error


def test_an_own_error_is_told_at_once_and_a_lost_connection_by_who_is_gone(store: Store) -> None:
    progress = Progress()
    heart = Heart(store, 0, 3, progress, 60.0, lambda note: None)
    error = RuntimeError("[gloo] Connection closed by peer")
    heart.start()
    for rank in (1, 2):
        beat(store, rank, 1, step=5)
    time.sleep(0.1)
    note = heart.explain(Note.of(error, 0, 5), error)
    heart.stop()
    # Neither beat moved on, so both are gone.
    assert note.is_ours and note.error.startswith("ranks 1, 2 are gone or stopped at step 5; rank")
    assert heart.explain(Note.of(KeyError("x"), 0, 5), KeyError("x")) == note


def test_a_step_is_told_when_it_begins_and_leave_is_taken(store: Store) -> None:
    progress = Progress()
    with beating(store, 1, 2, progress, 60.0, lambda note: None):
        progress.step = 9
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not store.check(["beat/1"]):
            time.sleep(0.01)
        while time.monotonic() < deadline and json.loads(store.get("beat/1"))[1] != 9:
            time.sleep(0.01)
        assert json.loads(store.get("beat/1"))[1] == 9
    assert store.check(["bye/1"])

from __future__ import annotations

from pathlib import Path

import pytest

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.job import TRAIN, Job, Note, end_together
from claw_plan.executor.run_log import read_log


def test_a_job_is_read_as_it_was_written(tmp_path: Path) -> None:
    job = Job(kind=TRAIN, folder=tmp_path, plans=(tmp_path / "plan.yaml",), steps=3, data="t.txt")
    assert Job.load(job.save()) == job


def test_a_note_keeps_the_error_in_one_line(tmp_path: Path) -> None:
    Note.of(RuntimeError("first line\nsecond"), rank=2, step=7).write(tmp_path)
    note = Note.read(tmp_path, 2)
    assert note is not None
    assert (note.rank, note.step, note.error, note.is_ours) == (
        2,
        7,
        "RuntimeError: first line",
        False,
    )
    assert Note.read(tmp_path, 0) is None


def test_a_note_for_the_user_is_the_message_itself() -> None:
    note = Note.of(ExecutionError("do this"), rank=0, step=0)
    assert (note.error, note.is_ours) == ("do this", True)


def test_a_wrapped_error_is_told_by_its_cause() -> None:
    wrapper = RuntimeError("stage failed: pages of shapes")
    wrapper.__cause__ = ValueError("the model's own")
    assert Note.of(wrapper, rank=0, step=1).error == "ValueError: the model's own"


def test_work_that_ends_well_leaves_its_log_and_no_note(tmp_path: Path) -> None:
    with end_together(tmp_path, 0) as progress:
        progress.phase = "building the model"
        progress.step = 3
    assert [path.name for path in tmp_path.iterdir()] == ["rank0.jsonl"]
    events = [(line["event"], line["step"]) for line in read_log(tmp_path, 0)]
    assert events == [("building the model", 0), ("step", 3)]


def test_work_that_fails_ends_the_process_and_leaves_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    monkeypatch.setattr("os._exit", ended.append)
    with end_together(tmp_path, 1) as progress:
        progress.step = 3
        raise KeyError("x")
    note = Note.read(tmp_path, 1)
    assert ended == [2]
    assert note is not None and note.step == 3

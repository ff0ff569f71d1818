from __future__ import annotations

from pathlib import Path

import pytest

from claw_plan.executor.run_log import RunLog, read_log


def test_events_are_whole_lines_with_rank_and_step(tmp_path: Path) -> None:
    log = RunLog(tmp_path, 3)
    log.event("joining the others")
    log.event("failed", 7, error="no such weight: ü")
    lines = read_log(tmp_path, 3)
    assert [(line["rank"], line["step"], line["event"]) for line in lines] == [
        (3, 0, "joining the others"),
        (3, 7, "failed"),
    ]
    assert lines[1]["error"] == "no such weight: ü" and lines[0]["time"] <= lines[1]["time"]
    assert read_log(tmp_path, 0) == []


def test_steps_are_logged_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, now = RunLog(tmp_path, 0), [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    for step, time in ((1, 100.0), (2, 100.4), (3, 100.9), (4, 101.1), (5, 102.2)):
        now[0] = time
        log.step(step)
    assert [line["step"] for line in read_log(tmp_path, 0)] == [1, 4, 5]

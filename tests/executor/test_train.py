from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from claw_plan.executor.job import TRAIN, Job, Progress
from claw_plan.executor.ranks import Rank
from claw_plan.executor.train import (
    PLAIN,
    STEPS_FILE,
    TIMELINE,
    WORK,
    RankRecord,
    counted,
    train,
    ways_of,
)
from claw_plan.profiles.work import OpWork


@pytest.mark.parametrize(
    ("steps", "ways"),
    [
        (1, [PLAIN]),
        (2, [PLAIN] * 2),
        (3, [PLAIN, PLAIN, TIMELINE]),
        (6, [PLAIN, PLAIN, TIMELINE, WORK, WORK, PLAIN]),
        (9, [PLAIN, PLAIN, TIMELINE, WORK, WORK, PLAIN, TIMELINE, PLAIN, TIMELINE]),
    ],
)
def test_most_steps_are_not_looked_at(steps: int, ways: list[str]) -> None:
    assert ways_of(steps) == ways


def test_recorded_steps_and_the_first_do_not_count() -> None:
    record = RankRecord(rank=0, wall_ns=[9, 1, 7, 8, 8, 2], ways=ways_of(6))
    assert counted(record) == [1, 2]
    assert counted(RankRecord(rank=0, wall_ns=[9], ways=[PLAIN])) == [9]


def test_one_rank_trains_and_tells(
    tiny_plan: Callable[..., Path], alone: Rank, tmp_path: Path
) -> None:
    plan = tiny_plan("train")
    job = Job(kind=TRAIN, folder=tmp_path, plans=(plan,), steps=6)
    progress, told = Progress(), list[float]()
    [record] = train(job, alone, progress, lambda line: told.append(line["loss"]))
    assert progress.step == 6
    assert told == record.losses
    assert len(record.wall_ns) == len(record.process_ns) == 6
    lines = (tmp_path / STEPS_FILE).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    optimizer = [w for w in record.samples if isinstance(w, OpWork) and w.kind == "optimizer"]
    parameters = 61 * 32 + 16 * 32 + 2 * 32 + 4 * (12 * 32 * 32 + 13 * 32)
    # AdamW touches seven fp32 values for each parameter.
    assert [work.bytes for work in optimizer] == [28 * parameters]
    assert list(record.spans) == [3]
    assert {span.kind for span in record.spans[3]} == {"forward", "backward", "optimizer"}

from __future__ import annotations

from pathlib import Path

import pytest

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.job import TRAIN, Job
from claw_plan.executor.worker import main


def test_a_worker_started_by_hand_says_what_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    job = Job(kind=TRAIN, folder=tmp_path, plans=(), steps=1)
    with pytest.raises(ExecutionError, match="started by `claw-plan run`"):
        main([str(job.save())])

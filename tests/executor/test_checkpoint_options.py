from __future__ import annotations

import json
from pathlib import Path

import pytest

from claw_plan.executor.checkpoint_folder import CHECKPOINTS, Header, commit, partial_path
from claw_plan.executor.checkpoint_options import CheckpointOptions
from claw_plan.profiles.errors import InputError


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    """A checkpoint of step 10 in the folder of a run."""
    partial = partial_path(tmp_path / "runs" / "1" / CHECKPOINTS, 10, 0)
    partial.mkdir(parents=True)
    (partial / ".metadata").write_bytes(b"")
    values = {"model": {}, "training": {}, "candidate": {}, "names": {}, "versions": {}}
    numbers = {"step": 10, "samples": 80, "saved_at_ns": 0, "groups": [], "loss_scale": None}
    header = Header.model_validate_json(json.dumps(values | numbers | {"optimizer": "AdamW"}))
    return commit(partial, header, None)


def test_latest_looks_through_the_runs(ten: Path, tmp_path: Path) -> None:
    options = CheckpointOptions(resume="latest").checked(20, tmp_path / "runs")
    assert options.resume == str(ten)
    assert options.job_fields(tmp_path / "runs" / "2")["resume"] == str(ten)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (CheckpointOptions(every=0), "--checkpoint-every is at least 1, but got 0"),
        (CheckpointOptions(keep=0), "--keep is at least 1"),
        (CheckpointOptions(resume="latest", init_from=Path("a")), "give one of them"),
        (CheckpointOptions(init_from=Path("none.pt")), "--init-from none.pt is not there"),
        (CheckpointOptions(resume="nowhere"), "no checkpoint in nowhere"),
    ],
)
def test_what_contradicts_itself_is_refused(
    options: CheckpointOptions, said: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=said):
        options.checked(20, tmp_path)


def test_steps_are_counted_from_the_beginning(ten: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is of step 10 already; .*more than 10, but got 10"):
        CheckpointOptions(resume=str(ten)).checked(10, tmp_path)


def test_two_trainings_do_not_share_a_folder(ten: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds checkpoints of another run, up to step-00000010"):
        CheckpointOptions(folder=ten.parent).checked(20, tmp_path)
    CheckpointOptions(folder=ten.parent, resume="latest").checked(20, tmp_path)


def test_nothing_is_written_unless_asked_for(tmp_path: Path) -> None:
    assert CheckpointOptions().job_fields(tmp_path)["checkpoint_folder"] == ""
    every = CheckpointOptions(every=5).job_fields(tmp_path)
    assert every["checkpoint_folder"] == str(tmp_path / CHECKPOINTS)
    own = CheckpointOptions(folder=tmp_path / "c").job_fields(tmp_path)
    assert (own["checkpoint_folder"], own["checkpoint_every"]) == (str(tmp_path / "c"), 0)

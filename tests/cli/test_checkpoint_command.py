"""`checkpoint list`, `inspect`, `export` on a checkpoint of one process; the options of
`run` for checkpoints.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from claw_plan.cli.main import cli
from claw_plan.executor import run as run_module
from claw_plan.executor.checkpoint_folder import HEADER, Header, commit, partial_path
from claw_plan.executor.checkpoint_io import write_boxes
from claw_plan.executor.checkpoint_options import CheckpointOptions
from claw_plan.executor.checkpoint_state import MODEL, whole_box

WEIGHT = torch.arange(6.0).view(2, 3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run's folder with checkpoints of steps 5 and 10, of one tied weight."""
    checkpoints = tmp_path / "run" / "checkpoints"
    for step in (5, 10):
        partial = partial_path(checkpoints, step, 0)
        write_boxes([whole_box((MODEL, "a"), WEIGHT)], partial, None)
        header = Header(
            step=step,
            samples=step * 8,
            saved_at_ns=0,
            model={"file": "gpt.py"},
            training={},
            candidate={"mesh_order": ["pp", "tp"], "pp": 1, "tp": 2},
            optimizer="AdamW",
            groups=[],
            loss_scale=None,
            names={"a": "a", "b": "a"},
            versions={"torch": "2"},
        )
        commit(partial, header, None)
    return tmp_path / "run"


def call(*args: object) -> Result:
    return CliRunner().invoke(cli, ["checkpoint", *map(str, args)])


def test_list_finds_them_from_every_folder_above(folder: Path) -> None:
    for where in (folder / "checkpoints", folder, folder.parent):
        lines = call("list", where).stdout.splitlines()
        assert [line.partition("  ")[0] for line in lines] == [
            str(folder / "checkpoints" / name) for name in ("step-00000005", "step-00000010")
        ]
        assert "step 10, 80 samples" in lines[1]
    values = json.loads(call("list", folder, "--json").stdout)["checkpoints"]
    assert [value["step"] for value in values] == [5, 10]
    assert values[0]["bytes"] > WEIGHT.nbytes


def test_inspect_says_what_is_in_it(folder: Path) -> None:
    text = call("inspect", folder / "checkpoints" / "step-00000010").stdout
    assert "gpt.py, 1 tensors" in text and "tp 2" in text and "__0_0.distcp" in text


def test_export_writes_what_load_state_dict_takes(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "weights.pt"
    result = call("export", folder / "checkpoints" / "step-00000010", "-o", target)
    assert result.exit_code == 0 and f"wrote {target}" in result.stdout
    held = torch.load(target)
    assert torch.equal(held["a"], WEIGHT) and torch.equal(held["b"], WEIGHT)


@pytest.mark.parametrize("command", ["list", "inspect"])
def test_what_is_no_checkpoint_is_said_in_one_line(command: str, tmp_path: Path) -> None:
    result = call(command, tmp_path)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1 and str(tmp_path) in result.stderr


def test_a_truncated_file_is_named(folder: Path) -> None:
    path = folder / "checkpoints" / "step-00000010"
    data = path / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    result = call("inspect", path)
    assert result.exit_code == 2 and f"{data} has" in result.stderr
    (path / HEADER).write_text("{")
    assert HEADER in call("inspect", path).stderr


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ([], CheckpointOptions()),
        (["--resume", "--keep", "3"], CheckpointOptions(resume="latest", keep=3)),
        (["--resume", "runs/1"], CheckpointOptions(resume="runs/1")),
        (
            ["--checkpoint-every", "5", "--checkpoint-dir", "c", "--init-from", "w.pt"],
            CheckpointOptions(every=5, folder=Path("c"), init_from=Path("w.pt")),
        ),
    ],
)
def test_options_of_run(
    given: list[str], options: CheckpointOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(run_module, "run_plan", lambda *args, **settings: asked.update(settings))
    result = CliRunner().invoke(cli, ["run", "plan.yaml", *given])
    assert result.exit_code == 0, result.output
    assert asked["checkpoints"] == options


def test_what_could_not_be_written_is_said_while_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_plan(*args: Any, on_step: Any, **settings: Any) -> None:
        on_step({"step": 1, "loss": 1.0, "step_time_ms": 1.0, "note": "disk full; goes on"})

    monkeypatch.setattr(run_module, "run_plan", run_plan)
    result = CliRunner().invoke(cli, ["run", "plan.yaml"])
    assert "claw-plan: disk full; goes on" in result.stderr

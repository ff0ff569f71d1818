from __future__ import annotations

import os
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from claw_plan.cli.options import check_can_write, planning_options
from claw_plan.planner.candidate import parse_fix
from claw_plan.profiles.errors import InputError


def test_a_file_in_an_existing_folder_can_be_written(tmp_path: Path) -> None:
    check_can_write(None)
    check_can_write(tmp_path / "plan.yaml")
    assert not (tmp_path / "plan.yaml").exists()


@pytest.mark.parametrize("name", ["", "none/plan.yaml"])
def test_a_path_that_cannot_be_written_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot write"):
        check_can_write(tmp_path / name)


def test_neither_a_device_nor_what_the_command_reads_is_replaced(tmp_path: Path) -> None:
    pipe, model = tmp_path / "pipe", tmp_path / "model.py"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match="it is a device or pipe; name a file"):
        check_can_write(pipe)
    with pytest.raises(InputError, match="uses that file otherwise too"):
        check_can_write(tmp_path / "." / "model.py", inputs=[None, model])
    with pytest.raises(InputError, match="File name too long"):
        check_can_write(tmp_path / ("a" * 300))


def test_the_options_keep_their_order_in_the_help() -> None:
    @click.command()
    @planning_options
    def command(**settings: object) -> None:
        pass

    assert [option.name for option in command.params] == [
        "cluster",
        "global_batch",
        "seq_len",
        "precision",
        "optimizer",
        "clip_norm",
        "memory_headroom",
        "fix",
        "codecs",
        "asynchronous",
        "token_frequencies",
        "baseline",
        "objective",
        "steps",
        "build",
        "inputs",
        "profile",
        "time_limit",
        "search",
        "storage",
        "policy",
        "seed",
    ]


def test_the_example_of_fix_in_the_help_is_right() -> None:
    assert parse_fix("tp=2,pp=2,schedule=1F1B") == {"tp": 2, "pp": 2, "schedule": "1F1B"}


def test_the_searcher_its_storage_and_its_policy_are_read() -> None:
    seen: dict[str, object] = {}

    @click.command()
    @planning_options
    def command(**settings: object) -> None:
        seen.update(settings)

    given = ["-c", "cpu", "--search", "rl", "--storage", "sqlite:///s.db", "--policy", "p.json"]
    assert CliRunner().invoke(command, given).exit_code == 0
    assert (seen["search"], seen["storage"]) == ("rl", "sqlite:///s.db")
    assert seen["policy"] == Path("p.json")
    assert CliRunner().invoke(command, ["-c", "cpu", "--search", "tabu"]).exit_code == 2

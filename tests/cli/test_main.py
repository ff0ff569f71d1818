from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from claw_plan.cli.main import cli


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


def test_help_tells_a_newcomer_what_to_type() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for said in ("claw-plan model.py --cluster 2xdgx-h100 -o plan.yaml", "No GPU is needed"):
        assert said in result.stdout
    for command in ("plan", "simulate", "run", "verify", "learn", "detect"):
        assert f"\n  {command} " in result.stdout


@pytest.mark.parametrize("command", ["plan", "simulate", "run", "verify", "learn", "detect"])
def test_every_command_and_option_says_what_it_is_for(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert cli.commands[command].help
    for option in cli.commands[command].params:
        if option.param_type_name == "option":
            assert getattr(option, "help", None), f"{command} {option.opts}"


def test_no_argument_shows_the_help() -> None:
    assert run().exit_code == 0
    assert run().stdout == run("--help").stdout


def test_the_version() -> None:
    assert run("--version").stdout.startswith("claw-plan, version ")


def test_plan_is_the_command_that_need_not_be_named() -> None:
    for args in (["model.py"], ["plan", "model.py"], ["--global-batch", "8", "model.py"]):
        result = run(*args)
        assert result.exit_code == 2
        assert "Missing option '--cluster'" in result.stderr
        assert result.stderr.count("\n") == 1 and result.stdout == ""


def test_a_misspelt_command_names_the_near_one() -> None:
    result = run("simulat", "plan.yaml")
    assert result.exit_code == 2
    assert "neither a command nor a model file 'simulat'; did you mean 'simulate'?" in (
        result.stderr
    )


def test_a_model_folder_called_like_a_command_is_no_mistake(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert "did you mean" not in run("runs").stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["m.py", "--clutser", "cpu"], "No such option '--clutser'"),
        (["m.py", "-c", "cpu", "--global-batch", "0"], "0 is not in the range"),
        (["m.py", "-c", "cpu", "--global-batch", "-4"], "-4 is not in the range"),
        (["m.py", "-c", "cpu", "--global-batch", "inf"], "'inf' is not a valid integer"),
        (["m.py", "-c", "cpu", "--seq-len", "many"], "'many' is not a valid integer"),
        (["m.py", "-c", "cpu", "--memory-headroom", "1"], "1.0 is not a fraction"),
        (["m.py", "-c", "cpu", "--clip-norm", "0"], "0.0 is not a positive number"),
        (["m.py", "-c", "cpu", "--memory-headroom", "nan"], "nan is not a fraction"),
        (["m.py", "-c", "cpu", "--time-limit", "0"], "0.0 is not a positive number of seconds"),
        (["m.py", "-c", "cpu", "--time-limit", "inf"], "inf is not a positive number of seconds"),
        (["m.py", "-c", "cpu", "--precision", "int8"], "'int8' is not one of"),
        (["m.py", "-c", "cpu", "--fix", "tpp=2"], "there is no knob 'tpp'; did you mean 'tp'"),
        (["m.py", "-c", "cpu", "--fix", "tp"], "--fix takes knob=value pairs"),
        (["m.py", "-c", "cpu", "-o", "no/folder/plan.yaml"], "there is no folder"),
        (["m.py", "-c", "cpu", "-o", "."], "it is a folder; name a file"),
        (["m.py", "-c", "cpu", "--trace", "no/folder/t.json"], "there is no folder"),
    ],
)
def test_a_bad_flag_is_one_clear_line_and_exit_2(args: list[str], said: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1 and result.stdout == ""

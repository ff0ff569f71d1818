"""One line and an exit code for every error; stdout for the result only."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import click
import pytest

from claw_plan.cli.streams import DONE, FAILED, NO_PLAN, exit_code, say
from claw_plan.executor.errors import ExecutionError
from claw_plan.planner.errors import InfeasiblePlan, PlanError, TraceError
from claw_plan.profiles.errors import InputError, Interrupted


def raising(error: BaseException) -> Callable[[], object]:
    def command() -> object:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InfeasiblePlan("12 GiB too much"), NO_PLAN),
        (PlanError("tp=3 does not divide"), FAILED),
        (InputError("there is no file"), FAILED),
        (TraceError("no gradient"), FAILED),
        (ExecutionError("rank 1 died"), FAILED),
        (click.UsageError("no such option"), FAILED),
        (OSError(28, "No space left on device"), FAILED),
        (KeyError("ours"), FAILED),
        (RecursionError(), FAILED),
        (click.Abort(), 130),
        (KeyboardInterrupt(), 130),
        (Interrupted(signal.SIGTERM), 143),
    ],
)
def test_every_error_is_one_line_and_a_code(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(raising(error)) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("claw-plan: ") and err.count("\n") == 1
    assert "Traceback" not in err


def test_an_error_of_ours_says_so_and_how_to_see_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CLAW_PLAN_DEBUG", raising=False)
    exit_code(raising(KeyError("h.0")))
    err = capsys.readouterr().err
    assert "our fault" in err and "KeyError: 'h.0'" in err and "CLAW_PLAN_DEBUG=1" in err


def test_the_debug_variable_shows_the_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLAW_PLAN_DEBUG", "1")
    exit_code(raising(KeyError("h.0")))
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_message_of_several_lines_becomes_one(capsys: pytest.CaptureFixture[str]) -> None:
    say("first,\n   then second")
    assert capsys.readouterr().err == "claw-plan: first, then second\n"


def test_a_command_answers_with_its_own_code() -> None:
    assert exit_code(lambda: 1) == 1
    assert exit_code(lambda: None) == DONE


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_run_ends_at_once_with_its_code_and_all_that_was_said() -> None:
    done = run_python(
        "import atexit, sys\n"
        "from claw_plan.cli.streams import end_at_once\n"
        "atexit.register(print, 'taken apart')\n"
        "print('the result', end='')\n"
        "try:\n"
        "    sys.exit(2)\n"
        "finally:\n"
        "    end_at_once(sys.exception())\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "the result", "")
    done = run_python("from claw_plan.cli.streams import end_at_once\nend_at_once(None)\n1 / 0")
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr


def test_what_others_print_meanwhile_goes_to_stderr() -> None:
    done = run_python(
        "import os, subprocess\n"
        "from claw_plan.cli.streams import stdout_kept_clean\n"
        "with stdout_kept_clean():\n"
        "    print('from python')\n"
        "    os.system('echo from a child')\n"
        "    os.write(1, b'from a library\\n')\n"
        "print('the result')\n"
    )
    assert done.stdout == "the result\n"
    assert set(done.stderr.splitlines()) == {"from python", "from a child", "from a library"}


def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    code = (
        "import sys\n"
        "from claw_plan.cli.streams import exit_code\n"
        "sys.exit(exit_code(lambda: (print('x' * 10**6), sys.stdout.flush())))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    os.close(write_end)
    assert done.stderr == ""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_the_null_device(closed: str) -> None:
    code = (
        "import os, sys; from claw_plan.cli.streams import open_closed_streams, say; "
        "open_closed_streams(); print('out'); say('err'); sys.stdout.flush(); "
        "sys.exit(os.open(os.devnull, os.O_RDONLY))"
    )
    command = f'exec "$0" -c "$1" {closed}'
    done = subprocess.run(
        ["bash", "-c", command, sys.executable, code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 3, done.stderr  # the first file opened is none of the three
    assert done.stdout == ("" if " >&-" in f" {closed}" else "out\n")
    assert done.stderr == ("" if "2>&-" in closed else "claw-plan: err\n")

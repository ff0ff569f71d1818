"""Where words go: results to stdout, everything else to stderr, errors to one line and a code.

Every command of `cli.main` runs under `exit_code`, the one place that catches all errors. Exit
codes: 0 done; 1 no plan fits, or a verification failed; 2 bad input or a failure, said in one
line; 130 ended by Ctrl-C, 143 by SIGTERM.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator

import click

from claw_plan.planner.errors import InfeasiblePlan
from claw_plan.profiles.errors import ClawPlanError, Interrupted

DONE, NO_PLAN, FAILED = 0, 1, 2

SIGNALLED = 128
"""The shell's own code for a program ended by a signal is this plus the signal's number."""

DEBUG_VARIABLE = "CLAW_PLAN_DEBUG"


def say(message: str) -> None:
    """One line to stderr, whatever line breaks the message came with."""
    click.echo("claw-plan: " + " ".join(message.split()), err=True)


def end_at_once(ending: BaseException | None) -> None:
    """Ends this process with the exit code of a SystemExit, and takes nothing apart before.

    With torch loaded that is a second of work for Python (ten, seen on a busy machine), and
    whoever started it waits for that end; gloo's threads may even abort it.
    """
    if not isinstance(ending, SystemExit) or not isinstance(ending.code, int):
        return
    with contextlib.suppress(OSError, ValueError):  # nobody reads, or it is closed
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(ending.code)


def open_closed_streams() -> None:
    """Puts the null device where the caller closed a standard stream (`>&-`).

    Else the next file opened would get its number, and what is printed would land in it.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


@contextlib.contextmanager
def stdout_kept_clean() -> Iterator[None]:
    """Sends to stderr what others print to stdout meanwhile.

    Model files print when imported and child processes inherit descriptor 1; stdout must hold
    the result only.
    """
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def exit_code(command: Callable[[], object]) -> int:
    """Runs a command and turns whatever it raises into one line on stderr and an exit code.

    A command answers with its own exit code, or with anything else for "done".
    """
    try:
        outcome = command()
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE) == "1":
            traceback.print_exc()
        return _explain(error)
    except KeyboardInterrupt as interrupt:
        return _signalled(interrupt)
    return outcome if isinstance(outcome, int) else DONE


def _explain(error: Exception) -> int:
    if isinstance(error, InfeasiblePlan):
        say(str(error))
        return NO_PLAN
    if isinstance(error, ClawPlanError):
        say(str(error))
    elif isinstance(error, click.UsageError):
        command = error.ctx.command_path if error.ctx else "claw-plan"
        say(f"{error.format_message()} ('{command} --help' lists the options)")
    elif isinstance(error, click.ClickException):
        say(error.format_message())
    elif isinstance(error, click.Abort):
        return _signalled(error.__cause__)  # click makes an Abort of every interrupt
    elif isinstance(error, BrokenPipeError):
        _forget_stdout()
    elif isinstance(error, OSError):
        where = f" ({error.filename})" if error.filename else ""
        say(f"the system refused: {error.strerror or error}{where}")
    else:
        say(
            f"internal error, our fault and not yours: {type(error).__name__}: {error}; "
            f"with {DEBUG_VARIABLE}=1 in the environment the traceback is shown, "
            "please report it together with the command"
        )
    return FAILED


def _signalled(interrupt: BaseException | None) -> int:
    if isinstance(interrupt, Interrupted):
        say(str(interrupt))
        return SIGNALLED + interrupt.number
    say("interrupted")
    return SIGNALLED + signal.SIGINT


def _forget_stdout() -> None:
    """The reader of stdout is gone; keeps the interpreter's last flush from failing again."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)

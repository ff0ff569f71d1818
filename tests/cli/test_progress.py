from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from claw_plan.cli import progress
from claw_plan.cli.progress import ProgressBar


def terminal() -> tuple[Console, io.StringIO]:
    text = io.StringIO()
    return Console(file=text, force_terminal=True, width=80), text


def test_short_work_shows_nothing() -> None:
    console, text = terminal()
    with ProgressBar(console) as bar:
        bar("tracing", 0.5)
    assert text.getvalue() == ""


def test_long_work_shows_what_is_being_done(monkeypatch: pytest.MonkeyPatch) -> None:
    console, text = terminal()
    monkeypatch.setattr(progress, "SHOW_AFTER_S", 0.0)
    with ProgressBar(console) as bar:
        bar("tracing", 0.5)
        deadline = time.monotonic() + 20
        while "tracing" not in text.getvalue() and time.monotonic() < deadline:
            time.sleep(0.02)
    assert "tracing" in text.getvalue() and "50 %" in text.getvalue()


def test_a_pipe_gets_nothing() -> None:
    text = io.StringIO()
    with ProgressBar(Console(file=text, width=80)) as bar:
        bar("tracing", 0.5)
        assert not bar._timer.is_alive()
    assert text.getvalue() == ""

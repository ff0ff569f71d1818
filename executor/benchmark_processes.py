"""Processes of this machine that measure together and answer through a queue."""

from __future__ import annotations

import multiprocessing
import queue
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from claw_plan.executor.errors import ExecutionError

_ENDING_S = 10.0


def measure_together(
    target: Callable[..., None],
    count: int,
    arguments: Sequence[Any],
    *,
    num_answers: int,
    timeout_s: float,
    advice: str,
) -> list[Any]:
    """What `target(rank, store, *arguments, answers)` puts into `answers` on `count` processes.

    `store` is the init_method of their process group. Raises ExecutionError when one fails, or
    when they have not given `num_answers` in time, which ends with `advice`.
    """
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    with tempfile.TemporaryDirectory(prefix="claw-plan-") as folder:
        store = (Path(folder) / "store").as_uri()
        processes = [
            context.Process(target=target, args=(rank, store, *arguments, answers), daemon=True)
            for rank in range(count)
        ]
        for process in processes:
            process.start()
        deadline = time.monotonic() + timeout_s
        try:
            return [_answer(answers, processes, deadline, advice) for _ in range(num_answers)]
        finally:
            for process in processes:
                process.join(timeout=_ENDING_S)
                if process.is_alive():
                    process.terminate()


def _answer(answers: Any, processes: Sequence[Any], deadline: float, advice: str) -> Any:
    while time.monotonic() < deadline:
        try:
            return answers.get(timeout=1.0)
        except queue.Empty:
            failed = [process.exitcode for process in processes if process.exitcode]
            if failed:
                raise ExecutionError(
                    f"a process that was to measure collectives ended with exit code {failed[0]}; "
                    "see its message above"
                ) from None
    raise ExecutionError(
        f"{len(processes)} processes could not measure their collectives in time; {advice}"
    )

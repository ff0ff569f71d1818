"""`StopRequest`: a wish to end that reaches one rank becomes an end of all at the same step.

Ctrl-C (SIGINT), SIGTERM and Slurm's warning (SIGUSR1) reach the ranks at different moments, and a
rank that ended alone would leave the others waiting. So whoever is asked keeps it until the next
step begins and tells it then to all; at the end of that step all know, may write a checkpoint of
the same step, and end. The exchange is one integer, sent while the step computes.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """One rank's side of it. In the training loop:

    ```
    stop = StopRequest()
    with stop.listen():
        for step in ...:
            stop.begin_step()
            train_step(...)
            if reason := stop.agreed():
                save_checkpoint(); break
    ```

    All ranks call `begin_step` and `agreed` once a step. The default group must know gloo, as
    that of `ranks.join` does; a single process needs no group.
    """

    def __init__(self) -> None:
        self._asked = 0
        self._before: dict[int, Any] = {}
        self._answer: tuple[dist.Work, torch.Tensor] | None = None

    @contextmanager
    def listen(self) -> Iterator[None]:
        """Meanwhile a first signal asks to stop, and a second one has its usual effect.

        In a thread that is not the main one, where Python allows no handlers, nothing listens.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def ask(self, number: int = signal.SIGTERM) -> None:
        """Asks for the end, as the signal of that number would."""
        self._asked = self._asked or number

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGUSR1:  # a warning may be followed by the real one
            signal.signal(number, self._before[number])
        self.ask(number)

    def begin_step(self) -> None:
        """Sends what this rank was asked on its way to the others."""
        if not dist.is_initialized():
            return
        flag = torch.tensor([self._asked], dtype=torch.int32)
        work = dist.all_reduce(flag, op=dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        self._answer = (work, flag)

    def agreed(self) -> int:
        """The signal for which all ranks end after this step; 0 when they go on."""
        if not dist.is_initialized():
            return self._asked
        assert self._answer is not None, "begin_step comes first"
        work, flag = self._answer
        work.wait()
        self._answer = None
        return int(flag.item())

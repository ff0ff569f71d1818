"""When a run reads and writes checkpoints: at its start, every N steps, at its end.

A checkpoint that cannot be written while training goes on is told and tried again N steps later;
the state of training and the older checkpoints are as they were. One at the end of a run that
cannot be written fails the run.
"""

from __future__ import annotations

from pathlib import Path

from claw_plan.executor.checkpoint import Checkpointer
from claw_plan.executor.checkpoint_folder import name_of
from claw_plan.executor.checkpoint_import import load_weights
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.job import Job
from claw_plan.executor.parallel_model import ParallelModel


class RunCheckpoints:
    """All ranks construct it, which loads what the job says, and call `after_step`.

    `first_step` steps are done when the run begins; `last` is what was written at its end.
    """

    def __init__(self, job: Job, compiled: ParallelModel) -> None:
        self._compiled = compiled
        self._folder = Path(job.checkpoint_folder) if job.checkpoint_folder else None
        self._every = job.checkpoint_every
        self.first_step, self.last, self._told, self._is_late = 0, "", "", False
        self._checkpointer: Checkpointer | None = None
        if job.init_from:
            load_weights(compiled, Path(job.init_from))
            if compiled.overlap is not None:
                compiled.overlap.versions.take_newest(before_too=True)
        if self._folder is not None or job.resume:
            self._checkpointer = Checkpointer(compiled, self._folder, keep=job.keep)
            if job.resume:
                self.first_step = self._checkpointer.load(Path(job.resume)).step
                self._told = self._checkpointer.note

    def _are_equal(self) -> bool:
        exchange = self._compiled.exchange
        return exchange is None or exchange.replicas_are_equal

    def after_step(self, step: int, *, ends: bool) -> str:
        """Saves after `step` steps if it is time to; answers what is to be said, mostly nothing.

        Raises ExecutionError when the run ends and its state cannot be written.
        """
        told, self._told = self._told, ""
        is_due = ends or self._is_late or (self._every > 0 and step % self._every == 0)
        if is_due and not self._are_equal():
            # They meet at steps of their own; to meet sooner would change training.
            if ends:
                told = f"replicas met out of turn after step {step}, the last"
            elif self._folder is not None and not self._is_late:
                told = f"what is to be saved after step {step} waits until replicas meet"
        self._is_late = is_due and not ends and not self._are_equal()
        is_due = is_due and not self._is_late
        if is_due:
            self._compiled.settle()
        if self._checkpointer is None or self._folder is None:
            return told
        note = self._checkpointer.save(step) if is_due else self._checkpointer.look()
        if ends:
            failed = self._checkpointer.finish()
            if failed:
                raise ExecutionError(f"{failed}; older checkpoints there are as they were")
            self.last = str(self._folder / name_of(step))
        note = f"{note}; training goes on" if note else ""
        return "; ".join(filter(None, (told, note)))

"""One run of a training that bench/kill.py disturbs: started, watched, and what it left behind."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from killed_model import EXAMPLES_FROM

BATCH, STEPS, EVERY = 8, 20, 3
"""Samples a step, steps of a training, and of these between two checkpoints."""

PATIENCE_S = 240.0
PAUSE_S = 0.04
"""What three samples take to read."""


@dataclass(frozen=True, kw_only=True)
class Starter:
    """How runs of one plan are started; `name` is claw-plan or torchrun.

    A rank holds so many pipeline stages, 0 without a pipeline.
    """

    name: str
    plan: Path
    ranks: int
    stages: int
    timeout_s: float

    def patient(self) -> Starter:
        """The same for runs that nobody kills, however busy this machine is."""
        return dataclasses.replace(self, timeout_s=PATIENCE_S)

    def command(self, runs: Path, *options: str) -> list[str]:
        program = str(Path(sys.executable).with_name("claw-plan"))
        own = [program, "run", str(self.plan), "--steps", str(STEPS), "--runs", str(runs)]
        own += ["--timeout", f"{self.timeout_s:g}", "--checkpoint-every", str(EVERY), *options]
        if self.name == "claw-plan":
            return own
        torchrun = (
            f"-m torch.distributed.run --standalone --nproc-per-node={self.ranks} --no-python"
        )
        return [sys.executable, *shlex.split(torchrun), *own]


@dataclass(kw_only=True)
class Attempt:
    """One run of a training that begins behind `start` steps; `seen` has what was trained on."""

    folder: Path
    start: int
    stages: int
    run: subprocess.Popen[bytes]
    earlier: frozenset[Path]

    @classmethod
    def begin(cls, starter: Starter, folder: Path, start: int) -> Attempt:
        """Starts a run; from the latest checkpoint of the folder if there is one."""
        count = len(list(folder.glob("seen-*")))
        seen = folder / f"seen-{count:02}"
        seen.mkdir(parents=True)
        earlier = frozenset(folder.glob("runs/*"))
        options = ["--resume"] if start else []
        with (seen / "said").open("wb") as said:
            run = subprocess.Popen(
                starter.command(folder / "runs", *options),
                stdout=said,
                stderr=subprocess.STDOUT,
                env=os.environ
                | {"OMP_NUM_THREADS": "1", "SEEN": str(seen), "PAUSE": str(PAUSE_S)},
                start_new_session=True,
            )
        return cls(
            folder=seen,
            start=start,
            stages=starter.stages,
            run=run,
            earlier=earlier,
        )

    @property
    def runs(self) -> Path:
        return self.folder.with_name("runs")

    @property
    def said(self) -> str:
        """The last line that tells of a rank, or the last of all."""
        text = (self.folder / "said").read_text(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()] or ["nothing"]
        ours = [line for line in lines if line.startswith("claw-plan: ") and "rank" in line]
        return (ours or lines)[-1]

    def own_run(self) -> Path | None:
        """The folder of this run, once there is one: the first (by its time) that is new."""
        return min((run for run in self.runs.glob("*") if run not in self.earlier), default=None)

    def losses(self) -> list[float]:
        run = self.own_run()
        file = run / "steps.jsonl" if run is not None else Path("nowhere")
        if not file.is_file():
            return []
        return [json.loads(line)["loss"] for line in file.read_text().splitlines()]

    def seen(self, before: int) -> Counter[int]:
        """How often each sample was trained on, of the steps until `before`.

        Before its first step torch runs each pipeline stage once, on a sample, to learn shapes:
        the first of a process. Example batches are no training either.
        """
        found: Counter[int] = Counter()
        for path in self.folder.glob("[0-9]*"):
            text = path.read_text()
            numbers = map(int, text[: text.rfind("\n") + 1].split())
            found.update([number for number in numbers if number < EXAMPLES_FROM][self.stages :])
        return Counter({n: k for n, k in found.items() if n < before * BATCH})

    def processes(self) -> dict[int, int | None]:
        """Processes of this run that live, and their ranks; the environment tells both."""
        found: dict[int, int | None] = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                variables = (process / "environ").read_bytes().split(b"\0")
                state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:  # it has ended meanwhile
                continue
            if f"SEEN={self.folder}".encode() in variables and state not in "ZX":
                ranks = [int(v[5:]) for v in variables if v.startswith(b"RANK=")]
                found[int(process.name)] = ranks[0] if ranks else None
        return found

    def await_none(self, started: float, limit_s: float, *, of_ranks: bool) -> float:
        """Seconds until the run's ranks, or all of its processes, were gone."""
        while time.monotonic() < started + limit_s:
            left = self.processes().values()
            if not (any(rank is not None for rank in left) if of_ranks else left):
                break
            time.sleep(0.02)
        return time.monotonic() - started

    def stop(self) -> None:
        if self.run.poll() is None:
            os.killpg(self.run.pid, signal.SIGKILL)
            self.run.wait()

"""kill -9 of a random rank at random moments: how soon all end, and what is said.

    bench/kill.py PLAN --kills 50 [--starter torchrun] [--timeout 10] [--seed 0]

PLAN should start four ranks. A moment is a random delay after one of the events of a run: the
process starts, the ranks meet, join, look at the machines, build, or train and write checkpoints.
Prints a line a kill and a summary; the exit code is 1 when one kill was not answered as promised.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

EVENTS = (
    "process",
    "waiting for the other ranks",
    "joining the others",
    "looking at the machines",
    "building the model",
    "step",
    "step",
    "step",
)
"""What is waited for before the delay; steps have the greatest part, as in a run."""

LONGEST_DELAY_S = 1.0
STARTING_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    rank: int
    event: str
    ended_s: float
    code: int
    said: str
    orphans: int
    half_files: int
    ranks_ended_s: float

    def ok(self, timeout_s: float) -> bool:
        named = re.search(rf"\brank {self.rank}\b", self.said) and re.search(
            r"at step \d|while |before ", self.said
        )
        in_time = self.ended_s <= timeout_s + 1
        return bool(named and in_time and self.code and not self.orphans and not self.half_files)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--starter", choices=("claw-plan", "torchrun"), default="claw-plan")
    parser.add_argument("--timeout", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    outcomes = []
    for number in range(options.kills):
        outcome = kill_once(options.plan, options.starter, options.timeout, chance)
        outcomes.append(outcome)
        verdict = "ok" if outcome.ok(options.timeout) else "WRONG"
        print(
            f"{number + 1:3} rank {outcome.rank} {outcome.event:28} ended in "
            f"{outcome.ended_s:5.2f} s (ranks {outcome.ranks_ended_s:.2f}), "
            f"code {outcome.code}, {verdict}: {outcome.said}",
            flush=True,
        )
    right = sum(outcome.ok(options.timeout) for outcome in outcomes)
    times = sorted(outcome.ended_s for outcome in outcomes)
    print(
        f"{right} of {len(outcomes)} as promised (all ended within {options.timeout:g} + 1 s, "
        f"exit code not 0, rank and moment named, no process or half file left); all ended after "
        f"{times[len(times) // 2]:.2f} s in the median, {times[-1]:.2f} s at most, the ranks "
        f"alone after {max(outcome.ranks_ended_s for outcome in outcomes):.2f} s at most; "
        f"{dict(Counter(outcome.event for outcome in outcomes))}"
    )
    return 0 if right == len(outcomes) else 1


def kill_once(plan: Path, starter: str, timeout_s: float, chance: random.Random) -> Outcome:
    """One run, ended by one kill."""
    rank, event = chance.randrange(4), chance.choice(EVENTS)
    delay_s = chance.random() * LONGEST_DELAY_S
    with tempfile.TemporaryDirectory(prefix="claw-plan-kill-") as name:
        folder = Path(name)
        output = folder / "said"
        with output.open("wb") as said:
            run = subprocess.Popen(
                command(plan, folder / "runs", starter, timeout_s),
                stdout=said,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "CLAW_PLAN_KILL": name},
                start_new_session=True,
            )
        try:
            pid = await_event(folder, name, rank, event, run)
            time.sleep(delay_s)
            started = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            ranks_ended_s = await_end(name, started, timeout_s + 60, of_ranks=True)
            code = run.wait(timeout_s + 60)
            ended_s = await_end(name, started, timeout_s + 60, of_ranks=False)
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait()
        lines = [line for line in output.read_text(errors="replace").splitlines() if line.strip()]
        ours = [line for line in lines if line.startswith("claw-plan: ") and "rank" in line]
        return Outcome(
            rank=rank,
            event=event,
            ended_s=ended_s,
            code=code,
            said=(ours or lines or ["nothing"])[-1],
            orphans=len(processes(name)),
            half_files=len(list(folder.rglob("*.tmp"))),
            ranks_ended_s=ranks_ended_s,
        )


def await_end(name: str, started: float, limit_s: float, *, of_ranks: bool) -> float:
    """Seconds until the run's ranks, or all of its processes, were gone."""
    while time.monotonic() < started + limit_s:
        left = processes(name)
        if not (any(rank is not None for rank in left.values()) if of_ranks else left):
            break
        time.sleep(0.02)
    return time.monotonic() - started


def command(plan: Path, runs: Path, starter: str, timeout_s: float) -> list[str]:
    program = str(Path(sys.executable).with_name("claw-plan"))
    own = [program, "run", str(plan), "--steps", "1000000", "--runs", str(runs)]
    own += ["--timeout", f"{timeout_s:g}", "--checkpoint-every", "3", "--keep", "2"]
    if starter == "claw-plan":
        return own
    torchrun = "-m torch.distributed.run --standalone --nproc-per-node=4 --no-python"
    return [sys.executable, *shlex.split(torchrun), *own]


def await_event(
    folder: Path, name: str, rank: int, event: str, run: subprocess.Popen[bytes]
) -> int:
    """The rank's process, once its log has the event."""
    deadline = time.monotonic() + STARTING_S
    while time.monotonic() < deadline and run.poll() is None:
        found = [pid for pid, number in processes(name).items() if number == rank]
        logs = list(folder.glob(f"runs/*/rank{rank}.jsonl"))
        if found and (
            event == "process" or any(f'"event": "{event}"' in p.read_text() for p in logs)
        ):
            return found[0]
        time.sleep(0.02)
    raise SystemExit(f"the run did not come to {event!r}: {(folder / 'said').read_text()[-2000:]}")


def processes(name: str) -> dict[int, int | None]:
    """Processes of this run that live, and their ranks; the environment tells both."""
    found: dict[int, int | None] = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            variables = (process / "environ").read_bytes().split(b"\0")
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if f"CLAW_PLAN_KILL={name}".encode() in variables and state not in "ZX":
            ranks = [int(v[5:]) for v in variables if v.startswith(b"RANK=")]
            found[int(process.name)] = ranks[0] if ranks else None
    return found


if __name__ == "__main__":
    sys.exit(main())

"""kill -9 of random ranks at random moments: how soon all end, what is said, and what it costs.

    bench/kill.py --kills 50 [--starter torchrun] [--timeout 10] [--seed 0] [--plans tp x dp]

Each kill takes one of the PLANS. A moment is a random delay after one of the events
of a run: the process starts, the ranks meet, join, look at the machines, build the model (or load
a checkpoint), begin a step, begin to write a checkpoint. The killed run is then resumed from its
latest checkpoint, sometimes killed again, and at last compared with a run that nobody disturbed:
losses, every tensor of the last checkpoint (weights, moments, random generators), and which
samples were trained on how often. Prints a line a kill and a summary; the exit code is 1 when one
was not answered as promised.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from killed_run import BATCH, EVERY, STEPS, Attempt, Starter

from claw_plan.executor.checkpoint import read, stored_in
from claw_plan.executor.checkpoint_folder import CHECKPOINTS, checkpoints_in, read_header
from claw_plan.executor.checkpoint_state import RANDOM, whole_box
from claw_plan.planner.plan import load_plan, save_plan
from claw_plan.planner.planning import PlanningRequest, make_plan

MODEL = Path(__file__).with_name("killed_model.py")
PLANS: dict[str, dict[str, Any]] = {
    "fsdp": {"dp_shard": 4},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "tp x dp": {"tp": 2, "dp_replicate": 2},
    "pp x fsdp": {"pp": 2, "dp_shard": 2, "zero": 1},
    "pp x tp": {"pp": 2, "tp": 2},
    "two fsdp": {"dp_shard": 2},
    "two tp": {"tp": 2},
    "two pp": {"pp": 2},
}
AXES = {"pp": 1, "tp": 1, "dp_replicate": 1, "dp_shard": 1, "microbatch_size": 1}

CHECKPOINT, STEP = "checkpoint", "step"
STARTS = (
    "process",
    "waiting for the other ranks",
    "joining the others",
    "looking at the machines",
    "building the model",
)
EVENTS = (*STARTS, *[STEP] * 6, *[CHECKPOINT] * 5)
"""What is waited for before the delay."""

LONGEST_DELAY_S = {STEP: 0.3, CHECKPOINT: 0.1}
START_DELAY_S = 1.0
STARTING_S = 900.0
AGAIN = 0.25
"""How often a resumed run is killed too."""

TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill and what came of it."""

    rank: int
    event: str
    ended_s: float
    ranks_ended_s: float
    code: int
    said: str
    left: tuple[str, ...]
    written_to: bool
    """Whether a checkpoint was half written at the kill."""

    def wrong(self, timeout_s: float) -> list[str]:
        named = re.search(rf"\brank {self.rank}\b", self.said) and re.search(
            r"at step \d|while |before ", self.said
        )
        found = [] if named else ["rank or moment not named"]
        found += [] if self.ended_s <= timeout_s + 1 else ["too late"]
        found += [] if self.code else ["exit code 0"]
        return found + [f"left: {name}" for name in self.left]


@dataclass(kw_only=True)
class Story:
    """All kills of one training and how its end differs from that of one nobody disturbed."""

    plan: str
    kills: list[Kill] = field(default_factory=list)
    resumed_from: list[int] = field(default_factory=list)
    compared: bool = False
    loss_diff: float = 0.0
    state_diff: float = 0.0
    bits_equal: bool = True
    wrong: list[str] = field(default_factory=list)


class NotReached(Exception):
    """A run ended before its moment had come: this machine was too busy."""


class Undisturbed:
    """A training from its begin to its end."""

    def __init__(self, starter: Starter, folder: Path) -> None:
        attempt = Attempt.begin(starter.patient(), folder, 0)
        try:
            if attempt.run.wait(STARTING_S):
                raise SystemExit(f"the undisturbed run failed: {attempt.said}")
        finally:
            attempt.stop()
        self.losses, self.seen = attempt.losses(), attempt.seen(STEPS)
        self.state = state_of(latest(attempt.runs))
        if set(self.seen) != set(range(STEPS * BATCH)):
            raise SystemExit("the undisturbed run did not train on each sample")


def latest(runs: Path) -> Path:
    found = [path for run in runs.glob("*") for path in checkpoints_in(run / CHECKPOINTS)]
    return max(found, key=lambda path: read_header(path).saved_at_ns)


def state_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of it, whole."""
    made = {
        key: torch.zeros(shape, dtype=dtype)
        for key, (shape, dtype) in stored_in(checkpoint).items()
    }
    read(
        [whole_box(tuple(key.split(".")), value) for key, value in made.items()], checkpoint, None
    )
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--starter", choices=("claw-plan", "torchrun"), default="claw-plan")
    parser.add_argument("--timeout", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="claw-plan-kill-") as name:
        stories = tell(Path(name), options)
    return summary(stories, options.timeout)


def tell(folder: Path, options: argparse.Namespace) -> list[Story]:
    """Kills until there are enough, plan after plan."""
    chance, stories = random.Random(options.seed), list[Story]()
    starters, undisturbed = {}, {}
    while sum(len(story.kills) for story in stories) < options.kills:
        name = options.plans[len(stories) % len(options.plans)]
        if name not in starters:
            plan = planned(folder, name)
            stages = load_plan(plan).knobs().stages_per_rank if "pp" in PLANS[name] else 0
            starters[name] = Starter(
                name=options.starter,
                plan=plan,
                ranks=math.prod(size for axis, size in PLANS[name].items() if axis in AXES),
                stages=stages,
                timeout_s=options.timeout,
            )
            undisturbed[name] = Undisturbed(starters[name], folder / name.replace(" ", "-"))
        here = folder / f"story-{len(stories)}"
        story = one_story(name, starters[name], undisturbed[name], here, chance)
        stories.append(story)
        say(story, options.timeout)
    return stories


def planned(folder: Path, name: str) -> Path:
    """Writes a plan for CPU ranks of this machine."""
    cluster = folder / "cluster.yaml"
    cluster.write_text("name: here\nnodes: [{devices: {type: cpu, cores: 2, count: 4}}]\n")
    request = PlanningRequest(
        model=MODEL,
        cluster=str(cluster),
        global_batch=BATCH,
        precision="float32",
        fix=AXES | {"recompute": "none"} | PLANS[name],
        output_folder=folder,
    )
    path = folder / f"{name.replace(' ', '-')}.yaml"
    save_plan(make_plan(request).plan, path)
    return path


def one_story(
    name: str, starter: Starter, undisturbed: Undisturbed, folder: Path, chance: random.Random
) -> Story:
    """Kills a training, once or more, lets it end and compares."""
    story, done = Story(plan=name), 0
    attempts: list[tuple[Attempt, int]] = []
    while not story.kills or (done < STEPS - 2 * EVERY and chance.random() < AGAIN):
        attempt = Attempt.begin(starter, folder, done)
        try:
            story.kills.append(kill(attempt, starter, chance))
            story.resumed_from.append(0)
        except NotReached as error:
            print(f"{name:10} begun again: {error}", flush=True)
        finally:
            attempt.stop()
        found = [c for run in attempt.runs.glob("*") for c in checkpoints_in(run / CHECKPOINTS)]
        done = max((read_header(path).step for path in found), default=0)
        attempts.append((attempt, done))
        if story.kills:
            story.resumed_from[-1] = done
            if not done:  # it begins anew
                return story
    attempt = Attempt.begin(starter.patient(), folder, done)
    try:
        if attempt.run.wait(STARTING_S):
            story.wrong.append(f"the resumed run failed: {attempt.said}")
            return story
    finally:
        attempt.stop()
    compare(story, [*attempts, (attempt, STEPS)], undisturbed)
    return story


def kill(attempt: Attempt, starter: Starter, chance: random.Random) -> Kill:
    """Waits for a moment of the run, kills a rank, waits for the end of all."""
    rank, event = chance.randrange(starter.ranks), chance.choice(EVENTS)
    timeout_s = starter.timeout_s
    step = chance.randrange(attempt.start, STEPS - 2)
    delay_s = chance.random() * LONGEST_DELAY_S.get(event, START_DELAY_S)
    pid = await_event(attempt, rank, event, step)
    time.sleep(delay_s)
    half = any(attempt.runs.glob(f"*/{CHECKPOINTS}/.*.partial"))
    started = time.monotonic()
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        raise NotReached(attempt.said) from None
    ranks_ended_s = attempt.await_none(started, timeout_s + 60, of_ranks=True)
    code = attempt.run.wait(timeout_s + 60)
    ended_s = attempt.await_none(started, timeout_s + 60, of_ranks=False)
    left = [f"process {pid}" for pid in attempt.processes()]
    left += [path.name for path in attempt.runs.rglob("*.tmp")]
    if starter.name == "claw-plan":  # torchrun leaves what is half to the next run
        left += [path.name for path in attempt.runs.rglob(".*.partial")]
    return Kill(
        rank=rank,
        event=f"step {step + 1}" if event == STEP else event,
        ended_s=ended_s,
        ranks_ended_s=ranks_ended_s,
        code=code,
        said=attempt.said,
        left=tuple(left),
        written_to=half,
    )


def await_event(attempt: Attempt, rank: int, event: str, step: int) -> int:
    """The rank's process, once the moment has come."""
    deadline, pid = time.monotonic() + STARTING_S, 0
    while time.monotonic() < deadline and attempt.run.poll() is None:
        pid = pid or next((p for p, r in attempt.processes().items() if r == rank), 0)
        if pid and has_come(attempt, rank, event, step):
            return pid
        time.sleep(0.005 if pid else 0.05)
    raise NotReached(f"the run did not come to {event!r}: {attempt.said}")


def has_come(attempt: Attempt, rank: int, event: str, step: int) -> bool:
    run = attempt.own_run()
    if event == "process":
        return True
    if run is None:
        return False
    if event == STEP:
        return attempt.start + len(attempt.losses()) >= step
    if event == CHECKPOINT:
        is_written = any((run / CHECKPOINTS).glob(".*.partial"))
        return is_written and attempt.start + len(attempt.losses()) >= step
    log = run / f"rank{rank}.jsonl"
    return log.is_file() and f'"event": "{event}"' in log.read_text()


def compare(
    story: Story, attempts: Sequence[tuple[Attempt, int]], undisturbed: Undisturbed
) -> None:
    """What the attempts made together against what one run makes."""
    losses, seen = list[float](), Counter[int]()
    for attempt, done in attempts:
        losses += attempt.losses()[: done - attempt.start]
        seen.update(attempt.seen(done))
    state, expected = state_of(latest(attempts[-1][0].runs)), undisturbed.state
    story.compared = True
    if len(losses) != STEPS or state.keys() != expected.keys():
        story.wrong.append("steps or tensors are missing")
        return
    story.loss_diff = largest(a - b for a, b in zip(losses, undisturbed.losses, strict=True))
    story.state_diff = largest(
        (value.double() - expected[key].double()).abs().max().item()
        for key, value in state.items()
        if value.numel() and not key.startswith(f"{RANDOM}.")
    )
    story.bits_equal = losses == undisturbed.losses and all(
        torch.equal(value, expected[key]) for key, value in state.items()
    )
    if not max(story.loss_diff, story.state_diff) <= TOLERANCE:
        story.wrong.append(f"differs by {story.loss_diff:.1e} and {story.state_diff:.1e}")
    if seen != undisturbed.seen:
        other = (seen - undisturbed.seen) + (undisturbed.seen - seen)
        story.wrong.append(f"lost or repeated samples: {sorted(other)[:5]}")


def largest(values: Iterable[float]) -> float:
    return max((abs(value) for value in values), default=0.0)


def say(story: Story, timeout_s: float) -> None:
    for index, one in enumerate(story.kills):
        wrong = "; ".join(one.wrong(timeout_s))
        print(
            f"{story.plan:10} rank {one.rank} {one.event:28} ended in {one.ended_s:5.2f} s "
            f"(ranks {one.ranks_ended_s:.2f}), code {one.code}, half a checkpoint: "
            f"{'yes' if one.written_to else 'no'}, resumed from {story.resumed_from[index]}, "
            f"{'WRONG: ' + wrong if wrong else 'ok'}: {one.said}"
        )
    if story.compared:
        bits = "to the bit" if story.bits_equal else f"losses to {story.loss_diff:.1e}, "
        bits += "" if story.bits_equal else f"state to {story.state_diff:.1e}"
        print(f"{story.plan:10} goes on as if undisturbed: {bits}")
    for wrong in story.wrong:
        print(f"{story.plan:10} WRONG: {wrong}")
    sys.stdout.flush()


def summary(stories: Sequence[Story], timeout_s: float) -> int:
    kills = [one for story in stories for one in story.kills]
    right = sum(not one.wrong(timeout_s) for one in kills)
    compared = [story for story in stories if story.compared]
    times = sorted(one.ended_s for one in kills)
    print(
        f"{right} of {len(kills)} kills as promised (all ended within {timeout_s:g} + 1 s, exit "
        f"code not 0, rank and moment named, nothing left); ended after "
        f"{times[len(times) // 2]:.2f} s in the median, {times[-1]:.2f} s at most, "
        f"the ranks alone after {max(one.ranks_ended_s for one in kills):.2f} s at most; "
        f"{sum(one.written_to for one in kills)} while a checkpoint was written; "
        f"{dict(Counter(one.event.split()[0] for one in kills))}"
    )
    print(
        f"{len(compared)} trainings of {len(stories)} had a checkpoint and went on: "
        f"{sum(story.bits_equal for story in compared)} equal the undisturbed one to the bit, the "
        f"others to {largest(s.loss_diff for s in compared):.1e} in losses and "
        f"{largest(s.state_diff for s in compared):.1e} in weights and moments; "
        f"{sum(bool(story.wrong) for story in stories)} wrong"
    )
    return 0 if right == len(kills) and not any(story.wrong for story in stories) else 1


if __name__ == "__main__":
    sys.exit(main())

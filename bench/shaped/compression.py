"""A 10M-parameter GPT on four hosts behind slow links: plans with and without codecs, predicted.

Run (as root): OMP_NUM_THREADS=1 nice -n -20 python bench/shaped/compression.py
    --folder FOLDER [--write docs/shaped_compression.md]
(six minutes; `--only` and `--which` make a part of it, in the order of `STAGES`)

Before other programs by niceness, not in real time: there a thread that a message wakes does not
interrupt what computes, which no host is set up to do.

Learns from runs of two smaller models without a codec. Plans the 10M one: as plain
DistributedDataParallel, with another algorithm, with codecs of gradients, and with what planning
chooses where one bit is allowed (`one_bit`) and where all codecs are (`any`). Writes down what is
predicted (predicted.json), then runs all, those whose momentum travels from a checkpoint after
their warm-up, and writes predicted beside measured, the whole step and its parts.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from hosts import SEGMENT, Hosts
from switch import Port

from claw_plan.executor.learn import learn
from claw_plan.executor.run_files import MEASUREMENTS, RunResult, read_result
from claw_plan.planner.averaging import averaging
from claw_plan.planner.averaging_buckets import buckets_of
from claw_plan.planner.candidate import parse_fix
from claw_plan.planner.plan import load_plan, save_plan
from claw_plan.planner.planned import Planned, open_planned
from claw_plan.planner.planning import PlanningRequest, make_plan
from claw_plan.planner.supported import OF_MOMENTUM
from claw_plan.planner.zero_one import is_zero_one
from claw_plan.profiles.profile import load_profile
from claw_plan.profiles.units import NS_PER_MS
from claw_plan.profiles.work import CollectiveWork

os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", str(1 << 32))
os.environ.setdefault("MALLOC_TRIM_THRESHOLD_", str(1 << 32))
# glibc then keeps what is freed: buffers of megabytes, new at every step, cost a page fault each
# 4 KiB otherwise, of all ways alike.

MODEL = Path(__file__).with_name("byte_gpt.py")
PROGRAM = Path(sys.executable).with_name("claw-plan")
HOSTS, BATCH, CONTEXT = 4, 4, 64
INPUTS = f"idx=int64[B,{CONTEXT}]<256 targets=int64[B,{CONTEXT}]<256"
NEUTRAL = {
    "recompute": "none",
    "dp_replicate": 1,
    "dp_shard": 1,
    "tp": 1,
    "pp": 1,
    "offload": "none",
}
ALL = f"dp_replicate={HOSTS},microbatch_size={BATCH}"
LEARNT = ("layers=2, width=192, rows=2039", "rows=1021")
"""Models: one a third as large, and one with the same blocks but a quarter of the tables."""

PLAIN = f"{ALL},codec=none,collective=auto,bucket_bytes=25000000"
TESTED = {
    "plain": (PLAIN, ""),
    "ring": (f"{ALL},codec=none,collective=ring,bucket_bytes=25000000", ""),
    "int8": (f"{ALL},codec=int8", ""),
    "int4": (f"{ALL},codec=int4", ""),
    "top_k": (f"{ALL},codec=top_k", ""),
    "one_bit": (ALL, "one_bit"),
    "any": (ALL, "all"),
}
"""Pinned knobs, and the codecs that planning may choose."""

DISTURBED = 2.0
"""A run whose small all-reduces took so many times as long as the learnt ones' is left out. They
last equally long to a tenth; beside another program in real time they took six times as long."""

MEETING_STEPS = 10
"""Steps more of 0/1 Adam, which then meets, and does not, in several that nobody looks at."""

STAGES = ("learn", "plan", "predict", "warm-up", "run", "table")
BEGIN, END = "<!-- measured -->\n", "<!-- end -->\n"


def cluster_text(mbit: float, delay_ms: float) -> str:
    """cluster.yaml of these hosts: a rank each, the cores of the machine shared among them."""
    cores = os.cpu_count() or 1
    lines = ["name: shaped", "nodes:"]
    for host in range(HOSTS):
        machine = f", machine: core-{host % cores}" if cores < HOSTS else ""
        lines += [
            "  - devices: {type: cpu, cores: 1, count: 1}",
            f"    nics: {{name: shaped-{mbit:g}, bandwidth: {mbit:g} Mb/s, "
            f"latency: {2 * delay_ms:g} ms}}",
            f"    host: {{memory: 8 GiB, cores: 1{machine}}}",
        ]
    return "\n".join(lines) + "\n"


class Bench:
    """One folder with its cluster, profile, plans and runs."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.folder: Path = options.folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.cluster = self.folder / "cluster.yaml"
        self.cluster.write_text(cluster_text(options.mbit, options.delay_ms))
        self.profile = self.folder / "cpu.profile"

    def plan(self, name: str, config: str, knobs: str, codecs: str = "") -> Path:
        """Plans the model under pinned knobs; all others are the planner's to choose."""
        request = PlanningRequest(
            model=MODEL,
            cluster=str(self.cluster),
            build=f"ByteGPT(Config({config}))",
            inputs=INPUTS,
            global_batch=HOSTS * BATCH,
            fix=NEUTRAL | parse_fix(knobs),
            codecs=codecs,
            profile=self.profile if self.profile.exists() else None,
            output_folder=self.folder,
        )
        made = make_plan(request)
        sooner = {"codec_warmup_steps": self.options.warmup, "meeting_repeats": 1}
        training = made.plan.training.model_copy(update=sooner)
        path = self.folder / f"{name}.yaml"
        save_plan(made.plan.model_copy(update={"training": training}), path)
        return path

    def predict(self) -> None:
        """Writes down what the profile says of each plan before any of them has run."""
        predicted = {}
        for name in self.options.which:
            plan = self.folder / f"{name}.yaml"
            planned = open_planned(plan).under(load_profile(self.profile))
            predicted[name] = {
                "step_ms": planned.scored.step_time_ns / NS_PER_MS,
                "messages_ms": messages_ns(planned) / NS_PER_MS,
            }
            print(f"predicted {name}: {predicted[name]['step_ms']:.0f} ms", flush=True)
        told = self.predicted() | predicted
        when = {"when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
        (self.folder / "predicted.json").write_text(json.dumps(told | when, indent=1))

    def predicted(self) -> dict[str, Any]:
        """What was written down."""
        file = self.folder / "predicted.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def warm_up(self, plan: Path) -> None:
        """The steps before a codec of momentum, the same before all of them.

        On this machine's own network, which is fast.
        """
        if not _warms_up(plan) or self.warm(plan):
            return
        command = [str(PROGRAM), "run", str(plan), "--steps", str(self.options.warmup), "--json"]
        command += ["--checkpoint-dir", str(self.warmed_up(plan))]
        command += ["--runs", str(self.folder / "warm-up-runs")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)

    def warmed_up(self, plan: Path) -> Path:
        """The folder of checkpoints after the warm-up; 0/1 Adam's is another than 1-bit Adam's."""
        return self.folder / ("warmed-up-0-1" if _meets_seldom(plan) else "warmed-up")

    def warm(self, plan: Path) -> list[Path]:
        """The checkpoint after the warm-up, if it is there."""
        return sorted(self.warmed_up(plan).glob("*"))

    def run(self, plan: Path) -> Path:
        """The run's folder; it goes on from the warm-up where there is one."""
        runs = plan.with_name(f"{plan.stem}-runs")
        known = set(runs.iterdir()) if runs.exists() else set()
        steps, resumed = self.options.steps, self.warm(plan) if _warms_up(plan) else []
        steps += MEETING_STEPS if _meets_seldom(plan) else 0
        ports = [
            Port(
                bits_per_s=int(self.options.mbit * 1e6),
                delay_ns=int(self.options.delay_ms * 1e6),
            )
        ] * HOSTS
        command = [str(PROGRAM), "run", str(plan), "--runs", str(runs), "--json"]
        if resumed:
            steps += self.options.warmup
            command += ["--resume", str(resumed[-1])]
        with Hosts(ports, SEGMENT) as hosts:
            hosts.run([*command, "--steps", str(steps)], ranks_per_host=1)
        (made,) = set(runs.iterdir()) - known
        return made

    def learn(self) -> None:
        """Runs of smaller models, and what they teach."""
        for number, config in enumerate(LEARNT):
            if not self.runs_of(f"learnt{number}"):
                self.run(self.plan(f"learnt{number}", config, f"{ALL},codec=none"))
        learned = learn(self.runs_of("learnt*"), self.profile)
        for one in learned.runs:
            print(
                f"learnt from {one.knobs}: measured {one.measured_ns / NS_PER_MS:.0f} ms, "
                f"predicted {one.before_ns / NS_PER_MS:.0f} before, "
                f"{one.after_ns / NS_PER_MS:.0f} after",
                flush=True,
            )

    def runs_of(self, plans: str) -> list[Path]:
        """Runs that ended well of the plans of that name."""
        found = self.folder.glob(f"{plans}-runs/*/result.json")
        return sorted(result.parent for result in found)

    def quiet_runs_of(self, plan: str) -> list[Path]:
        """Those that no other program disturbed: small all-reduces at their end show it."""
        known_ns = min(_small_all_reduce_ns(run) for run in self.runs_of("learnt*"))
        return [
            run for run in self.runs_of(plan) if _small_all_reduce_ns(run) < DISTURBED * known_ns
        ]

    def results(self, name: str) -> list[RunResult]:
        """Of all undisturbed runs of a plan; raises RuntimeError for one unlike its plan."""
        found = [read_result(run) for run in self.quiet_runs_of(name)]
        if unlike := [f"{one.run}: {one.unlike_plan}" for one in found if one.unlike_plan]:
            raise RuntimeError("; ".join(unlike))
        return found

    def table(self) -> list[str]:
        """Predicted beside measured, and how many times as fast the chosen plan is."""
        rows, medians, errors = [], {}, {}
        told = self.predicted()
        for name in (name for name in TESTED if self.quiet_runs_of(name)):
            predicted, times = told[name]["step_ms"], [r.step_time_ms for r in self.results(name)]
            medians[name] = statistics.median(time["median"] for time in times)
            least, most = min(t["min"] for t in times), max(t["max"] for t in times)
            errors[name] = predicted / medians[name] - 1
            knobs = load_plan(self.folder / f"{name}.yaml").knobs()
            rows.append(
                f"| {name} | {knobs.codec} | {knobs.collective} | {predicted:.0f} "
                f"| {medians[name]:.0f} ({least:.0f} to {most:.0f}) "
                f"| {errors[name]:+.0%} | {medians['plain'] / medians[name]:.1f} |"
            )
        lost = [name for name in TESTED if self.runs_of(name) and name not in errors]
        worst = max(errors, key=lambda name: abs(errors[name]))
        return [
            f"Predicted at {told['when']}.",
            "",
            "| plan | codec | collective | predicted ms | measured ms | error | times as fast |",
            "|---|---|---|--:|--:|--:|--:|",
            *rows,
            "",
            f"Worst: {worst}, {errors[worst]:+.1%}. Disturbed and left out: "
            f"{', '.join(lost) or 'none'}.",
            "",
            "| plan | predicted: messages | all else | measured: processor time | all else |",
            "|---|--:|--:|--:|--:|",
            *(self._parts_row(name, told[name], medians[name]) for name in errors),
        ]

    def _parts_row(self, name: str, told: dict[str, float], median_ms: float) -> str:
        """Ranks that share a core compute one after the other."""
        sharing = max(1, HOSTS // (os.cpu_count() or 1))
        busy = statistics.median(result.process_time_ms for result in self.results(name))
        busy_ms = sharing * busy
        return (
            f"| {name} | {told['messages_ms']:.0f} | {told['step_ms'] - told['messages_ms']:.0f} "
            f"| {busy_ms:.0f} | {median_ms - busy_ms:.0f} |"
        )


def _small_all_reduce_ns(run: Path) -> float:
    """The median of the smallest that the run timed by themselves after its last step."""
    found = [
        (one.work.bytes, statistics.median(one.samples_ns))
        for one in load_profile(run / MEASUREMENTS).measurements
        if isinstance(one.work, CollectiveWork) and one.work.op == "all_reduce"
    ]
    return min(found)[1]


def _warms_up(plan: Path) -> bool:
    return load_plan(plan).knobs().codec.partition(":")[0] in OF_MOMENTUM


def _meets_seldom(plan: Path) -> bool:
    return is_zero_one(load_plan(plan).knobs())


def messages_ns(planned: Planned) -> int:
    """What the replicas' messages take in a step by themselves, one after the other."""
    problem, candidate = planned.problem, planned.candidate
    held = [
        (parameter, parameter.numel)
        for parameter in problem.graph.parameters
        if parameter.trainable
    ]
    units = range(len(problem.graph.units))
    buckets = buckets_of(held, units, candidate, problem.training.optimizer)
    means = (averaging(problem, candidate, bucket.elements) for bucket in buckets)
    return sum(phase.cost.alone_ns for mean in means for phase in mean.phases)


def _write(page: Path, lines: list[str]) -> None:
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    page.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--only", choices=STAGES, help="default: all of them")
    parser.add_argument("--which", choices=TESTED, nargs="+", default=[*TESTED])
    parser.add_argument("--mbit", type=float, default=200.0)
    parser.add_argument("--delay-ms", type=float, default=0.2, help="one way, host to switch")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=50, help="steps before a codec of momentum")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the hosts are taken down on the way
    bench = Bench(options)
    stages = (options.only,) if options.only else STAGES
    plans = [bench.folder / f"{name}.yaml" for name in options.which]
    if "learn" in stages:
        bench.learn()
    if "plan" in stages:
        for name in options.which:
            bench.plan(name, "", *TESTED[name])
    if "predict" in stages:
        bench.predict()
    if "warm-up" in stages:
        for plan in plans:
            bench.warm_up(plan)
    if "run" in stages:
        for plan in plans:
            bench.run(plan)
    if "table" in stages:
        table = bench.table()
        print("\n".join(table))
        if options.write:
            _write(options.write, table)


if __name__ == "__main__":
    main()

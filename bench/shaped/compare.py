"""Plans predicted for shaped hosts against the same plans run on them, after learning on others.

Run (as root): python bench/shaped/compare.py --folder FOLDER --repeats 3
    python bench/shaped/compare.py --folder OTHER --mbit 200 200 50 --profile FOLDER/cpu.profile
    python bench/shaped/compare.py --folder NEW --measured FOLDER
(some 25 seconds a plan and repeat on two cores that nobody else uses)

Learns from runs of one small GPT, then predicts plans of a larger one with another batch, runs
them, in turns when repeated, and prints a line after each; the folder keeps runs and plans. What
every rank moves in a step is compared, too: predicted and counted must be equal.
With `--measured` nothing runs: a changed cost model learns from and is held against runs made
before, which know nothing of it.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from hosts import Hosts
from switch import Port

from claw_plan.executor.learn import learn
from claw_plan.executor.run_files import read_result
from claw_plan.planner.candidate import parse_fix
from claw_plan.planner.plan import load_plan, save_plan
from claw_plan.planner.planning import PlanningRequest, make_plan, simulate_plan
from claw_plan.profiles.units import NS_PER_MS

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "gpt.py"
PROGRAM = Path(sys.executable).with_name("claw-plan")
RANKS = 2
"""On each host, which share its core."""

LEARNT_MODEL = "vocab_size=256, block_size=128, n_layer=4, n_head=4, n_embd=192"
LEARNT = (
    (4, "dp_replicate=4,microbatch_size=1"),
    (8, "dp_shard=4,microbatch_size=2"),
    (4, "tp=2,dp_replicate=2,microbatch_size=2"),
    (4, "pp=4,microbatch_size=1,schedule=1F1B"),
    (8, "pp=2,dp_replicate=2,microbatch_size=2,schedule=GPipe"),
    (4, "pp=2,tp=2,microbatch_size=1,schedule=GPipe"),
)
"""Global batch and knobs."""

TWO_MODEL = "vocab_size=256, block_size=128, n_layer=4, n_head=4, n_embd=256"
TWO_HOSTS = (
    (8, "dp_replicate=4,microbatch_size=2"),
    (8, "dp_replicate=4,microbatch_size=1,bucket_bytes=2000000"),
    (8, "dp_shard=4,microbatch_size=2,zero=3"),
    (8, "dp_replicate=2,dp_shard=2,microbatch_size=2,zero=2"),
    (8, "tp=2,dp_replicate=2,microbatch_size=4"),
    (8, "pp=4,microbatch_size=2,schedule=GPipe"),
    (8, "pp=4,microbatch_size=1,schedule=InterleavedZeroBubble"),
    (8, "pp=2,dp_replicate=2,microbatch_size=2,schedule=1F1B"),
    (8, "pp=2,tp=2,microbatch_size=2,schedule=1F1B"),
    (8, "pp=2,dp_replicate=2,microbatch_size=1,schedule=Interleaved1F1B,stages_per_rank=2"),
)
THREE_MODEL = "vocab_size=256, block_size=128, n_layer=6, n_head=4, n_embd=192"
THREE_HOSTS = (
    (12, "dp_replicate=6,microbatch_size=2"),
    (12, "dp_replicate=4,microbatch_size=3"),
    (12, "pp=6,microbatch_size=2,schedule=1F1B"),
    (12, "pp=3,dp_replicate=2,microbatch_size=2,schedule=1F1B"),
    (12, "pp=3,tp=2,microbatch_size=2,schedule=GPipe"),
    (12, "pp=2,dp_replicate=2,microbatch_size=2,schedule=1F1B"),
    (12, "pp=2,dp_replicate=2,microbatch_size=3,schedule=ZBVZeroBubble,stages_per_rank=2"),
    (12, "dp_replicate=2,microbatch_size=3"),
)
"""Of six ranks, and of those that leave slow hosts, the last ones, out."""

NEUTRAL = {"recompute": "none", "dp_replicate": 1, "dp_shard": 1, "tp": 1, "pp": 1}
GAP = 0.10
"""A measured difference that predictions must order rightly."""


@dataclass(slots=True, kw_only=True)
class Row:
    """A tested plan, its prediction and the median steps of its runs."""

    knobs: str
    plan: Path
    predicted_ms: float
    measured: list[float] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    @property
    def measured_ms(self) -> float:
        return statistics.median(self.measured)

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1

    def add(self, run: Path) -> None:
        """One more run of the plan."""
        result = read_result(run)
        self.measured.append(result.step_time_ms["median"])
        self.differences += result.traffic_differences

    def line(self) -> str:
        """A row of the table."""
        low, high = min(self.measured), max(self.measured)
        return (
            f"| `{self.knobs}` | {self.predicted_ms:.0f} | {self.measured_ms:.0f} "
            f"| {low:.0f} to {high:.0f} ({len(self.measured)}) | {self.error:+.0%} "
            f"| {self.differences[0] if self.differences else 'equal'} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--mbit", type=float, nargs="+", default=[200.0, 200.0], help="per host")
    parser.add_argument("--delay-ms", type=float, default=1.0, help="one way, host to switch")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--profile", type=Path, help="learnt before, instead of learning here")
    parser.add_argument("--measured", type=Path, help="a folder of before, whose runs are taken")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the plans, from 0")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the hosts are taken down on the way
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True)
    cluster = folder / "cluster.yaml"
    cluster.write_text(cluster_text(options.mbit, options.delay_ms))
    if options.measured is not None:
        profile = options.profile or _learnt(_runs_of(options.measured, "learnt*"), cluster)
        rows = _predict(cluster, profile, len(options.mbit), options.only)
        for row in rows:
            for run in _runs_of(options.measured, row.plan.stem):
                row.add(run)
    else:
        ports = [
            Port(bits_per_s=int(rate * 1e6), delay_ns=int(options.delay_ms * 1e6))
            for rate in options.mbit
        ]
        with Hosts(ports) as hosts:
            profile = options.profile or _learn(hosts, cluster, options.steps)
            rows = _predict(cluster, profile, len(options.mbit), options.only)
            for _ in range(options.repeats):
                for row in rows:
                    row.add(_run(hosts, row.plan, options.steps))
                    print(row.line(), flush=True)
    print("\n".join(summary([row for row in rows if row.measured])))


def _runs_of(folder: Path, plans: str) -> list[Path]:
    """Runs that ended well of the plans of that name, in the order they were made."""
    return sorted(found.parent for found in folder.glob(f"{plans}-runs/*/result.json"))


def cluster_text(mbit: list[float], delay_ms: float) -> str:
    """cluster.yaml as a user of these hosts would write it.

    Hosts on one core of this machine say so.
    """
    lines = ["name: shaped", "nodes:"]
    cores = os.cpu_count() or 1
    for host, rate in enumerate(mbit):
        machine = f", machine: core-{host % cores}" if len(mbit) > cores else ""
        lines += [
            f"  - devices: {{type: cpu, cores: 1, count: {RANKS}}}",
            f"    nics: {{name: shaped-{rate:g}, bandwidth: {rate:g} Mb/s, "
            f"latency: {2 * delay_ms:g} ms}}",
            f"    host: {{memory: 8 GiB, cores: 1{machine}}}",
        ]
    return "\n".join(lines) + "\n"


def _learn(hosts: Hosts, cluster: Path, steps: int) -> Path:
    """Runs of other plans of another model, and what is learnt from them."""
    runs = []
    for number, (batch, knobs) in enumerate(LEARNT):
        plan = _plan(cluster, f"learnt{number}", LEARNT_MODEL, batch, knobs)
        runs.append(_run(hosts, plan, steps))
    return _learnt(runs, cluster)


def _learnt(runs: list[Path], cluster: Path) -> Path:
    learned = learn(runs, cluster.with_name("cpu.profile"))
    for run in learned.runs:
        print(
            f"learnt from {run.knobs}: measured {run.measured_ns / NS_PER_MS:.0f} ms, predicted "
            f"{run.before_ns / NS_PER_MS:.0f} before and {run.after_ns / NS_PER_MS:.0f} after",
            flush=True,
        )
    return learned.profile


def _predict(cluster: Path, profile: Path, hosts: int, only: list[int] | None) -> list[Row]:
    config, tested = (TWO_MODEL, TWO_HOSTS) if hosts == 2 else (THREE_MODEL, THREE_HOSTS)
    rows = []
    for number, (batch, knobs) in enumerate(tested):
        if only is None or number in only:
            plan = _plan(cluster, f"tested{number}", config, batch, knobs)
            predicted = simulate_plan(plan, profile).step_time_ns / NS_PER_MS
            rows.append(Row(knobs=knobs, plan=plan, predicted_ms=predicted))
    return rows


def _plan(cluster: Path, name: str, config: str, global_batch: int, knobs: str) -> Path:
    request = PlanningRequest(
        model=MODEL,
        cluster=str(cluster),
        build=f"GPT(GPTConfig({config}))",
        inputs="idx=int64[B,128]<256 targets=int64[B,128]<256",
        global_batch=global_batch,
        fix=NEUTRAL | parse_fix(knobs),
        output_folder=cluster.parent,
    )
    path = cluster.with_name(f"{name}.yaml")
    save_plan(make_plan(request).plan, path)
    return path


def _run(hosts: Hosts, plan: Path, steps: int) -> Path:
    runs = plan.with_name(f"{plan.stem}-runs")
    known = set(runs.iterdir()) if runs.exists() else set()
    command = [str(PROGRAM), "run", str(plan), "--steps", str(steps), "--runs", str(runs)]
    ranks = load_plan(plan).knobs().num_devices
    hosts.run([*command, "--json"], RANKS, hosts=-(-ranks // RANKS))
    (made,) = set(runs.iterdir()) - known
    return made


def summary(rows: list[Row]) -> list[str]:
    """The table, and what is asked of it."""
    median = statistics.median(abs(row.error) for row in rows)
    chosen = min(rows, key=lambda row: row.predicted_ms)
    best = min(rows, key=lambda row: row.measured_ms)
    apart = [
        (fast, slow)
        for pair in combinations(rows, 2)
        for fast, slow in [sorted(pair, key=lambda row: row.measured_ms)]
        if slow.measured_ms > (1 + GAP) * fast.measured_ms
    ]
    right = sum(fast.predicted_ms < slow.predicted_ms for fast, slow in apart)
    equal = sum(not row.differences for row in rows)
    return [
        f"- median error {median:.1%} over {len(rows)} plans",
        f"- of {len(apart)} pairs measured over {GAP:.0%} apart, {right} predicted in that order",
        f"- predicted best `{chosen.knobs}`, measured best `{best.knobs}`: "
        f"{chosen.measured_ms / best.measured_ms - 1:.0%} slower",
        f"- calls and bytes of every rank as predicted in {equal} of {len(rows)} plans",
        "",
        "| plan | predicted ms | measured ms | medians (runs) | error | moved |",
        "|---|--:|--:|--:|--:|---|",
        *(row.line() for row in rows),
    ]


if __name__ == "__main__":
    main()

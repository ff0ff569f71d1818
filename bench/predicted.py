"""Predicted against measured steps of the small GPT on this machine, after learning on others.

Run: python bench/predicted.py --folder FOLDER [--reuse] [--write docs/predicted.md]
(about twelve minutes on two cores that nobody else uses)

Learns from runs of two other GPTs, of other depth, width and batch, then predicts plans of
examples/gpt_small.py that it has not seen, runs them, and compares. Runs are repeated in turns
(A B A B ...) and their medians' median counts. With --reuse the runs in the folder are kept, and
only learning and predictions are made anew.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import torch

from claw_plan.executor.learn import Learned, learn
from claw_plan.executor.run import run_plan
from claw_plan.executor.run_files import RunResult, read_result
from claw_plan.planner.candidate import parse_fix
from claw_plan.planner.plan import save_plan
from claw_plan.planner.planning import PlanningRequest, make_plan, simulate_plan
from claw_plan.planner.score import Scored
from claw_plan.profiles.units import MIB, NS_PER_MS

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "examples" / "data" / "genesis.txt"
TESTED = ROOT / "examples" / "gpt_small.py"
OTHER = ROOT / "examples" / "gpt.py"

NARROW = "vocab_size=256, block_size=128, n_layer=4, n_head=4, n_embd=256"
WIDE = "vocab_size=256, block_size=128, n_layer=3, n_head=8, n_embd=512"

LEARNT = (
    (NARROW, 4, "microbatch_size=4"),
    (NARROW, 6, "microbatch_size=1"),
    (WIDE, 4, "microbatch_size=2,recompute=full"),
    (WIDE, 12, "microbatch_size=12"),
    (NARROW, 12, "dp_shard=2,microbatch_size=3"),
    (WIDE, 4, "dp_shard=2,microbatch_size=2"),
    (NARROW, 12, "dp_replicate=2,microbatch_size=6"),
    (WIDE, 4, "dp_replicate=2,microbatch_size=1"),
    (NARROW, 12, "tp=2,microbatch_size=6"),
    (WIDE, 6, "tp=2,microbatch_size=2,sequence_parallel=true"),
    (NARROW, 12, "pp=2,microbatch_size=3,schedule=1F1B"),
    (WIDE, 6, "pp=2,microbatch_size=1,schedule=GPipe"),
)
"""What is learnt from: model, global batch, knobs."""

TWO = (
    (8, "dp_shard=2,microbatch_size=4,zero=3"),
    (8, "dp_shard=2,microbatch_size=1,zero=2"),
    (8, "dp_replicate=2,microbatch_size=4"),
    (8, "dp_replicate=2,microbatch_size=2"),
    (8, "tp=2,microbatch_size=8,sequence_parallel=false"),
    (8, "tp=2,microbatch_size=4,sequence_parallel=true"),
    (8, "pp=2,microbatch_size=2,schedule=1F1B"),
    (8, "pp=2,microbatch_size=1,schedule=GPipe"),
    (16, "dp_shard=2,microbatch_size=4,zero=3,recompute=full"),
    (16, "dp_replicate=2,microbatch_size=8"),
    (16, "tp=2,microbatch_size=8,sequence_parallel=false,recompute=full"),
    (16, "pp=2,microbatch_size=4,schedule=1F1B"),
)
"""Plans of two processes: global batch, knobs."""

FOUR = (
    (8, "pp=2,tp=2,microbatch_size=2,schedule=1F1B"),
    (8, "pp=2,dp_shard=2,microbatch_size=2,schedule=1F1B"),
    (16, "dp_replicate=4,microbatch_size=4"),
)
"""Plans of four processes, on two cores."""

NEUTRAL = {"recompute": "none", "dp_replicate": 1, "dp_shard": 1, "tp": 1, "pp": 1}
GAP = 0.25
"""A predicted difference that must be seen in the measurements."""

STEADY = 0.06
"""Repeats of a plan that lie further apart than this are repeated once more."""

LEARNT_STEPS, TESTED_STEPS = 16, 12
"""Of which the first and three recorded ones do not count."""

BUSY, PATIENCE_S = 0.1, 40.0
"""While others use more than this share of the cores a run waits, at most so long."""

DISTURBED, ATTEMPTS = 0.05, 3
"""A run is made anew when others had more than this share of the cores, at most so often."""

OTHERS_FILE = "others"
"""In the run's folder: the share of the cores that others had."""

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
"""In which /proc/stat counts."""


@dataclass(kw_only=True)
class Row:
    """A tested plan, its prediction and its runs."""

    global_batch: int
    knobs: str
    devices: int
    plan: Path
    predicted: Scored | None = None
    runs: list[RunResult] = field(default_factory=list)

    @property
    def predicted_ms(self) -> float:
        assert self.predicted is not None
        return self.predicted.step_time_ns / NS_PER_MS

    @property
    def medians(self) -> list[float]:
        return [run.step_time_ms["median"] for run in self.runs]

    @property
    def measured_ms(self) -> float:
        return statistics.median(self.medians)

    @property
    def process_ms(self) -> float:
        return statistics.median(run.process_time_ms for run in self.runs)

    @property
    def spread(self) -> float:
        return (max(self.medians) - min(self.medians)) / self.measured_ms

    @property
    def others(self) -> str:
        """The largest share of the cores that others had during a run, if it was noted."""
        notes = [Path(run.run) / OTHERS_FILE for run in self.runs]
        shares = [max(0.0, float(note.read_text())) for note in notes if note.exists()]
        return f"{max(shares):.0%}" if shares else "-"

    @property
    def memory(self) -> str:
        """Predicted and resident MiB of the fullest rank."""
        predicted = max(self.runs[0].predicted_memory_gib or [0.0]) * 1024
        resident = max(max(run.peak_memory_bytes) for run in self.runs) / MIB
        return f"{predicted:.0f} / {resident:.0f}"

    @property
    def error(self) -> float:
        return self.predicted_ms / self.measured_ms - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="runs are kept there")
    parser.add_argument("--reuse", action="store_true", help="keep the runs in the folder")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", type=Path, help="write the table there as well")
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    if not arguments.reuse:
        shutil.rmtree(folder, ignore_errors=True)
        _run_learnt(folder / "learnt")
    learned = _learn(folder)
    rows = [
        _tested(folder / "tested", number, global_batch, knobs)
        for number, (global_batch, knobs) in enumerate((*TWO, *FOUR))
    ]
    for row in rows:
        row.predicted = simulate_plan(row.plan, learned.profile)
        _say(f"predicted {row.predicted_ms:.0f} ms: {row.knobs}")
    if not arguments.reuse:
        _measure(rows, arguments.repeats)
    for row in rows:
        runs = _runs_of(row.plan)
        row.runs = [read_result(run) for run in sorted(runs.iterdir())] if runs.exists() else []
    rows = [row for row in rows if row.runs]
    text = _document(rows, learned)
    print(text)
    if arguments.write:
        arguments.write.write_text(text)


def _say(what: str) -> None:
    print(f"{datetime.datetime.now():%H:%M:%S} {what}", file=sys.stderr, flush=True)


def _run_learnt(folder: Path) -> None:
    for number, (config, global_batch, knobs) in enumerate(LEARNT):
        plan = _plan(
            folder / f"{number:02d}.yaml", OTHER, f"GPT(GPTConfig({config}))", global_batch, knobs
        )
        result = _run(plan, LEARNT_STEPS, folder / "runs")
        _say(f"learnt from {result.step_time_ms['median']:.0f} ms: {knobs} [{config}]")


def _run(plan: Path, steps: int, runs: Path) -> RunResult:
    """Trains with the plan; anew, a few times, if others computed meanwhile."""
    for attempt in range(ATTEMPTS):
        _wait_until_idle()
        before, own_before = _core_times(), _own_s()
        result = run_plan(plan, steps, data=DATA, runs=runs)
        assert result is not None
        passed, idle = (new - old for new, old in zip(_core_times(), before, strict=True))
        others = 1 - idle / passed - (_own_s() - own_before) * TICKS_PER_S / passed
        (Path(result.run) / OTHERS_FILE).write_text(f"{others:.3f}")
        if others <= DISTURBED or attempt == ATTEMPTS - 1:
            break
        _say(f"others took {others:.0%} of the cores: {result.step_time_ms['median']:.0f} ms")
        shutil.rmtree(result.run)
    return result


def _own_s() -> float:
    """Processor time of this process and of the ranks that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _wait_until_idle() -> None:
    """Until the cores have been idle for a second."""
    deadline = time.monotonic() + PATIENCE_S
    before = _core_times()
    while time.monotonic() < deadline:
        time.sleep(1.0)
        now = _core_times()
        passed, idle = (new - old for new, old in zip(now, before, strict=True))
        if passed - idle <= BUSY * passed:
            return
        before = now


def _core_times() -> tuple[int, ...]:
    """Clock ticks of all cores since boot: all, and idle. Linux's."""
    line = Path("/proc/stat").read_text().split("\n", 1)[0]
    ticks = [int(field) for field in line.split()[1:9]]
    return sum(ticks), ticks[3] + ticks[4]


def _learn(folder: Path) -> Learned:
    profile = folder / "cpu.profile"
    profile.unlink(missing_ok=True)
    runs = sorted((folder / "learnt" / "runs").iterdir(), key=lambda run: run.name.split("-")[2])
    return learn(runs, profile)


def _plan(path: Path, model: Path, build: str | None, global_batch: int, knobs: str) -> Path:
    """Writes the plan with these knobs, all others pinned as well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    inputs = "idx=int64[B,128]<256 targets=int64[B,128]<256" if build else None
    request = PlanningRequest(
        model=model,
        cluster="cpu",
        build=build,
        inputs=inputs,
        global_batch=global_batch,
        fix=NEUTRAL | parse_fix(knobs),
        output_folder=path.parent,
    )
    save_plan(make_plan(request).plan, path)
    return path


def _tested(folder: Path, number: int, global_batch: int, knobs: str) -> Row:
    plan = folder / f"{number:02d}.yaml"
    if not plan.exists():
        _plan(plan, TESTED, None, global_batch, knobs)
    devices = 1
    for degree in re.findall(r"\b(?:dp_\w+|tp|pp)=(\d+)", knobs):
        devices *= int(degree)
    return Row(global_batch=global_batch, knobs=knobs, devices=devices, plan=plan)


def _runs_of(plan: Path) -> Path:
    return plan.with_name(plan.stem + "-runs")


def _measure(rows: Sequence[Row], repeats: int) -> None:
    """Plans in turns; one whose repeats lie apart comes once more at the end."""
    for turn in range(repeats):
        for row in rows:
            if row.devices == 2 or turn < 2:
                _measure_once(row)
    for row in rows:
        if row.devices == 2 and row.spread > STEADY:
            _measure_once(row)


def _measure_once(row: Row) -> None:
    result = _run(row.plan, TESTED_STEPS, _runs_of(row.plan))
    row.runs.append(result)
    _say(
        f"measured {result.step_time_ms['median']:.0f} ms (CPU {result.process_time_ms:.0f}): "
        f"{row.knobs}"
    )


def _document(rows: Sequence[Row], learned: Learned) -> str:
    two = [row for row in rows if row.devices == 2]
    four = [row for row in rows if row.devices == 4]
    median = statistics.median(abs(row.error) for row in two)
    lines = [
        "# Predicted against measured steps",
        "",
        f"Made on {datetime.date.today()} by `python bench/predicted.py --folder FOLDER --write "
        f"docs/predicted.md` on {_machine()}, torch {torch.__version__}, gloo over loopback, one "
        "pinned thread a rank.",
        "",
        "Learnt from two other GPTs, then asked about `examples/gpt_small.py` (10M parameters), "
        "which nothing was learnt from. *measured* is the median of the runs' median steps, "
        "*spread* how far these lie apart, *CPU* the processor time of rank 0 in a step, "
        "*others* the share of the cores that other programs had meanwhile. *memory* "
        "is that of the fullest rank: the predicted tensors at their peak, and the pages the "
        "process held, which also have what the allocator keeps between tensors.",
        "",
        f"- two processes: median error **{median:.1%}** over {len(two)} plans",
        *(f"- {line}" for line in _order(two)),
        "",
        *_table("Two processes", two),
        *_table("Four processes", four),
        *_learnt_table(learned),
    ]
    return "\n".join(lines) + "\n"


def _machine() -> str:
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", info.read_text()) if info.exists() else None
    return f"{os.cpu_count()} cores of {found[1] if found else platform.processor()}"


def _table(title: str, rows: Sequence[Row]) -> Iterator[str]:
    yield f"## {title}"
    yield ""
    yield (
        "| global batch | plan | predicted ms | measured ms | error | runs | spread | CPU ms "
        "| others | memory MiB |"
    )
    yield "|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|"
    for row in rows:
        yield (
            f"| {row.global_batch} | `{row.knobs}` | {row.predicted_ms:.0f} "
            f"| {row.measured_ms:.0f} | {row.error:+.0%} | {len(row.runs)} | {row.spread:.0%} "
            f"| {row.process_ms:.0f} | {row.others} | {row.memory} |"
        )
    yield ""


def _order(rows: Sequence[Row]) -> Iterator[str]:
    """Whether the faster plan is the predicted one, of all pairs predicted to differ by `GAP`."""
    wrong: list[str] = []
    count = 0
    for a, b in combinations(rows, 2):
        fast, slow = sorted((a, b), key=lambda row: row.predicted_ms)
        if a.global_batch == b.global_batch and slow.predicted_ms > (1 + GAP) * fast.predicted_ms:
            count += 1
            if fast.measured_ms > slow.measured_ms:
                wrong.append(f"`{fast.knobs}` was to beat `{slow.knobs}`")
    yield (
        f"of {count} pairs of equal batch predicted to differ by more than {GAP:.0%}, "
        f"{count - len(wrong)} measured in that order" + "".join(f"; {text}" for text in wrong)
    )
    for batch in sorted({row.global_batch for row in rows}):
        same = [row for row in rows if row.global_batch == batch]
        predicted = min(same, key=lambda row: row.predicted_ms)
        measured = min(same, key=lambda row: row.measured_ms)
        yield (
            f"global batch {batch}: predicted winner `{predicted.knobs}`, measured winner "
            f"`{measured.knobs}` ({predicted.measured_ms / measured.measured_ms - 1:.0%} faster "
            "than the predicted one)"
        )


def _learnt_table(learned: Learned) -> Iterator[str]:
    yield "## Learnt from"
    yield ""
    yield "| model | global batch | plan | measured ms | after learning | error |"
    yield "|---|--:|---|--:|--:|--:|"
    for run, (config, global_batch, knobs) in zip(learned.runs, LEARNT, strict=True):
        yield (
            f"| `{config}` | {global_batch} | `{knobs}` | {run.measured_ns / NS_PER_MS:.0f} "
            f"| {run.after_ns / NS_PER_MS:.0f} | {run.error(run.after_ns):+.0%} |"
        )
    yield ""


if __name__ == "__main__":
    main()

"""Predicted peak memory against torch's tracker, and against published readings.

Run: python bench/memory.py (all 32 layers of Llama-3-8B's shape, every plan; half an hour), or
     python bench/memory.py --fit training.yaml (constants of planner/allocator.py, and errors with
     whole groups of runs left out; two minutes).
Both print Markdown tables.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean, median

import numpy as np

from claw_plan.planner.memory import MemoryModel
from claw_plan.planner.model_source import load_model
from claw_plan.planner.published_run import pose
from claw_plan.planner.shards import ShardSizes
from claw_plan.planner.trace import trace
from claw_plan.profiles.published import read_published
from claw_plan.profiles.trainers import load_trainers
from claw_plan.profiles.training_row import TrainingRow
from claw_plan.profiles.units import gib

TEST = Path(__file__).parents[1] / "tests" / "validation" / "test_memory_tracker.py"

TAU = 0.7
"""Weight of an error too low; one too high weighs 1 - TAU."""

PRIOR_BYTES, PRIOR_WEIGHT = 3e9, 0.0375e-18
"""What lies outside the allocator is drawn to 3 GB, by so much for each byte squared."""

RATIOS = np.arange(1.0, 1.41, 0.01)
OUTSIDE = np.arange(0.5e9, 8.1e9, 0.25e9)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A published figure; `base_bytes` is what it shows without constants."""

    row: TrainingRow
    base_bytes: float

    @property
    def measured(self) -> float:
        return float(self.row.memory_bytes or 0)

    def error(self, ratio: float, outside: float) -> float:
        kind = self.row.memory_kind
        shown = self.base_bytes * (ratio if kind in ("reserved", "nvidia-smi") else 1.0)
        return (shown + outside * (kind == "nvidia-smi")) / self.measured - 1.0


def readings(path: Path) -> list[Reading]:
    trainers, found = load_trainers(), []
    for row in read_published(path).training:
        if row.memory_bytes:
            run = pose(row, trainers.get(row.trainer) or trainers["torch"])
            memory = MemoryModel(run.problem, ShardSizes(run.problem.graph))
            kind = row.memory_kind if row.memory_kind in ("activations", "states") else "allocated"
            base = memory.shown(run.candidate, run.cuts, kind).expected_bytes
            found.append(Reading(row=row, base_bytes=base))
    return found


def is_fitted(reading: Reading) -> bool:
    kinds = ("reserved", "nvidia-smi")
    return reading.row.memory_kind in kinds and reading.row.trust in ("A", "B")


def fit(known: Sequence[Reading]) -> tuple[float, float]:
    """The pair with the least pinball loss of log errors, over a grid."""

    def loss(ratio: float, outside: float) -> float:
        errors = np.log1p([reading.error(ratio, outside) for reading in known])
        prior = PRIOR_WEIGHT * (outside - PRIOR_BYTES) ** 2
        return float(np.where(errors < 0, -TAU * errors, (1 - TAU) * errors).sum() + prior)

    return min(product(RATIOS, OUTSIDE), key=lambda pair: loss(*pair))


def print_line(name: str, errors: Sequence[float]) -> None:
    percent = [100 * error for error in errors]
    low = sum(error < -5 for error in percent)
    spread = float(np.std(np.log1p(errors)))
    print(
        f"| {name} | {len(percent)} | {fmean(map(abs, percent)):.1f} "
        f"| {median(map(abs, percent)):.1f} | {fmean(percent):+.1f} | {low} | {spread:.3f} |"
    )


def fit_published(path: Path) -> None:
    known = readings(path)
    fitted = [reading for reading in known if is_fitted(reading)]
    ratio, outside = fit(fitted)
    print(f"RESERVED_RATIO {ratio:.2f}, OUTSIDE_BYTES {outside:.3g}, all {len(fitted)} readings\n")
    errors = {}
    for group in {reading.row.group for reading in known}:
        inside = [reading for reading in known if reading.row.group == group]
        pair = (ratio, outside)
        if any(map(is_fitted, inside)):
            pair = fit([reading for reading in fitted if reading.row.group != group])
        errors |= {reading.row.id: reading.error(*pair) for reading in inside}
    print("| readings, groups left out | n | MAPE | median | bias | > 5 % low | spread |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for family, kind in dict.fromkeys((r.row.family, r.row.memory_kind) for r in known):
        same = [r for r in known if (r.row.family, r.row.memory_kind) == (family, kind)]
        print_line(f"{family}, {kind}", [errors[r.row.id] for r in same])
    whole = [r for r in known if r.row.complete and r.row.trust in ("A", "B")]
    print_line("complete, trust A or B", [errors[r.row.id] for r in whole])
    print_line("all", list(errors.values()))
    low = sorted((error, name) for name, error in errors.items() if error < -0.05)
    print("\nToo low by more than 5 %:", ", ".join(f"{name} {e:+.1%}" for e, name in low))


def compare_with_tracker(layers: int, lengths: Iterable[int]) -> None:
    spec = importlib.util.spec_from_file_location("tracker_test", TEST)
    assert spec is not None and spec.loader is not None
    test = importlib.util.module_from_spec(spec)
    sys.modules["tracker_test"] = test
    spec.loader.exec_module(test)
    test.LAYERS = layers
    print("| tokens | plan | stage | recompute | predicted GiB | tracked GiB | error |")
    print("|--:|---|--:|---|--:|--:|--:|")
    for seq in lengths:
        test.SEQ = seq
        graphs = {
            dtype: trace(load_model(test.CONFIG), seq_len=seq, dtype=dtype)
            for dtype in ("bfloat16", "float32")
        }
        for (name, plain), recompute in product(test.PLANS.items(), ("none", "full")):
            candidate = replace(plain, recompute=recompute)
            graph = graphs["float32" if name == "ddp" else "bfloat16"]
            for stage in range(candidate.pp):
                predicted = test.predicted_bytes(graph, candidate, stage)
                tracked = test.tracked_bytes(candidate, stage, name == "ddp")
                print(
                    f"| {seq} | {name} | {stage} | {recompute} | {gib(predicted):.2f} "
                    f"| {gib(tracked):.2f} | {predicted / tracked - 1:+.2%} |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--fit", type=Path, help="a file of published runs")
    options = parser.parse_args()
    if options.fit:
        fit_published(options.fit)
    else:
        compare_with_tracker(32, (2048, 8192))


if __name__ == "__main__":
    main()

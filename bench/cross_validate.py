"""Errors on published runs that the constants were not fitted to.

    python bench/cross_validate.py FILE… [--write docs/accuracy/cross_validation.json]

Fits all constants, then once more without each group (the `group` field), each hidden size, each
GPU and each family in turn, and simulates what was left out under what the rest tells. Prints and
writes the errors by family; takes some ten minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from claw_plan.planner.fit_pool import FitPool
from claw_plan.planner.trainer_fit import Composed, Values, constants_of, fit, values_at
from claw_plan.planner.trainer_fitter import rows_of, weight_of
from claw_plan.profiles.accuracy import Errors, Pair, errors_of, plan_group
from claw_plan.profiles.files import write_atomic
from claw_plan.profiles.fit.registry import read_data
from claw_plan.profiles.fitted import fitted
from claw_plan.profiles.trainer import Trainer
from claw_plan.profiles.trainers import load_trainers
from claw_plan.profiles.training_row import TrainingRow

LEFT_OUT: Mapping[str, Callable[[TrainingRow], str]] = {
    "groups": lambda row: row.group,
    "hidden sizes": lambda row: str(row.dimensions.hidden),
    "GPUs": lambda row: row.device_name,
    "trainers": lambda row: row.trainer,
}


def left_out(
    rows: Sequence[TrainingRow], runs: Composed, key: Callable[[TrainingRow], str]
) -> list[Values]:
    """For each run the constants fitted without those of the same key."""
    keys = [key(row) for row in rows]
    found = {}
    for one in sorted(set(keys)):
        keep = np.array([other != one for other in keys])
        found[one] = values_at(runs.names, runs.solve(keep))
    return [found[one] for one in keys]


def table_of(rows: Sequence[TrainingRow], logs: Sequence[float]) -> dict[str, Errors]:
    """Errors by family, and pooled as the board has them."""
    pairs: dict[str, list[Pair]] = defaultdict(list)
    for row, log in zip(rows, logs, strict=True):
        measured = float(row.step_time_ns or 0)
        pair = Pair(
            predicted=measured * math.exp(log),
            measured=measured,
            group=plan_group(row),
            plan=row.plan,
        )
        for name in names_of(row):
            pairs[name].append(pair)
    return {name: errors_of(some) for name, some in sorted(pairs.items())}


def names_of(row: TrainingRow) -> list[str]:
    """The lines of the table that a run counts in."""
    names = [row.family]
    if row.trust not in ("A", "B") or row.trainer == "vtrain":
        return names
    names.append("all, trust A or B")
    if not row.complete:
        return [*names, "all assumed"]
    low = "fp8 and fp4" if row.plan.linear_dtype else row.plan.dtype
    return [*names, "all complete", f"complete, {low}"]


def committed(rows: Sequence[TrainingRow], trainers: Mapping[str, Trainer]) -> Values:
    """The constants of fitted.yaml, from which the fit takes up."""
    known = fitted()
    found = {("shared", "", key): value for key, value in known.shared.items()}
    for group, table in (("rate", known.rates), ("trainer", known.trainers)):
        found |= {(group, name, key): v for name, row in table.items() for key, v in row.items()}
    return {name: found[name] for name in constants_of(trainers, rows) if name in found}


def main(arguments: Sequence[str] | None = None) -> int:
    """Fits, leaves out, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--write", type=Path)
    chosen = parser.parse_args(arguments)
    rows = rows_of([read_data(path) for path in chosen.files])
    trainers = load_trainers(with_fitted=False)
    weights = [weight_of(row) for row in rows]
    board: dict[str, Any] = {}
    with FitPool(rows, trainers) as pool:
        start = committed(rows, trainers)
        _, runs = fit(rows, weights, trainers, pool.simulate, rounds=1, start=start, tell=print)
        report(board, "nothing (in sample)", rows, runs.errors.tolist())
        for title, key in LEFT_OUT.items():
            found = pool.simulate(left_out(rows, runs, key))
            report(board, title, rows, [one.error for one in found])
    if chosen.write:
        write_atomic(chosen.write, json.dumps(board, indent=1) + "\n")
    return 0


def report(
    board: dict[str, Any], title: str, rows: Sequence[TrainingRow], logs: Sequence[float]
) -> None:
    """Prints one table and keeps it for the file."""
    print(f"\n{title} left out" if title in LEFT_OUT else f"\n{title}")
    board[title] = {}
    for name, one in table_of(rows, logs).items():
        figures = {key: getattr(one, key) for key in ("n", "mape", "median", "p90", "bias")}
        figures |= {
            "pairs": one.pairs,
            "pairs_right_pct": one.pairs_right_pct,
            "regret_pct": one.regret_pct,
            "picks_near_best_pct": one.picks_near_best_pct,
        }
        board[title][name] = {
            key: round(value, 2) if isinstance(value, float) else value
            for key, value in figures.items()
        }
        print(
            f"{name:28s} "
            + " ".join(f"{key} {value}" for key, value in board[title][name].items())
        )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

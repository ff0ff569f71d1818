"""What convergence.py found, as a table: losses, bytes, and steps to the same loss.

Steps to the same loss are told as a multiple: AdamW with whole gradients is also trained for fewer
steps, each time under the whole schedule of learning rates; where its loss is as far above that of
all steps as a method's is, it took 1/multiple of them. Between those lengths, and beyond them, the
logarithm of the loss is taken for linear in the logarithm of the steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from convergence_methods import METHODS

from claw_plan.profiles.files import write_atomic

Found = Mapping[str, Any]
Runs = dict[int, dict[str, dict[int, Found]]]
"""By steps, method and seed."""

COLUMNS = (
    "method", "seeds", "final loss", "gap to its whole gradients, same seeds", "MB sent by a rank",
    "fewer", "fewer in its last step",
)  # fmt: skip
MULTIPLE = "steps to the same loss"
"""A column more where AdamW was trained for other numbers of steps, too."""


def table_of(known: Mapping[str, Found], steps: int) -> str:
    """One row for each method that has been run, in the order of METHODS."""
    runs = _by_steps(known)
    curve = _curve(runs, steps)
    columns = (*COLUMNS, MULTIPLE) if len(curve) > 1 else COLUMNS
    rows = [columns, ("---",) * len(columns)]
    for name, method in METHODS.items():
        by_seed = runs[steps].get(name, {})
        whole = runs[steps].get(method.against, {})
        seeds = sorted(by_seed.keys() & whole.keys())
        if seeds:
            pairs = [(by_seed[seed], whole[seed]) for seed in seeds]
            row, gap = _row(method.title, pairs)
            multiple = f"{multiple_of_steps(gap, curve):.2f}" if method.against == "adam" else "-"
            rows.append((*row, multiple)[: len(columns)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _by_steps(known: Mapping[str, Found]) -> Runs:
    runs: Runs = {}
    for key, found in known.items():
        name, seed, steps = key.split(" ")
        runs.setdefault(int(steps), {}).setdefault(name, {})[int(seed)] = found
    return runs


def _curve(runs: Runs, steps: int) -> dict[int, float]:
    """AdamW's loss after other numbers of steps, as a multiple of that after `steps`."""
    last = runs[steps]["adam"]
    return {
        ran: statistics.mean(
            found["loss"] / last[seed]["loss"] for seed, found in by_name["adam"].items()
        )
        for ran, by_name in runs.items()
        if "adam" in by_name
    }


def multiple_of_steps(gap: float, curve: Mapping[int, float]) -> float:
    """How many times AdamW's steps a method takes whose loss is above AdamW's by `gap`.

    NaN where AdamW was trained for one number of steps only.
    """
    if len(curve) < 2:
        return math.nan
    points = sorted((-math.log(ratio), math.log(ran)) for ran, ratio in curve.items())
    at = -math.log(1 + gap)
    (x0, y0), (x1, y1) = next(
        (pair for pair in pairwise(points) if at <= pair[1][0]), (points[-2], points[-1])
    )
    return math.exp(math.log(max(curve)) - (y0 + (at - x0) * (y1 - y0) / (x1 - x0)))


def _row(title: str, pairs: Sequence[tuple[Found, Found]]) -> tuple[tuple[str, ...], float]:
    """The cells of COLUMNS, and the gap."""
    losses = [own["loss"] for own, _ in pairs]
    gap = statistics.mean(losses) / statistics.mean(whole["loss"] for _, whole in pairs) - 1
    own, whole = pairs[0]
    last = own["last_step_sent_bytes"]
    spread = f" ({min(losses):.4f} to {max(losses):.4f})" if len(losses) > 1 else ""
    cells = (
        title,
        str(len(pairs)),
        f"{statistics.mean(losses):.4f}{spread}",
        f"{gap:+.2%}",
        f"{own['sent_bytes'] / 1e6:.1f}",
        f"{whole['sent_bytes'] / own['sent_bytes']:.2f}",
        f"{whole['last_step_sent_bytes'] / last:.1f}" if last else "nothing sent",
    )
    return cells, gap


def write_table(target: Path, table: str) -> None:
    """Puts the table between the page's marks; rows there of methods not in it stay, above it.

    Raises ValueError where these have other columns.
    """
    text = target.read_text()
    head, _, rest = text.partition("<!-- losses -->")
    before, _, tail = rest.partition("<!-- /losses -->")
    top, line, *rows = table.splitlines()
    known = {_method(row) for row in rows}
    kept = [row for row in before.strip().splitlines()[2:] if _method(row) not in known]
    if odd := [row for row in kept if row.count("|") != top.count("|")]:
        raise ValueError(f"{target}: a row of other columns than {top!r}: {odd[0]!r}")
    body = "\n".join((top, line, *kept, *rows))
    write_atomic(target, f"{head}<!-- losses -->\n{body}\n<!-- /losses -->{tail}")


def _method(row: str) -> str:
    return row.split("|")[1].strip()

"""From how often each token occurs to which rank of tensor parallelism holds its row.

Rows of a divided table are contiguous, and the first tokens of most vocabularies are the most
frequent: one rank then answers most lookups. Here rows are dealt out evenly, in number and in
lookups. Only as many of the most frequent as it takes change places, each to the least loaded
rank, the largest first (LPT; Graham 1969, "Bounds on multiprocessing timing anomalies"); the
others stay in contiguous runs, so that what a rank holds is few pieces of the whole table.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from claw_plan.planner.errors import PlanError
from claw_plan.planner.head_shard import chunk_of
from claw_plan.planner.plan import Plan
from claw_plan.planner.vocabulary_parallel_order import rows_text

EVEN_ENOUGH = 1.01
"""Load of the busiest rank over the mean at which no more rows change places."""

STYLES = ("embedding", "head")
"""Of rules that divide by the vocabulary (planner.vocabulary_parallel)."""

Counts = NDArray[np.float64]


def with_balanced_rows(plan: Plan, counts: Counts) -> tuple[Plan, str]:
    """The plan with its vocabulary dealt out by frequency, and a sentence for the report.

    Raises PlanError where the counts are of another vocabulary.
    """
    sizes = {rule.heads for rule in plan.tensor_parallel if rule.style in STYLES}
    degree = plan.knobs().tp
    if plan.mixed or degree == 1 or not sizes:
        why = "kinds divide it each in its own way" if plan.mixed else "tp divides no vocabulary"
        return plan, f"token frequencies change nothing in this plan: {why}"
    if len(counts) not in sizes:
        raise PlanError(
            f"--token-frequencies: one count for each token id, but got {len(counts)} counts for "
            f"a vocabulary of {' or '.join(map(str, sorted(sizes)))}"
        )
    rows = balanced_rows(counts, degree)
    before, after = load_factor(counts, None, degree), load_factor(counts, rows, degree)
    sentence = (
        f"rows of the vocabulary lie by frequency: the busiest of {degree} ranks looks up "
        f"{after:.2f} x the mean ({before:.2f} x if they were contiguous). It evens out lookups "
        "and the gradients of their rows alone; scores, traffic and the predicted time stay"
    )
    if rows == list(range(len(counts))):
        return plan, sentence
    return plan.model_copy(update={"vocabulary_rows": rows_text(rows)}), sentence


def balanced_rows(counts: Counts, degree: int) -> list[int]:
    """The rows of each rank's chunk in turn, in ascending order within it.

    As many rows change places as it takes, or the most even division that was seen.
    """
    moved, best, least = 0, list(range(len(counts))), load_factor(counts, None, degree)
    while least > EVEN_ENOUGH and moved < len(counts):
        moved = min(max(2 * moved, degree), len(counts))
        rows = _dealt(counts, degree, moved)
        if (factor := load_factor(counts, rows, degree)) < least:
            best, least = rows, factor
    return best


def _dealt(counts: Counts, degree: int, moved: int) -> list[int]:
    """The `moved` most frequent rows dealt out, the others in runs that fill the ranks up."""
    order = np.argsort(-counts, kind="stable")
    others = np.sort(order[moved:]).tolist()
    held, start = [], 0
    for rank in range(degree):
        first, stop = chunk_of(len(counts), degree, rank)
        end = start + (stop - first) - _room(moved, degree, rank)
        held.append(others[start:end])
        start = end
    loads = [(float(counts[own].sum()), rank) for rank, own in enumerate(held)]
    room = [_room(moved, degree, rank) for rank in range(degree)]
    heapq.heapify(loads)
    for row in order[:moved].tolist():
        while not room[loads[0][1]]:
            heapq.heappop(loads)
        load, rank = loads[0]
        held[rank].append(row)
        room[rank] -= 1
        heapq.heapreplace(loads, (load + float(counts[row]), rank))
    return [row for own in held for row in sorted(own)]


def _room(moved: int, degree: int, rank: int) -> int:
    """How many of the dealt rows a rank takes."""
    first, stop = chunk_of(moved, degree, rank)
    return stop - first


def load_factor(counts: Counts, rows: Sequence[int] | None, degree: int) -> float:
    """Lookups of the busiest rank over the mean of all; without `rows` the table as it is."""
    ordered = counts if rows is None else counts[rows]
    edges = [chunk_of(len(counts), degree, rank) for rank in range(degree)]
    return float(max(ordered[a:b].sum() for a, b in edges) * degree / counts.sum())


def read_counts(path: Path) -> Counts:
    """One count for each token id, from .npy or from text with one number a line."""
    try:
        if path.suffix == ".npy":
            counts = np.load(path, allow_pickle=False)
        else:
            counts = np.array([float(line) for line in path.read_text().split()])
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise PlanError(
            f"--token-frequencies {path}: one count for each token id, in .npy or as text, but "
            f"it cannot be read so ({reason})"
        ) from None
    if counts.ndim != 1 or counts.dtype.kind not in "iuf" or not counts.size:
        raise PlanError(
            f"--token-frequencies {path}: one count for each token id, but got an array of "
            f"{counts.dtype} in the shape {list(counts.shape)}"
        )
    numbers: Counts = counts.astype(np.float64)
    wrong = np.flatnonzero(~(np.isfinite(numbers) & (numbers >= 0)))
    if wrong.size or not numbers.sum():
        what = f"{numbers[wrong[0]]:g} for token {wrong[0]}" if wrong.size else "zeros only"
        raise PlanError(f"--token-frequencies {path}: counts are 0 or more, but got {what}")
    return numbers

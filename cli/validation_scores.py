"""Published rows and their predictions to scores: what `claw-plan validate` prints and writes.

`score_file` joins one file's rows with what was predicted for them; `summary_of` counts errors
over all of them, by family, and apart for what had to be assumed and for memory.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from claw_plan.profiles.accuracy import (
    Errors,
    Pair,
    Verdicts,
    errors_of,
    plan_group,
    share_too_low,
    verdicts_of,
)
from claw_plan.profiles.published_rows import NotExpressed, Published
from claw_plan.profiles.published_times import collective_times_ns
from claw_plan.profiles.short_runs import short_run_times_ns
from claw_plan.profiles.training_row import TrainingRow
from claw_plan.profiles.units import NS_PER_MS, NS_PER_US, gib

if TYPE_CHECKING:
    from claw_plan.planner.validation import Prediction

STEP_TIME, MEMORY, KERNEL, COLLECTIVE = "step_time", "memory", "kernel_time", "collective_time"
TIMES = (STEP_TIME, KERNEL, COLLECTIVE)
UNITS = {STEP_TIME: "ms", MEMORY: "GiB", KERNEL: "us", COLLECTIVE: "us"}

HEADLINE, ASSUMED, APART = "overall", "assumed", "apart"
"""Where a step time counts: the run is complete and trusted; something that decides its time had
to be assumed; or its source is not to be relied on alone (trust C)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowScore:
    """One figure of one row, in the unit of its quantity."""

    id: str
    family: str
    quantity: str
    pair: Pair
    counts: str = HEADLINE
    assumed: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    interval: tuple[float, float] | None = None

    @property
    def error_pct(self) -> float:
        """Signed, in percent of the measured figure."""
        return 100.0 * self.pair.error


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """All that was scored, and what could not be; `verdicts` are (ran out of memory, said so)."""

    rows: tuple[RowScore, ...]
    not_expressed: tuple[NotExpressed, ...]
    verdicts: tuple[tuple[bool, bool], ...] = ()

    def of(self, quantity: str) -> list[RowScore]:
        """The scores of one quantity."""
        return [row for row in self.rows if row.quantity == quantity]


def score_file(published: Published, predictions: Mapping[str, Prediction]) -> Scores:
    """The scores of one file; `predictions` are those of its training rows."""
    rows = [*_kernel_scores(published), *_collective_scores(published)]
    others = list(published.not_expressed)
    verdicts = []
    for row in published.training:
        prediction = predictions[row.id]
        if prediction.not_expressed:
            reason = prediction.not_expressed
            others.append(NotExpressed(id=row.id, family=row.family, reason=reason))
            continue
        rows += _training_scores(row, prediction)
        verdict = _verdict(row, prediction)
        verdicts += [verdict] if verdict else []
    return Scores(rows=tuple(rows), not_expressed=tuple(others), verdicts=tuple(verdicts))


def joined(scores: Sequence[Scores]) -> Scores:
    """The scores of several files as one."""
    return Scores(
        rows=tuple(row for each in scores for row in each.rows),
        not_expressed=tuple(other for each in scores for other in each.not_expressed),
        verdicts=tuple(verdict for each in scores for verdict in each.verdicts),
    )


def _training_scores(row: TrainingRow, prediction: Prediction) -> Iterable[RowScore]:
    def score(quantity: str, pair: Pair, **others: Any) -> RowScore:
        return RowScore(
            id=row.id,
            family=row.family,
            quantity=quantity,
            pair=pair,
            assumed=row.assumed,
            flags=row.flags,
            **others,
        )

    counts = HEADLINE if row.complete else ASSUMED
    counts = counts if row.trust in ("A", "B") else APART
    if row.step_time_ns is not None and prediction.step_time_ns is not None:
        interval = None
        if prediction.low_ns is not None and prediction.high_ns is not None:
            interval = (prediction.low_ns / NS_PER_MS, prediction.high_ns / NS_PER_MS)
        pair = Pair(
            predicted=prediction.step_time_ns / NS_PER_MS,
            measured=row.step_time_ns / NS_PER_MS,
            group=plan_group(row),
            plan=row.plan,
        )
        yield score(STEP_TIME, pair, counts=counts, interval=interval)
    if row.memory_bytes is not None and prediction.memory_bytes is not None:
        pair = Pair(predicted=gib(prediction.memory_bytes), measured=gib(row.memory_bytes))
        yield score(MEMORY, pair, counts=counts)


def _verdict(row: TrainingRow, prediction: Prediction) -> tuple[bool, bool] | None:
    """(ran out of memory, said so); a complete and trusted run with a step time has fitted."""
    needed = prediction.needed_bytes
    has_run = row.step_time_ns and row.complete and row.trust in ("A", "B")
    if needed is None or (row.out_of_memory is None and not has_run):
        return None
    capacity = row.cluster.nodes[0].device.memory_bytes
    return bool(row.out_of_memory), needed > capacity


def _kernel_scores(published: Published) -> Iterable[RowScore]:
    times = short_run_times_ns(published.kernels)
    for row in published.kernels:
        pair = Pair(predicted=times[row.id] / NS_PER_US, measured=row.measured_ns / NS_PER_US)
        yield RowScore(id=row.id, family=row.family, quantity=KERNEL, pair=pair, flags=row.flags)


def _collective_scores(published: Published) -> Iterable[RowScore]:
    times = collective_times_ns(published.collectives)
    for row in published.collectives:
        pair = Pair(predicted=times[row.id] / NS_PER_US, measured=row.measured_ns / NS_PER_US)
        yield RowScore(
            id=row.id,
            family=row.family,
            quantity=COLLECTIVE,
            pair=pair,
            assumed=row.assumed,
            flags=row.flags,
        )


def overall(scores: Scores, quantities: Sequence[str] = TIMES) -> Errors:
    """Times that count: complete and trusted runs, and all kernels and collectives."""
    kept = (row for row in scores.rows if row.quantity in quantities and row.counts == HEADLINE)
    return errors_of(row.pair for row in kept)


def assumed(scores: Scores) -> Errors:
    """Step times of trusted runs of which something had to be assumed."""
    kept = (row for row in scores.of(STEP_TIME) if row.counts == ASSUMED)
    return errors_of(row.pair for row in kept)


def memory(scores: Scores) -> tuple[Errors, float | None, Verdicts]:
    """Errors of memory of complete and trusted runs, the share much too low; all verdicts."""
    pairs = [row.pair for row in scores.of(MEMORY) if row.counts == HEADLINE]
    return errors_of(pairs), share_too_low(pairs), verdicts_of(scores.verdicts)


def families(scores: Scores, quantities: Sequence[str] = TIMES) -> dict[str, Errors]:
    """Errors of the times of each family, in the order of the files."""
    pairs: dict[str, list[Pair]] = defaultdict(list)
    for row in scores.rows:
        if row.quantity in quantities:
            pairs[row.family].append(row.pair)
    return {family: errors_of(known) for family, known in pairs.items()}


def flagged(scores: Scores) -> list[RowScore]:
    """Rows that carry a flag in their file; they are scored like the others."""
    return list({row.id: row for row in scores.rows if row.flags}.values())


def reasons(scores: Scores) -> dict[str, int]:
    """How many rows could not be expressed, by the reason."""
    return dict(Counter(other.reason for other in scores.not_expressed).most_common())


def summary_of(scores: Scores) -> dict[str, Any]:
    """The `summary` of the JSON output."""
    errors, too_low, verdicts = memory(scores)
    return {
        "overall": dataclasses.asdict(overall(scores)),
        "assumed": dataclasses.asdict(assumed(scores)),
        "memory": {
            **dataclasses.asdict(errors),
            "too_low_pct": too_low,
            "verdicts": dataclasses.asdict(verdicts),
        },
        "not_expressed": {"count": len(scores.not_expressed), "reasons": reasons(scores)},
        **{name: dataclasses.asdict(one) for name, one in families(scores).items()},
    }


def validation_object(scores: Scores) -> dict[str, Any]:
    """What `claw-plan validate --json` prints."""
    return {
        "rows": [_row_object(row) for row in scores.rows],
        "not_expressed": [dataclasses.asdict(other) for other in scores.not_expressed],
        "flagged": [
            {"id": row.id, "family": row.family, "flags": list(row.flags)}
            for row in flagged(scores)
        ],
        "summary": summary_of(scores),
    }


def _row_object(row: RowScore) -> dict[str, Any]:
    return {
        "id": row.id,
        "quantity": row.quantity,
        "unit": UNITS[row.quantity],
        "predicted": row.pair.predicted,
        "measured": row.pair.measured,
        "error_pct": row.error_pct,
        "family": row.family,
        "assumed": list(row.assumed),
        "counts": row.counts,
        "flags": list(row.flags),
        "interval": list(row.interval) if row.interval else None,
    }

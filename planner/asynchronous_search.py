"""Searches the asynchronous schedules, which change what is trained: only where they are allowed.

They are no members of the space's groups, whose bounds begin with a fill that a steady state has
not. Instead every group of 1F1B with whole replicas and no fewer microbatches than stages is
looked at once more, under bounds of its own: what the busiest rank computes in a step, of the cut
that makes that least. The proof is the same: best bound first, until the next is no better.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.group_bounds import RUN, GroupBounds
from claw_plan.planner.group_opener import Choice, may_be_cut_otherwise
from claw_plan.planner.group_table import SCHEDULE_NAMES, Int
from claw_plan.planner.memory import make_fits
from claw_plan.planner.objective import Objective
from claw_plan.planner.objective_search import Valued
from claw_plan.planner.schedules import ASYNCHRONOUS, PIPEDREAM_2BW
from claw_plan.planner.score import Scored, Scorer
from claw_plan.planner.search import Branch, Evaluated, Outcome, SearchReport, best_first
from claw_plan.planner.search_space import Searched
from claw_plan.planner.space import Space
from claw_plan.planner.stage_path import StagePath
from claw_plan.planner.supported import refusal

LARGE_BUBBLE = 0.05
"""Of a step that the busiest rank waits in the pipeline: of more it is told what would save it."""

KNOBS = {"dp_replicate": "dp"} | {
    knob: knob for knob in ("pp", "tp", "microbatch_size", "recompute", "sequence_parallel")
}
"""Knobs whose values are counted, with their columns of the table."""

SAID = "it trains with weights one step old, which is another training (docs/asynchronous.md)"


@dataclass
class _Searcher:
    """Makes the branches; keeps what explanations need."""

    scorer: Scorer
    space: Space
    offload: str
    pruned: list[Choice] = field(default_factory=list)

    def branches(self, bounds: GroupBounds) -> Iterator[Branch[Choice]]:
        """Runs of groups in the order of their crudest bounds, as `search_space` has them."""
        even_ns, rows = bounds.even_ns, self.rows()
        rows = rows[np.argsort(even_ns[rows], kind="stable")]
        for start in range(0, len(rows), RUN):
            run = rows[start : start + RUN].tolist()
            size = sum(len(self.space.blocks_run_again(row)) for row in run)
            yield Branch(int(even_ns[run[0]]), (), size, partial(self._groups, run))

    def rows(self) -> Int:
        """The groups that can overlap their steps."""
        table = self.space.table
        plain = (table.schedule == SCHEDULE_NAMES.index("1F1B")) & (table.stages_per_rank == 1)
        return np.flatnonzero(plain & (table.pp > 1) & (table.microbatches >= table.pp))

    def candidates(self, row: int) -> Iterator[Candidate]:
        """Those of a group."""
        for blocks in self.space.blocks_run_again(row):
            base = self.space.group(row, blocks).base
            yield replace(base, schedule=PIPEDREAM_2BW, offload=self.offload)

    def _groups(self, rows: Sequence[int]) -> Iterator[Branch[Choice]]:
        for row in rows:
            for candidate in self.candidates(row):
                path = self.scorer.bounds.stage_path(candidate)
                assert path is not None, "the space has no more stages than there are cuts"
                yield self._leaf(candidate, path, first_try=True)

    def _leaf(self, candidate: Candidate, path: StagePath, first_try: bool) -> Branch[Choice]:
        choice = (candidate, path.cuts)
        bound = self.scorer.bounds.overlapping_ns(candidate, path)
        order = (candidate.num_devices, candidate.pp, candidate.tp, repr(candidate))

        def evaluate() -> Evaluated[Choice] | Iterable[Branch[Choice]]:
            memory = self.scorer.memory
            if memory.fits(*choice):
                return Evaluated(choice, self.scorer.step_time_ns(*choice))
            if first_try and may_be_cut_otherwise(candidate):
                other = self.scorer.bounds.stage_path(candidate, make_fits(memory, candidate))
                if other is not None:
                    return [self._leaf(candidate, other, first_try=False)]
            self.pruned.append(choice)
            return Evaluated(choice, None)

        return Branch(bound, order, 1, evaluate)


def search_asynchronous(
    scorer: Scorer,
    fix: Mapping[str, Any],
    *,
    limit_ns: int | None = None,
    time_limit_s: float | None = None,
    progress: Callable[[str, float], None] | None = None,
    objective: Objective | None = None,
) -> Searched:
    """The best of the asynchronous plans that agree with the pinned knobs, and the proof.

    With `limit_ns` only shorter steps are looked for. Raises PlanError where none can be had.
    """
    _check(scorer, fix)
    space = Space(scorer.problem, {**fix, "schedule": "1F1B", "dp_shard": 1})
    searcher = _Searcher(scorer, space, fix.get("offload", Candidate().offload))
    bounds = GroupBounds(scorer, space)
    branches = list(searcher.branches(bounds))
    if not branches:
        raise PlanError(Space(scorer.problem, fix).explain_empty())
    valued = None
    if objective is not None:
        valued = Valued(objective, np.unique(space.table.num_devices).tolist())
        branches = [valued.branch(branch) for branch in branches]

    def show(opened: int, remaining: int) -> None:
        if progress is not None:
            progress("searching overlapping steps", opened / (opened + remaining + 1))

    outcome = best_first(branches, limit_ns=limit_ns, time_limit_s=time_limit_s, progress=show)
    times_ns = {choice: time_ns for time_ns, choice in outcome.ranked}
    if valued is not None:
        times_ns = {choice: valued.times_ns[choice] for choice in times_ns}
    return Searched(
        ranked=tuple(times_ns),
        times_ns={choice[0]: time_ns for choice, time_ns in times_ns.items()},
        report=_report(searcher, sum(branch.size for branch in branches), outcome),
        space=space,
        bounds=bounds,
        looked_at=[],
        pruned=searcher.pruned,
        pruned_rows=[],
    )


def _check(scorer: Scorer, fix: Mapping[str, Any]) -> None:
    """Pinned knobs and settings under which no steps overlap are refused with what to do."""
    own = {"pp": 2, "schedule": PIPEDREAM_2BW}
    if why := refusal(Candidate(**{**fix, **own, "pp": fix.get("pp", 2)})):
        raise PlanError(f"--fix {why}")
    if scorer.problem.training.precision == "float16":
        raise PlanError(
            f"schedule={PIPEDREAM_2BW}: whether gradients overflowed in float16 is known to all "
            "ranks only when all have ended a step; use --precision bfloat16 or float32"
        )


def with_asynchronous(
    scorer: Scorer, found: Searched, fix: Mapping[str, Any], objective: Objective | None = None
) -> Searched:
    """What was found, and asynchronous plans that are better, where the user allows them."""
    limit = found.times_ns[found.ranked[0][0]] if found.ranked and objective is None else None
    try:
        other = search_asynchronous(scorer, fix, limit_ns=limit, objective=objective)
    except PlanError as error:  # pinned knobs leave no pipeline, or shards alone
        return replace(found, said=(*found.said, f"--asynchronous brings no plan: {error}"))

    def value(choice: Choice) -> int:
        time_ns = times_ns[choice[0]]
        return time_ns if objective is None else objective.value(*choice, time_ns)

    times_ns = found.times_ns | other.times_ns
    ranked = sorted([*found.ranked, *other.ranked], key=value)
    return replace(found, ranked=tuple(ranked), times_ns=times_ns)


def asynchronous_said(scorer: Scorer, scored: Scored) -> Iterator[str]:
    """One sentence on what overlapping steps bring, or would; none where the bubble is small."""
    candidate, step_ns = scored.candidate, scored.step_time_ns
    if candidate.schedule in ASYNCHRONOUS:
        whole = scored.fill_and_drain_ns / step_ns
        yield (
            f"{candidate.schedule} has no bubble between steps; a run's beginning and end take "
            f"{whole:.2f} steps more; {SAID}"
        )
        return
    share = scored.parts_ns["pp_bubble"] / step_ns
    if candidate.pp == 1 or share < LARGE_BUBBLE:
        return
    other = replace(
        candidate, schedule=PIPEDREAM_2BW, stages_per_rank=1, zero=Candidate().zero,
        dp_replicate=candidate.dp, dp_shard=1, reshard_ranks=0, blocks_per_group=1,
    )  # fmt: skip
    count = candidate.num_microbatches(scorer.problem.training.global_batch)
    path = scorer.bounds.stage_path(other)
    if refusal(other) or count < candidate.pp or path is None:
        return
    fits = scorer.memory.fits(other, path.cuts)
    allow = "allow it with --asynchronous" if fits else "its versions of whole weights do not fit"
    yield f"{PIPEDREAM_2BW} would save most of the bubble of {share:.0%}; {SAID}; {allow}"


def _report(searcher: _Searcher, total: int, outcome: Outcome[Choice]) -> SearchReport:
    simulated, table = len(outcome.ranked), searcher.space.table
    rows = searcher.rows()
    return SearchReport(
        space=total,
        space_per_knob={
            knob: len(np.unique(getattr(table, column)[rows])) for knob, column in KNOBS.items()
        },
        bound_pruned=total - simulated - outcome.memory_pruned - outcome.left,
        memory_pruned=outcome.memory_pruned,
        simulated=simulated,
        seconds=outcome.seconds,
        gap=outcome.gap,
        left=outcome.left,
    )

"""A lower bound on the step of a MixedCandidate: its schedules played, every stage on its kind.

As `bound.Bounds` does it for equal devices: passes and messages on idle links, or all the traffic
of one stream, then the optimizer. What unlike ranks do together at the step's end, and contention,
are left out, which can only make the step longer.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from claw_plan.planner.actions import KINDS
from claw_plan.planner.bound import Bounds
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.data_bound import DataBounds, floor_ns
from claw_plan.planner.lower import send_cost
from claw_plan.planner.mixed.plan import MixedCandidate, MixedRank, Pipeline
from claw_plan.planner.mixed.score import MixedScorer
from claw_plan.planner.placement import crosses_node
from claw_plan.planner.schedule_bound import Work, play
from claw_plan.simulator.task_graph import Int


@dataclass(frozen=True)
class MixedBounds:
    """Bounds of one problem, with what candidates share kept."""

    scorer: MixedScorer
    _of_kind: dict[tuple[int, int], tuple[Bounds, DataBounds]] = field(
        default_factory=dict, init=False
    )
    _passes: dict[tuple[object, ...], Int] = field(default_factory=dict, init=False)

    def step_ns(self, mixed: MixedCandidate) -> int:
        """Of the slowest pipeline."""
        longest = max(self.pipeline_ns(pipeline) for pipeline in mixed.pipelines)
        return longest + self.scorer.problem.whole.step_overhead_ns()

    def pipeline_ns(self, pipeline: Pipeline) -> int:
        """Until the optimizers of its ranks are done; each rank holds one stage."""
        first = pipeline.ranks[0].candidate
        count = first.num_microbatches(pipeline.batch)
        layout = (first.schedule, first.pp, count, first.stages_per_rank)
        played = play(layout, self._work(pipeline))
        longest = 0
        for rank, cut, end_ns in zip(pipeline.ranks, pipeline.cuts, played.end_ns, strict=True):
            _, data = self._of(rank.kind, pipeline.batch)
            traffic = data.traffic(rank.candidate, *cut)
            busiest = max(end_ns, traffic.gather_ns, traffic.reduce_ns)
            steps = data.optimizer_ns(rank.candidate, *cut)
            longest = max(longest, busiest + steps)
        return longest

    def _of(self, kind: int, batch: int) -> tuple[Bounds, DataBounds]:
        key = (kind, batch)
        if key not in self._of_kind:
            problem = self.scorer.problem.kinds[kind].with_batch(batch)
            shards = self.scorer.shards
            self._of_kind[key] = Bounds(problem, shards), DataBounds(problem, shards)
        return self._of_kind[key]

    def _work(self, pipeline: Pipeline) -> Work:
        """All passes, each unit's on the kind of its stage."""
        stages = list(zip(pipeline.ranks, pipeline.cuts, strict=True))
        passes = [
            self._unit_passes(rank.kind, pipeline.batch, rank.candidate)[:, start:stop]
            for rank, (start, stop) in stages
        ]
        accumulate_ns = [
            self._of(rank.kind, pipeline.batch)[1].accumulate_ns(rank.candidate, *cut)
            for rank, cut in stages
        ]
        together = np.concatenate(passes, axis=1)
        return Work(
            first=np.array([*(start for start, _ in pipeline.cuts), pipeline.cuts[-1][1]]),
            column=np.repeat(np.arange(len(KINDS))[:, None], len(stages), axis=1),
            pass_ns=together,
            kernel_ns=np.zeros_like(together),
            accumulate_ns=np.array(accumulate_ns, np.int64),
            send_ns=np.array(self._send_ns(pipeline), np.int64),
        )

    def _unit_passes(self, kind: int, batch: int, candidate: Candidate) -> Int:
        key = (
            kind, candidate.tp, candidate.sequence_parallel, candidate.microbatch_size,
            candidate.recompute,
        )  # fmt: skip
        if key not in self._passes:
            times = self._of(kind, batch)[0].unit_times(candidate)
            self._passes[key] = np.array(times, np.int64).T.copy()
        return self._passes[key]

    def _send_ns(self, pipeline: Pipeline) -> list[int]:
        """The message between each stage and the next, and nothing after the last."""
        pairs = zip(pipeline.ranks, pipeline.ranks[1:], pipeline.cuts[1:], strict=False)
        return [
            *(self._message_ns(one, other, cut[0], pipeline.batch) for one, other, cut in pairs),
            0,
        ]

    def _message_ns(self, one: MixedRank, other: MixedRank, boundary: int, batch: int) -> int:
        views = [self.scorer.problem.view(rank, batch) for rank in (one, other)]
        if one.kind != other.kind:
            return max(floor_ns(send_cost(view, boundary, nodes=2)) for view in views)
        per_node = views[0].problem.devices_per_node
        nodes = 1 + crosses_node(one.candidate, one.place, per_node)
        return floor_ns(send_cost(views[0], boundary, nodes))

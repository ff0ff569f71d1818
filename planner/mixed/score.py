"""The score of a MixedCandidate: lowered and simulated as every other, by the same simulator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from typing_extensions import override

from claw_plan.planner.memory import HeldMemory, MemoryModel, StageMemory
from claw_plan.planner.mixed.kinds import MixedProblem
from claw_plan.planner.mixed.lower import lower_mixed
from claw_plan.planner.mixed.plan import MixedCandidate, Pipeline
from claw_plan.planner.mixed.share_bound import ShareBounds
from claw_plan.planner.mixed.utilisation import USEFUL, shares_of_speed
from claw_plan.planner.schedules import rank_of_stage
from claw_plan.planner.score import Scored, parts_of, sources_of
from claw_plan.planner.shards import ShardSizes
from claw_plan.profiles.units import s_from_ns
from claw_plan.simulator.simulate import makespan_ns, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedScored(Scored):
    """A way over unlike devices with everything the report says about it.

    `candidate` and `cuts` are those of the first pipeline's first stage and of the first
    pipeline; `memory` is of every stage of every pipeline. `utilisation` is the least time in
    which the devices of the whole cluster could compute the batch, each at its own best and
    never waiting, over the step time: B / sum of speeds. `shares_of_speed` says what the rest is
    lost to (planner.mixed.utilisation).
    """

    mixed: MixedCandidate
    kinds: tuple[str, ...]
    shares_of_speed: Mapping[str, float]

    @property
    def utilisation(self) -> float:
        """The useful share of all devices' speed."""
        return self.shares_of_speed[USEFUL]

    @property
    @override
    def short(self) -> str:
        return self.mixed.short(self.kinds)

    @property
    @override
    def num_devices(self) -> int:
        return self.mixed.num_devices


@dataclass(frozen=True)
class MixedScorer:
    """Scores ways over unlike devices of one problem."""

    problem: MixedProblem
    shards: ShardSizes
    _memory: dict[tuple[int, int], MemoryModel] = field(default_factory=dict, init=False)

    @cached_property
    def share_bounds(self) -> tuple[ShareBounds, ...]:
        """Of each kind's problem."""
        return tuple(ShareBounds(kind.problem) for kind in self.problem.kinds)

    def memory_of(self, kind: int, batch: int) -> MemoryModel:
        """The memory of stages on a kind of device."""
        if (kind, batch) not in self._memory:
            own = self.problem.kinds[kind].with_batch(batch)
            self._memory[kind, batch] = MemoryModel(own, self.shards)
        return self._memory[kind, batch]

    def rank_memory(self, pipeline: Pipeline, index: int) -> StageMemory:
        """Of a device of one rank."""
        rank = pipeline.ranks[index]
        return self.memory_of(rank.kind, pipeline.batch).rank(rank.candidate, index, pipeline.cuts)

    def fits(self, mixed: MixedCandidate) -> bool:
        """Whether every rank fits in its own kind of device."""
        return all(memory.fits for memory in self._memories(mixed))

    def step_time_ns(self, mixed: MixedCandidate) -> int:
        """The simulated step time alone."""
        return makespan_ns(lower_mixed(self.problem, self.shards, mixed).graph)

    def score(self, mixed: MixedCandidate) -> MixedScored:
        """In full, with its timeline."""
        held = [self._held(pipeline) for pipeline in mixed.pipelines]
        lowered = lower_mixed(self.problem, self.shards, mixed, held)
        timeline = simulate(lowered.graph)
        whole, step_ns = self.problem.whole, timeline.step_time_ns
        samples_per_s = whole.training.global_batch / s_from_ns(step_ns)
        parts = parts_of(timeline, len(mixed.ranks))
        comm = sum(ns for name, ns in parts.items() if name.endswith("_comm_exposed"))
        first = mixed.pipelines[0]
        return MixedScored(
            candidate=first.ranks[0].candidate,
            cuts=first.cuts,
            step_time_ns=step_ns,
            memory=self._memories(mixed),
            parts_ns=parts,
            samples_per_s=samples_per_s,
            tokens_per_s=samples_per_s * whole.graph.seq_len if whole.graph.seq_len else None,
            mfu=self._mfu(mixed, step_ns),
            compute_utilisation=(parts["compute"] + parts["recompute"]) / step_ns,
            communication_share=comm / step_ns,
            sources=sources_of(timeline),
            timeline=timeline,
            mixed=mixed,
            kinds=self.problem.names,
            shares_of_speed=shares_of_speed(
                self.problem, self.share_bounds, mixed, lowered, timeline
            ),
        )

    def _held(self, pipeline: Pipeline) -> list[HeldMemory]:
        """Of each stage, on the kind of its rank."""
        first = pipeline.ranks[0].candidate
        home = [
            pipeline.ranks[rank_of_stage(first.schedule, stage, first.pp)]
            for stage in range(len(pipeline.cuts))
        ]
        return [
            self.memory_of(rank.kind, pipeline.batch).held(rank.candidate, start, stop)
            for rank, (start, stop) in zip(home, pipeline.cuts, strict=True)
        ]

    def _memories(self, mixed: MixedCandidate) -> tuple[StageMemory, ...]:
        """Rank by rank."""
        return tuple(
            self.rank_memory(pipeline, index)
            for pipeline in mixed.pipelines
            for index in range(len(pipeline.ranks))
        )

    def _mfu(self, mixed: MixedCandidate, step_ns: int) -> float | None:
        """Model FLOPs over the data-sheet peaks of the devices used."""
        training = self.problem.whole.training
        peaks = [
            kind.problem.device.peak_flops_per_s.get(training.precision, 0.0)
            * mixed.devices_of(index)
            for index, kind in enumerate(self.problem.kinds)
        ]
        flops = sum(self.problem.whole.graph.flops(training.global_batch))
        return flops / (s_from_ns(step_ns) * sum(peaks)) if all(peaks) else None

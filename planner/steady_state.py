"""The step time of an asynchronous pipeline: how far apart steps are once the pipeline is full.

Several steps of `asynchronous` are lowered as one run: 1F1B's rows over all their microbatches,
each rank's update behind the last backward of a step there, without any meeting of all ranks. The
run begins with a fill and ends with a drain, which a training run has once and each checkpoint
once more; what a step takes is the time from one step's last update to the next one's, of a run
long enough that it repeats itself. With stages of F and B each and no fewer microbatches than
stages that is m (F + B), and fill and drain together take (pp - 1) (F + B).

The sums that an update waits for over stages (tied parameters) have a whole step to arrive: they
run beside, and only what they take of the links counts. The few bytes of the loss and of the
gradients' norm count with nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from claw_plan.planner.actions import BACKWARD, Action
from claw_plan.planner.asynchronous import ask_places
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.lower import Cuts, LoweredRank, Lowering
from claw_plan.planner.lower_end import TIED, StepEnd
from claw_plan.planner.lower_whole import Whole
from claw_plan.planner.memory import HeldMemory
from claw_plan.planner.memory_states import version_bytes
from claw_plan.planner.problem import STORED_BYTES, Problem
from claw_plan.planner.shards import ShardSizes
from claw_plan.planner.stage_streams import View, views_of
from claw_plan.simulator.engine import finish_times_ns
from claw_plan.simulator.simulate import timeline_of
from claw_plan.simulator.task_graph import Int, TaskGraph, TaskGraphBuilder
from claw_plan.simulator.timeline import MemorySample, Timeline

FEWEST_STEPS, MOST_STEPS = 5, 40
"""Steps of a run: enough that two periods can be compared, and at most."""

SLACK_NS = 1_000
"""Periods are equal when they differ by rounding: a few ns for each task on the way."""


class _Run(NamedTuple):
    """Some steps that were played.

    `ends_ns` is when each one's last update was made, but for the last step, which drains.
    """

    graph: TaskGraph
    start: Int
    finish: Int
    ends_ns: Sequence[int]

    @property
    def periods_ns(self) -> list[int]:
        """Times between updates."""
        return np.diff(self.ends_ns).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class SteadyStep:
    """A step among others; `fill_and_drain_ns` is what a run takes beside its steps.

    `timeline` is one period of it, beginning with an update.
    """

    period_ns: int
    fill_and_drain_ns: int
    timeline: Timeline


class OverlappingLowering(Lowering):
    """Lowers a run of some steps, whose updates lie between passes.

    `ends` are the tasks with which each step ends, one of each rank.
    """

    def __init__(
        self,
        builder: TaskGraphBuilder,
        views: Sequence[View],
        shards: ShardSizes,
        cuts: Cuts,
        held: Sequence[HeldMemory],
        steps: int,
    ) -> None:
        problem, candidate, _ = views[0]
        self._count = candidate.num_microbatches(problem.training.global_batch)
        super().__init__(builder, views, shards, cuts, held, self._count * steps)
        if self._places:
            self._places = ask_places([rank.pending for rank in self._ranks], self._count)
        held_by = Counter(name for rank in self._ranks for name in _trained(rank))
        self._holders = {name: ranks for name, ranks in held_by.items() if ranks > 1}
        self.ends: list[list[int]] = [[] for _ in range(steps)]

    @override
    def _lower_action(self, rank: LoweredRank, action: Action) -> None:
        step = action.microbatch // self._count
        stage = rank.stages[action.stage]
        stage.last_backward = (step + 1) * self._count - 1
        super()._lower_action(rank, action)
        if action.kind == BACKWARD and action.microbatch == stage.last_backward:
            self._update(rank)
            self.ends[step].append(rank.streams.last_task)

    def _update(self, rank: LoweredRank) -> None:
        """The end of a step on one rank, as the executor's `OverlappingSteps` makes it."""
        problem, candidate, _ = rank.view
        hosts = -(-candidate.num_devices // problem.devices_per_node)
        for name, elements in _trained(rank).items():
            if (ranks := self._holders.get(name, 1)) > 1:
                size = STORED_BYTES * elements
                cost = problem.collective("all_reduce", size, ranks, min(ranks, hosts))
                own = rank.streams
                own.beside(
                    own.reduce, "pp_comm", "tied gradients", cost, 0, [own.last_task], axis=TIED
                )
        StepEnd(problem, [self._end_of(rank)], candidate.num_devices, hosts).lower_alone()
        kept_bytes = sum(stage.data.owned_elements() for stage in rank.stages.values())
        keep_ns = problem.memory_op_ns(2 * version_bytes(problem) * kept_bytes)
        rank.streams.run("other", "keep version", keep_ns)
        for stage in rank.stages.values():
            assert isinstance(stage.data, Whole), "versions are of whole parameters"
            stage.data.begin_step()


def _trained(rank: LoweredRank) -> dict[str, int]:
    """Elements of the trained parameters that a rank holds, by name."""
    return {
        name: elements
        for stage in rank.stages.values()
        for name, elements in stage.data.trained().items()
    }


def _played(
    problem: Problem,
    shards: ShardSizes,
    candidate: Candidate,
    cuts: Cuts,
    held: Sequence[HeldMemory],
    steps: int,
) -> _Run:
    builder = TaskGraphBuilder()
    views = views_of(problem, candidate)
    lowering = OverlappingLowering(builder, views, shards, cuts, held, steps)
    lowering.run()
    graph = builder.build()
    start, finish = finish_times_ns(graph)
    ends_ns = [int(finish[tasks].max()) for tasks in lowering.ends[:-1]]
    return _Run(graph, start, finish, ends_ns)


def _repeats(run: _Run) -> bool:
    """Whether the last two periods are equal."""
    return abs(run.periods_ns[-1] - run.periods_ns[-2]) <= SLACK_NS


def _settled(
    problem: Problem,
    shards: ShardSizes,
    candidate: Candidate,
    cuts: Cuts,
    held: Sequence[HeldMemory],
) -> _Run:
    """A run that repeats itself at its end, or one of the most steps."""
    steps = FEWEST_STEPS
    while True:
        run = _played(problem, shards, candidate, cuts, held, steps)
        if steps == MOST_STEPS or _repeats(run):
            return run
        steps *= 2


def _window(timeline: Timeline, start_ns: int, end_ns: int) -> Timeline:
    """What of a timeline lies between two times, the first of which becomes 0."""
    spans = tuple(
        span._replace(
            start_ns=max(span.start_ns, start_ns) - start_ns,
            end_ns=min(span.end_ns, end_ns) - start_ns,
        )
        for span in timeline.spans
        if span.end_ns > start_ns and span.start_ns < end_ns
    )
    return replace(timeline, spans=spans, memory=_samples(timeline.memory, start_ns, end_ns))


def _samples(
    memory: Sequence[MemorySample], start_ns: int, end_ns: int
) -> tuple[MemorySample, ...]:
    """Those of the window, and what each rank had when it began."""
    before: dict[int, MemorySample] = {}
    inside = []
    for sample in memory:
        if sample.time_ns <= start_ns:
            before[sample.rank] = replace(sample, time_ns=0)
        elif sample.time_ns < end_ns:
            inside.append(replace(sample, time_ns=sample.time_ns - start_ns))
    return tuple(sorted([*before.values(), *inside], key=lambda s: (s.rank, s.time_ns)))


def steady_step(
    problem: Problem,
    shards: ShardSizes,
    candidate: Candidate,
    cuts: Cuts,
    held: Sequence[HeldMemory] = (),
) -> SteadyStep:
    """Plays steps until they repeat."""
    run = _settled(problem, shards, candidate, cuts, held)
    period_ns = run.periods_ns[-1]
    if not _repeats(run):
        half = len(run.ends_ns) // 2
        period_ns = -(-(run.ends_ns[-1] - run.ends_ns[half]) // (len(run.ends_ns) - 1 - half))
    whole_ns = int(run.finish.max(initial=0))
    timeline = timeline_of(run.graph, run.start, run.finish)
    return SteadyStep(
        period_ns=period_ns,
        fill_and_drain_ns=whole_ns - (len(run.ends_ns) + 1) * period_ns,
        timeline=_window(timeline, run.ends_ns[-1] - period_ns, run.ends_ns[-1]),
    )

"""Lower bounds on a candidate's step time, cheap enough for every candidate that may be the best.

Six, each closer and dearer than the one before, all of the simulated step:

- even:  the work divided as evenly as no cut can;
- path:  fill + m (F + B) and fill + m (F + I) + drain, for the slowest rank of the best cut, where
  F, B and I are its stages' forwards, backwards and gradients of inputs on idle links (I is B
  unless the schedule splits backwards), fill and drain the passes of the stages before its first;
- work: all that a rank computes, gradients that add up included;
- schedule: the schedule's rows played, messages included (`schedule_bound`), which all members
  of a group share;
- streams: that, or all the traffic of one stream (`data_bound`), and the optimizer;
- candidate: the rows played with all traffic, on idle links.

Rounded down, so that no bound ever exceeds its simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from claw_plan.planner.actions import KINDS
from claw_plan.planner.averaging_bound import AveragingBounds
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.data_bound import DataBounds, floor_ns
from claw_plan.planner.pass_time import PassTime
from claw_plan.planner.pipeline_bound import even_cuts
from claw_plan.planner.placement import crosses_node, stride_of, tp_nodes
from claw_plan.planner.problem import Problem, variant_of
from claw_plan.planner.schedule_bound import NOTHING, Work, play
from claw_plan.planner.schedules import rank_of_stage, schedule_of, stages_of_rank
from claw_plan.planner.shards import ShardSizes
from claw_plan.planner.stage_cut import Fits, cut_chain
from claw_plan.planner.stage_path import Cuts, StagePath
from claw_plan.planner.unit_times import UnitTimes, pass_floor_ns
from claw_plan.simulator.task_graph import Int


def _columns(stages: int, *, recomputes: bool) -> Int:
    """Which of the passes forward, backward, inputs and weights each action of a stage runs.

    As `lower`: the first stage, and under recompute every other, runs its backward whole.
    """
    _, backward, inputs, weights = range(len(KINDS))
    column = np.repeat(np.arange(len(KINDS))[:, None], stages, axis=1)
    column[inputs, 0], column[weights, 0] = NOTHING, backward
    if recomputes:
        column[inputs, 1:], column[weights, 1:] = backward, NOTHING
    return column


@dataclass(frozen=True)
class Bounds:
    """Bounds of one problem's candidates, with what they share kept."""

    problem: Problem
    shards: ShardSizes
    _paths: dict[tuple[object, ...], StagePath | None] = field(default_factory=dict)
    _compute: dict[tuple[object, ...], int] = field(default_factory=dict)
    _totals: dict[tuple[object, ...], int] = field(default_factory=dict)
    _played: dict[tuple[object, ...], tuple[int, ...]] = field(default_factory=dict)
    _passes: dict[tuple[object, ...], tuple[Int, Int, Int]] = field(default_factory=dict)
    times: UnitTimes = field(init=False)
    _data: DataBounds = field(init=False)
    _means: AveragingBounds = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", UnitTimes(self.problem))
        object.__setattr__(self, "_data", DataBounds(self.problem, self.shards))
        object.__setattr__(self, "_means", AveragingBounds(self.problem, self.shards))

    def stage_path(self, candidate: Candidate, fits: Fits | None = None) -> StagePath | None:
        """The best cut and its stage times; None when the chain cannot be cut so often."""
        key = (*self._cut_key(candidate), candidate.pp)
        if fits is None and key in self._paths:
            return self._paths[key]
        path = self._cut(candidate, fits)
        if fits is None:
            self._paths[key] = path
        return path

    def _cut(self, candidate: Candidate, fits: Fits | None) -> StagePath | None:
        graph, stages = self.problem.graph, candidate.pp * candidate.stages_per_rank
        may_start = graph.edges[1:-1]
        known = self.times.floors(candidate)
        balanced = {structure: time.balanced(candidate) for structure, time in known.items()}
        total = [balanced[unit.structure] for unit in graph.units]
        if fits is None:
            cuts = even_cuts(total, stages, may_start)
        else:
            cuts = cut_chain(total, stages, may_start, fits)
        return None if cuts is None else self.path_of(candidate, cuts)

    def path_of(self, candidate: Candidate, cuts: Cuts) -> StagePath:
        """The stage times of any cut."""
        known = self.times.floors(candidate)
        times = [known[unit.structure] for unit in self.problem.graph.units]
        ranks, per_rank = candidate.pp, candidate.stages_per_rank
        up, whole, inputs, weights, again = (
            [0, *accumulate(column)] for column in zip(*times, strict=True)
        )
        spans = [self.problem.recomputed_units(candidate, *cut) for cut in cuts]
        backward = [
            whole[stop] - whole[start] + again[span.stop] - again[span.start]
            for (start, stop), span in zip(cuts, spans, strict=True)
        ]
        early, late = list(backward), [0] * len(cuts)
        if schedule_of(candidate.schedule).splits_backward:
            early[0], late[0] = 0, backward[0]
            if candidate.recompute == "none":
                early[1:] = [inputs[stop] - inputs[start] for start, stop in cuts[1:]]
                late[1:] = [weights[stop] - weights[start] for start, stop in cuts[1:]]
        return StagePath(
            cuts=cuts,
            forward_ns=tuple(up[stop] - up[start] for start, stop in cuts),
            backward_ns=tuple(backward),
            inputs_ns=tuple(early),
            weights_ns=tuple(late),
            ranks=tuple(
                stages_of_rank(candidate.schedule, rank, ranks, per_rank) for rank in range(ranks)
            ),
        )

    def unit_times(self, candidate: Candidate) -> list[tuple[int, int, int, int]]:
        """Each unit's forward, its whole backward with recompute, and the backward's two parts.

        The parts are only told apart where the schedule does.
        """
        times = self.times.floors(candidate)
        each = {
            structure: (t.forward, t.whole + t.again, t.inputs + t.again, t.weights)
            for structure, t in times.items()
        }
        return [each[unit.structure] for unit in self.problem.graph.units]

    def even_ns(self, candidate: Candidate) -> int:
        """The crudest path bound: stages as equal as no cut can make them."""
        key = self._cut_key(candidate)
        if key not in self._totals:
            times = self.times.floors(candidate)
            self._totals[key] = sum(
                times[unit.structure].balanced(candidate) for unit in self.problem.graph.units
            )
        total = self._totals[key]
        count = candidate.num_microbatches(self.problem.training.global_batch)
        work = count * -(-total // candidate.pp)
        # One microbatch passes all stages, though not all gradients of weights on its way.
        splits = schedule_of(candidate.schedule).splits_backward
        # Some rank does at least a p-th of each.
        return work if splits else max(total, work)

    def compute_ns(self, candidate: Candidate) -> int:
        """The path bound without data-parallel traffic."""
        path = self.stage_path(candidate)
        assert path is not None, "the space has no more stages than there are cuts"
        count = candidate.num_microbatches(self.problem.training.global_batch)
        key = (*self._cut_key(candidate), candidate.pp, count)
        if key not in self._compute:
            self._compute[key] = path.longest_ns(count)
        return self._compute[key]

    def work_ns(self, candidate: Candidate, path: StagePath) -> int:
        """All that a rank computes, gradients that add up included, after the way to it."""
        count = candidate.num_microbatches(self.problem.training.global_batch)
        sends_ns = [*self._send_ns(candidate, path.cuts), 0]
        longest = reached = 0
        for rank, stages in enumerate(path.ranks):
            work = count * sum(path.least_work_ns(stage) for stage in stages)
            if candidate.pp > 1:
                added = (self._data.accumulate_ns(candidate, *path.cuts[s]) for s in stages)
                work += (count - 1) * sum(added)
            longest = max(longest, reached + work)
            reached += path.forward_ns[rank] + sends_ns[rank]
        return longest + self.problem.step_overhead_ns()

    def overlapping_ns(self, candidate: Candidate, path: StagePath) -> int:
        """What the busiest rank runs in a step where steps overlap (`steady_state`)."""
        count = candidate.num_microbatches(self.problem.training.global_batch)
        longest = 0
        for forward_ns, backward_ns, cut in zip(
            path.forward_ns, path.backward_ns, path.cuts, strict=True
        ):
            added_ns = (count - 1) * self._data.accumulate_ns(candidate, *cut)
            step_ns = self._data.optimizer_ns(candidate, *cut)
            longest = max(longest, count * (forward_ns + backward_ns) + added_ns + step_ns)
        return longest + self.problem.step_overhead_ns()

    def schedule_ns(self, candidate: Candidate, path: StagePath) -> int:
        """The schedule's rows played without data parallelism."""
        return max(self._played_alone(candidate, path)) + self.problem.step_overhead_ns()

    def _played_alone(self, candidate: Candidate, path: StagePath) -> tuple[int, ...]:
        """When each rank's last pass ends, whatever the data parallelism."""
        count = candidate.num_microbatches(self.problem.training.global_batch)
        # A message is as long as its way, which follows from how far apart pipeline ranks are.
        far = stride_of(candidate, "pp")
        key = (*self._cut_key(candidate), candidate.schedule, candidate.pp, far, count, path.cuts)
        if key not in self._played:
            if candidate.pp == 1:  # how gradients add up depends on the candidate
                self._played[key] = (count * (path.forward_ns[0] + path.backward_ns[0]),)
            else:
                work = self._work(candidate, path)
                self._played[key] = play(self._layout(candidate), work).end_ns
        return self._played[key]

    def streams_ns(self, candidate: Candidate, path: StagePath) -> int:
        """That, or the whole of some stream's traffic, and the optimizer."""
        ends_ns, data = self._played_alone(candidate, path), self._data
        traffic = data.stages(candidate, path.cuts)
        longest = 0
        for rank, stages in enumerate(path.ranks):
            streams_ns = (
                ends_ns[rank],
                sum(traffic[stage].gather_ns for stage in stages),
                sum(traffic[stage].reduce_ns for stage in stages),
            )
            averaged_ns = self._averaged_ns(candidate, path, stages, max(streams_ns))
            steps = sum(data.optimizer_ns(candidate, *path.cuts[stage]) for stage in stages)
            longest = max(longest, averaged_ns + steps)
        return longest + self.problem.step_overhead_ns()

    def candidate_ns(self, candidate: Candidate, path: StagePath) -> int:
        """The whole step played on idle links, with the cut of `path`."""
        data = self._data
        traffic = data.all_traffic(candidate, path.cuts)
        played = play(self._layout(candidate), self._work(candidate, path), traffic)
        longest = 0
        for rank, stages in enumerate(path.ranks):
            # What is left to the step's end begins when all stages of the rank are reduced.
            reduced_ns = max(played.reduced_ns[stage] for stage in stages)
            ready_ns = max(played.end_ns[rank], reduced_ns)
            ends = self._averaged_ns(candidate, path, stages, ready_ns)
            ends += sum(data.optimizer_ns(candidate, *path.cuts[stage]) for stage in stages)
            longest = max(longest, ends)
        return longest + self.problem.step_overhead_ns()

    def _averaged_ns(
        self, candidate: Candidate, path: StagePath, stages: Sequence[int], ends_ns: int
    ) -> int:
        """When a rank whose last pass ends then has its mean gradients."""
        cuts = tuple(path.cuts[stage] for stage in stages)

        def left_ns(unit: int) -> int:
            backward_ns = sum(times[1] for times in self.unit_times(candidate)[:unit])
            return backward_ns + self._data.accumulate_ns(candidate, *cuts[0])

        return self._means.end_ns(candidate, cuts, ends_ns, left_ns)

    def _cut_key(self, candidate: Candidate) -> tuple[object, ...]:
        """What the times of units, and with pp the best cut, depend on."""
        schedule = schedule_of(candidate.schedule)
        return (
            candidate.tp, tp_nodes(candidate, self.problem.devices_per_node),
            candidate.sequence_parallel, candidate.microbatch_size, candidate.recompute,
            candidate.recompute_blocks, candidate.stages_per_rank, schedule.places_v,
            schedule.splits_backward,
        )  # fmt: skip

    def _layout(self, candidate: Candidate) -> tuple[str, int, int, int]:
        count = candidate.num_microbatches(self.problem.training.global_batch)
        return candidate.schedule, candidate.pp, count, candidate.stages_per_rank

    def _work(self, candidate: Candidate, path: StagePath) -> Work:
        """All passes of the candidate, for playing its schedule."""
        cuts = path.cuts if candidate.recompute_blocks else len(path.cuts)
        key = (*self._cut_key(candidate), cuts)
        if key not in self._passes:
            self._passes[key] = (
                self._pass_columns(candidate, path.cuts, pass_floor_ns),
                self._pass_columns(candidate, path.cuts, lambda time: time.compute_ns),
                _columns(len(path.cuts), recomputes=candidate.recompute != "none"),
            )
        passes, kernels, column = self._passes[key]
        accumulate_ns = [self._data.accumulate_ns(candidate, *cut) for cut in path.cuts]
        return Work(
            first=np.array([*(start for start, _ in path.cuts), path.cuts[-1][1]], np.int64),
            column=column,
            pass_ns=passes,
            kernel_ns=kernels,
            accumulate_ns=np.array(accumulate_ns, np.int64),
            send_ns=np.array(self._send_ns(candidate, path.cuts), np.int64),
            sends_in_turn=self.problem.cluster.backend != "gloo",
        )

    def _pass_columns(
        self, candidate: Candidate, cuts: Cuts, of: Callable[[PassTime], int]
    ) -> Int:
        """A figure of every unit's passes [kind, unit]; what runs again is in whole backwards."""
        times = self.times.of(candidate, of)
        each = np.array([times[unit.structure] for unit in self.problem.graph.units], np.int64).T
        for cut in cuts:
            span = self.problem.recomputed_units(candidate, *cut)
            each[1, span.start : span.stop] += each[-1, span.start : span.stop]
        return each[:-1].copy()

    def _send_ns(self, candidate: Candidate, cuts: Cuts) -> list[int]:
        """The message between each stage and the next."""
        graph, variant = self.problem.graph, variant_of(candidate)
        per_node = self.problem.devices_per_node
        homes = [
            rank_of_stage(candidate.schedule, stage, candidate.pp) for stage in range(len(cuts))
        ]
        costs = []
        for stage, (_, stop) in enumerate(cuts[:-1]):
            if homes[stage] == homes[stage + 1]:
                costs.append(0)
                continue
            size = graph.cost(stop, variant).input_bytes.at(
                candidate.microbatch_size, candidate.tp
            )
            if self.problem.trainer.scatters_sends and not candidate.sequence_parallel:
                size = -(-size // candidate.tp)
            earlier = stage % candidate.pp
            if schedule_of(candidate.schedule).places_v:
                earlier = min(homes[stage : stage + 2])
            nodes = 1 + crosses_node(candidate, earlier, per_node)
            costs.append(floor_ns(self.problem.message(size, nodes)))
        return costs

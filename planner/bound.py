"""Lower bounds on a candidate's step time, cheap enough for every candidate that may be the best.

Four, each closer and dearer than the one before, all of the simulated step:

- even:  the work divided as evenly as no cut can;
- path:  fill + m (F + B) and fill + m (F + I) + drain, for the slowest rank of the best cut, where
  F, B and I are its stages' forwards, backwards and gradients of inputs on idle links (I is B
  unless the schedule splits backwards), fill and drain the passes of the stages before its first;
- schedule: the longest way through the schedule's rows, messages included (`schedule_bound`);
- candidate: that, what data parallelism and the optimizer add to it, and the whole of each
  stream's traffic (`data_bound`).

Rounded down, so that no bound ever exceeds its simulation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.data_bound import DataBounds, floor_ns
from claw_plan.planner.pass_time import INPUTS, WEIGHTS, PassTime
from claw_plan.planner.placement import crosses_node
from claw_plan.planner.problem import Problem, variant_of
from claw_plan.planner.schedule_bound import Durations, Played, play
from claw_plan.planner.schedules import rank_of_stage, schedule_of, stages_of_rank
from claw_plan.planner.shards import ShardSizes
from claw_plan.planner.stage_cut import Fits, cut_chain

Cuts = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePath:
    """Per stage: forward and backward (recompute included) on idle links.

    `inputs_ns` and `weights_ns` are the two parts of the backward where the schedule runs it in
    two, else all of it and nothing; the stage before waits for the first. `ranks` are the stages
    of each rank.
    """

    cuts: Cuts
    forward_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]
    inputs_ns: tuple[int, ...]
    weights_ns: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]

    def least_work_ns(self, stage: int) -> int:
        """A microbatch's forward and backward, whole or in parts."""
        parts_ns = self.inputs_ns[stage] + self.weights_ns[stage]
        return self.forward_ns[stage] + min(self.backward_ns[stage], parts_ns)


def _pass_floor_ns(time: PassTime) -> int:
    return time.compute_ns + sum(floor_ns(cost) for _, cost in time.steps if cost is not None)


def _cut_key(candidate: Candidate) -> tuple[object, ...]:
    """What the times of units, and with pp the best cut, depend on."""
    schedule = schedule_of(candidate.schedule)
    return (
        candidate.tp, candidate.sequence_parallel, candidate.microbatch_size,
        candidate.recompute, candidate.stages_per_rank, schedule.places_v,
        schedule.splits_backward,
    )  # fmt: skip


@dataclass(frozen=True)
class Bounds:
    """Bounds of one problem's candidates, with what they share kept."""

    problem: Problem
    shards: ShardSizes
    _paths: dict[tuple[object, ...], StagePath | None] = field(default_factory=dict)
    _compute: dict[tuple[object, ...], int] = field(default_factory=dict)
    _totals: dict[tuple[object, ...], int] = field(default_factory=dict)
    _played: dict[tuple[object, ...], Played] = field(default_factory=dict)
    _data: DataBounds = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_data", DataBounds(self.problem, self.shards))

    def stage_path(self, candidate: Candidate, fits: Fits | None = None) -> StagePath | None:
        """The best cut and its stage times; None when the chain cannot be cut so often."""
        key = (*_cut_key(candidate), candidate.pp)
        if fits is None and key in self._paths:
            return self._paths[key]
        path = self._cut(candidate, fits)
        if fits is None:
            self._paths[key] = path
        return path

    def _cut(self, candidate: Candidate, fits: Fits | None) -> StagePath | None:
        graph, ranks, per_rank = self.problem.graph, candidate.pp, candidate.stages_per_rank
        times = self.unit_times(candidate)
        last = len(graph.units) - 1
        may_start = [unit for unit in range(2, last) if unit not in graph.cut_refused]
        total = [f + min(whole, i + w) for f, whole, i, w in times]
        cuts = cut_chain(total, ranks * per_rank, may_start, fits)
        if cuts is None:
            return None
        up, whole, inputs, weights = (
            [0, *accumulate(column)] for column in zip(*times, strict=True)
        )
        backward = [whole[stop] - whole[start] for start, stop in cuts]
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
        graph = self.problem.graph
        size = (variant_of(candidate), candidate.microbatch_size, candidate.tp)
        splits = schedule_of(candidate.schedule).splits_backward and candidate.recompute == "none"
        by_structure: dict[int, tuple[int, int, int, int]] = {}
        times = []
        last = len(graph.units) - 1
        for index, unit in enumerate(graph.units):
            if unit.structure not in by_structure:
                pass_time, part = self.problem.pass_time, self.problem.part_time
                up = _pass_floor_ns(pass_time(index, *size, False))
                down = _pass_floor_ns(pass_time(index, *size, True))
                inputs = _pass_floor_ns(part(index, *size, INPUTS)) if splits else down
                weights = _pass_floor_ns(part(index, *size, WEIGHTS)) if splits else 0
                again = self._recompute_floor_ns(candidate, index) if 0 < index < last else 0
                by_structure[unit.structure] = (up, down + again, inputs + again, weights)
            times.append(by_structure[unit.structure])
        return times

    def _recompute_floor_ns(self, candidate: Candidate, unit: int) -> int:
        if candidate.recompute == "none":
            return 0
        again = self.problem.recompute_time(
            unit, variant_of(candidate), candidate.microbatch_size, candidate.tp,
            candidate.recompute,
        )  # fmt: skip
        return _pass_floor_ns(again)

    def even_ns(self, candidate: Candidate) -> int:
        """The crudest path bound: stages as equal as no cut can make them."""
        key = _cut_key(candidate)
        if key not in self._totals:
            self._totals[key] = sum(
                f + min(whole, i + w) for f, whole, i, w in self.unit_times(candidate)
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
        key = (*_cut_key(candidate), candidate.pp, count)
        if key not in self._compute:
            self._compute[key] = self.path_ns(path, count)
        return self._compute[key]

    @staticmethod
    def path_ns(path: StagePath, num_microbatches: int) -> int:
        """Longest way through a pipeline whose messages cost nothing."""
        longest = reached = drained = 0
        for rank, stages in enumerate(path.ranks):  # rank r's first stage is stage r
            early = sum(path.forward_ns[s] + path.inputs_ns[s] for s in stages)
            work = sum(path.least_work_ns(s) for s in stages)
            through = num_microbatches * early + drained
            longest = max(longest, reached + max(num_microbatches * work, through))
            reached += path.forward_ns[rank]
            drained += (path.inputs_ns if rank else path.backward_ns)[rank]
        return longest

    def schedule_ns(self, candidate: Candidate, path: StagePath) -> int:
        """The longest way through the schedule's rows."""
        return max(self.played(candidate, path).end_ns) + self.problem.step_overhead_ns()

    def played(self, candidate: Candidate, path: StagePath) -> Played:
        """The schedule's rows with the cut of `path`, gradients that add up included."""
        count = candidate.num_microbatches(self.problem.training.global_batch)
        key = (*_cut_key(candidate), candidate.schedule, candidate.pp, count, path.cuts)
        if key not in self._played:
            self._played[key] = self._play(candidate, path, count)
        return self._played[key]

    def _play(self, candidate: Candidate, path: StagePath, count: int) -> Played:
        if candidate.pp == 1:
            # How gradients add up depends on the candidate: `candidate_ns` has it.
            last_ns = path.forward_ns[0] + path.backward_ns[0]
            start_ns = (count - 1) * last_ns + path.forward_ns[0]
            return Played(end_ns=(count * last_ns,), last_start_ns=(start_ns,))
        passes = path.forward_ns, path.backward_ns, path.inputs_ns, path.weights_ns
        accumulate_ns = [self._data.accumulate_ns(candidate, *cut) for cut in path.cuts]
        some = Durations(
            pass_ns=np.array(passes, np.int64),
            accumulate_ns=np.array(accumulate_ns, np.int64),
            send_ns=np.array(self._send_ns(candidate, path.cuts), np.int64),
        )
        per_rank = candidate.stages_per_rank
        return play(candidate.schedule, candidate.pp, count, per_rank, some)

    def candidate_ns(self, candidate: Candidate, path: StagePath) -> int:
        """The full bound of a candidate with the cut of `path`."""
        played, data = self.played(candidate, path), self._data
        later = 0
        if candidate.pp == 1:
            count = candidate.num_microbatches(self.problem.training.global_batch)
            later = (count - 1) * data.accumulate_ns(candidate, *path.cuts[0])
        traffic = [data.traffic(candidate, *cut) for cut in path.cuts]
        # All passes wait, over messages, for the first of the first stage.
        later += traffic[0].before_ns
        longest = 0
        for rank, stages in enumerate(path.ranks):
            # Of its stages that end last the reductions follow each other on one stream.
            in_order = sorted(stages, key=lambda stage: -played.last_start_ns[stage])
            ends = max(
                later + played.end_ns[rank] + traffic[in_order[0]].after_ns,
                sum(traffic[stage].gather_ns for stage in stages),
                sum(traffic[stage].reduce_ns for stage in stages),
            )
            reduced = 0
            for stage in in_order:
                reduced += traffic[stage].last_ns
                ends = max(ends, later + played.last_start_ns[stage] + reduced)
            steps = sum(data.optimizer_ns(candidate, *path.cuts[stage]) for stage in stages)
            longest = max(longest, ends + steps)
        return longest + self.problem.step_overhead_ns()

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
            costs.append(floor_ns(self.problem.collective("send", size, 2, nodes)))
        return costs

"""Lower bounds on a candidate's step time, cheap enough for every candidate of the space.

A `Shape` fixes what the computation depends on (pipeline depth, tensor parallelism, microbatch,
recompute) and leaves open how data parallelism is done. Bounds, all of the simulated step:

- path:  fill + m (F + B) and fill + m (F + I) + drain, for the slowest rank, where F, B and I are
  its stages' forwards, backwards and gradients of inputs on idle links (I is B unless the schedule
  splits backwards), fill and drain the passes and messages of the stages before its first.
- traffic: what one rank's gather stream, reduce stream and port must carry.

Rounded down, so that no bound ever exceeds its simulation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.offload import host_step_ns
from claw_plan.planner.pass_time import INPUTS, WEIGHTS, PassTime
from claw_plan.planner.placement import crosses_node, group_nodes
from claw_plan.planner.problem import Problem, optimizer_work, variant_of
from claw_plan.planner.schedules import schedule_of, stages_of_rank
from claw_plan.planner.shards import ROOT, GroupSize, ShardSizes
from claw_plan.planner.stage_cut import Fits, cut_chain
from claw_plan.profiles.cost import CollectiveCost

Cuts = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePath:
    """Per stage: forward and backward (recompute included) on idle links.

    `inputs_ns` is the part of the backward that the stage before waits for. `ranks` are the
    stages of each rank.
    """

    cuts: Cuts
    forward_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]
    inputs_ns: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]


def floor_ns(cost: CollectiveCost) -> int:
    """A collective alone, rounded down."""
    if not cost.bytes:
        return cost.latency_ns
    return cost.latency_ns + int(cost.bytes * 1e9 / cost.rate_cap_bytes_per_s * (1 - 1e-12))


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
    _optimizer: dict[tuple[object, ...], int] = field(default_factory=dict)
    _traffic: dict[tuple[tuple[int, int], int, int, int], tuple[int, int, int, int]] = field(
        default_factory=dict
    )

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
        early = list(backward)
        if schedule_of(candidate.schedule).splits_backward:
            early[0] = 0
            if candidate.recompute == "none":
                early[1:] = [inputs[stop] - inputs[start] for start, stop in cuts[1:]]
                late = [weights[stop] - weights[start] for start, stop in cuts[1:]]
                backward[1:] = [i + w for i, w in zip(early[1:], late, strict=True)]
        return StagePath(
            cuts=cuts,
            forward_ns=tuple(up[stop] - up[start] for start, stop in cuts),
            backward_ns=tuple(backward),
            inputs_ns=tuple(early),
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
    def path_ns(
        path: StagePath,
        num_microbatches: int,
        send_ns: int = 0,
        before_ns: int = 0,
        after_ns: int = 0,
    ) -> int:
        """Longest way through a pipeline, a message costing `send_ns`.

        `before_ns` lie before the first pass of stage 0, `after_ns` after its last.
        """
        longest = reached = drained = 0
        splits = path.inputs_ns != path.backward_ns
        for rank, stages in enumerate(path.ranks):  # rank r's first stage is stage r
            early = sum(path.forward_ns[s] + path.inputs_ns[s] for s in stages)
            work = sum(path.forward_ns[s] + path.backward_ns[s] for s in stages)
            through = num_microbatches * early + drained + after_ns * (not splits)
            longest = max(longest, reached + max(num_microbatches * work, through))
            reached += path.forward_ns[rank] + send_ns
            drained += (path.inputs_ns if rank else path.backward_ns)[rank] + send_ns
        return longest + before_ns

    def candidate_ns(self, candidate: Candidate, path: StagePath) -> int:
        """The full bound of a candidate with the cut of `path`."""
        count = candidate.num_microbatches(self.problem.training.global_batch)
        before, after, streams = self._sharded_traffic(candidate, path.cuts, count)
        optimizer = min(self._optimizer_ns(candidate, *cut) for cut in path.cuts)
        overhead = self.problem.step_overhead_ns()
        send_ns = self._send_ns(candidate, path.cuts)
        length = self.path_ns(path, count, send_ns, before, after)
        return max(length, streams) + optimizer + overhead

    def _send_ns(self, candidate: Candidate, cuts: Cuts) -> int:
        """The cheapest message between neighbouring stages."""
        if candidate.pp == 1:
            return 0
        graph, variant = self.problem.graph, variant_of(candidate)
        per_node = self.problem.devices_per_node
        costs = []
        for stage, (_, stop) in enumerate(cuts[: candidate.pp - 1]):
            size = graph.cost(stop, variant).input_bytes.at(
                candidate.microbatch_size, candidate.tp
            )
            if self.problem.trainer.scatters_sends and not candidate.sequence_parallel:
                size = -(-size // candidate.tp)
            nodes = 1 + crosses_node(candidate, stage, per_node)
            costs.append(floor_ns(self.problem.collective("send", size, 2, nodes)))
        return min(costs)

    def _optimizer_ns(self, candidate: Candidate, start: int, stop: int) -> int:
        optimizer = self.problem.training.optimizer
        key = (start, stop, candidate.tp, candidate.dp_shard, candidate.offload)
        if key not in self._optimizer:
            groups = self.shards.groups(start, stop, candidate.tp, candidate.dp_shard)
            elements = sum(group.trainable_shard for group in groups.values())
            work = optimizer_work(optimizer, elements)
            on_host = candidate.offload == "optimizer"
            step_ns = host_step_ns(self.problem, elements) if on_host else 0
            self._optimizer[key] = step_ns or (self.problem.cost.op(work).ns if elements else 0)
        return self._optimizer[key]

    def _sharded_traffic(
        self, candidate: Candidate, cuts: Cuts, count: int
    ) -> tuple[int, int, int]:
        """Before the first pass, after the last, and the busiest stream of the fullest stage.

        A trainer that keeps whole parameters moves them beside the passes: nothing is certain.
        """
        copies = self.problem.trainer.keeps_compute_copy and candidate.zero < 2
        if candidate.dp_shard == 1 or copies:
            return 0, 0, 0
        each = candidate.pp == 1
        gathers = count if each and candidate.zero == 3 else 1
        reduces = count if each and candidate.zero > 1 else 1
        twice = 2 if each and candidate.zero == 3 else 1
        before = after = 0
        busiest = 0
        nodes = group_nodes(candidate, "dp_shard", self.problem.devices_per_node)
        for stage, cut in enumerate(cuts):
            key = (cut, candidate.tp, candidate.dp_shard, nodes)
            if key not in self._traffic:
                self._traffic[key] = self._stage_traffic(*key)
            root_gather, root_reduce, block_gather, block_reduce = self._traffic[key]
            gather = gathers * (root_gather + twice * block_gather)
            reduce = reduces * (root_reduce + block_reduce)
            busiest = max(busiest, gather, reduce)
            if stage == 0:
                before, after = root_gather, root_reduce
        return before, after, busiest

    def _stage_traffic(
        self, cut: tuple[int, int], tp: int, shard: int, nodes: int
    ) -> tuple[int, int, int, int]:
        """A stage's gather and reduction of the root group, and those of its blocks together."""
        groups = self.shards.groups(*cut, tp, shard)
        costs = {size: self._group_costs(size, shard, nodes) for size in set(groups.values())}
        blocks = [costs[size] for group, size in groups.items() if group >= 0]
        return (
            *costs[groups[ROOT]],
            sum(gather for gather, _ in blocks),
            sum(reduce for _, reduce in blocks),
        )

    def _group_costs(self, size: GroupSize, shard: int, nodes: int) -> tuple[int, int]:
        if not size.whole:
            return 0, 0
        compute = self.problem.training.compute_bytes
        gather = self.problem.collective(
            "all_gather", compute * size.shard * shard, shard, nodes, by_data=True
        )
        if not size.trainable_whole:
            return floor_ns(gather), 0
        whole = self.problem.trainer.gradient_bytes * size.trainable_shard * shard
        reduce = self.problem.collective("reduce_scatter", whole, shard, nodes, by_data=True)
        return floor_ns(gather), floor_ns(reduce)

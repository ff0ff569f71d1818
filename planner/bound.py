"""Lower bounds on a candidate's step time, cheap enough for every candidate of the space.

A `Shape` fixes what the computation depends on (pipeline depth, tensor parallelism, microbatch,
recompute) and leaves open how data parallelism is done. Bounds, all of the simulated step:

- path:  fill_s + m (F_s + B_s) + drain_s + optimizer, for the slowest stage s, where F_s and B_s
  are its kernels and exchanges on idle links, fill_s and drain_s the passes and messages of the
  stages before it. No schedule of whole forwards and backwards is faster.
- traffic: what one rank's gather stream, reduce stream and port must carry.

Rounded down, so that no bound ever exceeds its simulation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.pass_time import PassTime
from claw_plan.planner.placement import crosses_node, group_nodes
from claw_plan.planner.problem import Problem, optimizer_work, variant_of
from claw_plan.planner.shards import ROOT, GroupSize, ShardSizes
from claw_plan.planner.stage_cut import Fits, cut_chain
from claw_plan.profiles.cost import CollectiveCost

Cuts = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePath:
    """Per stage: forward and backward (recompute included) on idle links."""

    cuts: Cuts
    forward_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]


def floor_ns(cost: CollectiveCost) -> int:
    """A collective alone, rounded down."""
    if not cost.bytes:
        return cost.latency_ns
    return cost.latency_ns + int(cost.bytes * 1e9 / cost.rate_cap_bytes_per_s * (1 - 1e-12))


def _pass_floor_ns(time: PassTime) -> int:
    return time.compute_ns + sum(floor_ns(cost) for _, cost in time.steps if cost is not None)


@dataclass(frozen=True)
class Bounds:
    """Bounds of one problem's candidates, with what they share kept."""

    problem: Problem
    shards: ShardSizes
    _paths: dict[tuple[object, ...], StagePath | None] = field(default_factory=dict)
    _compute: dict[tuple[object, ...], int] = field(default_factory=dict)
    _totals: dict[tuple[object, ...], int] = field(default_factory=dict)
    _optimizer: dict[tuple[object, ...], int] = field(default_factory=dict)

    def stage_path(self, candidate: Candidate, fits: Fits | None = None) -> StagePath | None:
        """The best cut and its stage times; None when the chain cannot be cut so often."""
        key = (candidate.pp, candidate.tp, candidate.sequence_parallel,
               candidate.microbatch_size, candidate.recompute)  # fmt: skip
        if fits is None and key in self._paths:
            return self._paths[key]
        path = self._cut(candidate, fits)
        if fits is None:
            self._paths[key] = path
        return path

    def _cut(self, candidate: Candidate, fits: Fits | None) -> StagePath | None:
        graph = self.problem.graph
        forward, backward = self._unit_times(candidate)
        last = len(graph.units) - 1
        may_start = [unit for unit in range(2, last) if unit not in graph.cut_refused]
        total = [f + b for f, b in zip(forward, backward, strict=True)]
        cuts = cut_chain(total, candidate.pp, may_start, fits)
        if cuts is None:
            return None
        up, down = [0, *accumulate(forward)], [0, *accumulate(backward)]
        return StagePath(
            cuts=cuts,
            forward_ns=tuple(up[stop] - up[start] for start, stop in cuts),
            backward_ns=tuple(down[stop] - down[start] for start, stop in cuts),
        )

    def _unit_times(self, candidate: Candidate) -> tuple[list[int], list[int]]:
        graph, variant = self.problem.graph, variant_of(candidate)
        batch, tp = candidate.microbatch_size, candidate.tp
        by_structure: dict[int, tuple[int, int, int]] = {}
        forward, backward = [], []
        last = len(graph.units) - 1
        for index, unit in enumerate(graph.units):
            if unit.structure not in by_structure:
                by_structure[unit.structure] = (
                    _pass_floor_ns(self.problem.pass_time(index, variant, batch, tp, False)),
                    _pass_floor_ns(self.problem.pass_time(index, variant, batch, tp, True)),
                    _pass_floor_ns(self.problem.recompute_time(index, variant, batch, tp)),
                )
            up, down, again = by_structure[unit.structure]
            is_recomputed = candidate.recompute == "full" and 0 < index < last
            forward.append(up)
            backward.append(down + again * is_recomputed)
        return forward, backward

    def even_ns(self, candidate: Candidate) -> int:
        """The crudest path bound: stages as equal as no cut can make them."""
        key = (candidate.tp, candidate.sequence_parallel, candidate.microbatch_size,
               candidate.recompute)  # fmt: skip
        if key not in self._totals:
            self._totals[key] = sum(map(sum, self._unit_times(candidate)))
        total = self._totals[key]
        count = candidate.num_microbatches(self.problem.training.global_batch)
        # One microbatch passes all stages; some stage does at least a p-th of each.
        return max(total, count * -(-total // candidate.pp))

    def compute_ns(self, candidate: Candidate) -> int:
        """The path bound without data-parallel traffic."""
        path = self.stage_path(candidate)
        assert path is not None, "the space has no more stages than there are cuts"
        count = candidate.num_microbatches(self.problem.training.global_batch)
        key = (candidate.pp, candidate.tp, candidate.sequence_parallel,
               candidate.microbatch_size, candidate.recompute, count)  # fmt: skip
        if key not in self._compute:
            self._compute[key] = self.path_ns(path, count)
        return self._compute[key]

    @staticmethod
    def path_ns(path: StagePath, num_microbatches: int, edge_ns: int = 0, send_ns: int = 0) -> int:
        """Longest way through a pipeline; `edge_ns` before its first pass, `send_ns` a message."""
        longest = reached = 0
        for forward, backward in zip(path.forward_ns, path.backward_ns, strict=True):
            longest = max(longest, reached + num_microbatches * (forward + backward))
            reached += forward + backward + 2 * send_ns
        return longest + edge_ns

    def candidate_ns(self, candidate: Candidate, path: StagePath) -> int:
        """The full bound of a candidate with the cut of `path`."""
        count = candidate.num_microbatches(self.problem.training.global_batch)
        before, after, streams = self._sharded_traffic(candidate, path.cuts, count)
        optimizer = min(self._optimizer_ns(candidate, *cut) for cut in path.cuts)
        overhead = self.problem.step_overhead_ns()
        length = self.path_ns(path, count, before + after, self._send_ns(candidate, path.cuts))
        return max(length, streams) + optimizer + overhead

    def _send_ns(self, candidate: Candidate, cuts: Cuts) -> int:
        """The cheapest message between neighbouring stages."""
        if candidate.pp == 1:
            return 0
        graph, variant = self.problem.graph, variant_of(candidate)
        per_node = self.problem.devices_per_node
        costs = []
        for stage, (_, stop) in enumerate(cuts[:-1]):
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
        key = (start, stop, candidate.tp, candidate.dp_shard)
        if key not in self._optimizer:
            groups = self.shards.groups(start, stop, candidate.tp, candidate.dp_shard)
            elements = sum(group.trainable_shard for group in groups.values())
            work = optimizer_work(optimizer, elements)
            self._optimizer[key] = self.problem.cost.op(work).ns if elements else 0
        return self._optimizer[key]

    def _sharded_traffic(
        self, candidate: Candidate, cuts: Cuts, count: int
    ) -> tuple[int, int, int]:
        """Before the first pass, after the last, and the busiest stream of the fullest stage."""
        if candidate.dp_shard == 1:
            return 0, 0, 0
        each = candidate.pp == 1
        gathers = count if each and candidate.zero == 3 else 1
        reduces = count if each and candidate.zero > 1 else 1
        twice = 2 if each and candidate.zero == 3 else 1
        before = after = 0
        busiest = 0
        for stage, cut in enumerate(cuts):
            groups = self.shards.groups(*cut, candidate.tp, candidate.dp_shard)
            costs = {group: self._group_costs(candidate, size) for group, size in groups.items()}
            root_gather, root_reduce = costs[ROOT]
            blocks = [cost for group, cost in costs.items() if group != ROOT]
            gather = gathers * (root_gather + twice * sum(up for up, _ in blocks))
            reduce = reduces * (root_reduce + sum(down for _, down in blocks))
            busiest = max(busiest, gather, reduce)
            if stage == 0:
                before, after = root_gather, root_reduce
        return before, after, busiest

    def _group_costs(self, candidate: Candidate, size: GroupSize) -> tuple[int, int]:
        if not size.whole:
            return 0, 0
        shard = candidate.dp_shard
        nodes = group_nodes(candidate, "dp_shard", self.problem.devices_per_node)
        compute = self.problem.training.compute_bytes
        gather = self.problem.collective(
            "all_gather", compute * size.shard * shard, shard, nodes, by_data=True
        )
        if not size.trainable_whole:
            return floor_ns(gather), 0
        whole = self.problem.trainer.gradient_bytes * size.trainable_shard * shard
        reduce = self.problem.collective("reduce_scatter", whole, shard, nodes, by_data=True)
        return floor_ns(gather), floor_ns(reduce)

"""From a MixedCandidate to a TaskGraph: its pipelines side by side, and what they do together.

Every pipeline is lowered as one on equal devices is (`lower.Lowering`), each rank with the
problem of its own kind. Where parameters are held by ranks that are not replicas within one kind,
their gradients are summed, each pipeline's weighted by its samples before (a factor in the loss,
which costs nothing): in buckets, beside the last backwards, each once all its holders have it.
What is only complete within a kind at the step's end, and everything where nothing can run beside
the kernels, is summed then. Such a sum lasts as long as for the rank with the most to move or the
slowest port.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from typing_extensions import override

from claw_plan.planner.lower import Lowered, Lowering, lowered
from claw_plan.planner.lower_end import TIED, RankEnd, StepEnd, together
from claw_plan.planner.memory import HeldMemory
from claw_plan.planner.mixed.kinds import MixedProblem
from claw_plan.planner.mixed.plan import MixedCandidate
from claw_plan.planner.problem import STORED_BYTES
from claw_plan.planner.shards import ShardSizes
from claw_plan.profiles.cost import CollectiveCost
from claw_plan.simulator.task_graph import TaskGraphBuilder

BETWEEN = "gradients between kinds"
"""The name of their sums in the timeline."""


class Bucket(NamedTuple):
    """Gradients that are summed together: the ranks that hold them, names, bytes on each rank."""

    holders: tuple[int, ...]
    names: Sequence[str]
    sizes: Sequence[int]


class PipelinesEnd(StepEnd):
    """The end of a step of several pipelines."""

    @override
    def lower(self) -> None:
        """All of it; the sums between pipelines begin beside the passes."""
        self._held = [
            {name: size for stage in rank.stages for name, size in stage.trained().items()}
            for rank in self.ranks
        ]
        self._late = self._find_late()
        if all(rank.streams.overlaps for rank in self.ranks):
            self._sum_beside()
        else:
            self._late = {name for own in self._held for name in own}
        super().lower()

    def _find_late(self) -> set[str]:
        """What is not complete on a rank before the step's end."""
        return {
            name
            for rank in self.ranks
            for stage in rank.stages
            for own in (
                stage.averaged("dp_shard"),
                stage.averaged("dp_replicate"),
                stage.sequence_parallel(),
            )
            for name in own
        }

    def _sum_beside(self) -> None:
        """Bucket by bucket as gradients get complete; the optimizer waits for all."""
        complete = [
            {name: tasks for stage in r.stages for name, tasks in stage.complete_after().items()}
            for r in self.ranks
        ]
        streams = [
            rank.streams.builder.stream(f"{rank.streams.name} between kinds", rank.streams.rank)
            for rank in self.ranks
        ]
        newest: dict[int, int] = {}
        traffic_ns = [0] * len(self.ranks)
        early = [name for name in _in_order_of(complete) if name not in self._late]
        for bucket in self._buckets(early):
            cost = self._cost_of(bucket)
            needs = {
                task
                for index in bucket.holders
                for name in bucket.names
                for task in complete[index][name]
            }
            needs |= {newest[index] for index in bucket.holders if index in newest}
            for index in bucket.holders:
                own = self.ranks[index].streams
                newest[index] = own.beside(
                    streams[index], "dp_comm", BETWEEN, cost, 0, sorted(needs), axis=TIED
                )
                traffic_ns[index] += cost.alone_ns
        for index, task in newest.items():
            own = self.ranks[index].streams
            # Kernels lose to traffic beside them; these were added before it was known.
            lost_ns = round(own.overlap_loss * traffic_ns[index])
            if lost_ns:
                own.parts[own.run("backward", f"beside {BETWEEN}", lost_ns)] = ({}, lost_ns)
            own.wait_for([task])

    @override
    def tie(self) -> None:
        """What could not be summed before."""
        names = {name: None for own in self._held for name in own}
        for bucket in self._buckets([name for name in names if name in self._late]):
            ranks = [self.ranks[index] for index in bucket.holders]
            together(ranks, "dp_comm", BETWEEN, self._cost_of(bucket), TIED)

    def _buckets(self, names: Iterable[str]) -> Iterator[Bucket]:
        """Of what several ranks hold, in this order; a bucket has one set of holders.

        It is full once the rank that holds most of it has `bucket_bytes`.
        """
        filled: dict[tuple[int, ...], list[str]] = {}
        held: dict[tuple[int, ...], list[int]] = {}
        for name in names:
            holders = tuple(index for index, own in enumerate(self._held) if name in own)
            if len(holders) < 2:
                continue
            before = held.get(holders, [0] * len(holders))
            more = [STORED_BYTES * self._held[index][name] for index in holders]
            held[holders] = [size + own for size, own in zip(before, more, strict=True)]
            filled.setdefault(holders, []).append(name)
            most = min(self.ranks[index].view.candidate.bucket_bytes for index in holders)
            if max(held[holders]) >= most:
                yield Bucket(holders, filled.pop(holders), held.pop(holders))
        for holders, own in filled.items():
            yield Bucket(holders, own, held[holders])

    def _cost_of(self, bucket: Bucket) -> CollectiveCost:
        """The slowest of its ranks sets the pace of all.

        Each rank of the sum is on a node of its own, and all devices there sum as well.
        """
        count = len(bucket.holders)
        costs = [
            self.ranks[index].view.problem.collective(
                "all_reduce", size, count, count, by_data=True
            )
            for index, size in zip(bucket.holders, bucket.sizes, strict=True)
        ]
        return max(costs, key=lambda cost: cost.alone_ns)


def _in_order_of(complete: Sequence[Mapping[str, Sequence[int]]]) -> list[str]:
    """Names as the slowest of their holders completes them, of equal ones the last first.

    Ranks differ in how many reductions they make, so places are parts of each rank's own.
    """
    place: dict[str, float] = {}
    for own in complete:
        last = {name: max(tasks) for name, tasks in own.items()}
        order = {task: at for at, task in enumerate(sorted(set(last.values())), start=1)}
        for name, task in last.items():
            place[name] = max(place.get(name, 0.0), order[task] / len(order))
    return sorted(reversed(place), key=place.__getitem__)


def lower_mixed(
    problem: MixedProblem,
    shards: ShardSizes,
    mixed: MixedCandidate,
    held: Sequence[Sequence[HeldMemory]] = (),
) -> Lowered:
    """The tasks of one training step; with `held`, of each stage, also the memory they hold."""
    builder = TaskGraphBuilder()
    ends: list[RankEnd] = []
    for number, pipeline in enumerate(mixed.pipelines):
        views = [problem.view(rank, pipeline.batch) for rank in pipeline.ranks]
        own = held[number] if held else ()
        lowering = Lowering(builder, views, shards, pipeline.cuts, own, first_rank=len(ends))
        ends += lowering.run()
    kind = PipelinesEnd if len(mixed.pipelines) > 1 else StepEnd
    hosts = num_hosts(problem, mixed)
    return lowered(builder, kind(problem.whole, ends, mixed.num_devices, hosts))


def num_hosts(problem: MixedProblem, mixed: MixedCandidate) -> int:
    """Nodes that the candidate uses."""
    return sum(
        -(-mixed.devices_of(index) // kind.problem.devices_per_node)
        for index, kind in enumerate(problem.kinds)
    )

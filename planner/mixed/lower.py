"""From a MixedCandidate to a TaskGraph: its pipelines side by side, and what they do together.

Every pipeline is lowered as one on equal devices is (`lower.Lowering`), each rank with the
problem of its own kind. Where parameters are held by ranks that are not replicas within one kind,
their gradients are summed at the step's end: tied ones between stages, and all of them between
pipelines, in buckets, each pipeline's weighted by its samples before (a factor in the loss, which
costs nothing). Such a sum lasts as long as for the rank with the most to move or the slowest port.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from claw_plan.planner.lower import Lowered, Lowering, lowered
from claw_plan.planner.lower_end import TIED, RankEnd, StepEnd, bucket_sizes, together
from claw_plan.planner.memory import HeldMemory
from claw_plan.planner.mixed.kinds import MixedProblem
from claw_plan.planner.mixed.plan import MixedCandidate
from claw_plan.planner.problem import STORED_BYTES
from claw_plan.planner.shards import ShardSizes
from claw_plan.profiles.cost import CollectiveCost
from claw_plan.simulator.task_graph import TaskGraphBuilder


class PipelinesEnd(StepEnd):
    """The end of a step of several pipelines."""

    @override
    def tie(self) -> None:
        """The sums of all parameters that several ranks hold, one set of holders at a time."""
        held = [
            {name: size for stage in rank.stages for name, size in stage.trained().items()}
            for rank in self.ranks
        ]
        shared: dict[tuple[int, ...], list[str]] = {}
        for name in {name: None for own in held for name in own}:
            holders = tuple(index for index, own in enumerate(held) if name in own)
            if len(holders) > 1:
                shared.setdefault(holders, []).append(name)
        for holders, names in shared.items():
            ranks = [self.ranks[index] for index in holders]
            sizes = [[held[index][name] for name in names] for index in holders]
            self._sum(ranks, sizes)

    def _sum(self, ranks: Sequence[RankEnd], sizes: Sequence[Sequence[int]]) -> None:
        """Over ranks that hold so many elements of each gradient; the slowest sets the pace."""

        def whole_ns(index: int) -> int:
            return self._cost(ranks[index], STORED_BYTES * sum(sizes[index]), len(ranks)).alone_ns

        slowest = max(range(len(ranks)), key=whole_ns)
        bucket_bytes = ranks[slowest].view.candidate.bucket_bytes
        for size in bucket_sizes(sizes[slowest], bucket_bytes):
            cost = self._cost(ranks[slowest], size, len(ranks))
            together(ranks, "dp_comm", "gradients of unlike ranks", cost, TIED)

    @staticmethod
    def _cost(rank: RankEnd, size_bytes: int, ranks: int) -> CollectiveCost:
        """Each rank of the sum is on a node of its own, and all devices there sum as well."""
        problem = rank.view.problem
        return problem.collective("all_reduce", size_bytes, ranks, ranks, by_data=True)


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

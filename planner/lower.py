"""From a Candidate to a TaskGraph: what every pipeline stage computes, sends and waits for.

All ranks of a stage do the same at the same time, so one stands for all of them: a stage has a
compute stream, streams for gathers, reductions and sends, and its port to the node's link and to
the network. The rows of `schedules.schedule_actions` give the order of passes; this module gives
each pass its units, `lower_data` the data-parallel traffic around them.

On gloo nothing overlaps: its collectives are waited for where they are called and run on the
cores that compute, so there they are lowered onto the compute stream.

Folded: inside a pass without data-parallel traffic all kernels are one task and all
tensor-parallel exchanges another, since nothing else can meet them on their link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.lower_data import DataParallel, make_data_parallel
from claw_plan.planner.memory import HeldMemory
from claw_plan.planner.placement import crosses_node
from claw_plan.planner.problem import Problem, variant_of
from claw_plan.planner.schedules import Action, action_needs, schedule_actions
from claw_plan.planner.shards import ShardSizes
from claw_plan.planner.stage_streams import StageStreams, add_stage_streams
from claw_plan.profiles.cost import CollectiveCost
from claw_plan.simulator.task_graph import TaskGraph, TaskGraphBuilder

Cuts = tuple[tuple[int, int], ...]


@dataclass
class _Stage:
    """One stage while it is lowered; `pending[done]` is its next action."""

    index: int
    start: int
    stop: int
    streams: StageStreams
    data: DataParallel
    held: HeldMemory
    pending: list[Action] = field(default_factory=list)
    done: int = 0


class Lowering:
    """Lowers one candidate; `build` answers with the graph."""

    def __init__(
        self,
        problem: Problem,
        shards: ShardSizes,
        candidate: Candidate,
        cuts: Cuts,
        held: Sequence[HeldMemory] = (),
    ) -> None:
        self._problem, self._candidate = problem, candidate
        self._microbatches = candidate.num_microbatches(problem.training.global_batch)
        self._variant = variant_of(candidate)
        self._builder = TaskGraphBuilder()
        self._sent: dict[Action, int] = {}
        rows = schedule_actions(candidate.schedule, candidate.pp, self._microbatches)
        ports = add_stage_streams(self._builder, problem, candidate)
        self._stages = [
            _Stage(
                index=index,
                start=start,
                stop=stop,
                streams=ports[index],
                data=make_data_parallel(problem, shards, candidate, ports[index], start, stop),
                pending=list(rows[index]),
                held=held[index] if held else HeldMemory(),
            )
            for index, (start, stop) in enumerate(cuts)
        ]

    def build(self) -> TaskGraph:
        """Adds all tasks in an order in which each needs only earlier ones."""
        progress = True
        while progress:
            progress = False
            for stage in self._stages:
                while stage.done < len(stage.pending) and self._ready(stage.pending[stage.done]):
                    self._lower_action(stage, stage.pending[stage.done])
                    stage.done += 1
                    progress = True
        self._finish_step()
        return self._builder.build()

    def _ready(self, action: Action) -> bool:
        others = (n for n in action_needs(action, len(self._stages)) if n.stage != action.stage)
        return all(need in self._sent for need in others)

    def _lower_action(self, stage: _Stage, action: Action) -> None:
        needs = [
            self._sent[need]
            for need in action_needs(action, len(self._stages))
            if need.stage != stage.index
        ]
        stage.streams.wait_for(needs)
        if action.kind == "F":
            self._forward(stage, action)
        else:
            self._backward(stage, action)
        self._send(stage, action)

    def _forward(self, stage: _Stage, action: Action) -> None:
        data, batch, tp = stage.data, self._candidate.microbatch_size, self._candidate.tp
        first = stage.held.always_bytes if stage.done == 0 else 0
        stage.streams.next_alloc_bytes = first + stage.held.microbatch_bytes
        data.begin_forward(range(stage.start, stage.stop))
        label = str(action)
        passes = []
        for unit in range(stage.start, stage.stop):
            data.before_unit(unit, backward=False)
            passes.append(self._problem.pass_time(unit, self._variant, batch, tp, False))
            if data.by_unit:
                stage.streams.run_pass("forward", f"{label} unit {unit}", passes)
                passes = []
            data.after_forward(unit)
        if passes:
            stage.streams.run_pass("forward", label, passes)

    def _backward(self, stage: _Stage, action: Action) -> None:
        data, batch, tp = stage.data, self._candidate.microbatch_size, self._candidate.tp
        is_last = action.microbatch == self._last_backward(stage)
        units = list(reversed(range(stage.start, stage.stop)))
        data.begin_backward(units, is_last)
        label, redone, passes = str(action), [], []
        for unit in units:
            data.before_unit(unit, backward=True)
            if unit == stage.start:
                stage.streams.next_free_bytes = stage.held.microbatch_bytes
            if self._is_recomputed(unit):
                redone.append(self._problem.recompute_time(unit, self._variant, batch, tp))
            passes.append(self._problem.pass_time(unit, self._variant, batch, tp, True))
            if data.by_unit:
                stage.streams.run_pass("recompute", f"{label} unit {unit}", redone)
                stage.streams.run_pass("backward", f"{label} unit {unit}", passes)
                redone, passes = [], []
            data.after_backward(unit, is_last)
        if passes:
            stage.streams.run_pass("recompute", label, redone)
            stage.streams.run_pass("backward", label, passes)
        data.end_backward(is_last)

    def _is_recomputed(self, unit: int) -> bool:
        inside = 0 < unit < len(self._problem.graph.units) - 1
        return inside and self._candidate.recompute == "full"

    def _last_backward(self, stage: _Stage) -> int:
        """The microbatch whose backward comes last on the stage; its gradients are reduced."""
        return stage.pending[-1].microbatch

    def _send(self, stage: _Stage, action: Action) -> None:
        """Hidden states go on to the next stage, their gradients back to the one before."""
        peer = stage.index + (1 if action.kind == "F" else -1)
        if not 0 <= peer < len(self._stages):
            return
        boundary = stage.stop if action.kind == "F" else stage.start
        size = self._problem.graph.cost(boundary, self._variant).input_bytes.at(
            self._candidate.microbatch_size, self._candidate.tp
        )
        earlier = min(stage.index, peer)
        nodes = 1 + crosses_node(self._candidate, earlier, self._problem.devices_per_node)
        cost = self._problem.collective("send", size, 2, nodes)
        self._sent[action] = stage.streams.send(cost, f"send {action}")

    def _finish_step(self) -> None:
        """Tied gradients are summed, gradients of sharded sequences too, then the optimizer."""
        tied = self._tie_ends()
        for stage in self._stages:
            if tied is not None and stage.index in (0, len(self._stages) - 1):
                stage.streams.wait_for([tied])
            stage.data.reduce_sequence_parallel()
            stage.data.step_optimizer()
            overhead = self._problem.cost.step_overhead_ns()
            if overhead:
                stage.streams.run("other", "step overhead", overhead)

    def _tie_ends(self) -> int | None:
        """The all-reduce of parameters that both the first and the last stage hold."""
        first, last = self._stages[0], self._stages[-1]
        if first is last:
            return None
        shared = first.data.parameter_names & last.data.parameter_names
        size = 4 * sum(
            parameter.numel
            for parameter in self._problem.graph.parameters
            if parameter.name in shared and parameter.trainable
        )
        if not size:
            return None
        nodes = min(2, -(-self._candidate.num_devices // self._problem.devices_per_node))
        sharded = size // self._candidate.dp_shard
        cost: CollectiveCost = self._problem.collective("all_reduce", sharded, 2, nodes)
        first.streams.wait_for([last.streams.last_task] if last.streams.last_task >= 0 else [])
        return first.streams.exchange("pp_comm", "tied gradients", cost)


def lower(
    problem: Problem,
    shards: ShardSizes,
    candidate: Candidate,
    cuts: Cuts,
    held: Sequence[HeldMemory] = (),
) -> TaskGraph:
    """The tasks of one training step; with `held`, one a stage, also the memory they hold."""
    return Lowering(problem, shards, candidate, cuts, held).build()

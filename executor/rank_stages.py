"""The stages that this rank holds: built, cut, divided, recomputed, sharded; and their parameters.

Each stage is cut from a copy of the whole model of its own, so a rank with several stages may
hold a parameter more than once: a tied table whose ends meet on it, or what the model itself
owns. One of them is trained; the others are its copies, which take its value before a step and
give it their gradients after, so that there is one sum and one optimizer state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn

from claw_plan.executor.checkpoint_layout import WholeState, whole_state
from claw_plan.executor.context_parallel import hold_part
from claw_plan.executor.dropout import OwnNumbers
from claw_plan.executor.expert_parallel import ExpertParallel, hold_experts, joined
from claw_plan.executor.gradients import local
from claw_plan.executor.mesh import Mesh
from claw_plan.executor.model_check import check_model
from claw_plan.executor.model_copy import copied
from claw_plan.executor.reached import unreached
from claw_plan.executor.recompute import recompute
from claw_plan.executor.recording import record
from claw_plan.executor.sharding import shard_stage
from claw_plan.executor.stages import Stage
from claw_plan.executor.tensor_parallel import divide_weights
from claw_plan.executor.whole_model import (
    AS_PLANNED,
    DOUBLE,
    build_whole,
    cast_floats,
    first_names,
    loss_of,
)
from claw_plan.planner.model_source import Batch, LoadedModel
from claw_plan.planner.plan import Plan
from claw_plan.planner.plan_stages import stage_spans
from claw_plan.planner.schedules import stages_of_rank
from claw_plan.planner.tensor_parallel import TensorParallelModel


@dataclass(frozen=True, slots=True)
class TiedCopy:
    """A second place of a parameter on this rank."""

    copy: nn.Parameter
    original: nn.Parameter

    def take_value(self) -> None:
        """The value that the optimizer gave the original."""
        with torch.no_grad():
            local(self.copy).copy_(local(self.original))

    def give_gradient(self) -> None:
        """Adds to the original's gradient, and is empty afterwards."""
        gradient, self.copy.grad = self.copy.grad, None
        if gradient is None:
            return
        if self.original.grad is None:
            self.original.grad = gradient
        else:
            local(self.original.grad).add_(local(gradient))


@dataclass(frozen=True, kw_only=True)
class RankStages:
    """Stages by their index in the chain; parameters by their first name in the whole model."""

    stages: Mapping[int, Stage]
    parameters: Mapping[str, nn.Parameter]
    copies: Sequence[TiedCopy]
    whole: WholeState
    tensor_parallel: TensorParallelModel | None
    experts: ExpertParallel | None
    unreached: frozenset[str]


def make_rank_stages(
    plan: Plan,
    loaded: LoadedModel,
    mesh: Mesh,
    device: torch.device,
    precision: str,
    *,
    shards: bool,
) -> RankStages:
    """This rank's stages, ready to run; `shards` where fully_shard holds the parameters."""
    knobs = plan.knobs()
    model = build_whole(plan, loaded, precision)
    check_model(plan, model)
    names, whole = first_names(model), whole_state(model)
    not_reached = _unreached(plan, loaded, model, precision)
    stages, divided, shared, own_numbers = {}, [], [], OwnNumbers(mesh.index("tp"), device)
    for index, stage in _cut(plan, loaded, model, mesh.index("pp"), precision).items():
        start, end = stage_spans(plan)[index]
        blocks = plan.blocks[start:end]
        if knobs.tp > 1:
            divided.append(divide_weights(plan, stage.model, blocks, mesh, own_numbers))
        if knobs.ep > 1:
            shared.append(hold_experts(plan, stage.model, blocks, mesh))
        stage.to(device)
        for block in blocks[: knobs.recomputed(len(blocks))]:
            recompute(stage.model.get_submodule(block), knobs.recompute, precision)
        if knobs.sequence_parallel:
            own_numbers.inside([stage.model.get_submodule(block) for block in blocks])
        if shards:
            shard_stage(
                stage,
                blocks,
                plan,
                mesh,
                shared[-1] if shared else None,
                lowers=precision == AS_PLANNED,
                finds_unreached=bool(not_reached),
            )
        if knobs.cp > 1:
            own_tokens = OwnNumbers(mesh.index("cp"), device)
            hold_part(stage, blocks, knobs, mesh, own_tokens)
        stages[index] = stage
    parameters: dict[str, nn.Parameter] = {}
    copies = []
    for stage in stages.values():
        for name, parameter in stage.model.named_parameters():
            original = parameters.setdefault(names[name], parameter)
            if original is not parameter and parameter.requires_grad:
                copies.append(TiedCopy(parameter, original))
    return RankStages(
        stages=stages,
        parameters=parameters,
        copies=copies,
        whole=whole,
        tensor_parallel=_joined(divided) if divided else None,
        experts=joined(shared, parameters, names, is_sharded=shards, unreached=not_reached),
        unreached=not_reached.difference(*(one.first for one in shared)),
    )


def _cut(
    plan: Plan, loaded: LoadedModel, model: nn.Module, rank: int, precision: str
) -> dict[int, Stage]:
    """The rank's stages, each of a copy of the model, the last of the model itself."""
    call, spans = loss_of(loaded), stage_spans(plan)
    if len(spans) == 1:
        return {0: Stage(model, call)}
    batch = _example(plan, loaded, precision)
    recording = record(model, plan.blocks, lambda module: call(module, batch))
    schedule, num_ranks = plan.schedule, plan.knobs().pp
    held = stages_of_rank(schedule.name, rank, num_ranks, schedule.stages_per_rank)
    models = [*(copied(model) for _ in held[1:]), model]
    return {
        index: Stage(own, call, recording, spans[index])
        for index, own in zip(held, models, strict=True)
    }


def _example(plan: Plan, loaded: LoadedModel, precision: str) -> Batch:
    batch = loaded.example_batch(plan.knobs().microbatch_size, plan.training.seq_len)
    return cast_floats(batch, torch.float64) if precision == DOUBLE else batch


def _unreached(
    plan: Plan, loaded: LoadedModel, model: nn.Module, precision: str
) -> frozenset[str]:
    """Parameters without gradients, where data parallelism would wait for them.

    Stages that hold the same one would add up zeros.
    """
    knobs = plan.knobs()
    if knobs.dp == knobs.pp == knobs.cp == 1:
        return frozenset()
    call, batch = loss_of(loaded), _example(plan, loaded, precision)
    return unreached(model, lambda module: call(module, batch))


def _joined(divided: Sequence[TensorParallelModel]) -> TensorParallelModel:
    """What tensor parallelism did to all stages of the rank."""
    names = [name for part in divided for name in part.sequence_parallel_parameters]
    return TensorParallelModel(
        ranks=divided[0].ranks,
        sharded={name: how for part in divided for name, how in part.sharded.items()},
        sequence_parallel_parameters=tuple(dict.fromkeys(names)),
    )

"""Plan to a training step on this rank: `compile_plan` gives a `ParallelModel`.

The order is fixed, each wrapping what the one before left: build the whole model on the CPU under
the plan's seed (so that weights are those of one process; every rank needs the host memory for
it), cut the stage, divide tensor-parallel weights, recompute, shard or replicate, schedule.

Parameters are stored in fp32; lower precisions are computed through fully_shard's mixed precision,
which then is used on one device too. Gradients of sharded models are reduced after every
microbatch (only shards accumulate), but in a pipeline once, after the last, as torch's runtime
does it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn

from claw_plan.executor.batch_norm import RunningStatistics
from claw_plan.executor.checkpoint_layout import WholeState, divided_as
from claw_plan.executor.clipping import clip, counted_here, global_norm
from claw_plan.executor.communication.hooks import mean_once
from claw_plan.executor.communication.reducer import Replicas
from claw_plan.executor.dropout import seed_forwards
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.exchange_refusal import refuse_exchange
from claw_plan.executor.expert_parallel import ExpertParallel
from claw_plan.executor.gradients import TiedGradients, reduce_gradients, share_of_mean
from claw_plan.executor.loss_scale import LossScale
from claw_plan.executor.mesh import Mesh, make_mesh
from claw_plan.executor.microbatches import replicate, run_microbatches
from claw_plan.executor.next_forward import NextForward, why_not
from claw_plan.executor.offload import HostOptimizer
from claw_plan.executor.overlapping_steps import OverlappingSteps
from claw_plan.executor.pipeline import RecordedStage, make_pipeline
from claw_plan.executor.ranges import Ranges
from claw_plan.executor.rank_stages import RankStages, TiedCopy, make_rank_stages
from claw_plan.executor.reached import leave_unreached
from claw_plan.executor.recorder import StepRecorder
from claw_plan.executor.replica_exchange import (
    Exchange,
    ExchangeOptions,
    keep_alike_over_tp,
    make_exchange,
    optimizer_maker,
)
from claw_plan.executor.sharding import stays_whole
from claw_plan.executor.stages import Stage
from claw_plan.executor.whole_model import AS_PLANNED
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.model_source import Batch, LoadedModel
from claw_plan.planner.plan import Plan
from claw_plan.planner.schedules import ASYNCHRONOUS
from claw_plan.planner.tensor_parallel import TensorParallelModel
from claw_plan.profiles.work import OpWork

Step = Callable[[list[Batch]], torch.Tensor]
"""Forward and backward of all microbatches; their mean loss, 0 where this rank sees none."""


@dataclass(kw_only=True)
class ParallelModel:
    """This rank's part of the plan.

    `parameters` are this rank's, under the names of the whole model; a tied parameter stands
    under the first of its names; `copies` are second places of some. `whole` is the model before
    it was divided. `schedule` runs forward and backward; without a pipeline it calls `module`,
    the only one of `stages` or what replicates it. `exchange` is what replicas send each other
    where it is not the library's own all-reduce of gradients. `averaged` maps an axis to
    parameters whose gradients are averaged over it once a step; `evened` are those that all
    tensor-parallel ranks hold and a codec made unlike, with codes of what lay beside them in a
    bucket. `unreached` names parameters that
    the loss may not reach, `counted` are those whose part of the gradients' norm is counted on
    this rank. `next_forward` waits for buckets one by one where the plan orders them so, else
    `waits_because` says why not.
    """

    plan: Plan
    knobs: Candidate
    mesh: Mesh
    device: torch.device
    stages: tuple[Stage, ...]
    module: nn.Module
    parameters: Mapping[str, nn.Parameter]
    copies: Sequence[TiedCopy]
    whole: WholeState
    optimizer: torch.optim.Optimizer
    schedule: Step
    tensor_parallel: TensorParallelModel | None = None
    tied: TiedGradients | None = None
    experts: ExpertParallel | None = None
    averaged: Mapping[str, Sequence[nn.Parameter]] = field(default_factory=dict)
    evened: Sequence[nn.Parameter] = ()
    has_loss: bool = True
    pipeline_stages: tuple[RecordedStage, ...] = field(default=(), repr=False)
    loss_scale: LossScale | None = None
    statistics: RunningStatistics | None = None
    exchange: Exchange | None = None
    unreached: frozenset[str] = frozenset()
    counted: Sequence[nn.Parameter] = ()
    recorder: StepRecorder | None = None
    ranges: Ranges | None = None
    optimizer_work: OpWork | None = None
    overlap: OverlappingSteps | None = None
    next_forward: NextForward | None = None
    waits_because: str = ""

    def train_step(self, batch: Batch) -> float:
        """One optimizer step on this rank's slice; answers with the loss of the global batch, or
        with the newest that is known where steps overlap.
        """
        if self.overlap is not None:
            return self.overlap.step(self.microbatches_of(batch))
        defers = self.next_forward is not None and self.recorder is None
        with self._ahead_of_next(defers=defers), self.recorder or nullcontext():
            loss = self.forward_backward(batch)
            self.finish_gradients()
        if defers:
            return self.global_loss(loss)
        if self.takes_step():
            self.clip_gradients()
            with self.recorded_optimizer():
                self.optimizer.step()
        self.optimizer.zero_grad()
        return self.global_loss(loss)

    def _ahead_of_next(self, *, defers: bool) -> AbstractContextManager[None]:
        """Around forward and backward; with `defers` the optimizer steps in the next forward."""
        return (
            nullcontext() if self.next_forward is None else self.next_forward.step(defers=defers)
        )

    def settle(self) -> None:
        """Waits for all that goes on between steps; call it before anything is kept of them."""
        if self.next_forward is not None:
            self.next_forward.settle()
        if self.exchange is not None:
            self.exchange.settle()
        if self.overlap is not None:
            self.overlap.drain()

    def takes_step(self) -> bool:
        """Whether no gradient overflowed in fp16, be it in kernels or on the wire."""
        if self.exchange is not None and not self.exchange.takes_step():
            return False
        return self.loss_scale is None or self.loss_scale.divide(self.trainable())

    def recorded(
        self, kind: str, name: str, *, awaits_peer: bool = False
    ) -> AbstractContextManager[None]:
        """Around one computation: a span while a recorder looks, a range where profilers look."""
        recording: AbstractContextManager[None] = nullcontext()
        if self.recorder is not None:
            recording = self.recorder.span(kind, name, awaits_peer=awaits_peer)
        if self.ranges is None:
            return recording
        return self.ranges.around(name if kind == "other" else f"{kind} {name}", recording)

    def recorded_optimizer(self) -> AbstractContextManager[None]:
        """Around a step of the optimizer."""
        recording: AbstractContextManager[None] = nullcontext()
        if self.recorder is not None and self.optimizer_work is not None:
            recording = self.recorder.optimizer(self.optimizer_work)
        return recording if self.ranges is None else self.ranges.around("optimizer", recording)

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        """Accumulates the gradients of this rank's slice; answers with its mean loss."""
        for copied in self.copies:
            copied.take_value()
        return self.schedule(self.microbatches_of(batch))

    def microbatches_of(self, batch: Batch) -> list[Batch]:
        """The parts of this rank's slice; ExecutionError for one of another size."""
        size, rows = self.knobs.microbatch_size, next(iter(batch.values())).shape[0]
        if rows != self.plan.training.global_batch // self.knobs.dp:
            raise ExecutionError(
                f"a rank trains on {self.plan.training.global_batch // self.knobs.dp} samples a "
                f"step (global batch {self.plan.training.global_batch} over dp={self.knobs.dp}), "
                f"but got {rows}; means over unequal parts would weigh samples unequally, so drop "
                "or pad what is left over"
            )
        parts = zip(*(value.split(size) for value in batch.values()), strict=True)
        return [dict(zip(batch, part, strict=True)) for part in parts]

    def finish_gradients(self, *, ties: bool = True) -> None:
        """The sums that neither FSDP nor DDP do; see `gradients`.

        Without `ties` those of tied parameters are left to others.
        """
        for copied in self.copies:
            copied.give_gradient()
        bucket_bytes = self.knobs.bucket_bytes
        for axis, parameters in self.averaged.items():
            group = self.mesh.group(axis)
            if axis == "dp_replicate" and self.exchange is not None:
                mean_once(parameters, self.exchange.mean, group, bucket_bytes)
            else:
                reduce_gradients(parameters, group, dist.ReduceOp.AVG, bucket_bytes)
        if self.experts is not None:
            self.experts.finish(bucket_bytes)
        if self.tensor_parallel is not None:
            partial_sums = [
                parameter
                for name in self.tensor_parallel.sequence_parallel_parameters
                if (parameter := self.parameters[name]).requires_grad
            ]
            group = self.mesh.group("tp")
            reduce_gradients(partial_sums, group, dist.ReduceOp.SUM, bucket_bytes)
            reduce_gradients(self.evened, group, dist.ReduceOp.AVG, bucket_bytes)
        if self.tied is not None and ties:
            self.tied.add_up()
        if self.unreached:
            leave_unreached(
                [p for name, p in self.parameters.items() if name in self.unreached],
                [self.mesh.group(axis) for axis in self.mesh.state_axes],
            )
        if self.statistics is not None:
            self.statistics.compose()

    def clip_gradients(self) -> torch.Tensor | None:
        """Clips complete gradients as the plan says; their norm before, None without clipping."""
        max_norm = self.plan.training.clip_norm
        if max_norm is None:
            return None
        norm = self.gradient_norm()
        self.clip_to(norm)
        return norm

    def clip_to(self, norm: torch.Tensor) -> None:
        """The same by a norm that is known."""
        max_norm = self.plan.training.clip_norm
        assert max_norm is not None, "the plan clips"
        clip(self.trainable(), norm, max_norm)

    def gradient_norm(self) -> torch.Tensor:
        """The norm of all gradients of the model, as one process would see it."""
        return global_norm(self.counted, self.device)

    def share_of_loss(self, loss: torch.Tensor, num_microbatches: int) -> torch.Tensor:
        """What a microbatch's backward starts from."""
        share = share_of_mean(loss, num_microbatches)
        return share if self.loss_scale is None else share * self.loss_scale.factor

    def trainable(self) -> list[nn.Parameter]:
        """Parameters that the optimizer changes, in the model's order."""
        return [p for p in self.parameters.values() if p.requires_grad]

    def global_loss(self, own: torch.Tensor) -> float:
        """Mean over the global batch of what the ranks with a loss saw; the same on all ranks."""
        seen = own if self.has_loss else torch.zeros(1, dtype=torch.float64)
        total = seen.to(self.device, torch.float64).reshape(1)
        dist.all_reduce(total)
        return self.mean_of_ranks(total.item())

    def mean_of_ranks(self, total: float) -> float:
        """The same from the sum over all ranks."""
        return total / (self.knobs.dp * self.knobs.cp * self.knobs.tp)


def compile_plan(
    plan: Plan,
    loaded: LoadedModel,
    device: torch.device,
    *,
    precision: str = AS_PLANNED,
    exchange: ExchangeOptions | None = None,
) -> ParallelModel:
    """Makes this rank's part. Every rank of the default process group must call it.

    `exchange` is what a run asks for beyond the plan.
    """
    knobs, options = plan.knobs(), exchange or ExchangeOptions()
    refuse_exchange(plan, loaded, options)
    mesh = make_mesh(knobs, device.type)
    shards = plan.training.precision != "float32" or knobs.shard_ranks > 1
    shards = shards and plan.schedule.name not in ASYNCHRONOUS
    held = make_rank_stages(plan, loaded, mesh, device, precision, shards=shards)
    first = next(iter(held.stages.values()))
    scales_loss = plan.training.precision == "float16" and precision == AS_PLANNED
    trainable = [p for p in held.parameters.values() if p.requires_grad]
    make = optimizer_maker(plan, loaded, mesh)
    compiled = ParallelModel(
        plan=plan,
        knobs=knobs,
        mesh=mesh,
        device=device,
        stages=tuple(held.stages.values()),
        module=first,
        parameters=held.parameters,
        copies=held.copies,
        whole=held.whole,
        optimizer=HostOptimizer(make, trainable) if knobs.offload != "none" else make(trainable),
        schedule=lambda microbatches: torch.zeros(()),
        tensor_parallel=held.tensor_parallel,
        experts=held.experts,
        averaged=_averaged(knobs, held, shards=shards),
        has_loss=len(plan.stages) - 1 in held.stages,
        loss_scale=LossScale(plan.training.loss_scale_window) if scales_loss else None,
        statistics=RunningStatistics(held.stages.values(), mesh),
        unreached=held.unreached,
    )
    compiled.exchange = make_exchange(plan, mesh, compiled.optimizer, options, compiled.stages)
    keep_alike_over_tp(compiled)
    if knobs.pp > 1:
        _make_pipeline(compiled, held.stages, precision)
    else:
        _make_accumulation(compiled, replicates=not shards and knobs.dp_replicate > 1)
    compiled.counted = counted_here(
        held.parameters,
        mesh,
        lambda name: divided_as(compiled, name) is not None,
        compiled.tied,
        compiled.experts,
    )
    seed_forwards(mesh, plan.training.seed)
    return compiled


def _averaged(
    knobs: Candidate, held: RankStages, *, shards: bool
) -> Mapping[str, Sequence[nn.Parameter]]:
    """What is averaged after the last backward, over which axis: FSDP and DDP do the rest."""
    apart = held.experts.parameters if held.experts is not None else {}
    trainable = [p for n, p in held.parameters.items() if p.requires_grad and n not in apart]
    if shards:
        whole = [parameter for parameter in trainable if stays_whole(parameter)]
        states = ("cp", "dp_shard", "dp_replicate")
        axes = [axis for axis in states if getattr(knobs, axis) > 1]
        through_codec = knobs.codec != "none" and knobs.dp_replicate > 1
        shares = {"dp_replicate": trainable} if through_codec else {}
        return dict.fromkeys(axes, whole) | shares
    return {"dp_replicate": trainable} if knobs.dp_replicate > 1 and knobs.pp > 1 else {}


def _make_pipeline(compiled: ParallelModel, stages: Mapping[int, Stage], precision: str) -> None:
    """The schedule of a rank with pipeline stages."""
    plan, group = compiled.plan, compiled.mesh.group("pp")
    compiled.tied = TiedGradients(compiled.parameters, group)
    compiled.pipeline_stages = tuple(
        RecordedStage(
            stage, index, len(plan.stages), compiled.device, group, compiled.recorded,
            splits=compiled.knobs.recompute == "none",
        )
        for index, stage in stages.items()
    )  # fmt: skip
    if plan.schedule.name in ASYNCHRONOUS:
        compiled.overlap = OverlappingSteps(compiled, lowers=precision == AS_PLANNED)
        return
    compiled.schedule = make_pipeline(
        compiled.pipeline_stages, plan.schedule, compiled.device, compiled.share_of_loss
    )


def _make_accumulation(compiled: ParallelModel, *, replicates: bool) -> None:
    """The schedule of a rank with the whole chain of blocks."""
    knobs = compiled.knobs
    if replicates:
        compiled.module = replicate(
            compiled.module,
            compiled.mesh,
            knobs.bucket_bytes,
            buckets=knobs.buckets,
            order=knobs.bucket_order,
            mean=None if compiled.exchange is None else compiled.exchange.mean,
            finds_unreached=bool(compiled.unreached),
            left_out=list(compiled.experts.parameters.values()) if compiled.experts else (),
        )
        if compiled.exchange is not None:
            compiled.exchange.lay_out(compiled.module)
    if knobs.bucket_order and isinstance(compiled.module, Replicas):
        _wait_in_next_forward(compiled, compiled.module)
    compiled.schedule = partial(
        run_microbatches,
        compiled.module,
        knobs.zero,
        compiled.recorded,
        compiled.share_of_loss,
    )


def _wait_in_next_forward(compiled: ParallelModel, replicas: Replicas) -> None:
    """Where nothing needs all gradients at once."""
    reason = "what the run does to buckets holds the backward's end for all of them"
    if compiled.exchange is None:
        clip_norm, may_miss = compiled.plan.training.clip_norm, bool(compiled.unreached)
        reason = why_not(compiled.optimizer, clip_norm, may_miss=may_miss)
    if reason:
        compiled.waits_because = reason
    else:
        compiled.next_forward = NextForward(replicas, compiled.optimizer)

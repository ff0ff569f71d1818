"""What replicas send each other, as the plan's codec and collective algorithm say, and a run.

Codecs whose errors a second moment would not forgive carry AdamW's momentum (1-bit Adam and its
kin: one_bit, top_k, threshold); the others carry gradients. Under plain SGD, which is linear in
gradients, all do. PowerSGD (low_rank) carries gradients under any, after a warm-up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
import torch.nn as nn

from claw_plan.executor.checkpoint_layout import divided_as
from claw_plan.executor.communication.algorithms import NATIVE
from claw_plan.executor.communication.bucket_checks import BucketChecks
from claw_plan.executor.communication.group import group_over, open_ways
from claw_plan.executor.communication.group_mean import GroupMean
from claw_plan.executor.communication.hooks import GradientMean, Mean
from claw_plan.executor.communication.power_sgd import LowRankBuckets
from claw_plan.executor.communication.reducer import Replicas
from claw_plan.executor.communication.selector import Probe, Selector, Switch
from claw_plan.executor.communication.selector_options import SelectorOptions, parse_options
from claw_plan.executor.communication.shard_mean import ShardMean, reduce_by
from claw_plan.executor.communication.whole_mean import WholeMean, checked
from claw_plan.executor.mesh import Mesh
from claw_plan.executor.optimizer import make_optimizer
from claw_plan.executor.optimizers.compressed import CompressedOptimizer
from claw_plan.executor.optimizers.one_bit_adam import OneBitAdam
from claw_plan.executor.optimizers.one_bit_lamb import OneBitLamb
from claw_plan.executor.optimizers.zero_one_adam import ZeroOneAdam
from claw_plan.executor.step_times import APART, MET, STEADY, WARM_UP
from claw_plan.kernels.codec import codec_of
from claw_plan.kernels.fp16_scale import Fp16Scale
from claw_plan.kernels.plain import Half
from claw_plan.planner.averaging import WITH_MOMENTUM
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.model_source import LoadedModel
from claw_plan.planner.plan import Plan
from claw_plan.planner.problem import STORED_BYTES
from claw_plan.planner.supported import OF_MOMENTUM
from claw_plan.planner.zero_one import SENT_AS
from claw_plan.profiles.codecs import LOW_RANK, ZERO_ONE, describe_codec
from claw_plan.profiles.coded_means import time_ns
from claw_plan.profiles.collective_algorithms import Links
from claw_plan.profiles.collective_schedules import Nodes

if TYPE_CHECKING:
    from claw_plan.executor.parallel_model import ParallelModel

AUTO, UNCODED = "auto", "none"


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """What a run asks for beyond its plan: algorithms by what they cost here, and checksums."""

    selector: SelectorOptions | None = None
    checks_buckets: bool = False

    def __bool__(self) -> bool:
        return self.selector is not None or self.checks_buckets

    def asked(self) -> str:
        """As it was typed."""
        return "--selector" if self.selector is not None else "--check-buckets"


AS_PLANNED = ExchangeOptions()


def options_of(selector: Mapping[str, str] | None, checks_buckets: bool) -> ExchangeOptions:
    """What was typed, read; raises ExecutionError or InputError for what is not understood."""
    return ExchangeOptions(
        selector=None if selector is None else parse_options(selector),
        checks_buckets=checks_buckets,
    )


class RankState(Protocol):
    """Something with state that each rank has for itself."""

    def rank_state(self) -> dict[str, torch.Tensor]:
        """It, by name."""

    def load_rank_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Takes it up again; nothing at all where it was another number of ranks'."""


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """What buckets of gradients become in backward, who keeps errors, and what may overflow.

    `selector` and `checks` work where a step ends.
    """

    mean: Mean
    state: RankState
    gradients: GradientMean | None = None
    selector: Selector | None = None
    checks: BucketChecks | None = None

    def takes_step(self) -> bool:
        """Whether what came is finite, the same on all ranks; they skip the step together."""
        return self.gradients is None or self.gradients.take_finite()

    def step_ended(self, step: int) -> list[Switch | Probe]:
        """What was changed after this step, the same on all ranks.

        Raises ExecutionError if a bit was changed two steps ago.
        """
        if self.checks is not None:
            self.checks.step_ended(step)
        if self.selector is None:
            return []
        self.selector.step_ended()
        return self.selector.take_events()

    def algorithms(self) -> dict[int, str]:
        """What buckets of so many bytes go by, where a selector chooses."""
        return {} if self.selector is None else self.selector.used()

    def lay_out(self, module: nn.Module) -> None:
        """What buckets consist of, for who asks: as the module that replicates has them."""
        means = None if self.gradients is None else self.gradients.means
        if isinstance(means, LowRankBuckets):
            assert isinstance(module, Replicas), "whole replicas meet through a reducer of ours"
            means.lay_out([[view.shape for view in bucket.views] for bucket in module.buckets])

    def resume(self, state: Mapping[str, torch.Tensor], steps: int) -> None:
        """Takes up the rank's state as it was after so many steps; nothing begins at zero."""
        self.state.load_rank_state(state)
        if self.gradients is not None:
            self.gradients.backwards = steps

    @property
    def replicas_are_equal(self) -> bool:
        """Whether all replicas have the same parameters; those of 0/1 Adam meet now and then."""
        return not isinstance(self.state, ZeroOneAdam) or self.state.replicas_are_equal

    @property
    def phase(self) -> str:
        """What the last step did, as `step_times` has it."""
        if isinstance(self.state, OneBitAdam):
            if self.state.steps_done <= self.state.warmup_steps:
                return WARM_UP
            if isinstance(self.state, ZeroOneAdam):
                return MET if self.replicas_are_equal else APART
            return STEADY
        is_steady = self.gradients is None or self.gradients.is_steady
        return STEADY if is_steady else WARM_UP

    def settle(self) -> None:
        """Lets replicas meet, so that all are equal; every rank calls it.

        Raises ExecutionError if a bit was changed in any step so far.
        """
        if isinstance(self.state, ZeroOneAdam):
            self.state.meet()
        if self.checks is not None:
            self.checks.settle()


def needs_exchange(knobs: Candidate) -> bool:
    """Whether replicas do something else than the library's own all-reduce of gradients."""
    return knobs.codec != UNCODED or knobs.collective != AUTO


def without_codec(plan: Plan) -> Plan:
    """The plan with whole numbers on the wire: what can be compared with one process."""
    return plan.model_copy(update={"candidate": plan.candidate | {"codec": UNCODED}})


def sends_momentum(plan: Plan, loaded: LoadedModel) -> bool:
    """Whether the optimizer's momentum travels in place of gradients."""
    name = describe_codec(plan.knobs().codec).name
    has_momentum = loaded.optimizer is None and plan.training.optimizer in WITH_MOMENTUM
    return has_momentum and name in OF_MOMENTUM


def warmup_note(plan: Plan, loaded: LoadedModel, steps: int) -> str:
    """What to say of a run whose steps all, or first, send whole gradients; mostly nothing."""
    warmup, name = plan.training.codec_warmup_steps, describe_codec(plan.knobs().codec).name
    warms_up = sends_momentum(plan, loaded) or name == LOW_RANK
    if plan.knobs().codec == UNCODED or not warms_up:
        return ""
    sent = "one bit or, ever more seldom," if name == ZERO_ONE else "whole"
    said = f"codec={plan.knobs().codec}: the first {warmup} steps send {sent} gradients"
    reach = "" if steps > warmup else f", and this run ends after {steps}"
    return f"{said} (training.codec_warmup_steps of the plan){reach}"


def means_of(plan: Plan, mesh: Mesh) -> dict[str, Any]:
    """The group of this rank's replicas, and by which algorithm they meet."""
    asked = plan.knobs().collective
    return {
        "group": mesh.group("dp_replicate"),
        "algorithm": NATIVE if asked == AUTO else asked,
        "nodes": _nodes(plan, mesh),
    }


def optimizer_maker(
    plan: Plan, loaded: LoadedModel, mesh: Mesh
) -> Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]:
    """Parameters to what trains them: the plan's optimizer, or one whose momentum travels."""
    if sends_momentum(plan, loaded):
        return partial(_momentum_optimizer, plan, mesh)
    return partial(make_optimizer, plan.training, loaded)


def _momentum_optimizer(plan: Plan, mesh: Mesh, parameters: Sequence[nn.Parameter]) -> OneBitAdam:
    """AdamW or LAMB of the plan, its momentum through the codec."""
    training, codec = plan.training, describe_codec(plan.knobs().codec)
    options: dict[str, Any] = {
        "lr": training.learning_rate,
        "warmup_steps": training.codec_warmup_steps,
        **means_of(plan, mesh),
    }
    if training.optimizer == "lamb":
        return OneBitLamb(parameters, codec=plan.knobs().codec, **options)
    if codec.name != ZERO_ONE:
        return OneBitAdam(parameters, codec=plan.knobs().codec, **options)
    return ZeroOneAdam(
        parameters,
        codec=SENT_AS,
        variance_repeats=training.variance_repeats,
        meeting_repeats=training.meeting_repeats,
        longest_away=int(codec.parameters["longest_away"]),
        **options,
    )


def make_exchange(
    plan: Plan,
    mesh: Mesh,
    optimizer: torch.optim.Optimizer,
    options: ExchangeOptions = AS_PLANNED,
    stages: Sequence[nn.Module] = (),
) -> Exchange | None:
    """What the replicas' reducer and checkpoints need; None for the library's own all-reduce.

    Where a codec meets shards and no replicas, the `stages` reduce-scatter through it.
    """
    if not needs_exchange(plan.knobs()) and not options:
        return None
    means = means_of(plan, mesh)
    checks = None
    if options.checks_buckets:
        checks = BucketChecks(means["group"], torch.device(mesh.device_mesh.device_type))
    if plan.knobs().codec == UNCODED:
        return _whole_exchange(means, options, checks)
    if means["algorithm"] != NATIVE:
        open_ways(means["group"])
    if isinstance(optimizer, OneBitAdam):
        optimizer.averages_itself = False
        exchange = Exchange(mean=optimizer.mean_of_bucket, state=optimizer)
    else:
        gradients = _gradients_through(plan, mesh, means, stages)
        exchange = Exchange(mean=gradients, state=gradients, gradients=gradients)
    if options.selector is not None:
        exchange = _selected(exchange, plan, means, options.selector)
    if checks is None:
        return exchange
    return replace(exchange, mean=checked(exchange.mean, checks), checks=checks)


def _selected(
    exchange: Exchange, plan: Plan, means: Mapping[str, Any], options: SelectorOptions
) -> Exchange:
    """The same, its codes by what the selector chooses."""
    codec, ranks = describe_codec(plan.knobs().codec), means["group"].size()
    names = ["ring"] if ranks & (ranks - 1) else ["ring", "halving_doubling"]

    def modelled(size_bytes: int, sizes: tuple[int, ...], links: Links) -> dict[str, float]:
        elements = size_bytes // STORED_BYTES
        return {name: time_ns(codec, name, elements, sizes, links) for name in names}

    group = group_over(means["group"], means["nodes"], means["algorithm"])
    selector = Selector(group, options, modelled)
    sender = exchange.state if exchange.gradients is None else exchange.gradients
    assert isinstance(sender, CompressedOptimizer | GradientMean), "codes come from one of them"
    sender.means.selector = selector
    return replace(exchange, selector=selector)


def _gradients_through(
    plan: Plan, mesh: Mesh, means: Mapping[str, Any], stages: Sequence[nn.Module]
) -> GradientMean:
    """Gradients as codes: between replicas, or between shards where there are no replicas."""
    knobs, described = plan.knobs(), describe_codec(plan.knobs().codec)
    # Others than replicas hold other parts, and all must take a step or leave it out.
    meets = dist.group.WORLD if max(knobs.tp, knobs.pp, knobs.shard_ranks) > 1 else None
    if described.name == LOW_RANK:
        low_rank = LowRankBuckets(rank=int(described.parameters["rank"]), **means)
        warmup = plan.training.codec_warmup_steps
        return GradientMean(low_rank, whole_backwards=warmup, meets=meets)
    codec, scale = codec_of(knobs.codec), None
    if isinstance(codec, Half):
        window = plan.training.loss_scale_window
        scale = Fp16Scale(exponent=codec.exponent, growth_interval=window)
    if knobs.dp_replicate > 1:
        group_mean = GroupMean(codec=codec, momentum=described.momentum, **means)
        return GradientMean(group_mean, scale=scale, meets=meets)
    shards = ShardMean(mesh.data_mesh.get_group(), codec)
    gradients = GradientMean(shards, scale=scale, meets=meets)
    reduce_by(gradients, stages)
    return gradients


def _whole_exchange(
    means: Mapping[str, Any], options: ExchangeOptions, checks: BucketChecks | None
) -> Exchange:
    """Gradients as they are, by the plan's algorithm or the selector's."""
    group = group_over(means["group"], means["nodes"], means["algorithm"])
    selector = None if options.selector is None else Selector(group, options.selector)
    mean = WholeMean(group, selector=selector, checks=checks)
    return Exchange(mean=mean, state=mean, selector=selector, checks=checks)


def keep_alike_over_tp(compiled: ParallelModel) -> None:
    """What tensor parallelism leaves alike on all its ranks stays so where codes travel.

    Gradients become their mean over tp when they are complete, momentum where it is decoded.
    """
    tensor_parallel = compiled.tensor_parallel
    if tensor_parallel is None or compiled.knobs.codec == UNCODED:
        return
    alike = {
        name: parameter
        for name, parameter in compiled.parameters.items()
        if parameter.requires_grad and divided_as(compiled, name) is None
    }
    if isinstance(compiled.optimizer, CompressedOptimizer):
        compiled.optimizer.keep_alike(alike.values(), compiled.mesh.group("tp"))
        return
    # Sums over slices of the sequence, whose parts each rank decoded, come out alike.
    summed = set(tensor_parallel.sequence_parallel_parameters)
    compiled.evened = [parameter for name, parameter in alike.items() if name not in summed]


def _nodes(plan: Plan, mesh: Mesh) -> Nodes:
    """This rank's replicas by node, as numbers in their group."""
    nodes: dict[str, list[int]] = {}
    ranks = dist.get_process_group_ranks(mesh.group("dp_replicate"))
    for number, rank in enumerate(ranks):
        nodes.setdefault(plan.mesh.devices[rank].partition(":")[0], []).append(number)
    return tuple(tuple(held) for held in nodes.values())

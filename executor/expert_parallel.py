"""Experts shared out over ep ranks: tokens travel to their experts and back.

Ranks of data parallelism see different tokens. So many neighbours among them, `ep`, hold a part
of the experts each: every rank counts which tokens its router gives to whom, the counts are
exchanged, each token travels to the ranks of its experts (once for each), runs there through the
module's own forward, and comes back to be weighted and summed. No token is dropped, and a rank
whose experts get none takes part all the same: with empty messages, and zeros as gradients.

An expert's gradient is a sum over the tokens of its group's ranks; the mean over all of data
parallelism is then the mean over the ranks that hold the expert too, divided by ep. Router and
everything else stay plain data parallelism, auxiliary losses with them.

The all-to-all follows GShard (Lepikhin et al. 2020, arXiv 2006.16668, section 3.3), without its
capacity; groups of neighbours inside data parallelism are DeepSpeed-MoE's (Rajbhandari et al.
2022, arXiv 2201.05596, section 5.2).

Shapes: N tokens, k experts for each, E experts, h hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.gradients import local, reduce_gradients
from claw_plan.executor.mesh import Mesh
from claw_plan.executor.reached import leave_unreached
from claw_plan.planner.errors import PlanError
from claw_plan.planner.expert_parallel import ExpertCall, hold_part
from claw_plan.planner.expert_tensor_parallel import DividedExperts
from claw_plan.planner.graph import ExpertRule
from claw_plan.planner.placement import EXPERT_REPLICATE, EXPERT_SHARD
from claw_plan.planner.plan import Plan
from claw_plan.planner.plan_stages import block_pattern


@dataclass(frozen=True, kw_only=True)
class HeldExperts:
    """The experts of one stage on this rank.

    `first` maps their parameters, named from the model, to the row of the whole model's tensor
    with which they begin; 0 for those of experts that are modules of their own. `modules` are
    what was divided, by name.
    """

    ranks: DeviceMesh
    first: Mapping[str, int]
    modules: Mapping[str, nn.Module]

    @property
    def data_mesh(self) -> DeviceMesh:
        """What FSDP works on: the ranks that hold the same experts."""
        if self.ranks[EXPERT_REPLICATE].size() == 1:
            return self.ranks[EXPERT_SHARD]
        return self.ranks[EXPERT_REPLICATE, EXPERT_SHARD]


def hold_experts(plan: Plan, model: nn.Module, blocks: Sequence[str], mesh: Mesh) -> HeldExperts:
    """Leaves this rank its part of the experts of these blocks, in place. All ranks must call."""
    ep = plan.knobs().ep
    ranks = mesh.experts(ep)
    group, part = ranks.get_group("ep"), ranks.get_local_rank("ep")
    first: dict[str, int] = {}
    modules = dict(_divided(plan, model, blocks))
    for name, (module, rule) in modules.items():
        if rule.experts % ep:
            raise PlanError(f"candidate.ep is {ep}, which does not divide {rule.experts} experts")
        kept = hold_part(module, rule, part, ep)
        for own, _ in module.named_parameters():
            first[f"{name}.{own}"] = 0 if rule.listed else kept.start
        _put_inside(module, Spread(module, rule, group))
    return HeldExperts(
        ranks=ranks, first=first, modules={name: module for name, (module, _) in modules.items()}
    )


def _put_inside(module: nn.Module, spread: Spread) -> None:
    """Hidden states travel before tensor parallelism sums the results: k times fewer rows."""
    divided = module.forward
    if isinstance(divided, DividedExperts):
        spread.own, divided.own = divided.own, spread
    else:
        module.forward = spread


def _divided(
    plan: Plan, model: nn.Module, blocks: Sequence[str]
) -> Iterator[tuple[str, tuple[nn.Module, ExpertRule]]]:
    """The modules that the plan's rules are for, with the rule."""
    for block in blocks:
        names = {name for name, _ in model.get_submodule(block).named_modules()}
        for rule in plan.expert_parallel:
            for pattern in dict.fromkeys((block_pattern(block), block)):
                prefix, _, inner = rule.modules.partition(f"{pattern}.")
                if not prefix and inner in names:
                    name = f"{block}.{inner}"
                    yield name, (model.get_submodule(name), ExpertRule(
                        module=inner, experts=rule.experts, counted_by=tuple(rule.counted_by),
                        listed=rule.listed,
                    ))  # fmt: skip


class Spread:
    """In place of a module's forward: `own`, its forward, on the tokens of the group's ranks."""

    def __init__(self, module: nn.Module, rule: ExpertRule, group: dist.ProcessGroup) -> None:
        self._module, self._group = module, group
        self._experts, self._is_list = rule.experts, bool(rule.listed)
        self.own: Callable[..., Any] = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What the module would answer if it held all experts."""
        call = ExpertCall.read(args, kwargs)
        if call is None:
            raise ExecutionError(
                f"{type(self._module).__name__} was called otherwise than when it was planned: "
                "experts take hidden states, indices and weights; plan with ep=1"
            )
        hidden, index, weights = call[call.hidden], call[call.index], call[call.weights]
        top_k, size = index.shape[-1], hidden.shape[-1]
        chosen = index.reshape(-1)
        order = chosen.argsort(stable=True)
        here, counts = self._exchanged_counts(chosen)
        rows = hidden.reshape(-1, size)[order // top_k]
        arrived = _travel(rows, self._group, counts.sent, counts.received)
        made = self._made(call, arrived, here, weights.dtype)
        back = _travel(made, self._group, counts.received, counts.sent)
        shape = (*hidden.shape[:-1], top_k)
        of_token = back[order.argsort()].view(*shape, size) * weights.reshape(*shape, 1)
        summed = of_token.sum(-2)  # no view: fully_shard hooks on to it
        return summed.to(hidden.dtype)

    def _exchanged_counts(self, chosen: torch.Tensor) -> tuple[torch.Tensor, _Counts]:
        """For each row that will arrive the own expert it is for; how many rows go where."""
        ranks = self._group.size()
        own = torch.bincount(chosen, minlength=self._experts)
        if own.numel() > self._experts:
            raise ExecutionError(
                f"a router chose expert {own.numel() - 1} of {self._experts}; plan with ep=1"
            )
        others = torch.empty_like(own)
        dist.all_to_all_single(others, own, group=self._group)
        here = torch.arange(self._experts // ranks, device=own.device).repeat(ranks)
        return here.repeat_interleave(others), _Counts(
            sent=own.view(ranks, -1).sum(1).tolist(),
            received=others.view(ranks, -1).sum(1).tolist(),
        )

    def _made(
        self, call: ExpertCall, arrived: torch.Tensor, here: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """The experts' results, part of the graph even if no row arrived: backward must go on.

        Then common tensors get zeros as gradients, as in one process, where other experts had
        tokens; a module of its own that had none is left alone there too.
        """
        made = arrived
        if arrived.shape[0]:
            ones = torch.ones(here.shape[0], 1, dtype=dtype, device=arrived.device)
            made = call.again(self.own, arrived, here[:, None], ones)
        if made.requires_grad and (arrived.shape[0] or self._is_list):
            return made
        reached: torch.Tensor = _Reached.apply(made, *self._module.parameters())  # type: ignore[no-untyped-call]
        return reached


@dataclass(frozen=True, slots=True)
class _Counts:
    """Rows for each rank of the group, and from each."""

    sent: list[int]
    received: list[int]


class _Travel(torch.autograd.Function):
    """Rows to the ranks of the group; their gradients the way back."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup, sent: list[int],
        received: list[int],
    ) -> torch.Tensor:  # fmt: skip
        ctx.group, ctx.sent, ctx.received = group, sent, received
        return _travelled(rows, group, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        [gradient] = gradients
        return _travelled(gradient, ctx.group, ctx.received, ctx.sent), None, None, None


def _travel(
    rows: torch.Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]
) -> torch.Tensor:
    arrived: torch.Tensor = _Travel.apply(rows, group, sent, received)  # type: ignore[no-untyped-call]
    return arrived


def _travelled(
    rows: torch.Tensor, group: dist.ProcessGroup, sent: list[int], received: list[int]
) -> torch.Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


class _Reached(torch.autograd.Function):
    """Passes a tensor on, and gives parameters gradients of zeros."""

    @staticmethod
    def forward(ctx: Any, made: torch.Tensor, *parameters: nn.Parameter) -> torch.Tensor:
        ctx.like = parameters
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients[0], *(torch.zeros_like(parameter) for parameter in ctx.like)


@dataclass(frozen=True, kw_only=True)
class ExpertParallel:
    """The experts of all stages of this rank, once they are sharded or not.

    `parameters` by their first name in the whole model, `first` as in `HeldExperts`; the loss may
    not reach those `unreached`.
    """

    ranks: DeviceMesh
    parameters: Mapping[str, nn.Parameter]
    first: Mapping[str, int]
    is_sharded: bool
    unreached: frozenset[str]

    def finish(self, bucket_bytes: int) -> None:
        """The mean over data parallelism, from what one ep group has added up.

        Where fully_shard holds the experts it has averaged over those that hold the same.
        """
        trained = [p for p in self.parameters.values() if p.requires_grad]
        groups = [self.ranks.get_group(axis) for axis in (EXPERT_REPLICATE, EXPERT_SHARD)]
        groups = [group for group in groups if group.size() > 1]
        if self.is_sharded:
            leave_unreached([self.parameters[name] for name in sorted(self.unreached)], groups)
        for group in groups if not self.is_sharded else ():
            reduce_gradients(trained, group, dist.ReduceOp.AVG, bucket_bytes)
        gradients = [local(p.grad) for p in trained if p.grad is not None]
        if gradients:
            torch._foreach_mul_(gradients, 1 / self.ranks["ep"].size())

    def groups(self) -> dict[str, dist.ProcessGroup]:
        """This rank's group of each axis of the experts' own."""
        return {
            axis: self.ranks.get_group(axis) for axis in ("ep", EXPERT_SHARD, EXPERT_REPLICATE)
        }

    def counts_here(self) -> bool:
        """Whether no earlier rank holds the same part."""
        axes = [EXPERT_REPLICATE] if self.is_sharded else [EXPERT_REPLICATE, EXPERT_SHARD]
        return all(self.ranks.get_local_rank(axis) == 0 for axis in axes)


def joined(
    held: Sequence[HeldExperts],
    parameters: Mapping[str, nn.Parameter],
    names: Mapping[str, str],
    *,
    is_sharded: bool,
    unreached: frozenset[str],
) -> ExpertParallel | None:
    """The experts of all stages; `names` maps names of the whole model to their first."""
    if not held:
        return None
    first = {names[name]: row for one in held for name, row in one.first.items()}
    return ExpertParallel(
        ranks=held[0].ranks,
        parameters={name: parameters[name] for name in first},
        first=first,
        is_sharded=is_sharded,
        unreached=unreached.intersection(first),
    )

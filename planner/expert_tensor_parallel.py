"""Experts divided along their inner size over tensor-parallel ranks: found by trial, and applied.

Every rank holds a part of the inner size of all experts (columns of gate and up, rows of down),
runs the module's own forward on all tokens, and the results are summed: one all-reduce in the
forward, one in the backward for hidden states, and a small one for the weights of the experts
(Megatron-LM's placement; its expert-tensor-parallel size is then tp). Along a divided sequence
tokens are gathered before and scattered after; a token's place does not matter to an expert.

Which dimension of each tensor is the inner one is found by trying: a copy with random weights is
cut in halves along it, and their results must add up to that of the whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from claw_plan.planner.errors import TensorParallelError
from claw_plan.planner.expert_parallel import (
    TOLERANCE,
    TRIED_TOKENS,
    ExpertCall,
    count_experts,
    shallow_copy,
    tried_copies,
)
from claw_plan.planner.graph import ExpertRule, TensorParallelRule
from claw_plan.planner.sequence_parallel_search import TRIAL_ERRORS
from claw_plan.planner.tensor_parallel import ShardedParameter, TensorParallelModel, local_slice
from claw_plan.planner.tp_autograd import (
    Communicator,
    StandIn,
    enter,
    gather_sequence,
    reduce,
    reduce_scatter_sequence,
)

EXPERTS = "experts"
"""The style of their rules among those of tensor parallelism."""

MOST_PIECES = 2
"""A tensor holds the inner size once, or twice: gate and up side by side."""

Dims = tuple[tuple[str, int], ...]


def with_inner_size(
    rule: ExpertRule, module: nn.Module, call: ExpertCall, divides: int
) -> ExpertRule:
    """The rule with the inner size and its dimensions, if there is one that `divides` divides."""
    if rule.listed:
        return rule
    weights = {name: p for name, p in module._parameters.items() if p is not None}
    for inner, dims in _choices(weights):
        found = replace(rule, inner=inner, weight_dims=dims)
        copies = tried_copies(module, call[call.hidden].shape[-1])
        if inner % divides == 0 and any(_adds_up(*tried, call, dims) for tried in copies):
            return found
    return rule


def _choices(weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[int, Dims]]:
    """Every way of taking one dimension of each tensor so that all hold one inner size."""
    sizes = sorted({size for p in weights.values() for size in p.shape[1:]})
    for inner in sizes:
        each = [
            [(name, dim) for dim in range(1, p.ndim) if p.shape[dim] in _multiples(inner)]
            for name, p in weights.items()
        ]
        yield from ((inner, dims) for dims in itertools.product(*each))


def _multiples(inner: int) -> list[int]:
    return [inner * pieces for pieces in range(1, MOST_PIECES + 1)]


def _adds_up(tried: nn.Module, size: int, call: ExpertCall, dims: Dims) -> bool:
    """Whether the halves of the inner size give results that add up to the whole's."""
    experts, top_k = count_experts(tried), call[call.index].shape[-1]
    inner = min(tried._parameters[name].shape[dim] for name, dim in dims)  # type: ignore[union-attr]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        hidden = torch.randn(TRIED_TOKENS, size)
        scores, index = torch.rand(TRIED_TOKENS, experts).topk(min(top_k, experts))
        try:
            whole = call.again(tried.forward, hidden, index, scores)
            halves = []
            for rank in range(2):
                half = shallow_copy(tried)
                for name, how in _shares(half, dims, inner).items():
                    part = local_slice(half._parameters[name], how, 2, rank)  # type: ignore[arg-type]
                    half._parameters[name] = nn.Parameter(part)
                halves.append(call.again(half.forward, hidden, index, scores))
        except TRIAL_ERRORS:
            return False
    return torch.allclose(halves[0] + halves[1], whole, rtol=TOLERANCE, atol=TOLERANCE)


def _shares(module: nn.Module, dims: Dims, inner: int) -> dict[str, ShardedParameter]:
    """How each tensor is divided: in as many pieces as it holds the inner size."""
    found = {}
    for name, dim in dims:
        weight = module._parameters[name]
        assert weight is not None
        shape = tuple(weight.shape)
        found[name] = ShardedParameter(dim=dim, parts=max(1, shape[dim] // inner), shape=shape)
    return found


def tensor_rule(rule: ExpertRule) -> TensorParallelRule:
    """The rule as one of tensor parallelism."""
    return TensorParallelRule(
        module=rule.module, style=EXPERTS, heads=rule.inner, weight_dims=dict(rule.weight_dims)
    )


def divide_experts(
    model: nn.Module,
    rules: Mapping[str, Sequence[TensorParallelRule]],
    applied: TensorParallelModel,
    *,
    sequence_parallel: bool = False,
) -> None:
    """Divides the experts of the blocks in place; `applied` undoes it with all else."""
    for block, own in rules.items():
        for rule in own:
            name = f"{block}.{rule.module}"
            module = model.get_submodule(name)
            _shard(module, name, rule, applied)
            applied.sequence_parallel_parameters = tuple(
                other
                for other in applied.sequence_parallel_parameters
                if not other.startswith(f"{name}.")
            )
            module.forward = DividedExperts(module, applied.ranks, name, sequence_parallel)
            applied.undo.append(partial(module.__delattr__, "forward"))


def _shard(
    module: nn.Module, name: str, rule: TensorParallelRule, applied: TensorParallelModel
) -> None:
    ranks = applied.ranks
    shares = _shares(module, tuple(rule.weight_dims.items()), rule.heads)
    for own, how in shares.items():
        whole = module._parameters[own]
        assert whole is not None
        with torch.no_grad():
            part = local_slice(whole, how, ranks.degree, ranks.rank).clone()
        module._parameters[own] = nn.Parameter(part, requires_grad=whole.requires_grad)
        applied.sharded[f"{name}.{own}"] = how
        if isinstance(ranks, StandIn):
            applied.undo.append(partial(module._parameters.__setitem__, own, whole))


class DividedExperts:
    """In place of a module's forward: the sum over the ranks of what their parts give.

    `own` is what runs on a rank's part, the module's own forward unless something is put around
    it.
    """

    def __init__(
        self, module: nn.Module, ranks: Communicator, where: str, sequence_parallel: bool
    ) -> None:
        self.own: Callable[..., Any] = module.forward
        self._ranks, self._where, self._gathers = ranks, where, sequence_parallel

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What the module would answer undivided."""
        call = ExpertCall.read(args, kwargs)
        if call is None:
            raise TensorParallelError(f"{self._where} is called otherwise than before")
        hidden, index, weights = call[call.hidden], call[call.index], call[call.weights]
        if self._gathers:
            made = call.again(self.own, *map(self._gathered, (hidden, index, weights)))
            rows = made.reshape(1, -1, made.shape[-1])
            part = reduce_scatter_sequence(rows, self._ranks, self._where)
            return part.reshape(hidden.shape)
        entered = [enter(tensor, self._ranks, self._where) for tensor in (hidden, weights)]
        made = call.again(self.own, entered[0], index, entered[1])
        return reduce(made, self._ranks, self._where)

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks."""
        rows = tensor.reshape(1, -1, tensor.shape[-1])
        if not tensor.is_floating_point():
            return self._ranks.all_gather(rows, self._where)[0]
        return gather_sequence(rows, self._ranks, self._where)[0]

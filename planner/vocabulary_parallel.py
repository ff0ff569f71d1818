"""Embedding tables and heads divided over the rows of their vocabulary, for untouched modules.

`divide_vocabulary` cuts the weights to plain local parameters, ties kept, and stands by while the
modules' own forwards run: a lookup by `F.embedding` answers with the whole rows (each rank looks
up its own and the ranks add up), a product by `F.linear` with this rank's scores as a `HeadShard`,
whose cross entropy `planner.vocabulary_parallel_loss` has. Whatever else the modules do (a scale,
a cast) they do as written. A vocabulary that the degree does not divide is cut unevenly: nothing
is padded. `planner.vocabulary_parallel_search` finds the modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from claw_plan.planner import vocabulary_parallel_loss
from claw_plan.planner.errors import PlanError
from claw_plan.planner.graph import TensorParallelRule
from claw_plan.planner.head_shard import Arguments, Division, HeadShard, Layout, function_name
from claw_plan.planner.tensor_parallel import ShardedParameter, TensorParallelModel, local_slice
from claw_plan.planner.tp_autograd import StandIn, enter, reduce
from claw_plan.planner.vocabulary_parallel_loss import Chunk
from claw_plan.planner.vocabulary_parallel_order import RowOrder

TRANSLATIONS = (vocabulary_parallel_loss,)
"""Imported for what it registers."""

EMBEDDING, HEAD = "embedding", "head"
STYLES = {EMBEDDING: "embedding", HEAD: "linear"}
"""The styles of rules, and the function that each stands for."""


def divide_vocabulary(
    model: nn.Module, rules: Sequence[TensorParallelRule], result: TensorParallelModel
) -> None:
    """Divides the modules, named from the model, over the ranks of `result`, in place.

    `heads` of a rule is the size of the vocabulary. Modules whose parameters are elsewhere, as on
    other pipeline stages, are left alone. A module that shares a weight with a divided one and has
    no rule of its own cannot be called.
    """
    holders, orders = _holders(model), dict[tuple[int, ...], RowOrder]()
    here = [(rule, module) for rule in rules if (module := _module(model, rule)) is not None]
    for rule, module in here:
        if rule.heads < result.ranks.degree:
            raise PlanError(
                f"{rule.module} has a vocabulary of {rule.heads}, which cannot be divided by a "
                f"tensor-parallel degree of {result.ranks.degree}"
            )
        order = orders.setdefault(rule.rows, RowOrder(rule.rows)) if rule.rows else None
        for own, dim in rule.weight_dims.items():
            whole = module._parameters[own]
            # A tied weight has been cut when its other module was.
            if whole is not None and id(whole) in holders:
                places = holders.pop(id(whole))
                _cut(whole, dim, order, places, result)
                if whole.ndim == 2:
                    _refuse_calls(places, [module for _, module in here], rule.module, result)
        _stand_by(module, rule, order, result)


def _module(model: nn.Module, rule: TensorParallelRule) -> nn.Module | None:
    try:
        module = model.get_submodule(rule.module)
    except AttributeError:
        return None
    return module if all(own in module._parameters for own in rule.weight_dims) else None


Holder = tuple[str, nn.Module, str]
"""The full name of a parameter, the module that holds it, and its name there."""


def _holders(model: nn.Module) -> dict[int, list[Holder]]:
    found: dict[int, list[Holder]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for own, parameter in module._parameters.items():
            if parameter is not None:
                full = f"{name}.{own}" if name else own
                found.setdefault(id(parameter), []).append((full, module, own))
    return found


def _cut(
    whole: nn.Parameter,
    dim: int,
    order: RowOrder | None,
    holders: Sequence[Holder],
    result: TensorParallelModel,
) -> None:
    """Puts this rank's part of a parameter wherever the whole stands."""
    ranks, shape = result.ranks, tuple(whole.shape)
    how = ShardedParameter(dim=dim, parts=1, shape=shape, order=order)
    with torch.no_grad():
        part = nn.Parameter(
            local_slice(whole, how, ranks.degree, ranks.rank).clone(),
            requires_grad=whole.requires_grad,
        )
    for full, module, own in holders:
        module._parameters[own] = part
        result.sharded[full] = how
        if isinstance(ranks, StandIn):
            result.undo.append(partial(module._parameters.__setitem__, own, whole))


def _refuse_calls(
    places: Sequence[Holder],
    divided: Sequence[nn.Module],
    rule: str,
    result: TensorParallelModel,
) -> None:
    """A module that would take its part of a tied weight for the whole must not run."""
    for full, module, _ in places:
        if any(module is other for other in divided):
            continue

        def refuse(*args: Any, full: str = full, **kwargs: Any) -> Any:
            raise PlanError(
                f"{full} is the weight of {rule}, which tensor_parallel divides; give its module "
                "a rule too, or leave both whole"
            )

        module.forward = refuse
        result.undo.append(partial(module.__delattr__, "forward"))


def _stand_by(
    module: nn.Module,
    rule: TensorParallelRule,
    order: RowOrder | None,
    result: TensorParallelModel,
) -> None:
    """Replaces the module's forward by itself under a mode that knows the divided weight."""
    division = Division(ranks=result.ranks, where=rule.module, order=order)
    answer = partial(_lookup if rule.style == EMBEDDING else _scores, division, rule.heads)
    matrix = next(own for own in rule.weight_dims if module._parameters[own].ndim == 2)  # type: ignore[union-attr]
    own_forward = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _Divided(STYLES[rule.style], module, matrix, answer):
            return own_forward(*args, **kwargs)

    module.forward = forward
    result.undo.append(partial(module.__delattr__, "forward"))


class _Divided(TorchFunctionMode):
    """Answers one function of one weight; everything else runs as it is."""

    def __init__(
        self, name: str, module: nn.Module, matrix: str, answer: Callable[[Arguments], Any]
    ) -> None:
        super().__init__()
        self._name, self._module, self._matrix, self._answer = name, module, matrix, answer

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if function_name(func) == self._name:
            arguments = Arguments(name=self._name, args=list(args), kwargs=dict(kwargs or {}))
            if arguments.get(1, "weight") is self._module._parameters[self._matrix]:
                return self._answer(arguments)
        return func(*args, **(kwargs or {}))


def _lookup(division: Division, rows: int, arguments: Arguments) -> torch.Tensor:
    """The rows of a divided table: each rank's own, zeros elsewhere, summed."""
    indices, weight = arguments.get(0, "input"), arguments.get(1, "weight")
    chunk = Chunk.of(division.ranks, division.where, rows, division.order)
    padding = arguments.get(2, "padding_idx")
    if padding is not None:
        # The whole's row that gets no gradient, where this rank holds it.
        padding = chunk.place_of(padding % rows) - chunk.start
        padding = padding if 0 <= padding < weight.shape[0] else None
    local, elsewhere = chunk.locate(indices)
    found = F.embedding(local, weight, padding)
    return reduce(found.masked_fill_(elsewhere.unsqueeze(-1), 0), division.ranks, division.where)


def _scores(division: Division, classes: int, arguments: Arguments) -> HeadShard:
    """This rank's classes of a divided head; the hidden state's gradient is summed."""
    hidden, weight, bias = (
        arguments.get(place, name) for place, name in enumerate(("input", "weight", "bias"))
    )
    entered = enter(hidden, division.ranks, division.where)
    local = F.linear(entered, weight, bias)
    columns = frozenset((division.where,))
    return HeadShard(
        local, Layout(division=division, dim=local.ndim - 1, columns=columns, extent=classes)
    )

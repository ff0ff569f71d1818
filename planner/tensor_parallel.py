"""Tensor-parallel rules applied to the blocks of a model, for planning and for training alike.

`apply_rules` cuts the weights of column and row linears in place to plain local parameters, so
that FSDP, pipeline stages and optimizers see ordinary modules, and replaces the forwards of these
linears. A column linear lets its input enter once per region and input, and returns a `HeadShard`;
the row linear takes one and ends the region with the sum over the ranks. Everything between runs
as the model's author wrote it. `planner.tensor_parallel_search` finds the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from claw_plan.planner import head_shard_ops, head_shard_views
from claw_plan.planner.errors import PlanError, TensorParallelError
from claw_plan.planner.graph import TensorParallelRule
from claw_plan.planner.head_shard import (
    SHARED,
    Division,
    HeadShard,
    Layout,
    join_piecewise,
    slice_piecewise,
)
from claw_plan.planner.tp_autograd import (
    Communicator,
    StandIn,
    enter,
    gather_sequence,
    reduce,
    reduce_scatter_sequence,
)
from claw_plan.planner.vocabulary_parallel_order import RowOrder

TRANSLATIONS = (head_shard_ops, head_shard_views)
"""Imported for what they register."""

REGION, COLUMN, ROW = "region", "colwise", "rowwise"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardedParameter:
    """How one parameter is divided; by `order` first where its rows are not cut as they stand."""

    dim: int
    parts: int
    shape: tuple[int, ...]
    order: RowOrder | None = None


@dataclass(kw_only=True)
class TensorParallelModel:
    """What `apply_rules` did to a model.

    `sharded` has the divided parameters by name. `sequence_parallel_parameters` act on a part of
    the sequence on each rank: their gradients must be summed over the ranks before the optimizer
    step. Divided activations draw random numbers inside `drawing`. `remove` undoes everything
    when the whole parameters were kept.
    """

    ranks: Communicator
    sharded: dict[str, ShardedParameter] = field(default_factory=dict)
    sequence_parallel_parameters: tuple[str, ...] = ()
    drawing: AbstractContextManager[None] = SHARED
    undo: list[Callable[[], None]] = field(default_factory=list)

    def local_slice(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole parameter; the whole itself where it is not divided."""
        how, ranks = self.sharded.get(name), self.ranks
        return whole if how is None else local_slice(whole, how, ranks.degree, ranks.rank)

    def full_parameter(self, name: str, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole parameter (or gradient) from the local ones of all ranks, in rank order."""
        how = self.sharded.get(name)
        whole = shards[0] if how is None else join_piecewise(shards, how.dim, parts=how.parts)
        return whole if how is None or how.order is None else how.order.restore(whole, how.dim)

    def remove(self) -> None:
        """Puts the model's own forwards and whole parameters back."""
        for undo in reversed(self.undo):
            undo()
        self.undo.clear()


def local_slice(
    whole: torch.Tensor, how: ShardedParameter, degree: int, rank: int
) -> torch.Tensor:
    """A rank's part of a whole parameter, its gradient or its optimizer state."""
    ordered = whole if how.order is None else how.order.select(whole, how.dim)
    return slice_piecewise(ordered, how.dim, parts=how.parts, degree=degree, rank=rank)


def apply_rules(
    model: nn.Module,
    rules: Mapping[str, Sequence[TensorParallelRule]],
    ranks: Communicator,
    *,
    sequence_parallel: bool = False,
    drawing: AbstractContextManager[None] = SHARED,
) -> TensorParallelModel:
    """Divides the blocks, named as in `rules`, over `ranks`, in place.

    What divided activations draw (dropout on a rank's heads) is drawn inside `drawing`. With a
    `StandIn` for `ranks` the whole parameters are kept, so that `remove` restores them.
    Raises PlanError when the degree does not divide what it must.
    """
    result = TensorParallelModel(ranks=ranks, drawing=drawing)
    for name, block_rules in rules.items():
        check_degree(block_rules, ranks.degree)
        apply_to_block(model.get_submodule(name), name, block_rules, result, sequence_parallel)
    return result


def check_degree(rules: Sequence[TensorParallelRule], degree: int) -> None:
    """Raises PlanError, with the degrees that are valid, if `degree` is not."""
    for rule in rules:
        if rule.style != REGION and rule.heads % degree:
            valid = [d for d in range(1, rule.heads + 1) if all(r.heads % d == 0 for r in rules)]
            raise PlanError(
                f"the tensor-parallel degree must divide the {rule.heads} heads or columns of "
                f"{rule.module}, but got {degree}; valid are {', '.join(map(str, valid))}, or "
                "split the model by pp instead"
            )


def apply_to_block(
    block: nn.Module,
    name: str,
    rules: Sequence[TensorParallelRule],
    result: TensorParallelModel,
    sequence_parallel: bool = False,
    noted: Callable[[frozenset[str], int], None] | None = None,
) -> None:
    """Divides one block; `noted` hears of every size that a degree must divide."""
    for members in regions_of(rules):
        where = ".".join(filter(None, (name, members.region)))
        division = Division(ranks=result.ranks, where=where, noted=noted, drawing=result.drawing)
        region = _Region(
            division=division,
            columns=frozenset(rule.module for rule in members.columns),
            sequence_parallel=sequence_parallel,
        )
        for rule in (*members.columns, members.row):
            module = block.get_submodule(rule.module)
            _shard_parameters(module, f"{name}.{rule.module}", rule, result)
            forward = _column_forward if rule.style == COLUMN else _row_forward
            _replace_forward(module, forward(module, rule, region), result)
        if sequence_parallel:
            if not members.region:
                raise PlanError(
                    f"sequence parallelism needs the linears {members.columns[0].module} and "
                    f"{members.row.module} in a module of their own inside the block {name!r}; "
                    "leave sequence_parallel off for this model"
                )
            hook = block.get_submodule(members.region).register_forward_pre_hook(
                region.gather_input(members.columns[0], block), with_kwargs=True
            )
            result.undo.append(hook.remove)
    if sequence_parallel:
        own = (f"{name}.{parameter}" for parameter in sequence_parameters(block, rules))
        result.sequence_parallel_parameters += tuple(own)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRules:
    """The column linears of one region and the row linear that they feed."""

    region: str
    columns: tuple[TensorParallelRule, ...]
    row: TensorParallelRule


def regions_of(rules: Sequence[TensorParallelRule]) -> list[RegionRules]:
    """Rules come region by region: one 'region', its 'colwise', its 'rowwise'."""
    regions: list[RegionRules] = []
    region = ""
    columns: list[TensorParallelRule] = []
    for rule in rules:
        if rule.style == REGION:
            region, columns = rule.module, []
        elif rule.style == COLUMN:
            columns.append(rule)
        else:
            if not columns:
                raise PlanError(f"the rowwise {rule.module} has no colwise module before it")
            regions.append(RegionRules(region=region, columns=tuple(columns), row=rule))
            columns = []
    return regions


def sequence_parameters(block: nn.Module, rules: Sequence[TensorParallelRule]) -> list[str]:
    """Parameters of a block that act on parts of the sequence.

    They are those outside the regions, and what a row linear adds after the sum.
    """
    regions = [members.region for members in regions_of(rules)]
    rows = {members.row.module: members.row for members in regions_of(rules)}
    names = []
    for name, _ in block.named_parameters():
        module, _, own = name.rpartition(".")
        if module in rows:
            inside = own in rows[module].weight_dims
        else:
            inside = any(not r or module == r or module.startswith(r + ".") for r in regions)
        if not inside:
            names.append(name)
    return names


@dataclass(kw_only=True)
class _Region:
    """The state of one region while it runs.

    `_entered` holds, for the inputs of its column linears, what they became on entering, until
    all columns have run: q, k and v of one input share one all-reduce in the backward pass.
    """

    division: Division
    columns: frozenset[str]
    sequence_parallel: bool
    _entered: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _served: set[str] = field(default_factory=set)
    _sequence: Layout | None = None

    def enter(self, column: str, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, HeadShard):
            if not tensor.divided.division.sealed:
                raise TensorParallelError(f"{column} is given a tensor that is divided already")
            return tensor.local
        if column in self._served:
            self.clear()
        self._served.add(column)
        known = [entered for given, entered in self._entered if given is tensor]
        if known:
            entered = known[0]
        else:
            entered = enter(tensor, self.division.ranks, self.division.where)
            self._entered.append((tensor, entered))
        if self._served == self.columns:
            self.clear()
        return entered

    def clear(self) -> None:
        self._entered.clear()
        self._served.clear()

    def gather_input(self, column: TensorParallelRule, block: nn.Module) -> Callable[..., Any]:
        """A pre-hook that gives the region the whole sequence in place of this rank's part."""
        width = input_width(block.get_submodule(column.module), column)

        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            self.clear()
            key = hidden_argument(args, kwargs, width)
            if key is None:
                raise TensorParallelError(
                    f"{self.division.where} is given no hidden state [batch, sequence, {width}]"
                )
            hidden = args[key] if isinstance(key, int) else kwargs[key]
            gathered = self._gather(hidden)
            if isinstance(key, int):
                return (*args[:key], gathered, *args[key + 1 :]), kwargs
            return args, {**kwargs, key: gathered}

        return hook

    def _gather(self, hidden: torch.Tensor) -> torch.Tensor:
        ranks, where = self.division.ranks, self.division.where
        if isinstance(hidden, HeadShard):  # the search follows the sequence through the block
            self._sequence = hidden.divided
            sealed = Division(ranks=StandIn(1), where=where, sealed=True)
            whole = gather_sequence(hidden.local, ranks, where)
            return HeadShard(whole, Layout(division=sealed, dim=0))
        gathered = gather_sequence(hidden, ranks, where)
        self._entered.append((gathered, gathered))
        return gathered

    def leave(self, tensor: torch.Tensor) -> torch.Tensor:
        """The row linear's product, summed over the ranks."""
        ranks, where = self.division.ranks, self.division.where
        if not self.sequence_parallel:
            return reduce(tensor, ranks, where)
        part = reduce_scatter_sequence(tensor, ranks, where)
        return part if self._sequence is None else HeadShard(part, self._sequence)


def hidden_argument(
    args: Sequence[Any], kwargs: Mapping[str, Any], width: int
) -> int | str | None:
    """Where a hidden state stands among a module's arguments: floating, [batch, seq, width]."""
    named: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    for key, value in named:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            if value.ndim == 3 and value.shape[-1] == width:
                return key
    return None


def input_width(linear: nn.Module, rule: TensorParallelRule) -> int:
    """Size of the last dimension of a column linear's input."""
    name = matrix_name(linear)
    return int(getattr(linear, name).shape[1 - rule.weight_dims[name]])


def matrix_name(linear: nn.Module) -> str:
    """Name of the one two-dimensional parameter of a linear-like module."""
    return next(name for name, p in linear.named_parameters(recurse=False) if p.ndim == 2)


def bias_name(linear: nn.Module) -> str | None:
    """Name of its one-dimensional parameter, if it has one."""
    names = (name for name, p in linear.named_parameters(recurse=False) if p.ndim == 1)
    return next(names, None)


def _shard_parameters(
    module: nn.Module, name: str, rule: TensorParallelRule, result: TensorParallelModel
) -> None:
    ranks = result.ranks
    for own, dim in rule.weight_dims.items():
        whole = module._parameters[own]
        if whole is None:
            continue
        how = ShardedParameter(dim=dim, parts=rule.parts, shape=tuple(whole.shape))
        with torch.no_grad():
            part = local_slice(whole, how, ranks.degree, ranks.rank).clone()
        module._parameters[own] = nn.Parameter(part, requires_grad=whole.requires_grad)
        result.sharded[f"{name}.{own}"] = how
        if isinstance(ranks, StandIn):
            result.undo.append(partial(module._parameters.__setitem__, own, whole))


def _replace_forward(
    module: nn.Module, forward: Callable[..., Any], result: TensorParallelModel
) -> None:
    module.forward = forward
    result.undo.append(partial(module.__delattr__, "forward"))


def _column_forward(
    module: nn.Module, rule: TensorParallelRule, region: _Region
) -> Callable[..., Any]:
    matrix, bias = matrix_name(module), bias_name(module)
    outputs_first = rule.weight_dims[matrix] == 0

    def forward(tensor: torch.Tensor) -> torch.Tensor:
        entered = region.enter(rule.module, tensor)
        offset = None if bias is None else getattr(module, bias)
        local = _product(entered, getattr(module, matrix), offset, outputs_first)
        return HeadShard(
            local,
            Layout(
                division=region.division,
                dim=local.ndim - 1,
                parts=rule.parts,
                columns=frozenset((rule.module,)),
            ),
        )

    return forward


def _row_forward(
    module: nn.Module, rule: TensorParallelRule, region: _Region
) -> Callable[..., Any]:
    matrix, bias = matrix_name(module), bias_name(module)
    outputs_first = rule.weight_dims[matrix] == 1

    def forward(tensor: HeadShard) -> torch.Tensor:
        divided = isinstance(tensor, HeadShard) and tensor.divided.parts == 1
        if not divided or tensor.divided.dim != tensor.ndim - 1:
            raise TensorParallelError(
                f"{rule.module} must be given a tensor divided on its last dimension, in one "
                f"piece, but got {_described(tensor)}"
            )
        summed = region.leave(_product(tensor.local, getattr(module, matrix), None, outputs_first))
        return summed if bias is None else summed + getattr(module, bias)

    return forward


def _described(tensor: torch.Tensor) -> str:
    return repr(tensor) if isinstance(tensor, HeadShard) else f"a whole {list(tensor.shape)}"


def _product(
    tensor: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, outputs_first: bool
) -> torch.Tensor:
    if outputs_first:
        return F.linear(tensor, matrix, bias)
    product = tensor @ matrix
    return product if bias is None else product + bias

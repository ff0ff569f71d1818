"""Finds the column and row linears of any model from the flow of data, without names.

One forward pass records how every block is called. Then each block (one of every structure) runs
alone: its linear-like modules are recognised by the operations they run, and for every linear the
autograd graph tells which linears fed it last. These with it are a candidate region. A candidate
is accepted when the block, run again with the columns' outputs as HeadShards, brings the row
linear an input divided on its last dimension and no divided tensor comes out of the block; what
the run divides on the way (heads) is what every degree must divide.

Everything is judged on shapes, so that fake tensors serve as well as real ones.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn as nn

from claw_plan.planner.errors import PiecesNeeded, TensorParallelError
from claw_plan.planner.graph import TensorParallelRule
from claw_plan.planner.head_shard import Division, HeadShard, Layout
from claw_plan.planner.linear_modules import LinearCall, linear_calls, shared_parameters
from claw_plan.planner.tensor_parallel import (
    COLUMN,
    REGION,
    ROW,
    TensorParallelModel,
    apply_to_block,
    hidden_argument,
    input_width,
    regions_of,
    sequence_parameters,
)
from claw_plan.planner.tp_autograd import SEQUENCE_DIM, StandIn

TRIAL_ERRORS = (
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
)
"""What a model's own code may raise when it is run with divided tensors."""

UNCALLED = (nn.ModuleList, nn.ModuleDict)
"""Modules that hold others and have no forward."""

MOST_PIECES_TRIES = 4
"""A fused column's pieces are refined at most so often (q, k, v need one try)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelFinding:
    """The rules of every block, or the reason why there are none.

    `structures` lists the blocks by structure; a rule's `structures` index it, () means all.
    `tp_divides` is what every degree must divide. `refused` says for each row linear that was
    considered and left out why.
    """

    rules: tuple[TensorParallelRule, ...] = ()
    structures: tuple[tuple[str, ...], ...] = ()
    reason: str = ""
    no_sequence_parallel: str = ""
    tp_divides: int = 1
    refused: dict[str, str] = field(default_factory=dict)

    def by_block(self) -> dict[str, tuple[TensorParallelRule, ...]]:
        """The rules of each block by its name, as `apply_rules` takes them."""
        return {
            block: rules
            for index, blocks in enumerate(self.structures)
            if (rules := tuple(r for r in self.rules if index in (r.structures or (index,))))
            for block in blocks
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCall:
    """How a block was called."""

    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, change: Callable[[Any], Any] = lambda value: value) -> Any:
        """Calls the block again; caches and other objects among the arguments are copied."""
        args, kwargs = _copied((self.args, self.kwargs))
        args = tuple(change(value) for value in args)
        return self.block(*args, **{name: change(value) for name, value in kwargs.items()})


def find_rules(
    model: nn.Module, blocks: Sequence[str], forward: Callable[[], object]
) -> TensorParallelFinding:
    """Looks for column and row linears in `blocks`; `forward` runs the model once."""
    structures = _structures(model, blocks)
    calls = _block_calls(model, [names[0] for names in structures], forward)
    shared = shared_parameters(model)
    rules: list[TensorParallelRule] = []
    refused: dict[str, str] = {}
    no_sequence: list[str] = []
    for index, names in enumerate(structures):
        call = calls.get(names[0])
        if call is None:
            refused[names[0]] = "the forward pass does not call it"
            continue
        found, left_out = _find_in_block(call, shared)
        refused.update({f"{names[0]}.{row}": why for row, why in left_out.items()})
        if found:
            no_sequence.append(_why_no_sequence(call, found))
        only = () if len(structures) == 1 else (index,)
        rules.extend(replace(rule, structures=only) for rule in found)
    divides = math.gcd(*(rule.heads for rule in rules if rule.style != REGION)) if rules else 1
    return TensorParallelFinding(
        rules=tuple(rules) if divides > 1 else (),
        structures=tuple(tuple(names) for names in structures),
        reason=_reason(rules, divides, refused),
        no_sequence_parallel=next(filter(None, no_sequence), ""),
        tp_divides=divides,
        refused=refused,
    )


def _reason(rules: Sequence[TensorParallelRule], divides: int, refused: dict[str, str]) -> str:
    if rules and divides > 1:
        return ""
    if rules:
        sizes = ", ".join(f"{r.module} {r.heads}" for r in rules if r.style != REGION)
        return f"no degree above 1 divides the heads or columns of all modules ({sizes})"
    if refused:
        name, why = next(iter(refused.items()))
        return f"no column linears feed a row linear; the first that was tried, {name}: {why}"
    return "no linear of a block feeds another"


# How blocks are called.


def _structures(model: nn.Module, blocks: Sequence[str]) -> list[list[str]]:
    """Blocks by structure: types and parameter shapes of all modules, in order of appearance."""
    groups: dict[Any, list[str]] = {}
    for name in blocks:
        block = model.get_submodule(name)
        key = tuple(
            (
                own,
                type(m),
                tuple((n, tuple(p.shape)) for n, p in m.named_parameters(recurse=False)),
            )
            for own, m in block.named_modules()
        )
        groups.setdefault(key, []).append(name)
    return list(groups.values())


def _block_calls(
    model: nn.Module, names: Sequence[str], forward: Callable[[], object]
) -> dict[str, BlockCall]:
    calls: dict[str, BlockCall] = {}

    def recorder(name: str) -> Callable[..., None]:
        def hook(block: nn.Module, args: Any, kwargs: Any) -> None:
            if name not in calls:
                args, kwargs = _trained(_copied((args, kwargs)))
                calls[name] = BlockCall(block=block, args=args, kwargs=kwargs)

        return hook

    handles = [
        model.get_submodule(name).register_forward_pre_hook(recorder(name), with_kwargs=True)
        for name in names
    ]
    try:
        with torch.enable_grad():
            forward()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _copied(values: Any) -> Any:
    """A deep copy in which tensors (and modules) stay themselves."""
    memo: dict[int, Any] = {}
    seen: set[int] = set()

    def keep(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor | nn.Module):
            memo[id(value)] = value
        elif isinstance(value, dict):
            for item in value.values():
                keep(item)
        elif isinstance(value, list | tuple | set):
            for item in value:
                keep(item)
        elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
            keep(value.__dict__)

    keep(values)
    return copy.deepcopy(values, memo)


def _trained(values: tuple[Any, Any]) -> tuple[Any, Any]:
    """Floating arguments without their history; the graph must reach back to the hidden state."""
    args, kwargs = values
    flat = [*args, *kwargs.values()]
    floating = [t for t in flat if isinstance(t, torch.Tensor) and t.is_floating_point()]
    trains = {id(t) for t in floating if t.requires_grad} or {id(t) for t in floating[:1]}

    def one(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        return value.detach().requires_grad_(id(value) in trains)

    return tuple(one(v) for v in args), {name: one(v) for name, v in kwargs.items()}


# Candidates and their trials.


def _find_in_block(
    call: BlockCall, shared: frozenset[int]
) -> tuple[list[TensorParallelRule], dict[str, str]]:
    """Disjoint regions in execution order, and why the others are none."""
    linears = linear_calls(call.block, call.run, shared)
    rules: list[TensorParallelRule] = []
    refused: dict[str, str] = {}
    taken: set[str] = set()
    for row in linears.values():
        columns = [linears[name] for name in linears if name in row.fed_by]
        if not columns or taken & {row.name, *row.fed_by}:
            continue
        unfit = [linear.refused for linear in (*columns, row) if linear.refused]
        if unfit:
            refused[row.name] = unfit[0]
            continue
        try:
            rules.extend(_tried(call, columns, row))
        except TRIAL_ERRORS as error:
            refused[row.name] = str(error).splitlines()[0] if str(error) else repr(error)
        else:
            taken |= {row.name, *row.fed_by}
    return rules, refused


def _tried(
    call: BlockCall, columns: Sequence[LinearCall], row: LinearCall
) -> list[TensorParallelRule]:
    """The rules of one region, after it ran whole and in the smallest division."""
    parts = {column.name: 1 for column in columns}
    for _ in range(MOST_PIECES_TRIES):
        try:
            heads = _trial(call, _region_rules(call.block, columns, row, parts), degree=1)
            break
        except PiecesNeeded as needed:
            if all(parts[name] >= needed.pieces for name in needed.columns):
                raise
            parts.update(dict.fromkeys(needed.columns, needed.pieces))
    else:
        raise TensorParallelError(f"the output of {columns[0].name} is cut into too many pieces")
    together = math.gcd(*heads.values())
    if together == 1:
        sizes = ", ".join(f"{name} {size}" for name, size in heads.items())
        raise TensorParallelError(f"no degree above 1 divides all its heads or columns ({sizes})")
    rules = _region_rules(call.block, columns, row, parts, heads)
    _trial(call, rules, degree=_smallest_factor(together))
    return rules


def _smallest_factor(number: int) -> int:
    return next((d for d in range(2, math.isqrt(number) + 1) if number % d == 0), number)


def _region_rules(
    block: nn.Module,
    columns: Sequence[LinearCall],
    row: LinearCall,
    parts: dict[str, int],
    heads: dict[str, int] | None = None,
) -> list[TensorParallelRule]:
    heads = heads or {}
    paths = [linear.name.split(".")[:-1] for linear in (*columns, row)]
    depth = 0
    while all(len(p) > depth for p in paths) and len({p[depth] for p in paths}) == 1:
        depth += 1
    while isinstance(block.get_submodule(".".join(paths[0][:depth])), UNCALLED):
        depth -= 1
    region = TensorParallelRule(
        module=".".join(paths[0][:depth]), style=REGION, heads=math.gcd(*heads.values()) or 1
    )
    column_rules = [
        TensorParallelRule(
            module=column.name,
            style=COLUMN,
            heads=heads.get(column.name, 1),
            parts=parts[column.name],
            weight_dims={
                column.matrix: 0 if column.outputs_first else 1,
                **({column.bias: 0} if column.bias else {}),
            },
        )
        for column in columns
    ]
    row_rule = TensorParallelRule(
        module=row.name,
        style=ROW,
        heads=math.gcd(*heads.values()) or 1,
        weight_dims={row.matrix: 1 if row.outputs_first else 0},
    )
    return [region, *column_rules, row_rule]


@contextmanager
def _applied(
    call: BlockCall,
    rules: Sequence[TensorParallelRule],
    degree: int,
    noted: Callable[[frozenset[str], int], None] | None = None,
    sequence_parallel: bool = False,
) -> Iterator[None]:
    division = TensorParallelModel(ranks=StandIn(degree))
    try:
        apply_to_block(call.block, "", rules, division, sequence_parallel, noted)
        yield
    finally:
        division.remove()


def _trial(call: BlockCall, rules: Sequence[TensorParallelRule], degree: int) -> dict[str, int]:
    """Runs the block divided; returns what a degree must divide for every column linear."""
    heads = {rule.module: 0 for rule in rules if rule.style == COLUMN}

    def noted(columns: frozenset[str], size: int) -> None:
        for name in columns:
            heads[name] = math.gcd(heads[name], size)

    with _applied(call, rules, degree, noted), torch.enable_grad():
        output = call.run()
    if any(isinstance(leaf, HeadShard) for leaf in _leaves(output)):
        raise TensorParallelError("its block returns a divided tensor")
    return heads


def _leaves(value: Any) -> list[Any]:
    """The values inside nested lists, tuples and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


# Sequence parallelism.


def _why_no_sequence(call: BlockCall, rules: Sequence[TensorParallelRule]) -> str:
    """'' if the block also runs with its hidden state divided along the sequence."""
    regions = regions_of(rules)
    if any(not members.region for members in regions):
        return "column and row linears stand in the block itself, beside its norms"
    first = regions[0].columns[0]
    width = input_width(call.block.get_submodule(first.module), first)
    key = hidden_argument(call.args, call.kwargs, width)
    if key is None:
        return f"no argument of the block is a hidden state [batch, sequence, {width}]"
    hidden = call.args[key] if isinstance(key, int) else call.kwargs[key]
    try:
        with torch.enable_grad():
            return _follow_sequence(call, rules, hidden) or _run_on_part(call, rules, hidden)
    except TRIAL_ERRORS as error:
        return str(error).splitlines()[0] if str(error) else repr(error)


def _follow_sequence(
    call: BlockCall, rules: Sequence[TensorParallelRule], hidden: torch.Tensor
) -> str:
    """Runs the block with the sequence marked as divided: what mixes its positions is refused.

    The degree is 1, so that any length will do: what a mark allows does not depend on it.
    """
    own = {id(parameter): name for name, parameter in call.block.named_parameters()}
    joined: set[str] = set()

    def meets(tensor: torch.Tensor) -> None:
        names = {own.get(id(leaf)) for leaf in _trained_leaves(tensor)}
        if None in names:
            raise TensorParallelError(
                f"a trained tensor {list(tensor.shape)} that does not come from the block's own "
                "parameters meets the divided sequence"
            )
        joined.update(name for name in names if name)

    division = Division(ranks=StandIn(1), where="the block", joined=meets)
    marked = HeadShard(hidden, Layout(division=division, dim=SEQUENCE_DIM))
    with _applied(call, rules, 1, sequence_parallel=True):
        output = call.run(lambda value: marked if value is hidden else value)
    shards = [leaf for leaf in _leaves(output) if isinstance(leaf, HeadShard)]
    if [shard.shape for shard in shards] != [hidden.shape] or shards[0].divided.dim != 1:
        return "the block does not return a hidden state divided along the sequence"
    odd = sorted(joined.symmetric_difference(sequence_parameters(call.block, rules)))
    return f"{odd[0]} is not used on the divided sequence alone" if odd else ""


def _trained_leaves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a gradient of `tensor` would reach."""
    if tensor.grad_fn is None:
        return [tensor] if tensor.requires_grad else []
    leaves, seen, waiting = [], set(), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                leaves.append(node.variable)
            waiting.extend(following for following, _ in node.next_functions if following)
    return leaves


def _run_on_part(
    call: BlockCall, rules: Sequence[TensorParallelRule], hidden: torch.Tensor
) -> str:
    """Runs the block as it will run: on a plain tensor that holds a part of the sequence."""
    degree = _smallest_factor(math.gcd(*(r.heads for r in rules if r.style != REGION)))
    length, rest = divmod(int(hidden.shape[SEQUENCE_DIM]), degree)
    if degree == 1 or rest:
        return ""
    part = hidden.narrow(SEQUENCE_DIM, 0, length)
    with _applied(call, rules, degree, sequence_parallel=True):
        output = call.run(lambda value: part if value is hidden else value)
    shapes = [leaf.shape for leaf in _leaves(output) if isinstance(leaf, torch.Tensor)]
    return "" if part.shape in shapes else "the block does not return its part of the sequence"

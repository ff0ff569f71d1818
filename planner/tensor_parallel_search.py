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

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn as nn

from claw_plan.planner.block_calls import BlockCall, block_calls
from claw_plan.planner.errors import PiecesNeeded, TensorParallelError
from claw_plan.planner.graph import TensorParallelRule
from claw_plan.planner.head_shard import HeadShard
from claw_plan.planner.linear_modules import LinearCall, linear_calls, shared_parameters
from claw_plan.planner.sequence_parallel_search import (
    TRIAL_ERRORS,
    first_line,
    leaves,
    why_no_sequence,
)
from claw_plan.planner.tensor_parallel import (
    COLUMN,
    REGION,
    ROW,
    TensorParallelModel,
    apply_rules,
    apply_to_block,
)
from claw_plan.planner.tp_autograd import StandIn

UNCALLED = (nn.ModuleList, nn.ModuleDict)
"""Modules that hold others and have no forward."""

PARTIAL_DEGREES = (2, 4, 8)
"""Devices of a node. Where a degree does not divide every region it divides those that it can."""

MOST_PIECES_TRIES = 4
"""A fused column's pieces are refined at most so often (q, k, v need one try)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelFinding:
    """The rules of every block, or the reason why there are none.

    `structures` lists the blocks by structure; a rule's `structures` index it, () means all.
    `tp_divides` is what every degree must divide. `partial` has the rules of degrees that divide
    only some of the regions (12 heads, 3072 columns, degree 8). `refused` says for each row linear
    that was considered and left out why.
    """

    rules: tuple[TensorParallelRule, ...] = ()
    structures: tuple[tuple[str, ...], ...] = ()
    reason: str = ""
    no_sequence_parallel: str = ""
    tp_divides: int = 1
    partial: dict[int, tuple[TensorParallelRule, ...]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    def by_block(self, degree: int = 0) -> dict[str, tuple[TensorParallelRule, ...]]:
        """The rules of each block by its name, as `apply_rules` takes them at that degree."""
        chosen = self.partial.get(degree, self.rules)
        return {
            block: rules
            for index, blocks in enumerate(self.structures)
            if (rules := tuple(r for r in chosen if index in (r.structures or (index,))))
            for block in blocks
        }


def find_rules(
    model: nn.Module, blocks: Sequence[str], forward: Callable[[], object]
) -> TensorParallelFinding:
    """Looks for column and row linears in `blocks`; `forward` runs the model once."""
    structures = _structures(model, blocks)
    calls = block_calls(model, [names[0] for names in structures], forward)
    shared = shared_parameters(model)
    regions: list[_Region] = []
    refused: dict[str, str] = {}
    for index, names in enumerate(structures):
        call = calls.get(names[0])
        if call is None:
            refused[names[0]] = "the forward pass does not call it"
            continue
        found, left_out = _find_in_block(call, shared)
        refused.update({f"{names[0]}.{row}": why for row, why in left_out.items()})
        only = () if len(structures) == 1 else (index,)
        regions.extend(
            _Region.of(call, names, [replace(rule, structures=only) for rule in rules])
            for rules in found
        )
    finding = _finding(regions, structures, refused)
    if any(region.leaks for region in regions) and (why := _unread(model, finding, forward)):
        refused |= {region.name: why for region in regions if region.leaks}
        finding = _finding([r for r in regions if not r.leaks], structures, refused)
    if not finding.rules:
        return finding
    why_not = why_no_sequence(model, blocks, finding.by_block(), forward)
    return replace(finding, no_sequence_parallel=why_not)


def _finding(
    regions: Sequence[_Region], structures: Sequence[Sequence[str]], refused: dict[str, str]
) -> TensorParallelFinding:
    chosen, left_out = _agreeing(regions)
    rules = [rule for region in chosen for rule in region.rules]
    divides = math.gcd(*(region.divides for region in chosen)) if chosen else 1
    return TensorParallelFinding(
        rules=tuple(rules),
        structures=tuple(tuple(names) for names in structures),
        reason=_reason(rules, refused | left_out),
        tp_divides=divides,
        partial={
            degree: some
            for degree in PARTIAL_DEGREES
            if divides > 1 and divides % degree and (some := _divisible(regions, degree))
        },
        refused=refused | left_out,
    )


@dataclass(frozen=True, kw_only=True)
class _Region:
    """One region of the blocks of a structure: its rules, and its weight in all these blocks."""

    name: str
    rules: tuple[TensorParallelRule, ...]
    divides: int
    numel: int
    leaks: bool

    @classmethod
    def of(
        cls, call: BlockCall, names: Sequence[str], rules: Sequence[TensorParallelRule]
    ) -> _Region:
        block = call.block
        linears = [rule for rule in rules if rule.style != REGION]
        numel = sum(
            block.get_submodule(rule.module).get_parameter(own).numel()
            for rule in linears
            for own in rule.weight_dims
        )
        return cls(
            name=f"{names[0]}.{linears[-1].module}",
            rules=tuple(rules),
            divides=math.gcd(*(rule.heads for rule in linears)),
            numel=numel * len(names),
            leaks=_also_returns_divided(call, rules),
        )


def _divisible(regions: Sequence[_Region], degree: int) -> tuple[TensorParallelRule, ...]:
    """The rules of the regions that a degree divides."""
    return tuple(
        rule for region in regions if region.divides % degree == 0 for rule in region.rules
    )


def _agreeing(regions: Sequence[_Region]) -> tuple[list[_Region], dict[str, str]]:
    """Regions with a degree in common, the heaviest first, and why the others stay whole.

    One tower's few heads do not forbid tensor parallelism in another. Nor do odd ones: nodes have
    4 or 8 devices, so GPT-2 XL divides its 6400 columns and not, by 5, its 25 heads too.
    """
    divides, chosen, refused = 0, set(), {}
    for region in sorted(regions, key=lambda region: -region.numel):
        together = math.gcd(divides, region.divides)
        is_even = divides > 0 and divides % 2 == 0
        if together > 1 and not (is_even and together % 2):
            divides = together
            chosen.add(region.name)
        else:
            refused[region.name] = (
                f"its {region.divides} heads or columns have no {'even ' * is_even}degree in "
                f"common with the {divides} of heavier modules"
            )
    return [region for region in regions if region.name in chosen], refused


def _reason(rules: Sequence[TensorParallelRule], refused: dict[str, str]) -> str:
    if rules:
        return ""
    if refused:
        name, why = next(iter(refused.items()))
        return f"no column linears feed a row linear; the first that was tried, {name}: {why}"
    return "no linear of a block feeds another"


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


# Candidates and their trials.


def _find_in_block(
    call: BlockCall, shared: frozenset[int]
) -> tuple[list[list[TensorParallelRule]], dict[str, str]]:
    """Disjoint regions in execution order, and why the others are none."""
    linears = linear_calls(call.block, call.run, shared)
    rules: list[list[TensorParallelRule]] = []
    refused: dict[str, str] = {}
    taken: set[str] = set()
    for row in linears.values():
        feeding = [linears[name] for name in linears if name in row.fed_by]
        if not feeding or taken & {row.name, *row.fed_by}:
            continue
        unfit = [linear.refused for linear in (*feeding, row) if linear.refused]
        columns = [linear for linear in feeding if not linear.refused]
        if row.refused or not columns:
            refused[row.name] = unfit[0]
            continue
        try:
            rules.append(_tried_with_fewer(call, columns, row))
        except TRIAL_ERRORS as error:
            refused[row.name] = (*unfit, first_line(error))[0]
        else:
            taken |= {row.name, *row.fed_by}
    return rules, refused


def _tried_with_fewer(
    call: BlockCall, columns: Sequence[LinearCall], row: LinearCall
) -> list[TensorParallelRule]:
    """The rules with all columns, else with fewer: the narrowest stay whole first.

    So does one head of keys and values for all queries, as in Megatron, and what DeepSeek's latent
    attention compresses before its heads.
    """
    sizes = [_num_outputs(call.block, column) for column in columns]
    errors: list[Exception] = []
    for least in sorted(set(sizes)):
        wide = [column for column, size in zip(columns, sizes, strict=True) if size >= least]
        try:
            return _tried(call, wide, row)
        except TRIAL_ERRORS as error:
            errors.append(error)
    raise errors[0]


def _num_outputs(block: nn.Module, linear: LinearCall) -> int:
    matrix = block.get_submodule(linear.name).get_parameter(linear.matrix)
    return int(matrix.shape[0 if linear.outputs_first else 1])


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
    smallest = next(ways for ways in range(2, together + 1) if together % ways == 0)
    _trial(call, rules, degree=smallest)
    return rules


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
    noted: Callable[[frozenset[str], int], None],
) -> Iterator[None]:
    division = TensorParallelModel(ranks=StandIn(degree))
    try:
        apply_to_block(call.block, "", rules, division, noted=noted)
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
        hidden, *_ = (*leaves(call.run()), None)
    if isinstance(hidden, HeadShard):
        raise TensorParallelError("its block returns a divided tensor")
    return heads


def _also_returns_divided(call: BlockCall, rules: Sequence[TensorParallelRule]) -> bool:
    """Whether divided tensors leave the block beside the hidden state (attention's scores)."""
    with _applied(call, rules, 1, lambda columns, size: None), torch.enable_grad():
        return any(isinstance(leaf, HeadShard) for leaf in leaves(call.run()))


def _unread(
    model: nn.Module, finding: TensorParallelFinding, forward: Callable[[], object]
) -> str:
    """Why what blocks return divided is used, '' if the whole model runs with it there."""
    divided = apply_rules(model, finding.by_block(), StandIn(1))
    try:
        with torch.enable_grad():
            is_read = any(isinstance(leaf, HeadShard) for leaf in leaves(forward()))
    except TRIAL_ERRORS as error:
        return first_line(error)
    finally:
        divided.remove()
    return "the model returns what its block returns divided" if is_read else ""

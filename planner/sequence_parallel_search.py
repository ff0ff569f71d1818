"""Whether a model that tensor parallelism divides also runs with its sequence divided.

Between its regions every rank would hold a part of the sequence. The model runs once with the
hidden state marked, at the first block, as divided along the sequence: an operation that mixes
positions, or joins the mark with something trained that is not known to be summed over the ranks,
is refused by `HeadShard`, wherever in the model it stands. Then it runs once as it would in
training, on plain parts of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn

from claw_plan.planner.errors import TensorParallelError
from claw_plan.planner.graph import TensorParallelRule
from claw_plan.planner.head_shard import Division, HeadShard, Layout
from claw_plan.planner.sequence_parallel import divide_sequence
from claw_plan.planner.tensor_parallel import (
    REGION,
    apply_rules,
    hidden_argument,
    input_width,
    regions_of,
    sequence_parameters,
)
from claw_plan.planner.tp_autograd import SEQUENCE_DIM, StandIn

Rules = Mapping[str, Sequence[TensorParallelRule]]

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


def first_line(error: Exception) -> str:
    """What went wrong, without the rest of a long message."""
    return str(error).splitlines()[0] if str(error) else repr(error)


def leaves(value: Any) -> list[Any]:
    """The values inside nested lists, tuples and dicts."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def why_no_sequence(
    model: nn.Module, blocks: Sequence[str], rules: Rules, forward: Callable[[], object]
) -> str:
    """The reason against dividing the sequence, '' if there is none."""
    whole = [name for name in blocks if name not in rules]
    if whole:
        return f"{whole[0]} has no divided linears"
    for name in blocks:
        if any(not members.region for members in regions_of(rules[name])):
            return f"column and row linears stand in {name} itself, beside its norms"
    try:
        with torch.enable_grad():
            length = _follow_sequence(model, blocks, rules, forward)
            _run_on_parts(model, blocks, rules, forward, length)
    except TRIAL_ERRORS as error:
        return first_line(error)
    return ""


class _Mark:
    """Marks the hidden state at the first block and takes the mark off after the last."""

    def __init__(self, model: nn.Module, blocks: Sequence[str], rules: Rules) -> None:
        self.own = {
            id(parameter): f"{name}.{own}"
            for name in blocks
            for own, parameter in model.get_submodule(name).named_parameters()
        }
        self.joined: set[str] = set()
        self.length = 0
        self._first, self._last = (model.get_submodule(blocks[i]) for i in (0, -1))
        column = regions_of(rules[blocks[0]])[0].columns[0]
        self._width = input_width(self._first.get_submodule(column.module), column)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        handles = [
            self._first.register_forward_pre_hook(self._put_on, with_kwargs=True),
            self._last.register_forward_hook(self._take_off),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _meets(self, tensor: torch.Tensor) -> None:
        for leaf in _trained_leaves(tensor):
            if id(leaf) not in self.own:
                raise TensorParallelError(
                    f"a trained tensor {list(tensor.shape)} that does not come from the blocks' "
                    "own parameters meets the divided sequence"
                )
            self.joined.add(self.own[id(leaf)])

    def _put_on(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        key = hidden_argument(args, kwargs, self._width)
        if key is None:
            raise TensorParallelError(
                f"no argument of the first block is a hidden state [batch, seq, {self._width}]"
            )
        hidden = args[key] if isinstance(key, int) else kwargs[key]
        self.length = int(hidden.shape[SEQUENCE_DIM])
        # The degree is 1, so that any length will do: what a mark allows does not depend on it.
        division = Division(ranks=StandIn(1), where="the sequence", joined=self._meets)
        marked = HeadShard(hidden, Layout(division=division, dim=SEQUENCE_DIM))
        if isinstance(key, int):
            return (*args[:key], marked, *args[key + 1 :]), kwargs
        return args, {**kwargs, key: marked}

    def _take_off(self, module: nn.Module, args: Any, output: Any) -> Any:
        first = output[0] if isinstance(output, list | tuple) else output
        marked = [leaf for leaf in leaves(output) if isinstance(leaf, HeadShard)]
        if (
            len(marked) != 1
            or marked[0] is not first
            or first.divided.dim != SEQUENCE_DIM
            or first.divided.parts != 1
        ):
            raise TensorParallelError(
                "the last block does not return a hidden state divided along the sequence"
            )
        return first.local if first is output else (first.local, *output[1:])


def _follow_sequence(
    model: nn.Module, blocks: Sequence[str], rules: Rules, forward: Callable[[], object]
) -> int:
    """Runs the model with the mark; returns the length of the sequence."""
    mark = _Mark(model, blocks, rules)
    expected = {
        f"{name}.{own}"
        for name in blocks
        for own in sequence_parameters(model.get_submodule(name), rules[name])
    }
    applied = apply_rules(model, rules, StandIn(1), sequence_parallel=True)
    try:
        with mark.hooked():
            forward()
    finally:
        applied.remove()
    odd = sorted(mark.joined ^ expected)
    if odd:
        raise TensorParallelError(f"{odd[0]} is not used on the divided sequence alone")
    return mark.length


def _trained_leaves(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a gradient of `tensor` would reach."""
    if tensor.grad_fn is None:
        return [tensor] if tensor.requires_grad else []
    found: list[torch.Tensor] = []
    seen, waiting = set(), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            if hasattr(node, "variable"):
                found.append(node.variable)
            waiting.extend(following for following, _ in node.next_functions if following)
    return found


def _run_on_parts(
    model: nn.Module,
    blocks: Sequence[str],
    rules: Rules,
    forward: Callable[[], object],
    length: int,
) -> None:
    """Runs the model as it will run, at the smallest degree that its sequence allows, if any."""
    heads = [rule.heads for each in rules.values() for rule in each if rule.style != REGION]
    ways = (d for d in range(2, min(heads) + 1) if not any(n % d for n in (*heads, length)))
    degree = next(ways, None)
    if degree is None:
        return
    ranks = StandIn(degree)
    applied = apply_rules(model, rules, ranks, sequence_parallel=True)
    hooks = divide_sequence([model.get_submodule(name) for name in blocks], rules, ranks)
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
        applied.remove()

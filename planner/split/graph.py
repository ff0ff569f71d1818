"""`SplitGraph`: the data flow of one block, operator by operator, as one forward pass shows it.

A `BlockCall` runs once more on its fake tensors with a watch below autograd. The operators are
those that `recorder` sees; what no result depends on is left out. `ways` reads from it how
each operator can be divided.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from claw_plan.planner.block_calls import BlockCall
from claw_plan.planner.errors import TensorParallelError
from claw_plan.planner.op_work import Work, works_of
from claw_plan.planner.sequence_parallel_search import leaves
from claw_plan.planner.torch_private import TorchDispatchMode, storage_key, tree_leaves

MOST_OPERATORS = 600
"""Blocks of more (a loop over all positions) are not looked at: it would take minutes."""


class Ref(NamedTuple):
    """Stands for a tensor among an operator's arguments."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowTensor:
    """A tensor of the block. `parameter` is its name if it is one, or a view of one.

    `of_hidden`: whether it depends on the hidden state that enters the block.
    """

    shape: tuple[int, ...]
    num_bytes: int
    needs_grad: bool
    parameter: str = ""
    is_source: bool = False
    of_hidden: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowOp:
    """One operator; `args` and `kwargs` hold a `Ref` in the place of every tensor.

    `is_pointwise` is torch's own word for it, `works` are its kernels.
    """

    name: str
    is_pointwise: bool
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    works: tuple[Work, ...]


@dataclass(frozen=True, kw_only=True)
class SplitGraph:
    """Operators in execution order; `hidden` enters the block and `result` leaves it."""

    tensors: tuple[FlowTensor, ...]
    ops: tuple[FlowOp, ...]
    hidden: int
    result: int

    def signature(self) -> tuple[object, ...]:
        """Equal for blocks that compute the same on tensors of the same shapes."""
        shapes = tuple((tensor.shape, tensor.parameter) for tensor in self.tensors)
        return tuple((op.name, op.inputs, op.outputs) for op in self.ops), shapes

    def sources(self) -> list[int]:
        """Tensors that operators take and none makes, in order of their first use."""
        made = {tensor for op in self.ops for tensor in op.outputs}
        taken = dict.fromkeys(tensor for op in self.ops for tensor in op.inputs)
        return [tensor for tensor in taken if tensor not in made]


def split_graph(call: BlockCall) -> SplitGraph:
    """Runs the block once. Raises TensorParallelError where its data flow cannot be followed."""
    names = {
        id(parameter): name
        for name, parameter in call.block.named_parameters(remove_duplicate=False)
    }
    watch = _Watch(names)
    with torch.enable_grad(), watch:
        output = call.run()
    watch.check_writes()
    result = next((leaf for leaf in leaves(output) if isinstance(leaf, torch.Tensor)), None)
    given = [*call.args, *call.kwargs.values()]
    hidden = next(
        (t for t in given if isinstance(t, torch.Tensor) and t.is_floating_point()), None
    )
    if result is None or hidden is None or watch.number_of(result) is None:
        raise TensorParallelError("the block takes or returns no floating tensor")
    return _graph(watch, hidden, result)


def _graph(watch: _Watch, hidden: torch.Tensor, result: torch.Tensor) -> SplitGraph:
    first, last = watch.number_of(hidden), watch.number_of(result)
    if first is None:
        raise TensorParallelError("the block does not read the hidden state it is given")
    assert last is not None
    needed, ops = {last}, []
    for op in reversed(watch.ops):
        if needed.intersection(op.outputs):
            needed.update(op.inputs)
            ops.append(op)
    ops.reverse()
    return SplitGraph(
        tensors=tuple(_described(watch, ops, first)), ops=tuple(ops), hidden=first, result=last
    )


def _described(watch: _Watch, ops: Sequence[FlowOp], hidden: int) -> list[FlowTensor]:
    made = {tensor for op in ops for tensor in op.outputs}
    depends = {hidden}
    parameter = dict(watch.parameters)
    for op in ops:
        if depends.intersection(op.inputs):
            depends.update(op.outputs)
        if len(op.inputs) == 1 and op.inputs[0] in parameter and not op.works:
            parameter |= dict.fromkeys(op.outputs, parameter[op.inputs[0]])
    return [
        FlowTensor(
            shape=tuple(tensor.shape),
            num_bytes=tensor.numel() * tensor.element_size(),
            needs_grad=tensor.requires_grad,
            parameter=parameter.get(number, ""),
            is_source=number not in made,
            of_hidden=number in depends,
        )
        for number, tensor in enumerate(watch.kept)
    ]


@dataclass
class _Seen:
    """Numbers of live tensor objects, which are kept so that their ids stay theirs."""

    numbers: dict[int, int] = field(default_factory=dict)
    tensors: list[torch.Tensor] = field(default_factory=list)

    def add(self, tensor: torch.Tensor) -> int:
        number = len(self.tensors)
        self.tensors.append(tensor)
        self.numbers[id(tensor)] = number
        return number


class _Watch(TorchDispatchMode):
    """Writes down every operator with the tensors it takes and makes."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[FlowOp] = []
        self.parameters: dict[int, str] = {}
        self._names = names
        self._seen = _Seen()
        self._writes: list[tuple[int, int]] = []

    @property
    def kept(self) -> list[torch.Tensor]:
        return self._seen.tensors

    def number_of(self, tensor: torch.Tensor) -> int | None:
        return self._seen.numbers.get(id(tensor))

    def _number(self, tensor: torch.Tensor) -> int:
        known = self._seen.numbers.get(id(tensor))
        if known is None:
            known = self._seen.add(tensor)
            if id(tensor) in self._names:
                self.parameters[known] = self._names[id(tensor)]
        return known

    def _ref(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Ref(self._number(value))
        if isinstance(value, list | tuple):
            return tuple(self._ref(item) for item in value)
        return value

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)
        if len(self.ops) == MOST_OPERATORS:
            raise TensorParallelError(f"the block runs more than {MOST_OPERATORS} operators")
        refs = tuple(self._ref(value) for value in args)
        named = {name: self._ref(value) for name, value in kwargs.items()}
        out = func(*args, **kwargs)
        taken = tuple(r.number for r in _refs((*refs, *named.values())))
        made = []
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                made.append(self._seen.add(tensor))
        if func._schema.is_mutable and isinstance(args[0], torch.Tensor):
            self._writes.append((len(self.ops), storage_key(args[0])))
        self.ops.append(
            FlowOp(
                name=f"{func.namespace}.{func.overloadpacket.__name__}",
                is_pointwise=torch.Tag.pointwise in func.tags,
                args=refs,
                kwargs=named,
                inputs=taken,
                outputs=tuple(made),
                works=tuple(works_of(func, args, kwargs, out)),
            )
        )
        return out

    def check_writes(self) -> None:
        """A write into memory that is later read through another tensor would go unseen here."""
        for place, storage in self._writes:
            shown = set(self.ops[place].outputs)
            for op in self.ops[place + 1 :]:
                for number in op.inputs:
                    older = number < min(shown, default=0)
                    if older and storage_key(self.kept[number]) == storage:
                        raise TensorParallelError(f"{self.ops[place].name} writes into a view")


def _refs(values: Any) -> list[Ref]:
    found: list[Ref] = []
    for value in values:
        if isinstance(value, Ref):
            found.append(value)
        elif isinstance(value, tuple):
            found.extend(_refs(value))
    return found

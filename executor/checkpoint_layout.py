"""Which part of the whole model a rank holds: names of the whole model to boxes of its tensors.

Whatever divides a parameter here (tensor parallelism in pieces, fully_shard, both; a pipeline that
leaves it to another stage), what is left on this rank are boxes of the tensor that one process
would have. `parts_of` says which, and where they lie in the local tensor; moments of an optimizer
lie as their parameter does. Checkpoints are written and read by these boxes, so that any plan
reads what any other wrote, and `verify` compares by them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from claw_plan.executor.torch_private import own_box
from claw_plan.planner.tensor_parallel import TensorParallelModel

if TYPE_CHECKING:
    from claw_plan.executor.parallel_model import ParallelModel

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeState:
    """The state of the whole model, before anything was divided.

    `names` has every key of its state_dict and the first name of the parameter or buffer behind
    it, so tied parameters stand under several keys. `shapes` has all parameters and buffers by
    their first name, those that state_dict leaves out too.
    """

    names: Mapping[str, str]
    shapes: Mapping[str, Shape]


def whole_state(model: nn.Module) -> WholeState:
    """Reads off a whole model what its parts must come together to."""
    first: dict[int, str] = {}
    shapes: dict[str, Shape] = {}
    for named in (model.named_parameters(), model.named_buffers()):
        for name, tensor in named:
            first[id(tensor)] = name
            shapes[name] = tuple(tensor.shape)
    held = model.state_dict(keep_vars=True)
    names = {key: first[id(tensor)] for key, tensor in held.items() if id(tensor) in first}
    return WholeState(names=names, shapes=shapes)


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """A box of a whole tensor, and where it begins in the local tensor."""

    offsets: Shape
    sizes: Shape
    starts: Shape

    def of_local(self, local: torch.Tensor) -> torch.Tensor:
        """The box as a view of this rank's tensor."""
        return box_of(local, self.starts, self.sizes)

    def of_whole(self, whole: torch.Tensor) -> torch.Tensor:
        """The box as a view of the whole tensor."""
        return box_of(whole, self.offsets, self.sizes)

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return torch.Size(self.sizes).numel()


def box_of(tensor: torch.Tensor, starts: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """A view of the box that begins at `starts`."""
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def whole_part(shape: Sequence[int]) -> Part:
    """The one part of a tensor that is not divided."""
    zeros = (0,) * len(shape)
    return Part(zeros, tuple(shape), zeros)


def parts_of(compiled: ParallelModel, name: str) -> tuple[Part, ...]:
    """The boxes of parameter `name`, as the whole model calls it, that lie on this rank.

    Padding belongs to none of them; a rank whose shard is empty has none.
    """
    parameter = compiled.parameters[name]
    shape = compiled.whole.shapes[name]
    offsets, sizes = tuple((0,) * parameter.ndim), tuple(parameter.shape)
    if isinstance(parameter, DTensor):
        offsets, sizes = own_box(parameter)
    if compiled.experts is not None and name in compiled.experts.first:
        offsets = (offsets[0] + compiled.experts.first[name], *offsets[1:])
    if 0 in sizes:
        return ()
    divided = divided_as(compiled, name)
    if divided is None:
        return (Part(offsets, sizes, (0,) * len(shape)),)
    assert compiled.tensor_parallel is not None
    dim = compiled.tensor_parallel.sharded[divided].dim % len(shape)
    runs = runs_of(compiled.tensor_parallel, divided, shape)
    return tuple(_cut(offsets, sizes, dim, run) for run in _inside(runs, offsets[dim], sizes[dim]))


def divided_as(compiled: ParallelModel, name: str) -> str | None:
    """The name under which tensor parallelism divides it, perhaps another of a tied one's."""
    if compiled.tensor_parallel is None:
        return None
    sharded = compiled.tensor_parallel.sharded
    aliases = (alias for alias, first in compiled.whole.names.items() if first == name)
    return next((alias for alias in (name, *aliases) if alias in sharded), None)


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbours along the divided dimension that are neighbours in the whole tensor too."""

    local_start: int
    whole_start: int
    length: int


def runs_of(divided: TensorParallelModel, name: str, shape: Shape) -> list[Run]:
    """How tensor parallelism cuts the divided dimension, found by cutting its numbers.

    Zeros that come back are padding.
    """
    dim = divided.sharded[name].dim % len(shape)
    numbers = torch.arange(1, shape[dim] + 1).view(
        [-1 if d == dim else 1 for d in range(len(shape))]
    )
    own = divided.local_slice(name, numbers).flatten()
    own = own.where(own > 0, -1)
    breaks = (own.diff() != 1).nonzero().flatten() + 1
    edges = [0, *breaks.tolist(), own.numel()]
    return [
        Run(start, int(own[start]) - 1, end - start)
        for start, end in itertools.pairwise(edges)
        if own[start] > 0
    ]


def _inside(runs: Sequence[Run], start: int, size: int) -> list[Run]:
    """What of the runs lies in [start, start + size) of the tensor that was sharded again."""
    found = []
    for run in runs:
        first = max(run.local_start, start)
        end = min(run.local_start + run.length, start + size)
        if first < end:
            whole_start = run.whole_start + first - run.local_start
            found.append(Run(first - start, whole_start, end - first))
    return found


def _cut(offsets: Shape, sizes: Shape, dim: int, run: Run) -> Part:
    def put(values: Shape, value: int) -> Shape:
        return (*values[:dim], value, *values[dim + 1 :])

    return Part(
        put(offsets, run.whole_start),
        put(sizes, run.length),
        put((0,) * len(sizes), run.local_start),
    )

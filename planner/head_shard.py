"""`HeadShard`: one rank's part of an activation, which answers with the shapes of the whole.

Model files write global sizes into their forwards (`.split(n_embd, dim=2)`, `.view(B, T, n_head,
head_dim)`). A column linear whose weight is divided returns a HeadShard: `shape` and `size()` are
those of the undivided tensor, and every operation runs on the local part with its arguments
translated. So the file stays as it is, kernels and autograd see local tensors only, and what has
no divided form is refused by name. `planner.head_shard_ops` registers the translations: import it
wherever HeadShards are made.

The whole of a divided dimension is `parts` equal pieces laid one after another (q, k, v of a
fused weight: 3), each cut into `degree` chunks; a rank holds its chunk of every piece.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from claw_plan.planner.errors import TensorParallelError
from claw_plan.planner.torch_private import below_subclasses, without_storage
from claw_plan.planner.tp_autograd import Communicator, enter
from claw_plan.planner.vocabulary_parallel_order import RowOrder

Handler = Callable[[Callable[..., Any], "Arguments"], Any]
SHARED: AbstractContextManager[None] = nullcontext()
"""Random numbers as they come, the same on all ranks."""

HANDLERS: dict[str, Handler] = {}
"""Translations by the name of the torch function or method."""


def handles(names: str) -> Callable[[Handler], Handler]:
    """Registers a translation under the names of the functions it is for."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(names.split(), handler))
        return handler

    return register


OF_THE_WHOLE = frozenset(
    "shape size dim ndim ndimension numel nelement device dtype layout requires_grad is_leaf "
    "is_cuda is_cpu is_meta is_mps is_xla is_xpu is_sparse is_nested is_quantized is_mkldnn "
    "is_floating_point is_complex element_size itemsize get_device __len__ __hash__ names "
    "is_inference is_neg is_conj".split()
)
OF_THE_LOCAL = frozenset("is_contiguous grad_fn output_nr _base _version register_hook".split())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Division:
    """What the shards of one region have in common.

    `noted` hears of every size that the degree must divide, with the column linears it comes
    from; `joined` hears of every whole tensor that meets a shard. Random numbers are drawn inside
    `drawing`. `sealed` marks a tensor that may be asked for its shape and go through column
    linears, and nothing else. `handlers` are this division's own translations, before those of
    all; `sums_gradients` is off where whole tensors get their gradients of all ranks later.
    `order` is that of a vocabulary whose rows are not divided as they stand.
    """

    ranks: Communicator
    where: str
    noted: Callable[[frozenset[str], int], None] | None = None
    joined: Callable[[torch.Tensor], None] | None = None
    drawing: AbstractContextManager[None] = SHARED
    sealed: bool = False
    handlers: Mapping[str, Handler] = field(default_factory=dict)
    sums_gradients: bool = True
    order: RowOrder | None = None

    @property
    def degree(self) -> int:
        """Number of ranks."""
        return self.ranks.degree

    def own_part(self, whole: torch.Tensor, dim: int, parts: int) -> torch.Tensor:
        """This rank's chunk of every piece of `dim`."""
        if self.order is not None:
            whole = self.order.select(whole, dim)
        return slice_piecewise(whole, dim, parts=parts, degree=self.degree, rank=self.ranks.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Which dimension is divided, into how many pieces first, and whose output it was.

    `extent` is the whole size of the divided dimension where the ranks' chunks may be uneven (a
    vocabulary, in one piece); None where the degree divides it.
    """

    division: Division
    dim: int
    parts: int = 1
    columns: frozenset[str] = frozenset()
    extent: int | None = None


class HeadShard(torch.Tensor):
    """See the module. The tensor itself has the whole's shape and no storage."""

    _local: torch.Tensor
    _divided: Layout

    @staticmethod
    def __new__(cls, local: torch.Tensor, layout: Layout) -> HeadShard:
        """Wraps a local part."""
        shape = list(local.shape)
        shape[layout.dim] = _whole_size(local, layout)
        whole: HeadShard = without_storage(cls, shape, local)
        whole._local, whole._divided = local, layout
        if layout.division.noted is not None:
            layout.division.noted(layout.columns, shape[layout.dim] // layout.parts)
        return whole

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = function_name(func)
        if name in OF_THE_WHOLE:
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        arguments = Arguments(name=name, args=list(args), kwargs=dict(kwargs or {}))
        if name in OF_THE_LOCAL:
            return arguments.call(func)
        own = arguments.shards()[0].divided.division.handlers
        handler = own.get(name) or HANDLERS.get(name)
        if handler is None or any(s.divided.division.sealed for s in arguments.shards()):
            raise arguments.refused("has no divided form here")
        if arguments.draws():
            with arguments.shards()[0].divided.division.drawing:
                return handler(func, arguments)
        return handler(func, arguments)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub leaves `func` out
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        raise Arguments(name=str(func), args=list(args), kwargs=dict(kwargs or {})).refused(
            "reached the kernel with a divided tensor"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        layout = self._divided
        return (
            f"HeadShard(shape={tuple(self.shape)}, dim={layout.dim}, parts={layout.parts}, "
            f"degree={layout.division.degree})"
        )

    @property
    def local(self) -> torch.Tensor:
        """This rank's part.

        A custom autograd.Function runs below this class and attaches its gradient to the tensor
        without storage, where it would be lost: the result is refused.
        """
        with below_subclasses():
            trained = self.requires_grad
        if trained and not self._local.requires_grad:
            raise TensorParallelError(
                "a custom autograd.Function in "
                f"{self._divided.division.where or 'the block'} is given a divided tensor (the "
                f"output of {', '.join(sorted(self._divided.columns))}); it has no divided form"
            )
        return self._local

    @property
    def divided(self) -> Layout:
        """How the whole is divided (`layout` is taken: torch's memory layout)."""
        return self._divided

    @property
    def piece(self) -> int:
        """Whole size of one of the equal pieces of the divided dimension."""
        return int(self.shape[self._divided.dim]) // self._divided.parts


def _whole_size(local: torch.Tensor, layout: Layout) -> int:
    size, division = local.shape[layout.dim], layout.division
    if layout.extent is None:
        return size * division.degree
    start, stop = chunk_of(layout.extent, division.degree, division.ranks.rank)
    if layout.parts != 1 or size != stop - start:
        raise TensorParallelError(
            f"an operation in {division.where} changes the size of the divided vocabulary"
        )
    return layout.extent


def opened(tensor: torch.Tensor) -> torch.Tensor:
    """What of a tensor lies on this rank: itself unless it is divided."""
    return tensor.local if isinstance(tensor, HeadShard) else tensor


def function_name(func: Callable[..., Any]) -> str:
    """'view' for methods and functions, 'shape' for the getter of a property."""
    name: str = getattr(func, "__name__", repr(func))
    return func.__self__.__name__ if name == "__get__" else name  # type: ignore[attr-defined]


def chunk_of(size: int, degree: int, rank: int) -> tuple[int, int]:
    """Where a rank's chunk starts and stops: the first chunks are longer by one if uneven."""
    even, longer = divmod(size, degree)
    start = rank * even + min(rank, longer)
    return start, start + even + (rank < longer)


def slice_piecewise(
    whole: torch.Tensor, dim: int, *, parts: int, degree: int, rank: int
) -> torch.Tensor:
    """A rank's chunk of every piece of `dim`; a view where that is possible.

    One piece may be cut unevenly.
    """
    dim = dim % whole.ndim
    if parts == 1:
        start, stop = chunk_of(whole.shape[dim], degree, rank)
        return whole.narrow(dim, start, stop - start)
    pieces = torch.unflatten(whole, dim, (parts, degree, -1))
    return pieces.select(dim + 1, rank).flatten(dim, dim + 1)


def join_piecewise(shards: Sequence[torch.Tensor], dim: int, *, parts: int) -> torch.Tensor:
    """The whole again from the shards of all ranks, in rank order."""
    if parts == 1:
        return torch.cat(list(shards), dim)
    dim = dim % shards[0].ndim
    pieces = torch.stack([torch.unflatten(shard, dim, (parts, -1)) for shard in shards], dim + 1)
    return pieces.flatten(dim, dim + 2)


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    # Not a function inside `mapped`: one that calls itself is a cycle, which would keep the
    # tensors that `change` holds until the garbage collector runs.
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple) and any(isinstance(v, torch.Tensor) for v in value):
        return [_mapped(item, change) for item in value]
    return value


@dataclass(slots=True, kw_only=True)
class Arguments:
    """The arguments of one call, by position and name, with the shards among them."""

    name: str
    args: list[Any]
    kwargs: dict[str, Any]

    def get(self, index: int, name: str, default: Any = None) -> Any:
        """An argument that may be given either way."""
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)

    def set(self, index: int, name: str, value: Any) -> None:
        """Replaces an argument that may be given either way."""
        if len(self.args) > index:
            self.args[index] = value
        else:
            self.kwargs[name] = value

    def values(self) -> list[Any]:
        """All arguments, lists and tuples opened."""
        values: list[Any] = []
        for value in (*self.args, *self.kwargs.values()):
            values.extend(value if isinstance(value, list | tuple) else (value,))
        return values

    def shards(self) -> list[HeadShard]:
        """The divided tensors among the arguments."""
        return [value for value in self.values() if isinstance(value, HeadShard)]

    def draws(self) -> bool:
        """Whether the call draws random numbers."""
        if self.name == "dropout":
            return bool(self.get(1, "p", 0.5) and self.get(2, "training", True))
        if self.name == "scaled_dot_product_attention":
            return bool(self.get(4, "dropout_p", 0.0))
        return self.name == "rand_like"

    def mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Arguments:
        """With every tensor replaced, also inside lists and tuples."""
        return Arguments(
            name=self.name,
            args=[_mapped(value, change) for value in self.args],
            kwargs={name: _mapped(value, change) for name, value in self.kwargs.items()},
        )

    def call(
        self,
        func: Callable[..., Any],
        whole: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
    ) -> Any:
        """Runs the function on the local parts; `whole` prepares the tensors that have none."""
        local = self.mapped(lambda t: t.local if isinstance(t, HeadShard) else whole(t))
        return func(*local.args, **local.kwargs)

    def subject(self) -> HeadShard:
        """The first argument, which must be the only divided one."""
        first = self.args[0] if self.args else next(iter(self.kwargs.values()))
        if not isinstance(first, HeadShard) or len(self.shards()) > 1:
            raise self.refused("takes one divided tensor, and that first")
        return first

    def refused(self, why: str) -> TensorParallelError:
        """The error that names the operation and the column linears whose outputs it got."""
        shards = self.shards()
        columns = sorted({name for s in shards for name in s.divided.columns})
        where = next((s.divided.division.where for s in shards), "")
        shapes = ", ".join(f"{list(s.shape)} divided on dim {s.divided.dim}" for s in shards)
        source = " (the output of " + ", ".join(columns) + ")" if columns else ""
        return TensorParallelError(
            f"{self.name} in {where or 'the block'} {why}: {shapes}{source}"
        )


def common_layout(arguments: Arguments) -> tuple[int, Layout, int]:
    """How all shards of a call are divided alike.

    Returns the offset of the divided dimension from the right, the layout (columns united), and
    the whole extent of that dimension.
    """
    shards = arguments.shards()
    layouts = [shard.divided for shard in shards]
    offsets = {s.ndim - layout.dim for s, layout in zip(shards, layouts, strict=True)}
    alike = len(offsets) == 1
    alike &= len({(layout.parts, id(layout.division)) for layout in layouts}) == 1
    extents = {int(s.shape[layout.dim]) for s, layout in zip(shards, layouts, strict=True)}
    if not alike or (len(extents) > 1 and arguments.name != "scaled_dot_product_attention"):
        raise arguments.refused("joins tensors that are divided differently")
    columns = frozenset().union(*(layout.columns for layout in layouts))
    return offsets.pop(), replace(layouts[0], columns=columns), max(extents)


def whole_operand(
    operand: torch.Tensor, offset: int, layout: Layout, extent: int, arguments: Arguments
) -> torch.Tensor:
    """A tensor every rank holds whole, made to meet a shard by broadcasting.

    Where it spans the divided dimension, this rank's chunk is taken (masks, slopes, biases of
    heads). Each rank sees only its part of the gradient, so that the gradients are summed over the
    ranks.
    """
    division = layout.division
    if operand.ndim >= offset and operand.shape[-offset] != 1:
        if division.joined is not None:
            raise arguments.refused(
                f"joins a whole tensor {list(operand.shape)} across the divided dimension"
            )
        if operand.shape[-offset] != extent:
            raise arguments.refused(f"does not broadcast with {list(operand.shape)}")
        return division.own_part(meet(operand, layout), -offset, layout.parts)
    return meet(operand, layout)


def meet(operand: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A whole tensor used by every rank on its own part; its gradient is summed over them."""
    division = layout.division
    if division.joined is not None:
        division.joined(operand)
        return operand
    if not operand.requires_grad or not division.sums_gradients:
        return operand
    return enter(operand, division.ranks, division.where, keep_gradient=True)

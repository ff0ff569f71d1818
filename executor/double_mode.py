"""fp64 all the way: casts to fp32 that a model's own code asks for are left out.

Of grouped products (experts' weights, each for its own rows) torch has no fp64 kernels. They are
made of plain products here, without looking at the values of the groups' ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode

from claw_plan.executor.torch_private import GROUPED_PRODUCTS


class DoubleMode(TorchFunctionMode):
    """Inside it, whoever asks for float32 gets float64.

    Many models compute norms, softmax or the loss in fp32 whatever they are given. A comparison
    in fp64 would then be one in fp32, and a rounding could not be told from a fault. Numbers made
    of integers (the angles of a step's embedding) are float64 too.
    """

    outside: ClassVar[torch.dtype | None] = None
    """The dtype of floats without one outside of all these modes; None where none is on."""

    def __enter__(self) -> DoubleMode:
        """Floats without a dtype are float64 until the end."""
        self._default, self._outside = torch.get_default_dtype(), DoubleMode.outside
        DoubleMode.outside = self._outside or self._default
        torch.set_default_dtype(torch.float64)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *raised: Any) -> None:
        """As it was before."""
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self._default)
        DoubleMode.outside = self._outside

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        if func in GROUPED_PRODUCTS and args[0].dtype is torch.float64:
            return _grouped_product(*args, **(kwargs or {}))
        args = tuple(_wider(value) for value in args)
        return func(*args, **{name: _wider(value) for name, value in (kwargs or {}).items()})


@contextmanager
def drawn_as_outside() -> Iterator[None]:
    """Weights that are drawn here are those of a training without a DoubleMode."""
    inside = torch.get_default_dtype()
    torch.set_default_dtype(DoubleMode.outside or inside)
    try:
        yield
    finally:
        torch.set_default_dtype(inside)


def _wider(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _grouped_product(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """`a @ b` for each group; a matrix holds its groups side by side, up to their ends `offs`."""
    assert bias is None and out_dtype is None, "torch has kernels for neither"
    if offs is None:
        return a @ b
    if a.ndim == b.ndim == 2:
        return torch.stack([(a * own) @ b for own in _members(offs, a.shape[1], a)])
    if a.ndim == 2:
        members = enumerate(_members(offs, a.shape[0], a))
        products = [(a * own[:, None]) @ b[group] for group, own in members]
    else:
        members = enumerate(_members(offs, b.shape[1], b))
        products = [a[group] @ (b * own) for group, own in members]
    return torch.stack(products).sum(0)


def _members(offs: torch.Tensor, size: int, like: torch.Tensor) -> list[torch.Tensor]:
    """For each group 1 where an index is its own, else 0."""
    indices = torch.arange(size, device=offs.device)
    before = indices < offs[:, None]
    after = indices >= torch.cat([offs.new_zeros(1), offs[:-1]])[:, None]
    return list((before & after).to(like.dtype).unbind())

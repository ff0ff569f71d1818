"""Parameters of an optimizer as a few flat vectors, laid out once and the same on every rank.

What a codec sends keeps its place from step to step, because what was not sent is added to the
same elements at the next one. So buckets follow the optimizer's parameters in their order and
never change, unlike those of DistributedDataParallel, which are rebuilt after the first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn

BUCKET_BYTES = 25 * 2**20
"""DistributedDataParallel's default (bucket_cap_mb=25)."""


@dataclass(eq=False)
class Bucket:
    """Neighbouring parameters of one group, one device and one dtype.

    `key` names it among the buckets of its optimizer. `active` are the elements that travel, None
    for all of them.
    """

    key: str
    parameters: Sequence[nn.Parameter]
    active: torch.Tensor | None = None

    @property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return sum(parameter.numel() for parameter in self.parameters)

    def flat(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """A new vector of one tensor for each parameter."""
        return torch.cat([part.reshape(-1) for part in parts])

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of the vector in the shapes of the parameters."""
        parts = flat.split([parameter.numel() for parameter in self.parameters])
        return [
            part.view(parameter.shape)
            for part, parameter in zip(parts, self.parameters, strict=True)
        ]

    def leave_out(self, is_active: torch.Tensor) -> None:
        """From now on only these elements travel."""
        self.active = None if bool(is_active.all()) else is_active.nonzero().view(-1)

    def packed(self, flat: torch.Tensor) -> torch.Tensor:
        """What travels of the vector."""
        return flat if self.active is None else flat.index_select(0, self.active)

    def unpacked(self, packed: torch.Tensor) -> torch.Tensor:
        """The whole vector; what does not travel is zero."""
        if self.active is None:
            return packed
        whole = packed.new_zeros(self.numel)
        return whole.index_copy_(0, self.active, packed)


def buckets_of(parameters: Sequence[nn.Parameter], bucket_bytes: int, name: str) -> list[Bucket]:
    """The trained ones in order, a bucket closed once it holds at least `bucket_bytes`."""
    found: list[list[nn.Parameter]] = []
    held_bytes, kind = 0, None
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        if held_bytes >= bucket_bytes or kind != (parameter.dtype, parameter.device):
            found.append([])
            held_bytes, kind = 0, (parameter.dtype, parameter.device)
        found[-1].append(parameter)
        held_bytes += parameter.numel() * parameter.element_size()
    return [Bucket(f"{name}.{index}", tuple(held)) for index, held in enumerate(found)]

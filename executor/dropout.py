"""Which random numbers a rank draws in its forwards, so that dropout means what it should.

Ranks that hold other samples or other stages draw other numbers; tensor-parallel ranks draw the
same, for they compute the same. Where they do not, they draw from a generator of their own
(Korthikanti et al. 2022, arXiv 2205.05198; Megatron-LM's model-parallel generator): on the heads
and columns that they divide, and under sequence parallelism, where each holds another part of the
sequence, everywhere inside the chain of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn

from claw_plan.executor.mesh import Mesh
from claw_plan.executor.random_state import seed_all

RANKS = 1 << 20
"""More than a training has ranks: seeds of neighbours do not meet."""


def seed_forwards(mesh: Mesh, seed: int) -> None:
    """Starts this rank's generators for training; those of tensor-parallel ranks are equal."""
    seed_all(seed * RANKS + mesh.data_index * mesh.sizes["pp"] + mesh.index("pp"))


class OwnNumbers:
    """Inside `with own_numbers:` this rank draws numbers of its own, afterwards the shared ones.

    They start from a number that is drawn from the shared generator, so that the state of that
    generator alone, as a checkpoint keeps it, determines all that follow. Recompute draws the
    same again: it puts back the state that the block's forward began with.
    """

    def __init__(self, index: int, device: torch.device) -> None:
        self._index, self._device = index, device
        self._shared: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def inside(self, blocks: Sequence[nn.Module]) -> None:
        """Makes the forwards of these blocks draw so."""
        for block in blocks:
            block.register_forward_pre_hook(self.__enter__)
            block.register_forward_hook(self.__exit__, always_call=True)

    def __enter__(self, *_: Any) -> None:
        seed = int(torch.randint(1 << 40, ()).item()) * RANKS + self._index
        self._shared.append((torch.get_rng_state(), self._device_state()))
        torch.manual_seed(seed)

    def __exit__(self, *_: Any) -> None:
        host, device = self._shared.pop()
        torch.set_rng_state(host)
        if device is not None:
            torch.get_device_module(self._device).set_rng_state(device, self._device)

    def _device_state(self) -> torch.Tensor | None:
        if self._device.type == "cpu":
            return None
        return torch.get_device_module(self._device).get_rng_state(self._device)  # type: ignore[no-any-return]

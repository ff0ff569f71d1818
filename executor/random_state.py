"""Random numbers of one purpose apart from those of another, and as tensors for a checkpoint.

Two purposes draw: the model's forward (dropout) from the process's own generators, and the user's
`train_data` from a `RandomStream`, whose numbers depend on the seed alone. So all ranks read the
same samples however differently they draw for dropout, and reading the data once more, as a
resumed run does, draws them again without touching the model's.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

TORCH, DEVICE, PYTHON, NUMPY = "torch", "device", "python", "numpy"


def random_state() -> dict[str, torch.Tensor]:
    """The state of every generator of this process, as bytes."""
    state = {
        TORCH: torch.get_rng_state(),
        PYTHON: _packed(random.getstate()),
        NUMPY: _packed(_numpy_state()),
    }
    if torch.accelerator.is_available():
        state[DEVICE] = torch.get_device_module().get_rng_state()
    return state


def set_random_state(state: Mapping[str, torch.Tensor]) -> None:
    """Makes the generators go on where `random_state` was taken."""
    torch.set_rng_state(state[TORCH])
    version, numbers, following = json.loads(_unpacked(state[PYTHON]))
    random.setstate((version, tuple(numbers), following))
    np.random.set_state(json.loads(_unpacked(state[NUMPY])))
    if DEVICE in state and torch.accelerator.is_available():
        torch.get_device_module().set_rng_state(state[DEVICE])


def seed_all(seed: int) -> None:
    """Starts every generator of this process from the seed."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _numpy_state() -> object:
    kind, keys, *rest = np.random.get_state()
    assert not isinstance(keys, int)
    return [kind, np.asarray(keys).tolist(), *rest]


def _packed(state: object) -> torch.Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def _unpacked(state: torch.Tensor) -> str:
    return bytes(state.tolist()).decode()


class RandomStream:
    """Numbers of its own: what is drawn inside `with stream.drawing():` goes on where it ended."""

    def __init__(self, seed: int) -> None:
        self._state: dict[str, torch.Tensor] | None = None
        self._seed = seed

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Meanwhile the process's generators are this stream's."""
        outside = random_state()
        if self._state is None:
            seed_all(self._seed)
        else:
            set_random_state(self._state)
        try:
            yield
        finally:
            self._state = random_state()
            set_random_state(outside)

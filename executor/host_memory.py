"""Peak memory of this process: of its accelerator, or of the host where the CPU computes.

On a CPU the figure is resident memory above what the process had before the model was built, less
the pages of files (libraries are loaded as their code is first used), from Linux's /proc; 0 where
there is none. It holds what the allocator keeps between tensors, so it lies above their sum.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""What proc(5) says to write into clear_refs to set the peak to the present size."""


class MemoryMeter:
    """Made before the model is built; `reset` when training begins."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        if not self._cuda:
            _load_kernels()
            _return_free_memory()
        self._base_bytes = 0 if self._cuda else _status("RssAnon")

    def reset(self) -> None:
        """Peaks before now do not count."""
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        elif _CLEAR.exists():
            _return_free_memory()
            _CLEAR.write_text(_RESET_PEAK)

    def peak_bytes(self) -> int:
        """The most since `reset`."""
        if self._cuda:
            return int(torch.cuda.max_memory_allocated())
        return max(0, _status("VmHWM") - _status("RssFile") - self._base_bytes)


def _load_kernels() -> None:
    """A product forward and backward, so that the libraries it needs count as there before."""
    weight = torch.ones(64, 64, requires_grad=True)
    (weight @ weight).sum().backward()


def _return_free_memory() -> None:
    """What was freed but kept, as after building the model, goes back to the system (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status(name: str) -> int:
    if not _STATUS.exists():
        return 0
    found = re.search(rf"{name}:\s+(\d+) kB", _STATUS.read_text())
    return int(found[1]) * 1024 if found else 0

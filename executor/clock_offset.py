"""How far the clocks of other hosts are from the first one's.

Each exchange stamps a question, its arrival and the answer; the one that took the shortest time
bounds the offset best (D. Mills, 'Internet Time Synchronization: the Network Time Protocol',
IEEE Trans. Communications 39, 1991). Traces of several hosts are laid over each other with it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

EXCHANGES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """The other clock less the first one's, and how wrong that may be at most."""

    offset_ns: int
    error_ns: int


def best_offset(stamps: Sequence[tuple[int, int, int]]) -> ClockOffset:
    """Of (asked, arrived there, answered) in ns, the exchange that took the shortest time."""
    asked, arrived, answered = min(stamps, key=lambda stamp: stamp[2] - stamp[0])
    trip = answered - asked
    return ClockOffset(offset_ns=arrived - (asked + trip // 2), error_ns=max(0, (trip + 1) // 2))


def measure_offsets(rank: int, world_size: int, exchanges: int = EXCHANGES) -> list[ClockOffset]:
    """The offsets of ranks 1, 2, … from rank 0; only rank 0 gets them.

    All ranks of the default process group, which must carry CPU tensors, call this together.
    """
    found: list[ClockOffset] = []
    for other in range(1, world_size):
        if rank == 0:
            found.append(best_offset([_ask(other) for _ in range(exchanges)]))
        elif rank == other:
            for _ in range(exchanges):
                _answer()
        dist.barrier()
    return found


def _ask(other: int) -> tuple[int, int, int]:
    stamp = torch.zeros(1, dtype=torch.int64)
    asked = time.time_ns()
    dist.send(stamp, other)
    dist.recv(stamp, other)
    return asked, int(stamp.item()), time.time_ns()


def _answer() -> None:
    stamp = torch.zeros(1, dtype=torch.int64)
    dist.recv(stamp, 0)
    stamp[0] = time.time_ns()
    dist.send(stamp, 0)

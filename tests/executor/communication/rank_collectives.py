"""Runs our collectives beside gloo's on groups of 2 to 8 ranks and writes what was seen.

Started for each rank by tests as `python rank_collectives.py RANK WORLD_SIZE FOLDER`. Writes
`rank<r>.json`: for each case the error against the exact result, a hash of the bits that came
out, and the bytes that were sent.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import rank_script
import torch
import torch.distributed as dist
from torch import Tensor

from claw_plan.executor.communication import algorithms
from claw_plan.executor.traffic import TrafficCounter
from claw_plan.profiles.collective_schedules import ALGORITHMS, Nodes, alike

SIZES = (2, 3, 4, 5, 6, 7, 8)
LENGTHS = (1, 840, 4099)
LAYOUTS: dict[int, list[Nodes]] = {
    4: [alike(4, 2), ((3, 1), (0, 2))],
    3: [alike(3, 2)],
    5: [alike(5, 2), ((0,), (1, 2, 3, 4))],
    6: [alike(6, 2), alike(6, 3)],
    8: [alike(8, 2), alike(8, 3)],
}
"""Uneven ones among them, and one whose ring does not follow the ranks."""

HALF_BYTES = {"tree_in_chunks": 512.0}
"""So that even these buffers are cut: 4,099 elements among 8 ranks in 14 chunks."""

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def numbers(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * length + rank)
    return torch.randn(length, dtype=torch.float64, generator=generator).to(dtype)


def exact_sum(ranks: int, length: int, dtype: torch.dtype) -> Tensor:
    return torch.stack([numbers(rank, length, dtype).double() for rank in range(ranks)]).sum(0)


def seen(result: Tensor, exact: Tensor) -> dict[str, Any]:
    error = (result.double() - exact).abs().max().item() if len(exact) else 0.0
    bits = hashlib.sha256(result.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    return {"error": error, "bits": bits}


def cases(size: int) -> Iterator[tuple[str, Nodes, int, torch.dtype]]:
    for algorithm in (*ALGORITHMS, *HALF_BYTES):
        for nodes in [alike(size), *LAYOUTS.get(size, [])]:
            for length in LENGTHS[algorithm in HALF_BYTES :]:
                for dtype in DTYPES if length == 840 else DTYPES[:1]:
                    yield algorithm, nodes, length, dtype


def counted(call: Callable[[], Tensor], counter: TrafficCounter) -> tuple[Tensor, int]:
    counter.take()
    result = call()
    moved = counter.take()
    return result, sum(amount.bytes for kind, amount in moved.items() if kind.op == "send")


def try_all(size: int, group: dist.ProcessGroup, counter: TrafficCounter) -> dict[str, Any]:
    rank, found = group.rank(), {}
    for algorithm, nodes, length, dtype in cases(size):
        own = numbers(rank, length, dtype)
        summed = own.clone()

        half_bytes, name = HALF_BYTES.get(algorithm, 128e3), algorithm.partition("_in_")[0]

        def reduce() -> Tensor:
            algorithms.all_reduce(summed, group, name, nodes, half_bytes=half_bytes)  # noqa: B023
            return summed  # noqa: B023

        _, sent = counted(reduce, counter)
        exact = exact_sum(size, length, dtype)
        native = own.clone()
        dist.all_reduce(native, group=group)
        key = f"{size}/{algorithm}/{nodes}/{length}/{str(dtype)[6:]}"
        found[key] = seen(summed, exact) | {
            "sent": sent,
            "from_native": (summed - native).abs().max().item(),
            "parts": parts(own, summed, exact, group, name, nodes),
        }
    return found


def parts(
    own: Tensor,
    summed: Tensor,
    exact: Tensor,
    group: dist.ProcessGroup,
    algorithm: str,
    nodes: Nodes,
) -> list[float] | str:
    """Errors of reduce_scatter and all_gather; or why not."""
    bounds = algorithms.even_bounds(len(own), group.size())
    mine = slice(bounds[group.rank()], bounds[group.rank() + 1])
    errors = []
    for name in (algorithm, algorithms.NATIVE) if algorithm == "ring" else (algorithm,):
        try:
            part = algorithms.reduce_scatter(own, group, name, nodes)
            whole = algorithms.all_gather(summed[mine], len(own), group, name, nodes)
        except algorithms.ExecutionError as error:
            return str(error)
        errors += [seen(part, exact[mine])["error"], seen(whole, summed.double())["error"]]
    return errors


def main(rank: int, world_size: int, folder: Path) -> None:
    groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    counter = TrafficCounter({})
    found: dict[str, Any] = {}
    with counter.counting(sees_reducer=False):
        for size, group in groups.items():
            if rank < size:
                found |= try_all(size, group, counter)
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    rank_script.run(main)

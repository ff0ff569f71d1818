"""Runs `compressed_mean` of every codec over every algorithm, and writes what was seen.

Started for each rank by tests as `python rank_compressed.py RANK WORLD_SIZE FOLDER`. For a few
calls in a row it writes this rank's results and its residuals.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import rank_script
import torch
import torch.distributed as dist
from torch import Tensor

from claw_plan.executor.communication.algorithms import NATIVE
from claw_plan.executor.communication.compressed import (
    TwoPhaseFeedback,
    compressed_mean,
    compressed_reduce_scatter,
)
from claw_plan.executor.traffic import TrafficCounter
from claw_plan.kernels.codec import codec_of
from claw_plan.profiles.collective_schedules import ALGORITHMS, alike

SIZES = (3, 4)
CODECS = ("none", "fp16", "fp8", "int8", "int4", "one_bit", "top_k:0.05", "threshold:0.5")
COLLECTIVES = (*ALGORITHMS, NATIVE)
LENGTH = 1003
CALLS = 2
ORACLE = 131_072
"""Elements among 4 ranks, of which 1-bit codes of all chunks and scales are 24,600 bytes sent."""


def gradient(rank: int, call: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * call + rank)
    return torch.randn(LENGTH, generator=generator)


def try_case(codec_text: str, algorithm: str, size: int, group: dist.ProcessGroup) -> Any:
    """Three policies: means of gradients, of momenta, and a part of the mean alone."""
    nodes = alike(size, 2)
    codec = codec_of(codec_text)
    feedback = {name: TwoPhaseFeedback(codec) for name in ("gradient", "momentum", "part")}
    found: dict[str, list[Tensor]] = {name: [] for name in ("plain", *feedback)}
    mean = torch.zeros(LENGTH)
    for call in range(CALLS):
        own = gradient(group.rank(), call)
        found["plain"].append(compressed_mean(own, codec, None, group, algorithm, nodes))
        for name, numbers in (("gradient", own), ("momentum", momentum(mean, own))):
            mean = compressed_mean(numbers, codec, feedback[name], group, algorithm, nodes)
            found[name].append(mean)
        if algorithm != "hierarchical":
            part = compressed_reduce_scatter(own, codec, feedback["part"], group, algorithm)
            found["part"].append(part)
    every = [*found["plain"], *found["gradient"], *found["momentum"]]
    bits = [hashlib.sha256(result.numpy().tobytes()).hexdigest() for result in every]
    residuals = {name: kept.state_dict() for name, kept in feedback.items()}
    return found | {"bits": bits, "residuals": residuals}


def momentum(mean: Tensor, own: Tensor) -> Tensor:
    """What 1-bit Adam sends: the momentum all ranks have, moved by one's own gradient."""
    return 0.9 * mean + 0.1 * own


def sent_bytes(group: dist.ProcessGroup, counter: TrafficCounter, codec_text: str) -> int:
    """What left this rank in one mean of `ORACLE` elements by messages."""
    counter.take()
    compressed_mean(torch.ones(ORACLE), codec_of(codec_text), None, group, "ring")
    return sum(amount.bytes for kind, amount in counter.take().items() if kind.op == "send")


def interrupted(group: dist.ProcessGroup) -> dict[str, Tensor]:
    """A third mean of 1-bit codes: with the feedback of two before it, saved and not, and none."""
    codec, feedback = codec_of("one_bit"), TwoPhaseFeedback(codec_of("one_bit"))
    for call in range(2):
        compressed_mean(gradient(group.rank(), call), codec, feedback, group)
    saved = {name: value.clone() for name, value in feedback.state_dict().items()}
    loaded = TwoPhaseFeedback(codec)
    loaded.load_state_dict(saved)
    last = gradient(group.rank(), 2)
    return {
        "uninterrupted": compressed_mean(last, codec, feedback, group),
        "resumed": compressed_mean(last, codec, loaded, group),
        "forgotten": compressed_mean(last, codec, TwoPhaseFeedback(codec), group),
    }


def main(rank: int, world_size: int, folder: Path) -> None:
    groups = {size: dist.new_group(list(range(size))) for size in SIZES}
    found: dict[str, Any] = {}
    for size, group in groups.items():
        for codec in CODECS if rank < size else ():
            for algorithm in COLLECTIVES:
                found[f"{size}/{codec}/{algorithm}"] = try_case(codec, algorithm, size, group)
    found |= interrupted(groups[4])
    counter = TrafficCounter({})
    with counter.counting(sees_reducer=False):
        for codec in ("none", "one_bit"):
            found[f"sent/{codec}"] = sent_bytes(groups[4], counter, codec)
    torch.save(found, folder / f"rank{rank}.pt")


if __name__ == "__main__":
    rank_script.run(main)

r"""How fast codecs encode and decode, beside a copy of as many fp32 numbers.

A copy and a codec's pass take turns; a figure is the median over turns of the copy's CPU time over
the codec's, with half the distance of the quartiles. CPU time is the thread's own: other programs
take its turns, not its time, though they do take its cache.

A copy whose memory a cache holds is twice as fast as another, so both find theirs in one state:

    cached   both work on the same few tensors again and again, after turns that let caches settle
    memory   every pass takes the next of many, so that what it reads was not touched for long

The copy and decoding write into memory that they have; codes are made anew. New memory costs more
than the arithmetic where the C library gives it back to the system each time, as it does with
large pieces until it has seen some; the first turns, which do not count, show it some.

Run: OMP_NUM_THREADS=1 python bench/codecs.py [--numel 4194304] [--rounds 24] [--device cuda] \
    [--write docs/codecs.md]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path

import torch
from torch import Tensor

from claw_plan.kernels.codec import Codec, codec_of
from claw_plan.kernels.error_feedback import ErrorFeedback
from claw_plan.profiles.files import write_atomic

TEXTS = (
    *("none", "fp16", "fp16:12", "one_bit", "one_bit:l2", "top_k:0.001", "top_k:0.01"),
    *("threshold:3.3", "fp8", "fp8:e5m2", "int8", "int8:256,stochastic"),
    *("int4", "int4:64,stochastic"),
)
WARM_TURNS = 6
"""Caches take three or four turns to settle."""

RING = 16
"""Tensors, and room and codes for each, that passes take one after the other where what they read
is to come from memory."""

STATES = {"cached": 1, "memory": RING}
PASSES = ("encode", "decode", "with feedback")

HEAD = (
    "| codec | " + " | ".join(f"{name}, {state}" for state in STATES for name in PASSES) + " |",
    "|---" * (1 + len(STATES) * len(PASSES)) + "|",
)


def seconds(action: Callable[[], object], device: torch.device) -> float:
    """Of this thread on the CPU, or of the device."""
    if device.type == "cpu":
        began = time.thread_time()
        action()
        return time.thread_time() - began
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    action()
    torch.cuda.synchronize(device)
    return time.perf_counter() - began


Buffers = tuple[Tensor, Tensor, Tensor]
"""Numbers, room for as many, and their codes."""

Pass = Callable[[Tensor, Tensor, Tensor], object]


def passes(codec: Codec) -> Iterator[tuple[str, Pass]]:
    """What a codec does with buffers."""
    feedback = ErrorFeedback(codec)
    yield "encode", lambda given, _, __: codec.encode(given)
    yield "decode", lambda _, room, codes: codec.decode_into(codes, room)
    if codec.needs_error_feedback:
        yield "with feedback", lambda given, _, __: feedback.encode(given)


def beside_copies(
    action: Pass, ring: Iterator[Buffers], turns: int
) -> tuple[list[float], list[float]]:
    """Of each turn: the copy's seconds, and how many times a pass's they are."""
    copies, ratios = [], []
    for turn in range(WARM_TURNS + turns):
        given, room, _ = next(ring)
        copy = seconds(partial(room.copy_, given), given.device)
        taken = seconds(partial(action, *next(ring)), given.device)
        if turn >= WARM_TURNS:
            copies.append(copy)
            ratios.append(copy / taken)
    return copies, ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--numel", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    given = [torch.randn(arguments.numel, device=device) for _ in range(RING)]
    pairs = [(x, torch.zeros_like(x)) for x in given]
    copies: dict[str, list[float]] = {state: [] for state in STATES}
    rows = []
    for text in TEXTS:
        figures = []
        codec = codec_of(text)
        work = dict(passes(codec))
        buffers = [(x, room, codec.encode(x)) for x, room in pairs]
        for state, tensors in STATES.items():
            for name in PASSES:
                if name not in work:
                    figures.append("-")
                    continue
                ring = cycle(buffers[:tensors])
                copied, ratios = beside_copies(work[name], ring, arguments.rounds)
                copies[state] += copied
                figures.append(told(ratios))
        rows.append(f"| `{text}` | {' | '.join(figures)} |")
    print(f"{arguments.numel} elements, torch {torch.__version__}, {device}")
    for state, spent in copies.items():
        rate = 4 * arguments.numel / statistics.median(spent) / 1e9
        print(f"copy, {state}: {rate:.1f} GB/s of fp32 read, median of {len(spent)}")
    table = "\n".join([*HEAD, *rows])
    print(table)
    if arguments.write:
        write_table(arguments.write, HEAD[0], table)


def told(ratios: list[float]) -> str:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.2f} ±{(high - low) / 2:.2f}"


def write_table(page: Path, head: str, table: str) -> None:
    """In the place of the table with that head."""
    before, _, rest = page.read_text(encoding="utf-8").partition(head)
    after = rest[rest.index("\n\n") :]
    write_atomic(page, f"{before}{table}{after}")


if __name__ == "__main__":
    main()

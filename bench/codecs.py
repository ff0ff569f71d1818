r"""How fast codecs encode and decode, beside a copy of the same fp32 tensor.

Each round times a copy and then every codec, so that all meet the same machine; a figure is the
median over rounds of the copy's CPU time over the codec's, with the quartiles. CPU time is the
thread's own: other programs take its turns, not its time, though they do take its cache.

The copy and decoding write into memory that they have; codes are made anew. New memory costs more
than the arithmetic where the C library gives it back to the system each time, as it does with
large pieces until it has seen some; the first rounds, which do not count, show it some.

Run: OMP_NUM_THREADS=1 python bench/codecs.py [--numel 4194304] [--rounds 15] [--device cuda] \
    [--write docs/codecs.md]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
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
WARM_ROUNDS = 2


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


def passes(codec: Codec, x: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    codes = codec.encode(x)
    feedback = ErrorFeedback(codec)
    yield "encode", lambda: codec.encode(x)
    room = torch.empty_like(x)
    yield "decode", lambda: codec.decode_into(codes, room)
    if codec.needs_error_feedback:
        yield "with feedback", lambda: feedback.encode(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--numel", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device(arguments.device)
    x = torch.randn(arguments.numel, device=device)
    room = torch.empty_like(x)
    work = {text: dict(passes(codec_of(text), x)) for text in TEXTS}
    ratios: dict[tuple[str, str], list[float]] = {}
    copies = []
    for turn in range(WARM_ROUNDS + arguments.rounds):
        for text, actions in work.items():
            for name, action in actions.items():
                copy = seconds(lambda: room.copy_(x), device)
                taken = seconds(action, device)
                if turn >= WARM_ROUNDS:
                    copies.append(copy)
                    ratios.setdefault((text, name), []).append(copy / taken)
    rate = 4 * arguments.numel / statistics.median(copies) / 1e9
    print(f"{arguments.numel} elements, torch {torch.__version__}, {device}")
    print(f"copy: {rate:.1f} GB/s of fp32 read, median of {len(copies)}")
    rows = [row(text, {name: ratios[text, name] for name in work[text]}) for text in TEXTS]
    table = "\n".join([*HEAD, *rows])
    print(table)
    if arguments.write:
        write_table(arguments.write, HEAD[0], table)


HEAD = (
    "| codec | encode (quartiles) | decode | with feedback |",
    "|---|---|---|---|",
)


def row(text: str, ratios: dict[str, list[float]]) -> str:
    figures = []
    for name in ("encode", "decode", "with feedback"):
        if name not in ratios:
            figures.append("-")
            continue
        low, middle, high = statistics.quantiles(ratios[name], n=4)
        figures.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
    return f"| `{text}` | {' | '.join(figures)} |"


def write_table(page: Path, head: str, table: str) -> None:
    """In the place of the table with that head."""
    before, _, rest = page.read_text(encoding="utf-8").partition(head)
    after = rest[rest.index("\n\n") :]
    write_atomic(page, f"{before}{table}{after}")


if __name__ == "__main__":
    main()

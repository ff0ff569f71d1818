r"""How fast codecs encode and decode, beside a copy of the same fp32 tensor.

Each round times a copy and then every codec, so that all meet the same machine; a figure is the
median over rounds of the copy's CPU time over the codec's, with the quartiles. CPU time is the
thread's own: other programs take its turns, not its time, though they do take its cache.

The copy writes into memory that it has; codecs make their results anew. That memory costs more
than the arithmetic where the C library gives it back to the system each time, as it does with
large pieces. Allocators that keep it, or these variables, spare that.

Run: OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=1000000000 MALLOC_TRIM_THRESHOLD_=4000000000 \
    python bench/codecs.py [--numel 4194304] [--rounds 15] [--device cuda]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from claw_plan.kernels.codec import Codec, codec_of
from claw_plan.kernels.error_feedback import ErrorFeedback
from claw_plan.kernels.sparse import Threshold

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
    yield "decode", lambda: codec.decode(codes, x.numel())
    yield "with feedback", lambda: feedback.encode(x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--numel", type=int, default=1 << 22)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu")
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
    print("speed of the copy = 1: median (quartiles)")
    for text in TEXTS:
        codec = codec_of(text)
        size = codec.encode(x).numel() if isinstance(codec, Threshold) else None
        ratio = 4 * arguments.numel / (size or codec.wire_bytes(arguments.numel))
        figures = []
        for name in work[text]:
            low, middle, high = statistics.quantiles(ratios[text, name], n=4)
            figures.append(f"{name} {middle:.2f} ({low:.2f} to {high:.2f})")
        print(f"{text:20} {ratio:7.2f} x fewer bytes  {'  '.join(figures)}")


if __name__ == "__main__":
    main()

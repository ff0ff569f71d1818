"""What codecs cost a rank's processor, by the keys that planning asks for.

A mean of gradients goes through each codec among the replicas, or a step of the optimizer whose
momentum goes through it, less AdamW's own step. The processor time of the calling thread, in which
it waits for nobody, is divided among encoding, averaging and decoding as the memory that each
moves. Copies around the codec and the look for numbers that are not finite are in it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn as nn

from claw_plan.executor.communication.group_mean import GroupMean
from claw_plan.executor.communication.hooks import GradientMean
from claw_plan.executor.optimizers.one_bit_adam import OneBitAdam
from claw_plan.kernels.codec import codec_of
from claw_plan.planner.averaging import codec_works
from claw_plan.planner.supported import CODECS, OF_MOMENTUM
from claw_plan.profiles.codecs import LOW_RANK, ZERO_ONE, describe_codec
from claw_plan.profiles.work import OpWork

MEASURED = tuple(name for name in CODECS if name not in ("threshold", LOW_RANK, ZERO_ONE))
"""Those that need no parameters. PowerSGD's products are measured as products, and what 0/1 Adam
sends is one_bit."""

ELEMENTS = 1 << 20
"""More than a core's own caches hold, as the buckets of a model that is worth compressing. Where
momentum travels, which is less on the wire, four times as many."""

_WARM_UPS = 2
_REPEATS = 3

Samples = dict[OpWork, list[int]]


def measure_codecs(
    group: dist.ProcessGroup, codecs: Sequence[str] = MEASURED, elements: int = ELEMENTS
) -> Samples:
    """Times of the kernels of each codec on this rank. All ranks of the group call it together."""
    gradient = torch.randn(4 * elements, generator=torch.Generator().manual_seed(0))
    found: Samples = {}
    for name in codecs:
        if of_momentum := name in OF_MOMENTUM:
            times = _of_momentum_ns(group, name, gradient)
        else:
            times = _of_gradients_ns(group, name, gradient[:elements])
        numel = 4 * elements if of_momentum else elements
        works = codec_works(describe_codec(name), numel, group.size(), of_momentum)
        moved_bytes = sum(work.bytes for work in works)
        for taken_ns in times:
            for work in works:
                found.setdefault(work, []).append(taken_ns * work.bytes // moved_bytes)
    return found


def _of_gradients_ns(group: dist.ProcessGroup, codec: str, gradient: torch.Tensor) -> list[int]:
    mean = GradientMean(GroupMean(group, codec_of(codec)))
    flat = torch.empty_like(gradient)

    def prepare(number: int) -> None:
        flat.copy_(gradient.roll(number))

    return _thread_ns(prepare, lambda: flat.copy_(mean(0, flat)))


def _of_momentum_ns(group: dist.ProcessGroup, codec: str, gradient: torch.Tensor) -> list[int]:
    parameter = nn.Parameter(torch.zeros_like(gradient))
    warmup = _WARM_UPS + _REPEATS
    optimizer = OneBitAdam([parameter], codec=codec, warmup_steps=warmup, group=group)
    optimizer.averages_itself = False

    def prepare(number: int) -> None:
        # The same gradient in every step would make all elements of what travels equal.
        parameter.grad = gradient.roll(number)

    whole_ns = statistics.median(_thread_ns(prepare, optimizer.step))
    return [max(1, ns - round(whole_ns)) for ns in _thread_ns(prepare, optimizer.step)]


def _thread_ns(prepare: Callable[[int], None], call: Callable[[], object]) -> list[int]:
    """Processor times of this thread in some calls, the first of which do not count."""
    taken = []
    for number in range(_WARM_UPS + _REPEATS):
        prepare(number)
        start_ns = time.thread_time_ns()
        call()
        taken.append(time.thread_time_ns() - start_ns)
    return taken[_WARM_UPS:]

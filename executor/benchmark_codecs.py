"""What codecs of gradients cost a rank's processor, by the keys that planning asks for.

A mean of gradients goes through each codec among the replicas. The processor time of its thread,
in which it waits for nobody, is divided among encoding, averaging and decoding as the memory that
each moves. Copies around the codec and the look for numbers that are not finite are in it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from claw_plan.executor.communication.group_mean import GroupMean
from claw_plan.executor.communication.hooks import GradientMean
from claw_plan.kernels.codec import codec_of
from claw_plan.planner.averaging import codec_works
from claw_plan.planner.supported import CODECS, OF_MOMENTUM
from claw_plan.profiles.codecs import describe_codec
from claw_plan.profiles.work import OpWork

OF_GRADIENTS = tuple(name for name in CODECS if name not in OF_MOMENTUM)

ELEMENTS = 1 << 20
"""More than a core's caches hold, as the buckets of a model that is worth compressing."""

_WARM_UPS = 1
_REPEATS = 3

Samples = dict[OpWork, list[int]]


def measure_codecs(
    group: dist.ProcessGroup, codecs: Sequence[str] = OF_GRADIENTS, elements: int = ELEMENTS
) -> Samples:
    """Times of the kernels of each codec on this rank. All ranks of the group call it together."""
    gradient = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    found: Samples = {}
    for name in codecs:
        mean = GradientMean(GroupMean(group, codec_of(name)))
        works = codec_works(describe_codec(name), elements, group.size(), of_momentum=False)
        moved_bytes = sum(work.bytes for work in works)
        for index in range(_WARM_UPS + _REPEATS):
            flat = gradient.clone()
            start_ns = time.thread_time_ns()
            flat.copy_(mean(0, flat))
            taken_ns = time.thread_time_ns() - start_ns
            if index >= _WARM_UPS:
                for work in works:
                    share_ns = taken_ns * work.bytes // moved_bytes
                    found.setdefault(work, []).append(share_ns)
    return found

"""`Trainer`: what the software that trains adds to the kernels and links of the hardware.

The same model, plan and GPUs take other times under other trainers: how well their element-wise
kernels are fused, how much of their traffic hides behind computation, what the host costs. Six
constants say so, fitted by `planner.trainer_fit` to published runs and kept, with where they come
from, in trainers.yaml. `torch` is what planning uses when there is no profile of the user's own.
"""

from __future__ import annotations

from dataclasses import dataclass

FITTED = (
    "memory_scale",
    "tp_scale",
    "dp_scale",
    "overlap_loss",
    "host_ns",
    "zero_rank_ns",
)
"""The constants that are fitted, in this order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A trainer's constants.

    `memory_scale` multiplies the time of kernels bound by memory, `tp_scale` that of collectives
    on the critical path (tensor, context and expert parallelism), `dp_scale` that of gathers and
    reductions of data parallelism. `overlap_loss` is the share of the shorter of two overlapping
    things (computation, traffic) that is lost. `host_ns` is what launching one kernel costs the
    host. `zero_rank_ns` is what each further rank of an optimizer-sharding group adds to a step.
    """

    name: str
    memory_scale: float = 1.0
    tp_scale: float = 1.0
    dp_scale: float = 1.0
    overlap_loss: float = 0.0
    host_ns: float = 0.0
    zero_rank_ns: float = 0.0
    source: str = ""


NEUTRAL = Trainer(name="neutral", source="plain sums of kernels and collectives")

"""`Trainer`: what the software that trains adds to the kernels and links of the hardware.

The same model, plan and GPUs take other times under other trainers: how well their element-wise
kernels are fused, how much of their traffic hides behind computation, what the host costs. Six
constants say so, fitted by `planner.trainer_fit` to published runs and kept, with where they come
from, in trainers.yaml. `torch` is what planning uses when there is no profile of the user's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

CONSTANTS = (
    "memory_scale",
    "attention_scale",
    "tp_scale",
    "dp_scale",
    "overlap_loss",
    "host_ns",
    "zero_rank_ns",
)
"""What can be fitted; of each trainer at most six are."""

SHARED = ("cp_scale", "ep_scale", "grouped_scale", "step_ns")
"""What is fitted once for all trainers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A trainer: fitted constants first, then facts of its software.

    `memory_scale` multiplies the time of kernels bound by memory, `attention_scale` that of fused
    attention, `tp_scale` that of tensor parallelism's collectives, `dp_scale` that of gathers and
    reductions of data parallelism. `overlap_loss` is the share of the shorter of two overlapping
    things (computation, traffic) that is lost. `host_ns` is what launching one kernel costs the
    host. `zero_rank_ns` is what each further rank of an optimizer-sharding group adds to a step.

    The same for all trainers: `cp_scale` and `ep_scale` multiply the time of collectives of
    context and expert parallelism (what of it is exposed), `grouped_scale` the time of experts'
    products, and `step_ns` is what a step costs beside kernels and traffic.

    `keeps_compute_copy`: parameters are stored in the compute precision with fp32 copies in the
    optimizer (Megatron), else in fp32 and cast by fully_shard. `gradient_bytes` of an element
    where gradients are accumulated and reduced. `fuses_accumulation`: products for weight
    gradients add to those sums themselves. `gathers_float8`: weights that are scaled by tensor
    are gathered in fp8 where products take them so. `reduces_beside` and `gathers_beside`:
    whether that traffic runs beside computation. `fused_attention`, `fused_loss`: as in
    `reference_model.Division`. `loss_in_place`: the loss overwrites its scores, of `score_bytes`
    each: 2 where its kernel reads the 16-bit logits and makes no fp32 copy.
    `recompute_stops_early`: torch's checkpoint stops at the last
    tensor that backward needs, Megatron's runs the whole block. `half_recompute` is the share of
    a block's forward that a selective policy of the trainer runs again, and `repeats_exchanges`
    says whether its collectives are in that part. `scatters_sends`:
    tensor-parallel ranks send a part of the hidden state each to the next stage, where it is put
    together again (Narayanan et al. 2021, section 4.1).

    `parent` is the trainer whose constants it takes where it has none, and to which its own are
    drawn when they are fitted, times `relative` where that says more. `fitted` names its own.
    """

    name: str
    memory_scale: float = 1.0
    attention_scale: float = 1.0
    tp_scale: float = 1.0
    dp_scale: float = 1.0
    overlap_loss: float = 0.0
    host_ns: float = 0.0
    zero_rank_ns: float = 0.0
    cp_scale: float = 1.0
    ep_scale: float = 1.0
    grouped_scale: float = 1.0
    step_ns: float = 0.0
    keeps_compute_copy: bool = False
    gradient_bytes: int = 4
    fuses_accumulation: bool = False
    gathers_float8: bool = False
    reduces_beside: bool = True
    gathers_beside: bool = True
    fused_attention: bool = True
    fused_loss: bool = True
    loss_in_place: bool = False
    score_bytes: int = 4
    recompute_stops_early: bool = True
    half_recompute: float = 0.45
    repeats_exchanges: bool = False
    scatters_sends: bool = False
    parent: str = ""
    relative: Mapping[str, float] = field(default_factory=dict)
    fitted: tuple[str, ...] = ()
    source: str = ""


NEUTRAL = Trainer(
    name="neutral",
    repeats_exchanges=True,
    source="plain sums of kernels and collectives, as the executor runs them",
)

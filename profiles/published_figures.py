"""What was measured in a published run: step time and memory in the project's units.

Sources print a step time, tokens or samples per second, or only a rate of floating-point
operations by a definition of their own; all become nanoseconds of one step. Definitions as the
sources give them: SC'21 (arXiv 2104.04473, equation 3), Korthikanti et al. (arXiv 2205.05198,
appendix A), MosaicML's benchmark page, NeMo's FLOPs callback and Megatron-LM's training loop.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from claw_plan.profiles.cluster import Device
from claw_plan.profiles.published_fields import Fields
from claw_plan.profiles.training_row import Dimensions
from claw_plan.profiles.units import GIB, ns_from_s

_KINDS = {
    "torchtitan": "reserved",
    "bigscience": "nvidia-smi",
    "internevo": "nvidia-smi",
    "alpa": "allocated",
}
"""How trainers that print memory read it. Of the rest, binary units are torch's maximum of
'allocated' bytes and decimal ones nvidia-smi's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A printed figure of memory of one device."""

    bytes: int
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the conversion of a rate to a time needs."""

    sizes: Dimensions
    device: Device
    count: int
    global_batch: int
    trainer: str = ""

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.global_batch * self.sizes.seq_len


def step_time_ns(measured: Fields, derived: Fields, run: Run) -> tuple[int | None, str]:
    """The time of a step, and a sentence where it had to be inferred; None where none is given."""
    for fields in (measured, derived):
        for key in ("step_time_s", "step_time_s_from_tflops"):
            if key in fields:
                return ns_from_s(fields.number(key)), ""
    for key, work in (
        ("tokens_per_s_per_gpu", run.tokens / run.count),
        ("tokens_per_s", run.tokens),
        ("samples_per_s", run.global_batch),
    ):
        if key in measured:
            return ns_from_s(work / measured.number(key)), ""
    if "tflops_per_gpu" in measured:
        rate = measured.number("tflops_per_gpu") * 1e12
    elif "mfu" in measured:
        peak = run.device.peak_flops_per_s
        rate = measured.number("mfu") * peak.get("bfloat16", peak.get("float16", 0.0))
    else:
        return None, ""
    flops, definition = _printed_flops(measured.text("flops_definition", ""), run)
    note = f"step time from a printed FLOP rate, counted as {definition}"
    return ns_from_s(flops / (rate * run.count)), note


def _printed_flops(text: str, run: Run) -> tuple[float, str]:
    """The FLOPs of a step as the source counts them, and in words."""
    words = text.lower()
    if not words and run.trainer == "megatron-2021":
        return _megatron_flops(run, passes=3), "Megatron's"
    if "sc21" in words or "x4" in words or "96*b" in words:
        return _megatron_flops(run, passes=4), "Megatron's with full recompute"
    if "72*b" in words or "x3" in words:
        return _megatron_flops(run, passes=3), "Megatron's"
    multiple = re.search(r"params\*([34])\*2\*tokens", words)
    scale = int(multiple[1]) / 3 if multiple else 1.0
    is_full = "non-causal" in words or "nemo" in words or "4*l*d*s^2" in words
    attention = attention_flops_per_token(run.sizes, causal=not is_full)
    per_token = 6 * active_parameters(run.sizes) + (0.0 if multiple else attention)
    name = "the whole attention matrix" if is_full else "the causal half of attention"
    return scale * per_token * run.tokens, f"6 N and {name}"


def _megatron_flops(run: Run, *, passes: int) -> float:
    """24 B s l h^2 per pass: forward, twice that backward, forward again with recompute.

    The head is never recomputed: its 6 B s h V stay as they are.
    """
    sizes = run.sizes
    hidden, seq = sizes.hidden, sizes.seq_len
    layers = 24.0 * passes * sizes.layers * hidden**2 * (1 + seq / (6 * hidden))
    return run.tokens * (layers + 6 * hidden * sizes.vocab)


def attention_flops_per_token(sizes: Dimensions, *, causal: bool = True) -> float:
    """Forward and backward of all layers' attention cores: 12 s times the heads' width."""
    width = float(sizes.heads * sizes.head_dim)
    if sizes.mla is not None:
        width = sizes.heads * (sizes.head_dim + sizes.mla.v_head_dim) / 2
    windowed = sizes.sliding_window_layers
    seen = (sizes.layers - windowed) * sizes.seq_len
    seen += windowed * min(sizes.sliding_window or sizes.seq_len, sizes.seq_len)
    return 12 * width * seen * (0.5 if causal and sizes.causal else 1.0)


def active_parameters(sizes: Dimensions) -> float:
    """Parameters that a token meets, with the output head and without the embedding's table."""
    matrices = 3 if sizes.activation == "swiglu" else 2
    plain = sizes.layers
    total = sizes.layers * _attention_parameters(sizes) + sizes.vocab * sizes.hidden
    if sizes.moe is not None:
        plain = sizes.moe.dense_layers
        width = sizes.moe.topk * sizes.moe.expert_ffn + sizes.moe.shared_ffn
        routed = sizes.layers - plain
        total += routed * sizes.hidden * (matrices * width + sizes.moe.experts)
    ffn = sizes.moe.dense_ffn if sizes.moe is not None else sizes.ffn
    return float(total + plain * matrices * sizes.hidden * ffn)


def _attention_parameters(sizes: Dimensions) -> int:
    hidden, heads = sizes.hidden, sizes.heads
    if sizes.mla is None:
        return hidden * sizes.head_dim * 2 * (heads + sizes.kv_heads)
    mla = sizes.mla
    query = mla.qk_nope_dim + mla.qk_rope_dim
    through = mla.q_lora_rank or hidden
    total = (hidden * mla.q_lora_rank) + through * heads * query
    total += hidden * (mla.kv_lora_rank + mla.qk_rope_dim)
    total += mla.kv_lora_rank * heads * (mla.qk_nope_dim + mla.v_head_dim)
    return total + heads * mla.v_head_dim * hidden


def memories(measured: Fields, trainer: str) -> list[Memory]:
    """All figures of memory that a row prints, whole ones first."""
    found = []
    if "memory_gib" in measured:
        kind = _KINDS.get(trainer, "allocated")
        found.append(Memory(bytes=round(measured.number("memory_gib") * GIB), kind=kind))
    elif "memory_gb" in measured:
        kind = _KINDS.get(trainer, "nvidia-smi")
        found.append(Memory(bytes=round(measured.number("memory_gb") * 1e9), kind=kind))
    for key, part in (
        ("memory_activations_gib", "activations"),
        ("memory_params_optimizer_gib", "states"),
    ):
        if key in measured:
            found.append(Memory(bytes=round(measured.number(key) * GIB), kind=part))
    return found


def out_of_memory(measured: Fields) -> bool | None:
    """Whether the run did not fit; None where the source says nothing of it."""
    if "oom" in measured:
        return measured.truth("oom", False)
    if "fits_80gib" in measured:
        return not measured.truth("fits_80gib", True)
    return None

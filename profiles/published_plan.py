"""The plan of a published run: its printed words and degrees to a `PublishedPlan`.

What the source leaves out is filled in with what the trainer does by itself or what published
runs of its kind did, and every such step is a sentence. Used by `published_training`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from itertools import pairwise

from claw_plan.profiles.published_fields import Fields
from claw_plan.profiles.training_row import Dimensions, PublishedPlan

_MEGATRON_PAPERS = ("megatron-2021", "megatron-2022")
_MEGATRON_CORE = ("megatron-core", "megatron-core-26", "megascale", "simumax")
_MEGATRON = (*_MEGATRON_CORE, *_MEGATRON_PAPERS)
_SEQUENCE_PARALLEL = ("torch", "torchtitan", *_MEGATRON_CORE)
"""Trainers whose tensor parallelism divides the sequence too where nothing is said of it; Llama
3's is that of Korthikanti et al. (arXiv 2407.21783, section 3.3.2)."""
_PYTORCH = ("torch", "torchtitan", "llm-foundry", "fms-fsdp", "maxtext")

MAX_CHUNKS = {"megascale": 6, "megatron-2021": 3, "megatron-2022": 3, "torchtitan": 2, "torch": 8}
"""Virtual stages taken at most where they are not printed, for trainers that interleave: 6 in
MegaScale's runs (arXiv 2402.15627), 3 in Megatron's of 175B and 530B parameters (arXiv
2205.05198, table 3), 2 torchtitan's default, one layer each in Llama 3's (arXiv 2407.21783)."""


@dataclass(slots=True)
class Assumptions:
    """Sentences about what was filled in."""

    texts: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Adds a sentence."""
        self.texts.append(text)


def plan_of(
    plan: Fields, sizes: Dimensions, trainer: str, notes: str, assumed: Assumptions
) -> PublishedPlan:
    """The plan as the planner can repeat it."""
    degrees = {key: plan.whole(key, 1) for key in ("dp", "tp", "pp", "cp", "ep")}
    global_batch = plan.whole("global_batch")
    micro_batch = _micro_batch(plan, degrees["dp"], degrees["pp"], global_batch, assumed)
    num_microbatches = max(1, global_batch // (degrees["dp"] * micro_batch))
    vpp = _vpp(plan, sizes.layers, degrees["pp"], trainer, assumed)
    vpp = _in_equal_rounds(plan, vpp, degrees["pp"], num_microbatches, assumed)
    sharding, shard_group, reshard = _sharding(plan, degrees, trainer, assumed)
    dtype, linear_dtype, scaling = precision_of(plan.text("precision", "bf16"))
    return PublishedPlan(
        **degrees,
        etp=_etp(plan, sizes),
        vpp=vpp,
        micro_batch=micro_batch,
        global_batch=global_batch,
        sharding=sharding,
        shard_group=shard_group,
        reshard=reshard,
        recompute=_recompute(plan, sizes, trainer, assumed),
        sequence_parallel=_sequence_parallel(plan, degrees["tp"], trainer, assumed),
        dtype=dtype,
        linear_dtype=linear_dtype,
        scaling=scaling,
        schedule="interleaved-1F1B" if vpp > 1 else "1F1B",
        compiled=plan.truth("compile", trainer == "maxtext"),
        cuda_graphs=plan.truth("cuda_graphs", "cuda graph" in notes.lower()),
        async_tp=plan.truth("async_tp", False),
        overlaps_tp="no tp comm overlap" not in notes.lower(),
        cp_kind="a2a" if "a2a" in plan.text("cp_comm", "").lower() else "ring",
        layers_per_stage=layers_per_stage(plan, sizes.layers, degrees["pp"], vpp),
    )


def _micro_batch(plan: Fields, dp: int, pp: int, global_batch: int, assumed: Assumptions) -> int:
    if "micro_batch" in plan:
        return plan.whole("micro_batch")
    if "grad_accum" in plan and global_batch % (dp * plan.whole("grad_accum")) == 0:
        return global_batch // (dp * plan.whole("grad_accum"))
    if "local_batch" in plan and plan.whole("local_batch") % pp == 0:
        # torchtitan splits a rank's batch into as many microbatches as there are stages.
        micro_batch = plan.whole("local_batch") // pp
        assumed.say(f"micro-batch not printed: local batch / pp = {micro_batch}")
        return micro_batch
    assumed.say("micro-batch not printed: 1")
    return 1


def _vpp(plan: Fields, layers: int, pp: int, trainer: str, assumed: Assumptions) -> int:
    if "vpp" in plan:
        return plan.whole("vpp") if pp > 1 else 1
    schedule = plan.text("schedule", "").lower()
    is_plain = bool(schedule) and "interleaved" not in schedule
    if pp == 1 or is_plain:
        return 1
    limit = MAX_CHUNKS.get(trainer, 2 if schedule else 1)
    per_rank = (layers if layers % pp == 0 else layers + 2) // pp
    vpp = max(n for n in range(1, limit + 1) if n == 1 or per_rank % n == 0)
    assumed.say(f"virtual stages not printed: {vpp}")
    return vpp


def _in_equal_rounds(
    plan: Fields, vpp: int, pp: int, num_microbatches: int, assumed: Assumptions
) -> int:
    """The virtual stages, or 1 where the microbatches do not go round them in equal rounds.

    Rounds as in PyTorch's ScheduleInterleaved1F1B; Megatron's last round may be shorter, which is
    closer to stages that do not interleave than a refusal is.
    """
    rounds = max(1, num_microbatches // pp)
    if vpp == 1 or num_microbatches % rounds == 0 or "pipeline_cuts" in plan:
        return vpp
    assumed.say(
        f"{num_microbatches} microbatches make no equal rounds over {pp} stages: simulated "
        f"without the {vpp} virtual stages"
    )
    return 1


def _etp(plan: Fields, sizes: Dimensions) -> int:
    """Tensor parallelism inside experts: as printed, else none, as recipes have it."""
    return plan.whole("etp") if "etp" in plan and sizes.moe is not None else 1


def _sharding(
    plan: Fields, degrees: dict[str, int], trainer: str, assumed: Assumptions
) -> tuple[str, int, bool]:
    """What is sharded, over how many ranks, and whether gathered weights are freed."""
    text = plan.text("sharding", "").lower()
    group = 0
    for key in ("fsdp_degree", "zero1_group"):
        if key in plan:
            group = plan.whole(key)
    match = re.search(r"groups? (?:of )?(\d+)|over (\d+) ranks|fsdp (\d+)", text)
    if match and not group:
        group = int(next(number for number in match.groups() if number))
    group = 0 if group >= degrees["dp"] * degrees["cp"] else group
    kind = _sharding_kind(text)
    if not kind:
        kind = _usual_sharding(degrees, trainer)
        if degrees["dp"] > 1:
            assumed.say(f"sharding not printed: {kind}")
    return kind, group, not (kind == "zero2" or "no reshard" in text)


def _sharding_kind(text: str) -> str:
    match = re.search(r"zero-?\s?([123])", text)
    if "shard_grad_op" in text or "no reshard" in text:
        return "zero2"
    is_fsdp = re.search(r"fsdp|hsdp|full.?shard|hybrid.?shard", text)
    if is_fsdp and not (match and match[1] == "2"):
        return "zero3"
    if match:
        return f"zero{match[1]}"
    if "distributed optimizer" in text:
        return "zero1"
    return "none" if "none" in text or "ddp" in text else ""


def _usual_sharding(degrees: dict[str, int], trainer: str) -> str:
    if trainer in _MEGATRON:
        return "zero1"
    is_plain = degrees["tp"] == 1 and degrees["pp"] == 1
    return "zero3" if trainer in _PYTORCH and is_plain else "none"


def _recompute(plan: Fields, sizes: Dimensions, trainer: str, assumed: Assumptions) -> str:
    text = plan.text("recompute", "").lower()
    if text.startswith("full") or text in ("true", "block", "uniform"):
        return "full"
    if text in ("none", "false", "no", "off"):
        return "none"
    if text:
        return _selective(text, trainer)
    kind = _usual_recompute(sizes, trainer)
    assumed.say(f"recompute not printed: {kind}")
    return kind


def _selective(text: str, trainer: str) -> str:
    if "core" in text:
        return "attention"
    if "moe" in text or "layernorm" in text:
        return "moe"
    is_megatron = trainer in _MEGATRON and "minimal" not in text
    return "attention" if is_megatron else "half"


def _usual_recompute(sizes: Dimensions, trainer: str) -> str:
    """What runs of the trainer do that say nothing of it.

    Megatron's recipes recompute a little of mixtures of experts and nothing of dense models;
    MaxText's and torchtitan's keep about half; Megatron of 2021 to 2023 the attention's core.
    """
    if trainer in (*_MEGATRON_PAPERS, "megascale"):
        return "attention"
    if trainer in ("maxtext", "torchtitan", "fms-fsdp"):
        return "half"
    if trainer == "amp":
        return "full"
    return "moe" if sizes.moe is not None and trainer in _MEGATRON else "none"


def _sequence_parallel(plan: Fields, tp: int, trainer: str, assumed: Assumptions) -> bool:
    if "sequence_parallel" in plan:
        return plan.truth("sequence_parallel", False)
    is_usual = tp > 1 and trainer in _SEQUENCE_PARALLEL
    if tp > 1:
        assumed.say(f"sequence parallelism not printed: {'on' if is_usual else 'off'}")
    return is_usual


def precision_of(text: str) -> tuple[str, str, str]:
    """'mxfp8' to what kernels compute in, what linear layers compute in, and how it is scaled."""
    words = text.lower()
    if "fp32" in words and "bf16" not in words and "fp8" not in words:
        return "float32", "", ""
    base = "float16" if "fp16" in words and "fp8" not in words else "bfloat16"
    if re.search(r"nvfp4|mxfp4|fp4", words):
        return base, "float4", "block"
    if "fp8" not in words and "float8" not in words:
        return base, "", ""
    if re.search(r"mxfp8|block|other quantisation granularity", words):
        return base, "float8", "block"
    return base, "float8", "row" if "row" in words else "tensor"


def layers_per_stage(plan: Fields, layers: int, pp: int, vpp: int) -> tuple[int, ...]:
    """Layers of the pp * vpp stages in the order of the model; () where all are equal."""
    stages = pp * vpp
    if pp == 1:
        return ()
    if "pipeline_cuts" in plan:
        return _from_cuts(plan, layers, stages)
    if layers % stages == 0:
        return ()
    if "pp_partition" not in plan and (layers + 2) % stages == 0 and layers > stages:
        # Embedding and head count as a layer each (Llama 3, Megatron's account_for_... options).
        inner = (layers + 2) // stages
        return (inner - 1, *[inner] * (stages - 2), inner - 1)
    base, rest = divmod(layers, stages)
    if "pp_partition" in plan:
        return tuple(base + (stage < rest) for stage in range(stages))
    # The head's stage, then the embedding's, have fewer layers.
    short = stages - rest
    order = [stage for near in range(stages) for stage in (stages - 1 - near, near)]
    ends = set(list(dict.fromkeys(order))[:short])
    return tuple(base + (stage not in ends) for stage in range(stages))


def _from_cuts(plan: Fields, layers: int, stages: int) -> tuple[int, ...]:
    """Layers between printed cuts, which count units before and behind the layers too.

    Megatron-DeepSpeed's pipeline of GPT-2 has three units before its layers (cast, embedding,
    transpose) and three behind (transpose, norm, head).
    """
    cuts = [int(number) for number in re.findall(r"\d+", str(plan.values["pipeline_cuts"]))]
    if len(cuts) != stages + 1 or cuts != sorted(cuts) or cuts[-1] - cuts[0] < layers:
        raise plan.fail("pipeline_cuts", f"must be {stages + 1} growing numbers; got {cuts}")
    front = (cuts[-1] - layers) // 2
    inside = [min(max(cut - front, 0), layers) for cut in cuts]
    return tuple(after - before for before, after in pairwise(inside))

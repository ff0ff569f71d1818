"""Sizes of a published model, and the small facts of a run that decide its time.

Used by `published_training`; what a source leaves out of the model's sizes is filled in here.
"""

from __future__ import annotations

import re

from claw_plan.profiles.published_fields import Fields, shown
from claw_plan.profiles.published_plan import Assumptions
from claw_plan.profiles.training_row import Dimensions, LatentAttention, MixtureOfExperts

USUAL_VOCAB = 51200
"""GPT-2's 50257 tokens padded to a multiple of 1024, as Megatron's papers do."""


def dimensions_of(model: Fields, assumed: Assumptions) -> Dimensions:
    """The sizes; raises InputError for one that is missing or impossible."""
    hidden, heads = model.whole("hidden"), model.whole("heads")
    layers = model.whole("layers")
    moe = _experts(model.part("moe")) if "moe" in model else None
    mla = _latent(model.part("mla")) if "mla" in model else None
    activation = _activation(model)
    is_gpt = activation == "gelu"
    return Dimensions(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=model.whole("kv_heads", heads),
        head_dim=_head_dim(model, hidden, heads, mla),
        ffn=_ffn(model, hidden, moe, assumed),
        vocab=_vocab(model, assumed),
        seq_len=model.whole("seq_len"),
        activation=activation,
        norm="rms" if activation == "swiglu" else "layer",
        tied=model.truth("tied_embeddings", is_gpt),
        causal=model.truth("causal", True),
        learned_positions=is_gpt,
        sliding_window=model.whole("sliding_window", 0, at_least=0),
        sliding_window_layers=_windowed(model, layers),
        moe=moe,
        mla=mla,
    )


def _activation(model: Fields) -> str:
    text = model.text("activation", "").lower()
    if "squared" in text or "relu2" in text:
        return "squared-relu"
    is_gated = model.truth("gated_mlp", "glu" in text or "silu" in text)
    return "swiglu" if is_gated else "gelu"


def _head_dim(model: Fields, hidden: int, heads: int, mla: LatentAttention | None) -> int:
    if mla is not None:
        return mla.qk_nope_dim + mla.qk_rope_dim
    if "head_dim" in model:
        return model.whole("head_dim")
    if hidden % heads:
        raise model.fail("heads", f"must divide hidden {hidden}; got {heads}")
    return hidden // heads


def _ffn(model: Fields, hidden: int, moe: MixtureOfExperts | None, assumed: Assumptions) -> int:
    if moe is not None:
        return moe.dense_ffn or (model.whole("ffn") if "ffn" in model else 0)
    if "ffn" not in model:
        assumed.say(f"width of the MLP not printed: 4 * hidden = {4 * hidden}")
    return model.whole("ffn", 4 * hidden)


def _vocab(model: Fields, assumed: Assumptions) -> int:
    if "vocab" not in model:
        assumed.say(f"vocabulary not printed: {USUAL_VOCAB}")
    return model.whole("vocab", USUAL_VOCAB)


def _windowed(model: Fields, layers: int) -> int:
    """How many layers see only a window: 'alternate' is every second one."""
    if "sliding_window" not in model:
        return 0
    value = model.values.get("sliding_window_layers")
    if isinstance(value, int):
        return min(layers, model.whole("sliding_window_layers", at_least=0))
    return layers // 2 if value is not None and "alternat" in shown(value).lower() else layers


def _experts(moe: Fields) -> MixtureOfExperts:
    experts, topk = moe.whole("experts"), moe.whole("topk")
    if topk > experts:
        raise moe.fail("topk", f"must be at most the {experts} experts; got {topk}")
    return MixtureOfExperts(
        experts=experts,
        topk=topk,
        expert_ffn=moe.whole("expert_ffn"),
        shared_ffn=moe.whole("shared_expert_ffn", 0, at_least=0),
        dense_layers=moe.whole("dense_layers", 0, at_least=0),
        dense_ffn=moe.whole("dense_ffn", 0, at_least=0),
    )


def _latent(mla: Fields) -> LatentAttention:
    return LatentAttention(
        q_lora_rank=mla.whole("q_lora_rank", 0, at_least=0),
        kv_lora_rank=mla.whole("kv_lora_rank"),
        qk_nope_dim=mla.whole("qk_nope_dim"),
        qk_rope_dim=mla.whole("qk_rope_dim"),
        v_head_dim=mla.whole("v_head_dim"),
    )


def facts_of(fields: Fields) -> dict[str, str]:
    """Texts of the source, and what its notes say that changes the time of a step.

    Keys besides 'title', 'table', 'where', 'notes', 'group', 'sharding', 'precision':
        release: Container of Megatron-Bridge, as '26.04'.
        states: 'bfloat16' where parameters, gradients and optimizer are kept in it.
        routing: 'balanced', 'capacity' or 'natural'.
        mtp: 'yes' with a multi-token-prediction layer.
        tp_overlap: 'none' where tensor-parallel traffic is said not to overlap.
        offload: 'activations' where they go to the host.
        loss: 'fused' where the cross entropy is one kernel.
        gradients: 'float32' where they accumulate in it.
        attention: As the model's entry says.
    """
    source = fields.part("source") if isinstance(fields.values.get("source"), dict) else None
    facts = {key: source.text(key, "") for key in ("title", "table", "where")} if source else {}
    plan, model = fields.part("plan"), fields.part("model")
    facts |= {"notes": fields.text("notes", ""), "group": fields.text("group", "")}
    facts |= {key: plan.text(key, "") for key in ("sharding", "precision", "routing")}
    facts["attention"] = model.text("attention", "")
    words = " ".join((facts["notes"], facts["precision"], facts["routing"])).lower()
    container = re.search(r"\b(\d\d\.\d\d(?:\.\d+)?) nemo container", words)
    facts["release"] = container[1] if container else ""
    facts["states"] = "bfloat16" if "pure" in words and "bf16" in words else ""
    facts["routing"] = _routing(words)
    facts["mtp"] = "yes" if re.search(r"with multi-token|w/ mtp|\bmtp on", words) else ""
    facts["tp_overlap"] = "none" if "no tp comm overlap" in words else ""
    facts["offload"] = "activations" if "activation offload" in words else ""
    facts["loss"] = "fused" if re.search(r"cross[ -]entropy fusion", words) else ""
    facts["gradients"] = "float32" if "fp32 grad accumulation" in words else ""
    return {key: text for key, text in facts.items() if text}


def _routing(words: str) -> str:
    if re.search(r"token ?drop|capacity factor", words):
        return "capacity"
    if re.search(r"force-?balanced", words):
        return "balanced"
    return "natural" if "natural routing" in words or "dropless" in words else ""

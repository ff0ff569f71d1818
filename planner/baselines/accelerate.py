"""Accelerate's YAML (`accelerate config`) to a `Setting`.

Meanings are those of accelerate's `commands/config/config_args.py` and of its FSDP, Megatron-LM
and DeepSpeed plugins. It names no batch but through those, so the microbatch mostly stays open.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from claw_plan.planner.baselines import deepspeed
from claw_plan.planner.baselines.setting import (
    NODE,
    PRECISIONS,
    REST,
    Draft,
    Setting,
    truth,
    whole,
)
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.files import Document, parse_yaml

FORMAT = "Accelerate"

STRATEGIES = {
    "1": "FULL_SHARD",
    "2": "SHARD_GRAD_OP",
    "3": "NO_SHARD",
    "4": "HYBRID_SHARD",
    "5": "HYBRID_SHARD_ZERO2",
}
"""`fsdp_sharding_strategy` may be the number of torch's ShardingStrategy."""

PARALLELISM = {"dp_replicate_size": "dp_replicate", "dp_shard_size": "dp_shard",
               "tp_size": "tp", "cp_size": "cp"}  # fmt: skip


def is_accelerate(text: str) -> bool:
    """Whether the text has the two keys that every such file has."""
    return "distributed_type:" in text and "num_processes:" in text


def read_accelerate(text: str, file: str) -> Setting:
    """Reads it; raises InputError for a kind of training that is none of torch's."""
    document = parse_yaml(text, Path(file))
    draft, values = Draft(FORMAT, file), document.data
    draft.knobs |= {"pp": 1, "cp": 1, "tp": 1, "sequence_parallel": False, "offload": "none"}
    draft.knobs |= {"schedule": "1F1B", "stages_per_rank": 1}
    draft.devices = whole(values.get("num_processes"), document.where(["num_processes"]))
    kind = str(values.get("distributed_type"))
    place = document.where(["distributed_type"])
    if kind in ("NO", "MULTI_GPU", "MULTI_CPU"):
        draft.knob("dp_replicate", REST, place)
        draft.knobs["dp_shard"] = 1
        draft.knobs["recompute"] = "none"
    elif kind == "FSDP":
        _fsdp(draft, document)
    elif kind == "DEEPSPEED":
        _deepspeed(draft, document)
    elif kind == "MEGATRON_LM":
        _megatron(draft, document)
    else:
        raise InputError(f"{place}: {kind!r} is not simulated; known are FSDP, DEEPSPEED, "
                         "MEGATRON_LM, MULTI_GPU and NO")  # fmt: skip
    _parallelism(draft, document)
    precision = str(values.get("mixed_precision", "no"))
    if precision in PRECISIONS:
        draft.train("precision", PRECISIONS[precision], document.where(["mixed_precision"]))
    elif precision != "None":
        where = document.where(["mixed_precision"])
        draft.leave_out(where, f"{precision} is reckoned in 16 bits")
    return draft.done()


def _part(document: Document, section: str) -> dict[str, Any]:
    part = document.data.get(section)
    return dict(part) if isinstance(part, dict) else {}


def _fsdp(draft: Draft, document: Document) -> None:
    section = "fsdp_config"
    values = _part(document, section)
    strategy_place = document.where([section, "fsdp_sharding_strategy"])
    given = str(values.get("fsdp_sharding_strategy", "FULL_SHARD"))
    strategy = STRATEGIES.get(given, given)
    if strategy not in STRATEGIES.values():
        raise InputError(
            f"{strategy_place} is one of {', '.join(STRATEGIES.values())}, but got {given!r}"
        )
    if "fsdp_reshard_after_forward" in values:
        strategy_place = document.where([section, "fsdp_reshard_after_forward"])
        given = str(values["fsdp_reshard_after_forward"])
        if given in STRATEGIES.values():  # the old strategies are also accepted there
            strategy = given
        elif not truth(given):
            strategy = "SHARD_GRAD_OP"
    hybrid = strategy.startswith("HYBRID")
    if strategy == "NO_SHARD":
        draft.knob("dp_replicate", REST, strategy_place)
        draft.knobs["dp_shard"] = 1
    else:
        draft.knob("dp_shard", NODE if hybrid else REST, strategy_place)
        draft.knob("dp_replicate", REST if hybrid else 1, strategy_place)
        zero = 2 if strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2") else 3
        draft.knob("zero", zero, strategy_place)
    place = document.where([section, "fsdp_activation_checkpointing"])
    recomputes = truth(values.get("fsdp_activation_checkpointing", False))
    draft.knob("recompute", "full" if recomputes else "none", place)
    if truth(values.get("fsdp_offload_params", False)):
        place = document.where([section, "fsdp_offload_params"])
        draft.knob("offload", "optimizer", place)
        draft.leave_out(place, "parameters on the host are reckoned as the optimizer alone there")


def _deepspeed(draft: Draft, document: Document) -> None:
    section = "deepspeed_config"
    values = _part(document, section)
    if "deepspeed_config_file" in values:
        place = document.where([section, "deepspeed_config_file"])
        raise InputError(f"{place}: the setting is in {values['deepspeed_config_file']!r}; "
                         "give that file as the baseline")  # fmt: skip
    stage = whole(values.get("zero_stage", 2), document.where([section, "zero_stage"]), least=0)
    place = document.where([section, "zero_stage"])
    draft.knob("dp_shard" if stage else "dp_replicate", REST, place)
    draft.knobs["dp_replicate" if stage else "dp_shard"] = 1
    if stage:
        draft.knob("zero", stage, place)
    device = str(values.get("offload_optimizer_device", "none")).lower()
    place = document.where([section, "offload_optimizer_device"])
    draft.knob("offload", "none" if device == "none" else "optimizer", place)
    steps = values.get("gradient_accumulation_steps")
    if steps not in (None, deepspeed.AUTO):
        place = document.where([section, "gradient_accumulation_steps"])
        draft.accumulation = whole(steps, place)
    _clip(draft, document, section, "gradient_clipping")


def _megatron(draft: Draft, document: Document) -> None:
    section, prefix = "megatron_lm_config", "megatron_lm_"
    values = _part(document, section)

    def number(key: str) -> int:
        return whole(values.get(prefix + key, 1), document.where([section, prefix + key]))

    for key, knob in (("tp_degree", "tp"), ("pp_degree", "pp")):
        draft.knob(knob, number(key), document.where([section, prefix + key]))
    sequence = truth(values.get(prefix + "sequence_parallelism", False))
    draft.knobs["sequence_parallel"] = sequence and draft.knobs["tp"] > 1
    sharded = truth(values.get(prefix + "use_distributed_optimizer", False))
    draft.knobs |= {"dp_shard": REST if sharded else 1, "dp_replicate": 1 if sharded else REST}
    if sharded:
        draft.knobs["zero"] = 1
    selective = truth(values.get(prefix + "recompute_activations", False))
    place = document.where([section, prefix + "recompute_activations"])
    draft.knob("recompute", "attention" if selective else "none", place)
    draft.accumulation = number("num_micro_batches")
    _clip(draft, document, section, prefix + "gradient_clipping")


def _clip(draft: Draft, document: Document, section: str, key: str) -> None:
    value = _part(document, section).get(key)
    if value not in (None, deepspeed.AUTO) and float(value) > 0:
        draft.train("clip_norm", float(value), document.where([section, key]))


def _parallelism(draft: Draft, document: Document) -> None:
    """`parallelism_config`, which wins over the plugins' own degrees."""
    section = "parallelism_config"
    for key, value in _part(document, section).items():
        name = key.removeprefix("parallelism_config_")
        place = document.where([section, key])
        if name in PARALLELISM:
            draft.knob(PARALLELISM[name], whole(value, place), place)

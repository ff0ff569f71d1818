"""DeepSpeed's JSON to a `Setting`.

Meanings are those of DeepSpeed's configuration page (deepspeed.ai/docs/config-json): `stage` is
ZeRO's, the batch is micro batch x accumulation x ranks. The word "auto" leaves a value to the
Trainer of transformers, so here it stays open.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from claw_plan.planner.baselines.setting import REST, Draft, Setting, truth, whole
from claw_plan.profiles.files import Document, parse_yaml

FORMAT = "DeepSpeed"

KEYS = (
    "zero_optimization",
    "train_micro_batch_size_per_gpu",
    "train_batch_size",
    "gradient_accumulation_steps",
)
AUTO = "auto"
NO_KNOB = {
    ("zero_optimization", "offload_param"): "parameters stay on the device",
    ("zero_optimization", "zero_quantized_weights"): "gathers are reckoned in 16 bits",
    ("zero_optimization", "zero_quantized_gradients"): "reductions are reckoned in 16 bits",
    ("sparse_attention",): "attention is the model's own",
    ("compression_training",): "parameters are not compressed",
    ("activation_checkpointing", "cpu_checkpointing"): "activations stay on the device",
    ("activation_checkpointing", "partition_activations"): "activations are not divided",
}


def is_deepspeed(text: str) -> bool:
    """Whether the text is JSON with one of DeepSpeed's keys."""
    return text.lstrip().startswith("{") and any(f'"{key}"' in text for key in KEYS)


def read_deepspeed(text: str, file: str) -> Setting:
    """Reads it; raises InputError for what is no JSON, or a value that is no number."""
    document = parse_yaml(text.replace("\t", " "), Path(file))
    draft = Draft(FORMAT, file)
    fill(draft, document)
    return draft.done()


def fill(draft: Draft, document: Document, under: tuple[str, ...] = ()) -> None:
    """Puts what a DeepSpeed configuration says into a draft; `under` is where it lies."""
    values = _Values(document, under, draft)
    draft.knobs |= {"pp": 1, "cp": 1, "tp": 1, "sequence_parallel": False}
    draft.knobs |= {"schedule": "1F1B", "stages_per_rank": 1}
    ways, place = values.find("tensor_parallel", "autotp_size")
    if ways is not None:
        draft.knob("tp", whole(ways, place, least=0) or 1, place)
    _sharding(draft, values)
    _batches(draft, values)
    for dtype, precision in (("bf16", "bfloat16"), ("fp16", "float16")):
        enabled, place = values.find(dtype, "enabled")
        if truth(enabled):
            draft.train("precision", precision, place)
    name, place = values.find("optimizer", "type")
    if name is not None and str(name).lower() in ("adam", "adamw", "sgd"):
        draft.train("optimizer", "sgd" if str(name).lower() == "sgd" else "adamw", place)
    elif name is not None:
        draft.leave_out(place, f"the optimizer {name} is reckoned as AdamW")
    norm, place = values.find("gradient_clipping")
    if norm is not None and float(norm) > 0:
        draft.train("clip_norm", float(norm), place)
    for keys, why in NO_KNOB.items():
        value, place = values.find(*keys)
        if value not in (None, False, {}) and not _is_off(value):
            draft.leave_out(place, why)


def _is_off(value: Any) -> bool:
    return isinstance(value, dict) and str(value.get("device", "none")).lower() == "none"


class _Values:
    """Values of the document by their keys; "auto" is told once and then absent."""

    def __init__(self, document: Document, under: tuple[str, ...], draft: Draft) -> None:
        self._document, self._under, self._draft = document, under, draft

    def find(self, *keys: str) -> tuple[Any, str]:
        path: Sequence[str] = (*self._under, *keys)
        value: Any = self._document.data
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        place = self._document.where(path)
        if value == AUTO:
            self._draft.leave_out(place, 'is "auto"; left open')
            return None, place
        return value, place


def _sharding(draft: Draft, values: _Values) -> None:
    stage, place = values.find("zero_optimization", "stage")
    stage = whole(stage, place, least=0) if stage is not None else 0
    draft.zero(stage, place)
    group, place = values.find("zero_optimization", "mics_shard_size")
    if group is not None and whole(group, place, least=-1) > 0 and stage == 3:
        draft.knob("dp_shard", int(group), place)
        draft.knob("dp_replicate", REST, place)
    second, place = values.find("zero_optimization", "zero_hpz_partition_size")
    if second is not None and whole(second, place) > 1 and stage == 3:
        draft.knob("reshard_ranks", int(second), place)
    device, place = values.find("zero_optimization", "offload_optimizer", "device")
    offloads = device is not None and str(device).lower() != "none"
    draft.knob("offload", "optimizer" if offloads else "none", place)
    if str(device).lower() == "nvme":
        draft.leave_out(place, "states on NVMe are reckoned in the host's memory")


def _batches(draft: Draft, values: _Values) -> None:
    size, place = values.find("train_micro_batch_size_per_gpu")
    if size is not None:
        draft.knob("microbatch_size", whole(size, place), place)
    batch, place = values.find("train_batch_size")
    if batch is not None:
        draft.train("global_batch", whole(batch, place), place)
    steps, place = values.find("gradient_accumulation_steps")
    if steps is not None:
        draft.accumulation = whole(steps, place)
        draft.places["accumulation"] = place

"""torchtitan's TOML to a `Setting`.

Meanings and defaults are those of torchtitan's `torchtitan/config/job_config.py`: FSDP over all
devices that are left, resharding after forward unless there is a pipeline, sequence parallelism
with every tensor parallelism, pipeline microbatches of one sample. Older files keep the degrees
under [training] and [experimental].
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any

from claw_plan.planner.baselines.setting import REST, Draft, Setting, truth, whole
from claw_plan.planner.schedules import SCHEDULES
from claw_plan.profiles.errors import InputError

FORMAT = "torchtitan"

SECTIONS = ("parallelism", "training", "experimental", "activation_checkpoint")
DEGREES = {
    "data_parallel_replicate_degree": ("dp_replicate", 1),
    "data_parallel_shard_degree": ("dp_shard", REST),
    "tensor_parallel_degree": ("tp", 1),
    "pipeline_parallel_degree": ("pp", 1),
    "context_parallel_degree": ("cp", 1),
    "expert_parallel_degree": ("ep", 1),
    "expert_tensor_parallel_degree": ("etp", 1),
}
NO_KNOB = {
    ("parallelism", "enable_async_tensor_parallel"): "tensor-parallel traffic is reckoned exposed",
    ("parallelism", "pipeline_parallel_split_points"): "stages are cut evenly",
    ("parallelism", "module_fqns_per_model_part"): "stages are cut evenly",
    ("experimental", "pipeline_parallel_split_points"): "stages are cut evenly",
    ("float8", "enable_fsdp_float8_all_gather"): "products and gathers are reckoned in 16 bits",
    ("compile", "enable"): "kernels are reckoned as the trainer of the profile fuses them",
    ("training", "compile"): "kernels are reckoned as the trainer of the profile fuses them",
}
CLIP_NORM = 1.0
"""`training.max_norm` where it is not given."""


class _Toml:
    """The values of the file and their lines."""

    def __init__(self, text: str, file: str) -> None:
        try:
            self.data: Mapping[str, Any] = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"{file}: not valid TOML: {error}") from None
        self.file, self._lines = file, _lines(text)

    def find(self, *places: tuple[str, str]) -> tuple[Any, str]:
        """The first of these (section, key) that stands there, and where; None if none does."""
        for section, key in places:
            value = self.data.get(section, {}).get(key)
            if value is not None:
                line = self._lines.get((section, key), 0)
                return value, f"{self.file}:{line}: {section}.{key}"
        return None, self.file


def _lines(text: str) -> dict[tuple[str, str], int]:
    section, found = "", {}
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*\[([\w.]+)\]", line):
            section = header[1]
        elif key := re.match(r"\s*([\w.]+)\s*=", line):
            found[section, key[1]] = number
    return found


def is_torchtitan(text: str) -> bool:
    """Whether the text has a section of torchtitan's and one of its keys."""
    sections = re.findall(r"(?m)^\s*\[(\w+)", text)
    keys = rf"(?m)^\s*(?:{'|'.join(DEGREES)}|local_batch_size|selective_ac_option|batch_size)\s*="
    return any(name in SECTIONS for name in sections) and bool(re.search(keys, text))


def read_torchtitan(text: str, file: str) -> Setting:
    """Reads it; raises InputError for what is no TOML or no number."""
    toml, draft = _Toml(text, file), Draft(FORMAT, file)
    for key, (knob, default) in DEGREES.items():
        value, place = toml.find(("parallelism", key), ("training", key), ("experimental", key))
        if knob in ("ep", "etp") and value is None:
            continue
        least = -1 if default == REST else 1
        draft.knob(knob, default if value is None else whole(value, place, least=least), place)
    value, place = toml.find(("training", "data_parallel_degree"))
    if value is not None:
        draft.knob("dp_shard", whole(value, place, least=-1), place)
    _loose_tensor(draft, toml)
    _schedule(draft, toml)
    _resharding(draft, toml)
    _recompute(draft, toml)
    _batches(draft, toml)
    for where, why in NO_KNOB.items():
        value, place = toml.find(where)
        if value not in (None, False, []):
            draft.leave_out(place, why)
    return draft.done()


def _loose_tensor(draft: Draft, toml: _Toml) -> None:
    value, place = toml.find(
        ("parallelism", "enable_sequence_parallel"), ("parallelism", "tensor_parallel_degree")
    )
    off = place.endswith("enable_sequence_parallel") and not truth(value)
    draft.knob("sequence_parallel", draft.knobs["tp"] > 1 and not off, place)
    draft.knobs["offload"] = "none"
    value, place = toml.find(("training", "enable_cpu_offload"))
    if truth(value):
        draft.knob("offload", "optimizer", place)
        draft.leave_out(place, "parameters on the host are reckoned as the optimizer alone there")


def _schedule(draft: Draft, toml: _Toml) -> None:
    names = ("pipeline_parallel_schedule",)
    value, place = toml.find(*(("parallelism", n) for n in names), ("experimental", names[0]))
    name = next(
        (known for known in SCHEDULES if known.lower() == str(value or "1F1B").lower()), ""
    )
    if draft.knobs["pp"] > 1 and not name:
        raise InputError(
            f"{place}: the schedule {value!r} is not simulated; known are {', '.join(SCHEDULES)}"
        )
    chosen = name if draft.knobs["pp"] > 1 else "1F1B"
    draft.knob("schedule", chosen, place)
    fewest = SCHEDULES[chosen].fewest_stages
    draft.knob("stages_per_rank", fewest, place)


def _resharding(draft: Draft, toml: _Toml) -> None:
    value, place = toml.find(("parallelism", "fsdp_reshard_after_forward"))
    kept = value == "never" or (value in (None, "default") and draft.knobs["pp"] > 1)
    if draft.knobs["pp"] > 1:
        draft.knob("zero", 1 if kept else 3, place)
    else:
        draft.knob("zero", 2 if kept else 3, place)


def _recompute(draft: Draft, toml: _Toml) -> None:
    value, place = toml.find(("activation_checkpoint", "mode"))
    mode = str(value or "selective")
    option, option_place = toml.find(("activation_checkpoint", "selective_ac_option"))
    if mode == "selective" and str(option or "2").isdecimal():
        every = str(option or "2")
        mode = "full" if every == "1" else "half"
        if every != "1":
            draft.leave_out(
                option_place, f"one block in {every} run again is reckoned as a half of each"
            )
    elif mode not in ("none", "full"):
        mode = "half"
    draft.knob("recompute", mode, place)


def _batches(draft: Draft, toml: _Toml) -> None:
    local, place = toml.find(("training", "local_batch_size"), ("training", "batch_size"))
    local = whole(local, place) if local is not None else 8
    size = local
    if draft.knobs["pp"] > 1:
        each, place = toml.find(("parallelism", "pipeline_parallel_microbatch_size"))
        size = whole(each, place) if each is not None else 1
        if local % size:
            raise InputError(f"{place}: microbatches of {size} do not divide a batch of {local}")
    draft.knob("microbatch_size", size, place)
    whole_batch, place = toml.find(("training", "global_batch_size"))
    if whole_batch is not None and whole_batch != -1:
        draft.train("global_batch", whole(whole_batch, place), place)
    else:
        draft.accumulation = local // size
    seq_len, place = toml.find(("training", "seq_len"))
    if seq_len is not None:
        draft.train("seq_len", whole(seq_len, place), place)
    name, place = toml.find(("optimizer", "name"))
    if name is not None and str(name).lower() not in ("adam", "adamw"):
        draft.leave_out(place, f"the optimizer {name} is reckoned as AdamW")
    draft.train("optimizer", "adamw", place)
    draft.train("precision", "bfloat16", draft.file)
    norm, place = toml.find(("training", "max_norm"))
    draft.train("clip_norm", float(norm) if norm is not None else CLIP_NORM, place)

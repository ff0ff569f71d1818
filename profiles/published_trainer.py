"""The software of a published run, from what its source says of itself, to a trainer's name.

`family` in a published file names who published; one publisher runs several programs (NVIDIA:
Megatron-Core and MaxText). `published_training` asks here, `trainers.yaml` has the constants.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

DEFAULT = "torch"
"""PyTorch with its own parallelism: for whoever is not known here."""

_FUSED_RELEASE = (26, 6)
"""Megatron-Bridge containers from 26.06 on run the same plans up to 1.7 times faster."""

_SOFTWARE = (
    (r"maxtext", "maxtext"),
    (r"torchtitan", "torchtitan"),
    (r"llm-foundry|mosaicml", "llm-foundry"),
    (r"internevo", "internevo"),
    (r"fms-fsdp|foundation-model-stack", "fms-fsdp"),
    (r"simumax", "simumax"),
    (r"neusight", "neusight"),
    (r"bigscience|megatron-deepspeed", "bigscience"),
    (r"homogeneous_results|dachengli1/amp|\bamp \(", "amp"),
    (r"\balpa\b", "alpa"),
    (r"vtrain", "vtrain"),
    (r"2104\.04473|narayanan", "megatron-2021"),
    (r"megatron|nemo|mlperf.*nvidia|dgx cloud", "megatron-core"),
)
"""Words of a source, the more particular first."""

_FAMILIES = {
    "mosaicml": "llm-foundry",
    "nvidia-megatron": "megatron-core",
    "nvidia-jax": "maxtext",
    "megatron-paper": "megatron-2021",
    "mlperf-amd": "megatron-core",
    "megascale": "megascale",
    "meta-llama3": "torch",
    "tinyllama": "torch",
}
_FAMILIES |= {
    name: name
    for name in (
        *("torchtitan", "bigscience", "internevo", "amp", "neusight", "simumax"),
        *("fms-fsdp", "alpa", "vtrain", "maxtext", "llm-foundry", "megatron-core"),
    )
}


def trainer_of(family: str, facts: Mapping[str, str]) -> str:
    """The trainer's name.

    Args:
        family: Who published.
        facts: Texts of the row: 'title', 'table', 'where', 'notes', 'group', 'sharding'.
    """
    sharding = facts.get("sharding", "").lower()
    if "deepspeed" in sharding and re.search(r"zero-?3", sharding):
        return "deepspeed-zero3"
    text = " | ".join(facts.get(key, "") for key in ("title", "table", "where", "group")).lower()
    if family == "megascale" or "megascale" in text:
        is_baseline = "baseline megatron" in facts.get("notes", "").lower()
        return "megatron-2021" if is_baseline else "megascale"
    if re.search(r"2205\.05198|korthikanti", text):
        return "megatron-2022"
    if "maxtext" in text:
        return "maxtext"
    known = _FAMILIES.get(family) or _by_words(text)
    if known == "megatron-core" and release_of(facts) >= _FUSED_RELEASE:
        return "megatron-core-26"
    return known


def _by_words(text: str) -> str:
    for pattern, name in _SOFTWARE:
        if re.search(pattern, text):
            return name
    return DEFAULT


def release_of(facts: Mapping[str, str]) -> tuple[int, int]:
    """Year and month of the container that a source names; (0, 0) where it names none."""
    for key in ("table", "notes"):
        match = re.search(r"\b(2\d)\.(\d\d)(?:\.\d+)?\b", facts.get(key, ""))
        if match and "container" in facts[key].lower():
            return int(match[1]), int(match[2])
    return 0, 0

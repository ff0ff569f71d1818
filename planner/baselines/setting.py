"""`Setting`: the split that a configuration file asks for, in our knobs, each with its place.

Some degrees follow from others: REST stands for all devices that are left, NODE for those of one
node. `planner.baseline` puts numbers in their place once the cluster is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from claw_plan.profiles.errors import InputError

REST, NODE = -1, -2
"""A degree that is 'all that is left' (as torchtitan writes it), or 'the devices of a node'."""

PRECISIONS = {"bf16": "bfloat16", "fp16": "float16", "no": "float32", "fp32": "float32"}
"""How configuration files name the precision of kernels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a file says. `knobs` are fields of `Candidate`; what it leaves open is not in them.

    `training` may hold global_batch, seq_len, precision, optimizer and clip_norm. `accumulation`
    is the number of microbatches a rank runs in a step, `devices` how many the file starts.
    `places` says for each knob and training value the line and key it came from, `left_out` is a
    sentence for each thing that has no knob here, or no value in the file.
    """

    format: str
    file: str
    knobs: Mapping[str, Any]
    training: Mapping[str, Any] = field(default_factory=dict)
    accumulation: int | None = None
    devices: int | None = None
    places: Mapping[str, str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """'Megatron-LM: train.sh'."""
        return f"{self.format}: {self.file}"

    def place(self, name: str) -> str:
        """Where a knob or training value stands; the file alone where it follows from others."""
        return self.places.get(name, self.file)


@dataclass(slots=True)
class Draft:
    """A `Setting` in the making."""

    format: str
    file: str
    knobs: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    accumulation: int | None = None
    devices: int | None = None

    def knob(self, name: str, value: Any, place: str) -> None:
        """Sets a knob."""
        self.knobs[name], self.places[name] = value, place

    def train(self, name: str, value: Any, place: str) -> None:
        """Sets what is trained."""
        self.training[name], self.places[name] = value, place

    def zero(self, stage: int, place: str) -> None:
        """All ranks that are left shard at this stage; at stage 0 they are replicas."""
        if stage:
            self.knob("zero", stage, place)
        axis, other = ("dp_shard", "dp_replicate") if stage else ("dp_replicate", "dp_shard")
        self.knob(axis, REST, place)
        self.knobs[other] = 1

    def leave_out(self, place: str, why: str) -> None:
        """Says what has no counterpart."""
        self.left_out.append(f"{place}: {why}")

    def done(self) -> Setting:
        """The setting."""
        return Setting(
            format=self.format,
            file=self.file,
            knobs=self.knobs,
            training=self.training,
            accumulation=self.accumulation,
            devices=self.devices,
            places=self.places,
            left_out=tuple(self.left_out),
        )


def whole(value: Any, place: str, *, least: int = 1) -> int:
    """A whole number of at least `least`; raises InputError that says where it stands."""
    try:
        number = int(str(value))
    except ValueError:
        raise InputError(f"{place} must be a whole number, but got {value!r}") from None
    if number < least:
        raise InputError(f"{place} must be at least {least}, but got {number}")
    return number


def truth(value: Any) -> bool:
    """Whether a switch is on; configuration files write true, 'True', 'yes' and 1."""
    return str(value).lower() in ("true", "yes", "1")

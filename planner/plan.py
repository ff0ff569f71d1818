"""`Plan`: all that the executor needs to train, and nothing to decide at run time.

`plan.yaml` is this class written down. It stands alone: the model file is named relative to it
with its hash, the cluster is inlined. `load_plan` reads one that a person may have edited and
says what is wrong with it; `save_plan` writes atomically.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.profiles.errors import near_matches
from claw_plan.profiles.files import read_yaml, validate, write_atomic

LINE_WIDTH = 100


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class PlanModel(_Part):
    """Where the model comes from. `file` is relative to the plan's folder."""

    file: str
    sha256: str
    build: str | None = None
    inputs: str | None = None
    parameters: int = Field(gt=0)


class PlanTraining(_Part):
    """What is trained: the same whatever the plan.

    `clip_norm` is the largest norm of all gradients together, None for any. In float16 the loss
    scale is doubled after `loss_scale_window` steps without overflow. A codec that carries AdamW's
    or LAMB's momentum begins after `codec_warmup_steps`; 15 to 25 % of all steps are usual. With
    zero_one the warm-up renews second moments ever more seldom, their distance doubling after as
    many as `variance_repeats`; afterwards that between meetings does, after `meeting_repeats`, up
    to the codec's longest.
    """

    global_batch: int = Field(gt=0)
    seq_len: int | None = None
    precision: Literal["float32", "bfloat16", "float16"]
    optimizer: Literal["adamw", "lamb", "sgd"]
    learning_rate: float = Field(default=3e-4, gt=0)
    clip_norm: float | None = Field(default=None, gt=0)
    loss_scale_window: int = Field(default=2000, gt=0)
    codec_warmup_steps: int = Field(default=300, gt=0)
    variance_repeats: int = Field(default=64, gt=0)
    meeting_repeats: int = Field(default=16, gt=0)
    seed: int = 0


class PlanMesh(_Part):
    """The device mesh; `devices` names node:device of rank 0, 1, …"""

    axes: dict[str, int]
    devices: list[str]


class PlanSchedule(_Part):
    """The pipeline schedule; `planner.schedules` expands it to actions."""

    name: str
    stages_per_rank: int = Field(gt=0)
    num_microbatches: int = Field(gt=0)


class PlanStage(_Part):
    """The modules of one pipeline stage; 'h[0:6]' stands for six blocks."""

    rank_group: int
    modules: list[str]


class PlanRank(_Part):
    """One rank of a pipeline over unlike devices: which devices, and how they divide it."""

    kind: str
    devices: list[str]
    candidate: dict[str, Any]


class PlanPipeline(_Part):
    """One pipeline of a plan on unlike devices; `batch` are its samples of every step."""

    batch: int = Field(gt=0)
    num_microbatches: int = Field(gt=0)
    ranks: list[PlanRank]
    stages: list[PlanStage]


class PlanTie(_Part):
    """One parameter under several names; its gradient is summed over the stages that hold it."""

    parameters: list[str]
    stages: list[int]
    reduce: Literal["sum"] = "sum"


class PlanTensorParallel(_Part):
    """How tensor parallelism treats modules; '[*]' stands for every block.

    'embedding' and 'head' are tables outside the blocks, `heads` the size of their vocabulary; for
    'experts' it is their inner size.
    `weight_dims` maps the module's own parameters to the dimension that is divided.
    """

    modules: str
    style: Literal["region", "colwise", "rowwise", "experts", "embedding", "head"]
    heads: int = 1
    parts: int = 1
    weight_dims: dict[str, int] = Field(default_factory=dict)


class PlanExpertParallel(_Part):
    """Modules whose experts are shared out over ep ranks; '[*]' stands for every block.

    `counted_by` are their attributes that say how many experts there are, `listed` is their list
    of one module for each, '' where all weights lie in common tensors.
    """

    modules: str
    experts: int = Field(gt=1)
    counted_by: list[str] = Field(default_factory=list)
    listed: str = ""


class PlanSharding(_Part):
    """Modules whose parameters are gathered together: one entry per FSDP group pattern."""

    modules: str
    zero: int


class PlanCommunication(_Part):
    """One kind of collective the plan uses."""

    axis: str
    op: str
    algorithm: str = "auto"
    codec: str = "none"


class PlanTraffic(_Part):
    """What each of these ranks ('0-3,6') gives to one kind of collective or message in a step.

    `axis` is that of the mesh, 'world' for all ranks, 'tied' for the stages that hold one
    parameter; `bytes` are those of the full buffers of all calls together.
    """

    ranks: str
    op: str
    axis: str
    group_size: int
    calls: int
    bytes: int


class PlanPrediction(_Part):
    """What the planner expects. `interval_ms` holds the step time with 90 % probability.

    `traffic` is that of every step from the third on; None where it is not predicted.
    """

    step_time_ms: float
    interval_ms: tuple[float, float]
    samples_per_s: float
    tokens_per_s: float | None
    mfu: float | None
    memory_gib: list[float]
    profile: str
    search: dict[str, Any]
    traffic: list[PlanTraffic] | None = None

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False)


class Plan(_Part):
    """A whole plan. `blocks` are the units between which stages may be cut, in order.

    `vocabulary_rows` is the order in which tensor parallelism divides the rows of tables and
    heads, as in 0-17,25; empty for their own. On unlike devices `mixed` says what each pipeline
    does; candidate, schedule and stages are then those of the first pipeline's first rank.
    """

    version: Literal[1]
    model: PlanModel
    training: PlanTraining
    cluster: dict[str, Any]
    candidate: dict[str, Any]
    mesh: PlanMesh
    schedule: PlanSchedule
    blocks: list[str]
    stages: list[PlanStage]
    tied: list[PlanTie] = Field(default_factory=list)
    tensor_parallel: list[PlanTensorParallel] = Field(default_factory=list)
    vocabulary_rows: str = ""
    expert_parallel: list[PlanExpertParallel] = Field(default_factory=list)
    sharding: list[PlanSharding] = Field(default_factory=list)
    communication: list[PlanCommunication] = Field(default_factory=list)
    mixed: list[PlanPipeline] = Field(default_factory=list)
    prediction: PlanPrediction | None = None

    def knobs(self) -> Candidate:
        """The candidate as a noun; raises PlanError for what a knob cannot be."""
        return candidate_from(self.candidate)


def candidate_mapping(candidate: Candidate) -> dict[str, Any]:
    """A candidate as it stands in plan.yaml."""
    values = {f.name: getattr(candidate, f.name) for f in dataclasses.fields(candidate)}
    return {
        name: list(value) if isinstance(value, tuple) else value for name, value in values.items()
    }


def candidate_from(values: Mapping[str, Any]) -> Candidate:
    """The candidate of plan.yaml; raises PlanError that names the key and what it takes."""
    neutral = candidate_mapping(Candidate())
    for name, value in values.items():
        if name not in neutral:
            raise PlanError(f"candidate.{name}: no such knob; {near_matches(name, neutral)}")
        if type(value) is not type(neutral[name]):
            kind = type(neutral[name]).__name__
            raise PlanError(f"candidate.{name} is of type {kind}, but got {value!r}")
    for name, kind in (("buckets", "parameters"), ("bucket_order", "buckets")):
        given = values.get(name, [])
        if any(type(number) is not int for number in given):
            raise PlanError(f"candidate.{name} are numbers of {kind}, but got {given!r}")
    known: dict[str, Any] = {**neutral, **values}
    for name, value in known.items():
        if isinstance(value, list):
            known[name] = tuple(value)
    return Candidate(**known)


def load_plan(path: Path) -> Plan:
    """Reads and validates a plan. Raises InputError with file, line and key."""
    return validate(read_yaml(path), Plan)


def save_plan(plan: Plan, path: Path) -> None:
    """Writes the plan atomically."""
    write_atomic(path, plan_text(plan))


def plan_text(plan: Plan) -> str:
    """The plan as YAML, keys in the order of the class, short things on one line."""
    data = plan.model_dump(mode="json", exclude_none=False)
    text: str = yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=LINE_WIDTH
    )
    return text


class _Dumper(yaml.SafeDumper):
    """Writes what is flat, and mappings that fit on a line, in flow style."""


def _is_flat(values: Iterable[object]) -> bool:
    return not any(isinstance(value, list | dict) for value in values)


def _represent_list(dumper: yaml.SafeDumper, data: list[object]) -> yaml.SequenceNode:
    flow = _is_flat(data)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=flow)


def _represent_dict(dumper: yaml.SafeDumper, data: dict[str, object]) -> yaml.MappingNode:
    flat = all(_is_flat(v if isinstance(v, list) else [v]) for v in data.values())
    flow = flat and len(str(data)) < LINE_WIDTH
    return dumper.represent_mapping("tag:yaml.org,2002:map", data, flow_style=flow)


_Dumper.add_representer(list, _represent_list)
_Dumper.add_representer(dict, _represent_dict)

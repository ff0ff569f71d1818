"""The grammar of cluster.yaml and of catalogue.yaml, as pydantic models.

Quantities are text with a unit in the file and integers or floats in base units here. What the
names in a file stand for is the business of `catalogue` and `cluster_file`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.units import (
    GIB,
    format_bytes,
    parse_bytes,
    parse_bytes_per_s,
    parse_flops_per_s,
    parse_ns,
)
from claw_plan.profiles.work import COLLECTIVE_OPS

MAX_DEVICE_BYTES = 1024 * GIB
"""No accelerator has a TiB of its own memory; a larger figure is a slip in the unit."""

MAX_BYTES_PER_S = 1e15
MAX_FLOPS_PER_S = 1e18
"""No memory or link moves a PB/s and no device computes an EFLOPS (B200: 8 TB/s, 2.25 PFLOPS)."""

MAX_HOST_BYTES = 64 * 1024 * GIB
_MAX_NODES = 100_000


def _quantity(
    parse: Callable[[object], float], limit: float = float("inf"), limit_text: str = ""
) -> BeforeValidator:
    def read(value: object) -> float:
        try:
            number = parse(value)
        except InputError as error:
            raise ValueError(str(error)) from None
        if number > limit:
            raise ValueError(f"{value} is implausible: more than {limit_text}; is the unit right?")
        if number < 1:
            raise ValueError(f"{value} is less than one unit")
        return number

    return BeforeValidator(read)


def _price(value: object) -> float:
    number, _, currency = str(value).partition(" ")
    try:
        price = float(number)
    except ValueError:
        price = -1.0
    if currency.strip() != "USD" or not 0 <= price < float("inf"):
        raise ValueError("a price is a number of USD, as in '32.77 USD'")
    return price


def _type_alone(value: object) -> object:
    """`intra: nvswitch4` is short for `intra: {type: nvswitch4}`."""
    return {"type": value} if isinstance(value, str) else value


DeviceBytes = Annotated[
    int, _quantity(parse_bytes, MAX_DEVICE_BYTES, format_bytes(MAX_DEVICE_BYTES))
]
HostBytes = Annotated[int, _quantity(parse_bytes, MAX_HOST_BYTES, format_bytes(MAX_HOST_BYTES))]
BytesPerS = Annotated[float, _quantity(parse_bytes_per_s, MAX_BYTES_PER_S, "1 PB/s")]
FlopsPerS = Annotated[float, _quantity(parse_flops_per_s, MAX_FLOPS_PER_S, "1000 PFLOPS")]
Ns = Annotated[int, _quantity(parse_ns)]
Count = Annotated[int, Field(strict=True, gt=0, le=_MAX_NODES)]
Dtype = Literal["float64", "float32", "bfloat16", "float16", "float8", "float4", "int8"]
Op = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send"]
assert set(Op.__args__) == set(COLLECTIVE_OPS)  # type: ignore[attr-defined]


class Part(BaseModel):
    """Refuses keys it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DeviceFigures(Part):
    """What is known of a device; what is None comes from elsewhere."""

    like: str | None = None
    kind: Literal["cuda", "rocm", "cpu"] | None = None
    memory: DeviceBytes | None = None
    bandwidth: BytesPerS | None = None
    peak: dict[Dtype, FlopsPerS] | None = Field(default=None, min_length=1)
    source: str | None = None
    achieved: dict[Dtype | Literal["attention"], FlopsPerS] | None = None
    achieved_source: str | None = None
    kernel_launch: Ns | None = None
    power_w: int | None = Field(default=None, strict=True, gt=0, le=100_000)
    processors: int | None = Field(default=None, strict=True, ge=0)
    gemm_ramp: int | None = Field(default=None, strict=True, ge=0)
    peer_to_peer: bool | None = None


class DevicesSpec(DeviceFigures):
    """`devices:` of a node. `cores` is for CPUs: how many compute at once."""

    type: str
    name: str | None = None
    count: Count | None = None
    cores: Count | None = None


class LinkFigures(Part):
    """What is known of a link."""

    like: str | None = None
    bandwidth: BytesPerS | None = None
    latency: Ns | None = None
    source: str | None = None
    achieved: dict[Op | Literal["other", "nvls"], BytesPerS] | None = None
    achieved_source: str | None = None
    startup: dict[Op, Ns] | None = None
    launch: Ns | None = None
    nvls: bool | None = None
    peer_links: int | None = Field(default=None, strict=True, ge=1)
    group_share: dict[int, float] | None = None


class LinkSpec(LinkFigures):
    """A link of a cluster file: one of the catalogue, or spelled out."""

    type: str | None = None
    name: str | None = None


class IntraSpec(LinkSpec):
    """`intra:` of a node. `pairs` are [device, device, link], the rest goes over `default`."""

    pairs: list[tuple[int, int, str]] = Field(default_factory=list)
    default: Annotated[LinkSpec, BeforeValidator(_type_alone)] | None = None


class NicsSpec(LinkSpec):
    """`nics:` of a node; `count` of them are shared by its devices."""

    count: Count = 1


class HostSpec(Part):
    """`host:` of a node."""

    memory: HostBytes
    cores: Count
    machine: str | None = None


class RackSpec(Part):
    """Up to `nodes` such nodes reach each other over `link` (catalogue only)."""

    nodes: Count
    link: str


class NodeSpec(Part):
    """One entry of `nodes:`, standing for `count` equal nodes.

    Entries with the same `node_profile` are planned for as one kind of device, by their slowest.
    """

    count: Count = 1
    type: str | None = None
    devices: DevicesSpec | None = None
    intra: Annotated[IntraSpec, BeforeValidator(_type_alone)] | None = None
    nics: Annotated[NicsSpec, BeforeValidator(_type_alone)] | None = None
    host: HostSpec | None = None
    rack: RackSpec | None = None
    source: str | None = None
    node_profile: Annotated[str, Field(min_length=1, max_length=60)] | None = None

    @model_validator(mode="after")
    def _type_or_devices(self) -> NodeSpec:
        if (self.type is None) == (self.devices is None):
            raise ValueError("a node has either a `type` of the catalogue or its own `devices`")
        return self


class NetworkSpec(Part):
    """What lies between the nodes."""

    type: Literal["single-switch", "fat-tree", "rails"] = "single-switch"
    oversubscription: float = Field(default=1.0, ge=1.0, le=1000.0, allow_inf_nan=False)
    latency: Ns | None = None


class FailuresSpec(Part):
    """How often a node fails."""

    node_mtbf: Ns


class PriceSpec(Part):
    """What a node costs."""

    per_node_hour: Annotated[float, BeforeValidator(_price)]


class TrainingSpec(Part):
    """Defaults of the settings of the command line."""

    global_batch: Count | None = None
    seq_len: Count | None = None
    precision: Literal["bf16", "fp16", "fp32", "bfloat16", "float16", "float32"] | None = None
    optimizer: Literal["adamw", "sgd"] | None = None


class ClusterSpec(Part):
    """A whole cluster file."""

    name: str | None = None
    source: str | None = None
    nodes: list[NodeSpec] = Field(min_length=1)
    network: NetworkSpec | None = None
    failures: FailuresSpec | None = None
    price: PriceSpec | None = None
    training: TrainingSpec | None = None


class CatalogueSpec(Part):
    """catalogue.yaml."""

    devices: dict[str, DeviceFigures]
    links: dict[str, LinkFigures]
    nodes: dict[str, NodeSpec]


def given(figures: Part) -> dict[str, Any]:
    """The fields that a file sets."""
    return {name: getattr(figures, name) for name in figures.model_fields_set}

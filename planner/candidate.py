"""`Candidate`: one way of splitting the training over the cluster; its fields are the knobs.

The space makes candidates, `lower` turns one into tasks, `--fix` pins fields of it by name, and
plan.yaml stores it under `candidate`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from claw_plan.planner.errors import PlanError
from claw_plan.profiles.errors import near_matches

MESH_ORDER = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
ZERO = (1, 2, 3)

CP_COMM_TYPES = ALL_GATHER, ALL_TO_ALL = "all_gather", "a2a"
"""How attention sees all positions: keys and values are gathered, or heads are exchanged; the
names are those of Megatron-LM's --cp-comm-type."""

BUCKET_BYTES = 25_000_000
"""DistributedDataParallel's own bucket, in MB rather than MiB."""

_LEAST = dict.fromkeys(
    ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "microbatch_size", "blocks_per_group"), 1
) | {"recompute_blocks": 0, "reshard_ranks": 0}
"""The least value of knobs that count something."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Candidate:
    """The knobs. Degrees multiply to the number of devices the plan uses.

    `zero` says what `dp_shard` shards: 3 parameters, freed after every pass; 2 gradients, reduced
    after every microbatch, while parameters stay gathered for the whole step; 1 the optimizer
    alone, so that gradients are reduced once a step, as under a pipeline they always are.
    `recompute` is 'none', or 'full': every block keeps its input only; 'attention', 'half' and
    'moe' run a part of a block again (`profiles.training_row.PublishedPlan`). `recompute_blocks`
    is how many blocks of each stage do so, its first ones; 0 for all.
    `reshard_ranks` is fully_shard's `reshard_after_forward` as a number: between forward and
    backward parameters lie in shards over so many neighbours on dp_shard, so that backward
    gathers among those; 0 leaves it to `zero`. `blocks_per_group` neighbouring blocks of a stage
    are gathered, freed and reduced together.
    `cp` ranks hold a part of every sequence and, as torchtitan has it, share the states that
    dp_shard cuts; attention gathers keys and values ('all_gather') or exchanges heads ('a2a'), by
    `cp_comm_type`.
    `ep` ranks, taken from cp, dp and tp, share experts, each expert divided over `etp` of them.
    `bucket_bytes` is the size of one gradient all-reduce where dp_replicate works without
    sharding; `buckets` says instead how many parameters each holds, from the model's last to its
    first. `bucket_order` are the numbers of these buckets in the order in which they leave; with
    it the optimizer steps bucket by bucket inside the next forward. `mesh_order` names the axes
    from the slowest to the fastest over the devices.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    zero: int = 3
    sequence_parallel: bool = False
    schedule: str = "1F1B"
    stages_per_rank: int = 1
    microbatch_size: int = 1
    recompute: str = "none"
    recompute_blocks: int = 0
    reshard_ranks: int = 0
    blocks_per_group: int = 1
    bucket_bytes: int = BUCKET_BYTES
    buckets: tuple[int, ...] = ()
    bucket_order: tuple[int, ...] = ()
    collective: str = "auto"
    codec: str = "none"
    offload: str = "none"
    cp_comm_type: str = "all_gather"
    mesh_order: tuple[str, ...] = MESH_ORDER

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                value = getattr(self, name)
                raise PlanError(f"{name} is at least {least}, but got {name}={value}")
        if any(size < 1 for size in self.buckets):
            raise PlanError(f"buckets hold at least 1 parameter each, but got {self.buckets=}")
        if self.zero not in ZERO:
            raise PlanError(f"zero is 1, 2 or 3, but got zero={self.zero}")
        if sorted(self.mesh_order) != sorted(MESH_ORDER):
            raise PlanError(f"mesh_order names {MESH_ORDER} once each, but got {self.mesh_order=}")

    @property
    def dp(self) -> int:
        """Number of data-parallel replicas and shards together."""
        return self.dp_replicate * self.dp_shard

    @property
    def shard_ranks(self) -> int:
        """Ranks over which dp_shard's states are cut: those of cp hold the same parameters."""
        return self.dp_shard * self.cp

    @property
    def reduces_in_backward(self) -> bool:
        """Whether replicas' gradients meet in buckets while the last backward runs."""
        return self.dp_replicate > 1 and self.shard_ranks == 1 and self.pp == 1

    @property
    def num_devices(self) -> int:
        """Devices the candidate uses."""
        return self.pp * self.dp * self.cp * self.tp

    def recomputed(self, num_blocks: int) -> int:
        """How many of a stage's blocks run again in backward.

        They are its first: their activations are kept longest, and they are made again when all
        others are gone, so that the peak does not hold them (Megatron-LM's method `block`).
        """
        if self.recompute == "none":
            return 0
        return min(num_blocks, self.recompute_blocks or num_blocks)

    def num_microbatches(self, global_batch: int) -> int:
        """Microbatches a rank runs in a step; raises PlanError if the batch does not divide."""
        count, rest = divmod(global_batch, self.dp * self.microbatch_size)
        if rest or not count:
            raise PlanError(
                f"a global batch of {global_batch} does not divide into dp={self.dp} x "
                f"microbatch_size={self.microbatch_size}"
            )
        return count

    def short(self) -> str:
        """The knobs that are not at their neutral value, in one line for people."""
        parts = [
            f"{name}={getattr(self, name)}"
            for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
            if getattr(self, name) > 1
        ] or ["one device"]
        if self.pp > 1:
            parts.append(self.schedule)
        if self.cp > 1:
            parts.append(f"cp by {self.cp_comm_type}")
        if self.shard_ranks > 1:
            parts.append(f"zero {self.zero}")
        if self.reshard_ranks:
            parts.append(f"resharded over {self.reshard_ranks}")
        if self.blocks_per_group > 1:
            parts.append(f"{self.blocks_per_group} blocks gathered together")
        if self.sequence_parallel:
            parts.append("sequence parallel")
        if self.recompute != "none":
            blocks = f" of {self.recompute_blocks} blocks" * bool(self.recompute_blocks)
            parts.append(f"recompute {self.recompute}{blocks}")
        parts.append(f"microbatch {self.microbatch_size}")
        if self.buckets:
            ordered = ", as the next forward needs them" * bool(self.bucket_order)
            parts.append(f"{len(self.buckets)} planned buckets{ordered}")
        elif self.bucket_bytes != BUCKET_BYTES:
            parts.append(f"buckets of {self.bucket_bytes / 1e6:g} MB")
        if self.collective != "auto":
            parts.append(f"all-reduce by {self.collective}")
        if self.codec != "none":
            parts.append(f"exchanged as {self.codec}")
        if self.mesh_order != MESH_ORDER:
            names = [name for name in self.mesh_order if getattr(self, name) > 1]
            parts.append(f"mesh {'/'.join(names) or 'of one'}")
        return ", ".join(parts)


def parse_fix(text: str) -> dict[str, Any]:
    """'tp=2,pp=2,schedule=1F1B' to the pinned fields; raises PlanError naming the bad one.

    A codec's parameters have commas of their own, as in codec=top_k:0.01,0.9: what follows them
    without "=" and is no knob's name belongs to the codec.
    """
    kinds = {field.name: field.type for field in fields(Candidate)}
    pinned: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals and name not in kinds and next(reversed(pinned), "") == "codec":
            pinned["codec"] += f",{name}"
            continue
        if not equals or not value:
            raise PlanError(f"--fix takes knob=value pairs, as in tp=2,pp=2; got {part!r}")
        if name in ("buckets", "bucket_order"):
            raise PlanError(
                f"--fix: {name} is made from the model and its times; pin bucket_bytes, or edit "
                f"candidate.{name} of a plan"
            )
        if name not in kinds:
            raise PlanError(f"--fix: there is no knob {name!r}; {near_matches(name, kinds)}")
        if name in pinned:
            raise PlanError(f"--fix names {name} twice; give it one value")
        kind = str(kinds[name])
        pinned[name] = (
            _parse_order(value) if name == "mesh_order" else _parse_value(name, value, kind)
        )
    return pinned


def _parse_order(text: str) -> tuple[str, ...]:
    """'dp_shard/pp/tp' to all axes; those left out are the slowest, in their usual order."""
    named = [part.strip() for part in text.split("/")]
    strange = next((name for name in named if name not in MESH_ORDER), None)
    if strange is not None or len(set(named)) < len(named):
        raise PlanError(
            f"--fix: mesh_order names axes once each, the slowest first, as in dp_shard/pp/tp, "
            f"of {', '.join(MESH_ORDER)}; got {text!r}"
        )
    return (*(name for name in MESH_ORDER if name not in named), *named)


def _parse_value(name: str, value: str, kind: str) -> Any:
    if kind == "bool":
        if value.lower() not in ("true", "false", "yes", "no"):
            raise PlanError(f"--fix: {name} is true or false, but got {value!r}")
        return value.lower() in ("true", "yes")
    if kind == "int":
        try:
            number = int(value)
        except ValueError:
            raise PlanError(f"--fix: {name} is a whole number, but got {value!r}") from None
        if number < (least := _LEAST.get(name, 1)):
            raise PlanError(f"--fix: {name} is at least {least}, but got {value!r}")
        return number
    return value

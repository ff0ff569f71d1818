"""How the members of a group average gradients: bucket sizes, algorithms and codecs that act.

Bucket sizes and algorithms act where whole replicas meet during backward. Codecs do wherever
gradients are averaged, if they are named: no candidate has one otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from claw_plan.planner.averaging_buckets import Bucket, buckets_of
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.memory_states import WHOLE, kind_of
from claw_plan.planner.placement import group_nodes
from claw_plan.planner.problem import Problem, Training
from claw_plan.planner.shards import local_numel
from claw_plan.planner.supported import (
    ALGORITHMS,
    CODECS,
    OF_MOMENTUM,
    nodes_refusal,
    refusal,
    sends_codes,
)
from claw_plan.profiles.codecs import LOW_RANK, ZERO_ONE, describe_codec

BUCKETS = (25_000_000, 5_000_000, 10_000_000, 50_000_000, 100_000_000)
"""Values of bucket_bytes, the usual one first; of those that make the same buckets, one."""

MOST_BY_MESSAGES = 128
"""Ranks among which an all-reduce by rounds of messages is offered: every pair that talks keeps a
connection, and what such rounds cost is known from few ranks only."""

_OF_GRADIENTS = ", ".join(n for n in CODECS if n not in (LOW_RANK, *OF_MOMENTUM))


def encodes_anywhere(problem: Problem, codec: str) -> bool:
    """Whether gradients may be such codes where shards or stages average them.

    Megatron's trainer knows of no codec; what one has not sent in float16 would be in units of a
    loss scale that moves.
    """
    copies = problem.trainer.keeps_compute_copy
    of_gradients = codec.partition(":")[0] not in (LOW_RANK, *OF_MOMENTUM)
    return of_gradients and not copies and problem.training.precision != "float16"


def training_refusal(training: Training, codec: str, collective: str = "auto") -> str:
    """Why the pair does not go with optimizer, precision or clipping; empty when it does.

    0/1 Adam is one, the momentum that a sparse codec keeps is SGD's, no rank has the mean gradient
    whose norm is clipped where momentum travels, and lower precisions than fp32 are sharded.
    """
    name, said = codec.partition(":")[0], f"codec={codec}"
    if training.precision == "float16" and codec != "none":
        return (
            f"{said}: what it has not sent would be in units of a loss scale that moves; use "
            "--precision bf16 or fp32"
        )
    if training.precision != "float32" and collective != "auto":
        return f"collective={collective} acts in fp32; use --precision fp32, or collective=auto"
    if training.precision != "float32" and name in (LOW_RANK, *OF_MOMENTUM):
        return f"{said} acts in fp32; use --precision fp32, or one of {_OF_GRADIENTS}"
    if name == ZERO_ONE and training.optimizer != "adamw":
        return f"{said} sends what AdamW moves; use --optimizer adamw, or codec=one_bit"
    if describe_codec(codec).momentum and training.optimizer != "sgd":
        return f"{said} keeps the momentum of sgd; use --optimizer sgd, or {name} without momentum"
    if training.clip_norm is not None and name in OF_MOMENTUM:
        return (
            f"{said}: no rank has the mean gradient whose norm is clipped; leave --clip-norm out, "
            f"or use one of {_OF_GRADIENTS}, {LOW_RANK}"
        )
    return ""


class AveragingChoices:
    """Values of `bucket_bytes`, `collective` and `codec` that agree with the pinned knobs."""

    def __init__(self, problem: Problem, fix: Mapping[str, Any], codecs: Sequence[str]) -> None:
        self._problem, self._fix = problem, fix
        self._codecs = tuple(dict.fromkeys((fix.get("codec", "none"), *codecs)))

    def of(
        self, pipelined: bool, tp: int, shard: int, replicas: int, offload: str
    ) -> list[dict[str, Any]]:
        """All there are where axes have these degrees."""
        base = Candidate(
            pp=1 + pipelined, tp=tp, dp_shard=shard, dp_replicate=replicas,
            offload=offload, bucket_bytes=self._fix.get("bucket_bytes", BUCKETS[0]),
            **self._of_graph(tp),
        )  # fmt: skip
        plain = {name: getattr(base, name) for name in ("bucket_bytes", "collective", "codec")}
        choices = [plain]
        if base.reduces_in_backward and kind_of(self._problem, base) == WHOLE:
            choices = [
                {"bucket_bytes": size, "collective": algorithm, "codec": codec}
                for size in self._bucket_sizes(base)
                for codec in self._codecs
                if not training_refusal(self._problem.training, codec)
                for algorithm in self._algorithms(base, codec)
            ]
        else:
            known = [codec for codec in self._codecs if encodes_anywhere(self._problem, codec)]
            choices = [plain | {"codec": codec} for codec in dict.fromkeys(("none", *known))]
        return [
            choice
            for choice in choices
            if all(self._pinned(name, value) for name, value in choice.items())
            and not refusal(replace(base, **choice))
        ]

    def _algorithms(self, base: Candidate, codec: str) -> list[str]:
        """The library's own, and those by messages where that pays on shaped links: between hosts.

        A rank should not talk to too many. NCCL chooses by tables of its own, which nobody has
        measured messages against; but it knows no codes that travel between nodes alone.
        """
        nodes = group_nodes(base, "dp_replicate", self._problem.devices_per_node)
        names = [self._fix.get("collective", base.collective)]
        if "collective" not in self._fix and base.dp_replicate <= MOST_BY_MESSAGES and nodes > 1:
            by_gloo = self._problem.cluster.backend == "gloo"
            names += ALGORITHMS if by_gloo else ["hierarchical"] * sends_codes(codec)
        coded = replace(base, codec=codec)
        return [one for one in names if not nodes_refusal(replace(coded, collective=one), nodes)]

    def _bucket_sizes(self, base: Candidate) -> list[int]:
        """Those that make unlike buckets of the model's gradients."""
        if "bucket_bytes" in self._fix:
            return [base.bucket_bytes]
        graph = self._problem.graph
        held = [(p, local_numel(p, base.tp)) for p in graph.parameters if p.trainable]
        units = range(len(graph.units))
        found: dict[tuple[Bucket, ...], int] = {}
        optimizer = self._problem.training.optimizer
        for size in BUCKETS:
            sized = replace(base, bucket_bytes=size)
            found.setdefault(buckets_of(held, units, sized, optimizer), size)
        return list(found.values())

    def _of_graph(self, tp: int) -> dict[str, Any]:
        """The knobs that say how ranks share sequences and experts."""
        graph = self._problem.graph
        shared = {"ep": graph.ep, "etp": tp} if graph.ep > 1 else {}
        return {"cp": graph.cp, "cp_comm_type": graph.cp_comm_type, **shared}

    def _pinned(self, knob: str, value: Any) -> bool:
        return knob not in self._fix or self._fix[knob] == value

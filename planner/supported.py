"""Which compositions the search may offer: those a test has proven to train like one process.

Planner and executor grow without waiting for each other: a value that the executor cannot run
yet, or that no test has proven, is refused here with its reason, and the report prints it.
"""

from __future__ import annotations

from dataclasses import dataclass
from sys import maxsize

from claw_plan.planner.candidate import MESH_ORDER, Candidate
from claw_plan.planner.schedules import SCHEDULES


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """Axes that may be larger than 1 together, the schedules they run under, and the proof."""

    axes: frozenset[str]
    schedules: frozenset[str]
    proven_by: str


def _composition(axes: str, proven_by: str) -> Composition:
    names = frozenset(axes.split())
    schedules = frozenset(SCHEDULES) if "pp" in names else frozenset({"1F1B"})
    return Composition(axes=names, schedules=schedules, proven_by=proven_by)


_PARITY = "tests/executor/test_parity.py"

COMPOSITIONS: tuple[Composition, ...] = (
    _composition("", f"{_PARITY}::one"),
    _composition("dp_replicate", f"{_PARITY}::dp_replicate"),
    _composition("dp_shard", f"{_PARITY}::dp_shard"),
    _composition("tp", f"{_PARITY}::tp"),
    _composition("pp", f"{_PARITY}::pp"),
    _composition("dp_replicate dp_shard", f"{_PARITY}::hsdp"),
    _composition("dp_replicate tp", f"{_PARITY}::dp_replicate_tp"),
    _composition("dp_shard tp", f"{_PARITY}::dp_shard_tp"),
    _composition("pp tp", f"{_PARITY}::pp_tp"),
    _composition("pp dp_shard", f"{_PARITY}::pp_dp_shard"),
    _composition("pp dp_replicate", f"{_PARITY}::pp_dp_replicate"),
    _composition("dp_replicate dp_shard tp", f"{_PARITY}::hsdp_tp"),
    _composition("pp dp_shard tp", f"{_PARITY}::pp_dp_shard_tp"),
    _composition("pp dp_replicate tp", f"{_PARITY}::pp_dp_replicate_tp"),
    _composition("pp dp_replicate dp_shard", f"{_PARITY}::pp_hsdp"),
)

_ONLY = {
    "cp": (1, "context parallelism is not executed yet"),
    "ep": (1, "expert parallelism is not executed yet"),
    "collective": ("auto", "the collective library chooses its own algorithm"),
    "codec": ("none", "no codec is executed yet"),
}
"""Knobs with one value so far, and why."""

ALGORITHMS: tuple[str, ...] = ()
"""Collective algorithms beside the library's own that the executor has."""

RECOMPUTE = ("none", "full", "half")
OFFLOAD = ("none", "optimizer")


def axes_of(candidate: Candidate) -> frozenset[str]:
    """The axes of a degree above 1."""
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    return frozenset(name for name in names if getattr(candidate, name) > 1)


def knob_refusal(candidate: Candidate) -> str:
    """Why a single knob's value may not be offered; empty when all may."""
    for name, (only, reason) in _ONLY.items():
        if getattr(candidate, name) != only:
            return f"{name}={getattr(candidate, name)}: {reason}; use {name}={only}"
    if candidate.schedule not in SCHEDULES:
        return f"schedule={candidate.schedule}: use one of {', '.join(SCHEDULES)}"
    fewest = SCHEDULES[candidate.schedule].fewest_stages
    most = SCHEDULES[candidate.schedule].most_stages
    if candidate.stages_per_rank < fewest or candidate.stages_per_rank > (most or maxsize):
        many = f"{fewest}" if most == fewest else f"{fewest} or more"
        return (
            f"stages_per_rank={candidate.stages_per_rank}: schedule={candidate.schedule} runs "
            f"with {many}"
        )
    if candidate.recompute not in RECOMPUTE:
        return f"recompute={candidate.recompute}: use one of {', '.join(RECOMPUTE)}"
    if candidate.offload not in OFFLOAD:
        return f"offload={candidate.offload}: use one of {', '.join(OFFLOAD)}"
    if candidate.zero == 2 and candidate.pp > 1:
        return "zero=2: under a pipeline gradients are reduced once a step; use zero=1"
    return ""


def _sharding_refusal(candidate: Candidate) -> str:
    """Why knobs that act together with others have nothing to act on; empty when they do."""
    blocks, ranks, shard = candidate.recompute_blocks, candidate.reshard_ranks, candidate.dp_shard
    if blocks and candidate.recompute == "none":
        return f"recompute_blocks={blocks}: nothing is run again; use recompute=full, or half"
    if candidate.blocks_per_group > 1 and shard == 1:
        return (
            f"blocks_per_group={candidate.blocks_per_group}: only shards are gathered; use "
            "dp_shard above 1"
        )
    if ranks and candidate.zero != 3:
        return (
            f"reshard_ranks={ranks}: with zero={candidate.zero} nothing is freed after forward; "
            "use zero=3"
        )
    if ranks and (ranks in (1, shard) or shard % ranks):
        return (
            f"reshard_ranks={ranks}: dp_shard={shard} must be a multiple of it, and larger "
            "(zero=2 keeps parameters whole, reshard_ranks=0 cuts them over all of dp_shard)"
        )
    return ""


def _order_refusal(candidate: Candidate) -> str:
    """Why the mesh's axes may not lie so; empty when they may."""
    order = candidate.mesh_order
    if order == MESH_ORDER:
        return ""
    if min(candidate.dp_replicate, candidate.dp_shard) > 1 and (
        order.index("dp_shard") < order.index("dp_replicate")
    ):
        return (
            "mesh_order: fully_shard takes a mesh of replicas of shards, so dp_replicate comes "
            "before dp_shard"
        )
    return ""


def refusal(candidate: Candidate) -> str:
    """Why the candidate may not be offered; empty when it may."""
    why = knob_refusal(candidate) or _sharding_refusal(candidate) or _order_refusal(candidate)
    if why:
        return why
    axes = axes_of(candidate)
    proven = next((known for known in COMPOSITIONS if known.axes == axes), None)
    if proven is None:
        return f"{' x '.join(sorted(axes))}: no test proves that this composition trains right"
    if candidate.schedule not in proven.schedules:
        return f"schedule={candidate.schedule} is not proven with {' x '.join(sorted(axes))}"
    return ""


def can_grow_from(candidate: Candidate) -> bool:
    """Whether some proven composition has at least the candidate's axes."""
    return any(known.axes >= axes_of(candidate) for known in COMPOSITIONS)


def proof(candidate: Candidate) -> str:
    """The test that proves the candidate's composition."""
    return next(known.proven_by for known in COMPOSITIONS if known.axes == axes_of(candidate))

"""Which compositions the search may offer: those a test has proven to train like one process.

Planner and executor grow without waiting for each other: a value that the executor cannot run
yet, or that no test has proven, is refused here with its reason, and the report prints it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from sys import maxsize

from claw_plan.planner.candidate import CP_COMM_TYPES, MESH_ORDER, Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.schedules import ASYNCHRONOUS, EVERY_SCHEDULE, SCHEDULES
from claw_plan.profiles.codecs import CODEC_NAMES, LOW_RANK, ZERO_ONE, CodecError, describe_codec
from claw_plan.profiles.coded_means import ACTING


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """Axes that may be larger than 1 together, the schedules they run under, and the proof."""

    axes: frozenset[str]
    schedules: frozenset[str]
    proven_by: str


def _composition(axes: str, proven_by: str) -> Composition:
    names = frozenset(axes.split())
    schedules = frozenset(SCHEDULES) if "pp" in names else frozenset({"1F1B"})
    if "pp" in names and names <= {"pp", "tp", "dp_replicate"}:
        schedules |= frozenset(ASYNCHRONOUS)
    return Composition(axes=names, schedules=schedules, proven_by=proven_by)


_PARITY = "tests/executor/test_parity.py"
_CONTEXT = "tests/executor/test_parity_context.py"
_EXPERTS = "tests/executor/test_parity_experts.py"

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
    _composition("cp", f"{_CONTEXT}::cp"),
    _composition("dp_shard cp", f"{_CONTEXT}::dp_shard_cp"),
    _composition("dp_replicate cp", f"{_CONTEXT}::dp_replicate_cp"),
    Composition(
        axes=frozenset({"pp", "cp"}),
        schedules=frozenset({"1F1B", "GPipe"}),
        proven_by=f"{_CONTEXT}::pp_cp",
    ),
    _composition("dp_replicate ep", f"{_EXPERTS}::dp_replicate_ep"),
    _composition("dp_shard ep", f"{_EXPERTS}::dp_shard_ep"),
    _composition("dp_replicate dp_shard ep", f"{_EXPERTS}::hsdp_ep"),
    _composition("dp_replicate tp ep", f"{_EXPERTS}::dp_replicate_tp_ep"),
    _composition("dp_shard tp ep", f"{_EXPERTS}::dp_shard_tp_ep"),
    _composition("pp dp_replicate ep", f"{_EXPERTS}::pp_dp_replicate_ep"),
    _composition("pp dp_shard ep", f"{_EXPERTS}::pp_dp_shard_ep"),
    _composition("pp dp_replicate tp ep", f"{_EXPERTS}::pp_dp_replicate_tp_ep"),
    _composition("pp dp_shard tp ep", f"{_EXPERTS}::pp_dp_shard_tp_ep"),
    _composition("pp dp_replicate dp_shard ep", f"{_EXPERTS}::pp_hsdp_ep"),
    _composition("dp_replicate dp_shard tp ep", f"{_EXPERTS}::hsdp_tp_ep"),
)

_EXCHANGE = "tests/executor/test_replica_exchange.py"

ALGORITHMS: Mapping[str, str] = dict.fromkeys(
    ("ring", "tree", "recursive_doubling", "halving_doubling", "hierarchical"),
    f"{_EXCHANGE}::test_another_algorithm_trains_like_the_librarys",
)
CODECS: Mapping[str, str] = (
    dict.fromkeys(
        ("one_bit", "top_k", "threshold"),
        f"{_EXCHANGE}::test_momentum_through_a_codec_trains_after_a_warm_up",
    )
    | dict.fromkeys(
        ("fp16", "fp8", "int8", "int4"),
        "tests/executor/test_replica_exchange_coded.py::test_gradients_are_within_the_codecs_bound",
    )
    | {
        LOW_RANK: f"{_EXCHANGE}::test_low_rank_gradients_are_those_of_power_sgd_after_a_warm_up",
        ZERO_ONE: f"{_EXCHANGE}::test_replicas_of_zero_one_adam_meet_as_planned",
    }
)
"""Algorithms beside the library's own, and codecs by name, each with the test that proves it."""

OF_MOMENTUM = ("one_bit", "top_k", "threshold", ZERO_ONE)
"""Codecs that carry AdamW's momentum rather than gradients: 1-bit Adam and its kin."""

RECOMPUTE = ("none", "full", "half")
OFFLOAD = ("none", "optimizer")


def sends_codes(codec: str) -> bool:
    """Whether codes are what travels: the factors of `low_rank` are numbers, which are added."""
    return codec.partition(":")[0] not in ("none", LOW_RANK)


def axes_of(candidate: Candidate) -> frozenset[str]:
    """The axes of a degree above 1."""
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    return frozenset(name for name in names if getattr(candidate, name) > 1)


def knob_refusal(candidate: Candidate) -> str:
    """Why a single knob's value may not be offered; empty when all may."""
    if candidate.schedule not in EVERY_SCHEDULE:
        return f"schedule={candidate.schedule}: use one of {', '.join(EVERY_SCHEDULE)}"
    fewest = EVERY_SCHEDULE[candidate.schedule].fewest_stages
    most = EVERY_SCHEDULE[candidate.schedule].most_stages
    if candidate.stages_per_rank < fewest or candidate.stages_per_rank > (most or maxsize):
        many = f"{fewest}" if most == fewest else f"{fewest} or more"
        return (
            f"stages_per_rank={candidate.stages_per_rank}: schedule={candidate.schedule} runs "
            f"with {many}"
        )
    if candidate.recompute not in RECOMPUTE:
        return f"recompute={candidate.recompute}: use one of {', '.join(RECOMPUTE)}"
    if candidate.collective != "auto" and candidate.collective not in ALGORITHMS:
        known = ", ".join(("auto", *ALGORITHMS))
        return f"collective={candidate.collective}: use one of {known}"
    if candidate.codec != "none":
        try:
            name = describe_codec(candidate.codec).name
        except CodecError as error:
            return f"codec={candidate.codec}: {error}"
        if name not in CODECS:
            known = ", ".join(("none", *CODECS))
            return f"codec={candidate.codec}: no test proves that it trains; use one of {known}"
    if candidate.offload not in OFFLOAD:
        return f"offload={candidate.offload}: use one of {', '.join(OFFLOAD)}"
    if candidate.zero == 2 and candidate.pp > 1:
        return "zero=2: under a pipeline gradients are reduced once a step; use zero=1"
    return ""


def _sharding_refusal(candidate: Candidate) -> str:
    """Why knobs that act together with others have nothing to act on; empty when they do."""
    blocks, ranks = candidate.recompute_blocks, candidate.reshard_ranks
    shard = candidate.shard_ranks
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


def shares_experts(dp: int, dp_shard: int, ep: int) -> bool:
    """Whether so many ranks of data parallelism can share experts, in runs of neighbours."""
    return dp % ep == 0 and (dp_shard % ep == 0 or ep % dp_shard == 0)


def _expert_refusal(candidate: Candidate) -> str:
    """Why experts may not be shared out so; empty when they may."""
    ep, shard = candidate.ep, candidate.dp_shard
    expected = candidate.tp if ep > 1 else 1
    if candidate.etp != expected:
        return (
            f"etp={candidate.etp}: ranks of tensor parallelism hold the same experts; leave etp "
            f"out, it is {expected} at ep={ep} and tp={candidate.tp}"
        )
    if ep == 1:
        return ""
    if not shares_experts(candidate.dp, shard, ep):
        return (
            f"ep={ep}: ranks that see different tokens share experts, so ep divides dp_shard, or "
            f"is a multiple of it that divides dp; here dp_replicate={candidate.dp_replicate}, "
            f"dp_shard={shard}"
        )
    plain = ("reshard_ranks", "blocks_per_group", "codec", "collective", "buckets", "mesh_order")
    for name in plain:
        value = getattr(candidate, name)
        if value != getattr(Candidate(), name):
            return f"ep={ep} with {name}={value} is not proven; leave {name} as it is by default"
    return ""


def _context_refusal(candidate: Candidate) -> str:
    """Why a sequence may not be divided so; empty when it may."""
    if candidate.cp_comm_type not in CP_COMM_TYPES:
        return f"cp_comm_type={candidate.cp_comm_type}: use one of {', '.join(CP_COMM_TYPES)}"
    if candidate.cp == 1:
        return ""
    order = candidate.mesh_order
    if order.index("cp") != order.index("dp_shard") + 1:
        return "mesh_order: cp shares the states of dp_shard and comes right after it"
    if candidate.reshard_ranks:
        return f"reshard_ranks={candidate.reshard_ranks} is not proven with cp; use 0"
    return ""


def averaging_refusal(candidate: Candidate) -> str:
    """Why gradients may not be averaged so; empty when they may."""
    codec, algorithm = candidate.codec, candidate.collective
    if codec == "none" and algorithm == "auto":
        return ""
    name = codec.partition(":")[0]
    acts_anywhere = sends_codes(codec) and name not in OF_MOMENTUM
    if sends_codes(codec) and algorithm != "auto" and (why := _pair_refusal(candidate)):
        return why
    if acts_anywhere and algorithm == "auto":
        return _gradient_codec_refusal(candidate)
    said = f"collective={algorithm}" if acts_anywhere or codec == "none" else f"codec={codec}"
    if not candidate.reduces_in_backward:
        return (
            f"{said}: it acts where whole replicas meet during backward; use dp_replicate above "
            "1, dp_shard=1 and pp=1"
        )
    if candidate.tp > 1 and name in (LOW_RANK, ZERO_ONE):
        return f"{said} is not proven with tensor parallelism; use tp=1"
    if candidate.tp > 1 and algorithm != "auto":
        return (
            f"collective={algorithm} is not proven with tensor parallelism; use tp=1, or "
            "collective=auto"
        )
    if name in OF_MOMENTUM and candidate.offload != "none":
        return f"{said}: the momentum that travels lies on the host; use offload=none"
    return ""


def _pair_refusal(candidate: Candidate) -> str:
    """Why codes may not travel by the algorithm: most would go as another one has them go."""
    algorithm, ranks = candidate.collective, candidate.dp_replicate
    said = f"codec={candidate.codec} with collective={algorithm}"
    if algorithm not in ACTING:
        known = ", ".join(("auto", *ACTING))
        return (
            f"{said}: codes go straight to who averages them and are gathered in parts, which "
            f"it has no way of its own for; use one of {known}"
        )
    if algorithm == "halving_doubling" and ranks & (ranks - 1):
        return (
            f"{said}: parts are gathered so among a power of two of ranks only, and "
            f"dp_replicate is {ranks}; use collective=ring"
        )
    return ""


def nodes_refusal(candidate: Candidate, nodes: int) -> str:
    """Why codes may not travel by the algorithm between replicas on so many nodes."""
    if not sends_codes(candidate.codec) or candidate.collective != "hierarchical":
        return ""
    said = f"codec={candidate.codec} with collective=hierarchical"
    if nodes == 1:
        return (
            f"{said}: gradients travel whole inside a node, and all replicas lie on one, so "
            "nothing would be encoded; use collective=ring"
        )
    if nodes == candidate.dp_replicate:
        return (
            f"{said}: each replica lies on a node of its own, where codes travel as by ring; use "
            "collective=ring"
        )
    return ""


def _gradient_codec_refusal(candidate: Candidate) -> str:
    """Of codecs that carry gradients, wherever these are averaged."""
    said = f"codec={candidate.codec}"
    if candidate.dp_replicate == 1 and candidate.shard_ranks == 1:
        return (
            f"{said}: it acts where gradients are averaged; use dp_replicate, dp_shard or cp "
            "above 1"
        )
    if candidate.schedule in ASYNCHRONOUS:
        return f"{said}: schedule={candidate.schedule} averages gradients of overlapping steps"
    if candidate.offload != "none" and not candidate.reduces_in_backward:
        return (
            f"{said} is not proven with offload={candidate.offload} where shards or stages "
            "average; use offload=none"
        )
    return ""


def codecs_named(text: str) -> tuple[str, ...]:
    """'one_bit,top_k:0.001' to codecs that may be offered; 'all' to every one with defaults.

    Others may follow 'all', as 'all,threshold:0.1'. Raises PlanError for what is no codec.
    """
    # Parameters have commas of their own: what names no codec belongs to the one before.
    named: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if part == "all":
            named += [name for name in CODECS if name != "threshold"]
        elif named and part.partition(":")[0] not in CODEC_NAMES:
            named[-1] += f",{part}"
        else:
            named.append(part)
    for codec in named:
        if why := knob_refusal(Candidate(codec=codec)):
            raise PlanError(f"--codecs {why}")
    return tuple(dict.fromkeys(named))


def order_refusal(candidate: Candidate) -> str:
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
    why = (
        knob_refusal(candidate)
        or _sharding_refusal(candidate)
        or _expert_refusal(candidate)
        or _context_refusal(candidate)
        or averaging_refusal(candidate)
        or order_refusal(candidate)
    )
    if why:
        return why
    axes = axes_of(candidate)
    proven = next((known for known in COMPOSITIONS if known.axes == axes), None)
    if proven is None:
        return f"{' x '.join(sorted(axes))}: no test proves that this composition trains right"
    if candidate.schedule in ASYNCHRONOUS and candidate.pp == 1:
        return f"schedule={candidate.schedule}: steps overlap in a pipeline; use pp above 1"
    if candidate.schedule in ASYNCHRONOUS and candidate.dp_shard > 1:
        return (
            f"schedule={candidate.schedule} keeps two versions of whole parameters, which "
            "fully_shard does not; use dp_shard=1, dp_replicate instead"
        )
    if candidate.schedule not in proven.schedules:
        return f"schedule={candidate.schedule} is not proven with {' x '.join(sorted(axes))}"
    return ""


def can_grow_from(candidate: Candidate) -> bool:
    """Whether some proven composition has at least the candidate's axes."""
    return any(known.axes >= axes_of(candidate) for known in COMPOSITIONS)


def proof(candidate: Candidate) -> str:
    """The test that proves the candidate's composition."""
    return next(known.proven_by for known in COMPOSITIONS if known.axes == axes_of(candidate))

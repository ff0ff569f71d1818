"""Every composition in `planner.supported` trains like one process; PROOFS are its proofs.

Each composition is tried in several ways (what is sharded, schedules, recompute, sequence
parallel, mixed-precision wrapping, clipping, offload, uneven stages) on the tiny GPT, and those of
two and four processes on untouched Hugging Face models. All plans of one size are verified in one
set of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest

from claw_plan.executor.verify import VerifyResult, verify_plans
from claw_plan.planner.supported import COMPOSITIONS

pytestmark = [pytest.mark.slow, pytest.mark.sweep]

FULL, HALF = {"recompute": "full"}, {"recompute": "half"}
GPIPE, UNEVEN = {"schedule": "GPipe"}, {"cuts": [1]}
SP, MIXED, PAIRS = {"sequence_parallel": True}, {"precision": "bfloat16"}, {"microbatch_size": 2}
ZERO1, ZERO2 = {"zero": 1}, {"zero": 2}
CLIP, OFFLOAD = {"clip_norm": 0.5}, {"offload": "optimizer"}
BUCKETS = {"bucket_bytes": 9000}
PLANNED = {"buckets": (11, 30, 1, 10)}
"""Numbers of parameters: the tiny GPT trains 52."""
TOGETHER, NEAR = {"blocks_per_group": 3}, {"dp_shard": 4, "reshard_ranks": 2}
FIRST = FULL | {"recompute_blocks": 1}
ROWS = {"vocabulary_rows": "30,3,0-2,31-60,4-29"}
"""Of the tiny GPT's 61 tokens: which ranks hold them is no order of theirs."""
HALF_FIRST = HALF | {"recompute_blocks": 3}


def _order(text: str) -> dict[str, Any]:
    """The axes of the mesh, the slowest first."""
    return {"mesh_order": tuple(text.split())}


PP_INSIDE = _order("dp_replicate dp_shard cp pp tp")
PP_BETWEEN = _order("dp_replicate pp dp_shard cp tp")
TP_OUTSIDE = _order("tp pp dp_replicate dp_shard cp")
TP_BETWEEN = _order("pp dp_replicate tp dp_shard cp")

PROOFS: dict[str, tuple[dict[str, int], list[dict[str, Any]]]] = {
    "one": ({}, [{}, FULL | PAIRS, MIXED, HALF | CLIP, OFFLOAD, MIXED | HALF | CLIP | OFFLOAD]),
    "dp_replicate": (
        {"dp_replicate": 2},
        [
            *({}, FULL | PAIRS, MIXED, BUCKETS, CLIP, HALF | CLIP | OFFLOAD),
            *(PLANNED, PLANNED | PAIRS | HALF | CLIP | OFFLOAD),
        ],
    ),
    "dp_shard": (
        {"dp_shard": 2},
        [
            *({}, ZERO2, ZERO1, FULL | ZERO2, MIXED | PAIRS | ZERO1, HALF | CLIP),
            *(OFFLOAD | CLIP | ZERO2, FULL | PAIRS | CLIP | ZERO1),
            *(TOGETHER, TOGETHER | ZERO1 | HALF_FIRST, TOGETHER | ZERO2 | FIRST | MIXED),
            *(NEAR, NEAR | MIXED | PAIRS, NEAR | TOGETHER | FIRST | CLIP | OFFLOAD),
        ],
    ),
    "tp": (
        {"tp": 2},
        [
            {},
            SP,
            SP | FULL | PAIRS,
            MIXED,
            HALF,
            SP | HALF | CLIP,
            OFFLOAD | CLIP,
            SP | FIRST,
            ROWS,
        ],
    ),
    "pp": (
        {"pp": 2},
        [
            *({}, GPIPE | FULL, UNEVEN | PAIRS, MIXED, CLIP, GPIPE | HALF | CLIP | OFFLOAD),
            *(FIRST, UNEVEN | HALF_FIRST),
        ],
    ),
    "hsdp": (
        {"dp_replicate": 2, "dp_shard": 2},
        [
            *({}, FULL | MIXED, ZERO2 | CLIP, ZERO1 | PAIRS, HALF | OFFLOAD | CLIP | ZERO1),
            *(TOGETHER, NEAR | FIRST),
        ],
    ),
    "dp_replicate_tp": (
        {"dp_replicate": 2, "tp": 2},
        [{}, SP | MIXED, SP | CLIP, HALF | OFFLOAD, SP | PLANNED | CLIP],
    ),
    "dp_shard_tp": (
        {"dp_shard": 2, "tp": 2},
        [
            *({}, SP | FULL, ZERO1 | CLIP, SP | ZERO2 | HALF | CLIP, MIXED | OFFLOAD),
            *(SP | TOGETHER, SP | NEAR, NEAR | MIXED | TOGETHER | FIRST),
            *(TP_BETWEEN | SP, TP_OUTSIDE | NEAR, ROWS | SP | ZERO1),
        ],
    ),
    "pp_tp": (
        {"pp": 2, "tp": 2},
        [{}, GPIPE | SP | FULL, SP | CLIP, HALF | OFFLOAD | CLIP, TP_OUTSIDE, ROWS | CLIP],
    ),
    "pp_dp_shard": (
        {"pp": 2, "dp_shard": 2},
        [
            *(ZERO1, GPIPE | FULL, {}, ZERO1 | CLIP, HALF | OFFLOAD | CLIP),
            *(TOGETHER, ZERO1 | TOGETHER | FIRST, NEAR, GPIPE | NEAR | TOGETHER | FIRST),
            *(PP_INSIDE, PP_INSIDE | NEAR),
        ],
    ),
    "pp_dp_replicate": (
        {"pp": 2, "dp_replicate": 2},
        [{}, GPIPE | BUCKETS, MIXED, CLIP, FULL | OFFLOAD | CLIP, PP_INSIDE],
    ),
    "hsdp_tp": (
        {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
        [SP, ZERO1 | CLIP, SP | ZERO2 | FULL | CLIP | OFFLOAD, TP_BETWEEN | SP],
    ),
    "pp_dp_shard_tp": (
        {"pp": 2, "dp_shard": 2, "tp": 2},
        [SP, GPIPE, SP | ZERO1 | CLIP | HALF, TP_OUTSIDE | ZERO1, PP_INSIDE | SP],
    ),
    "pp_dp_replicate_tp": ({"pp": 2, "dp_replicate": 2, "tp": 2}, [SP, CLIP | FULL | OFFLOAD]),
    "pp_hsdp": (
        {"pp": 2, "dp_replicate": 2, "dp_shard": 2},
        [{}, ZERO1 | CLIP | OFFLOAD, FULL | MIXED, PP_BETWEEN],
    ),
}
"""Name -> (degrees, the ways of running them)."""

CONFIG_PROOFS: dict[str, dict[str, Any]] = {
    "dp_shard": {"dp_shard": 2},
    "dp_replicate": {"dp_replicate": 2},
    "tp": {"tp": 2},
    "tp_sp": {"tp": 2} | SP,
    "pp": {"pp": 2},
    "pp_tp": {"pp": 2, "tp": 2} | SP,
    "pp_dp_shard": {"pp": 2, "dp_shard": 2} | FULL,
}
FAMILIES = ("llama", "gpt2")


def _plans(
    tiny_plan: Callable[..., Path], config_plan: Callable[..., Path]
) -> Iterator[tuple[str, int, Path]]:
    """(test, number of processes, plan file) of everything there is to verify."""
    for name, (degrees, ways) in PROOFS.items():
        for index, way in enumerate(ways):
            chosen = degrees | way
            size = prod(chosen[axis] for axis in degrees)
            yield name, size, tiny_plan(f"{name}-{index}", **chosen)
    for name, knobs in CONFIG_PROOFS.items():
        size = knobs.get("pp", 1) * knobs.get("tp", 1) * knobs.get("dp_shard", 1)
        size *= knobs.get("dp_replicate", 1)
        for family in FAMILIES:
            yield f"{family}-{name}", size, config_plan(family, name, **knobs)


Verified = dict[str, dict[str, VerifyResult]]


@pytest.fixture(scope="module")
def verified(tiny_plan: Callable[..., Path], config_plan: Callable[..., Path]) -> Verified:
    """The results of every plan, by test and plan name."""
    plans = list(_plans(tiny_plan, config_plan))
    results: Verified = {}
    for size in (1, 2, 4, 8):
        chosen = [(name, path) for name, wanted, path in plans if wanted == size]
        found = verify_plans([path for _, path in chosen], steps=5)
        for (name, path), result in zip(chosen, found, strict=True):
            results.setdefault(name, {})[path.stem] = result
    return results


def test_every_supported_composition_has_its_proof_here() -> None:
    assert {known.proven_by for known in COMPOSITIONS} == {
        f"tests/executor/test_parity.py::{name}" for name in PROOFS
    }
    for known in COMPOSITIONS:
        degrees, _ = PROOFS[known.proven_by.partition("::")[2]]
        assert frozenset(degrees) == known.axes


@pytest.mark.parametrize("name", PROOFS)
def test_trains_like_one_process(name: str, verified: Verified) -> None:
    wrong = {plan: result for plan, result in verified[name].items() if not result.ok}
    assert not wrong
    assert len(verified[name]) == len(PROOFS[name][1])


@pytest.mark.parametrize("name", [f"{f}-{proof}" for f in FAMILIES for proof in CONFIG_PROOFS])
def test_untouched_hugging_face_models_do_too(name: str, verified: Verified) -> None:
    assert not {plan: result for plan, result in verified[name].items() if not result.ok}

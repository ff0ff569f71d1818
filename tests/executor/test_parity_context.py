"""Ranks that share sequences train like one process: PROOFS prove every composition with cp.

Both ways of attention, in all that is sharded, recomputed, wrapped, clipped and offloaded; on the
tiny GPT, on untouched Hugging Face models, and on a model that writes its attention out. All plans
of one size are verified in one set of processes.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest

from claw_plan.executor.verify import VerifyResult, verify_plans
from claw_plan.planner.plan import load_plan
from claw_plan.planner.supported import COMPOSITIONS

pytestmark = pytest.mark.slow

HEADS = {"cp_comm_type": "a2a"}
FULL, HALF = {"recompute": "full"}, {"recompute": "half"}
MIXED, PAIRS = {"precision": "bfloat16"}, {"microbatch_size": 2}
ZERO1, ZERO2 = {"zero": 1}, {"zero": 2}
CLIP, OFFLOAD = {"clip_norm": 0.5}, {"offload": "optimizer"}
TOGETHER = {"blocks_per_group": 3}
PP_INSIDE = {"mesh_order": ("dp_replicate", "dp_shard", "cp", "pp", "tp")}

PROOFS: dict[str, tuple[dict[str, int], list[dict[str, Any]]]] = {
    "cp": (
        {"cp": 2},
        [
            *({}, ZERO2 | FULL | CLIP, HALF | MIXED | PAIRS, TOGETHER | OFFLOAD | CLIP),
            *(HEADS, HEADS | ZERO1 | FULL | PAIRS, HEADS | HALF | MIXED, PP_INSIDE),
        ],
    ),
    "dp_shard_cp": (
        {"dp_shard": 2, "cp": 2},
        [CLIP, ZERO1 | FULL, HEADS | MIXED | ZERO2, HEADS | TOGETHER | CLIP | OFFLOAD],
    ),
    "dp_replicate_cp": (
        {"dp_replicate": 2, "cp": 2},
        [ZERO1, CLIP | HALF | PAIRS, HEADS | MIXED, HEADS | OFFLOAD | CLIP | ZERO2],
    ),
    "pp_cp": (
        {"pp": 2, "cp": 2},
        [
            *({}, ZERO1 | {"schedule": "GPipe"} | FULL, HEADS | CLIP, HEADS | HALF | PAIRS),
            *({"cuts": [1]}, HEADS | MIXED | PP_INSIDE),
        ],
    ),
}
"""Name -> (degrees, the ways of running them)."""

FOUR: list[dict[str, Any]] = [{"cp": 4}, {"cp": 4} | HEADS]
CONFIGS: list[dict[str, Any]] = [{"cp": 2}, {"cp": 2} | HEADS, {"cp": 4} | FULL]
"""Of four ranks each has two chunks of two of the sixteen tokens; the GPT has four heads, and
Llama two of keys, of which each of four ranks needs one: exchanged, each would have a copy."""

FAMILIES = ("llama", "gpt2")
Verified = dict[str, dict[str, VerifyResult]]


@pytest.fixture(scope="module")
def verified(tiny_plan: Callable[..., Path], config_plan: Callable[..., Path]) -> Verified:
    """The results of every plan, by test and plan name."""
    plans: list[tuple[str, Path]] = []
    for name, (degrees, ways) in PROOFS.items():
        plans += [
            (name, tiny_plan(f"{name}-{i}", **(degrees | way))) for i, way in enumerate(ways)
        ]
    plans += [("four", tiny_plan(f"four-{i}", **way)) for i, way in enumerate(FOUR)]
    for family in FAMILIES:
        plans += [(family, config_plan(family, f"cp-{i}", **way)) for i, way in enumerate(CONFIGS)]
    results: Verified = {}
    for size in (2, 4):
        chosen = [(name, path) for name, path in plans if _size(path) == size]
        found = verify_plans([path for _, path in chosen], steps=3)
        for (name, path), result in zip(chosen, found, strict=True):
            results.setdefault(name, {})[path.stem] = result
    return results


def _size(path: Path) -> int:
    return load_plan(path).knobs().num_devices


def test_every_composition_with_cp_has_its_proof_here() -> None:
    with_cp = {known.proven_by: known.axes for known in COMPOSITIONS if "cp" in known.axes}
    assert with_cp == {
        f"tests/executor/test_parity_context.py::{name}": frozenset(degrees)
        for name, (degrees, _) in PROOFS.items()
    }
    assert all(prod(degrees.values()) in (2, 4) for degrees, _ in PROOFS.values())


@pytest.mark.parametrize("name", [*PROOFS, "four", *FAMILIES])
def test_trains_like_one_process(name: str, verified: Verified) -> None:
    assert not {plan: result for plan, result in verified[name].items() if not result.ok}
    # Rounding alone: gradients of one process to the last digits, whatever was divided.
    for result in verified[name].values():
        assert result.fp64_max_loss_diff < 1e-12
        assert result.fp64_max_param_diff < 1e-11

"""Every pipeline schedule, alone and beside other axes, trains like one process.

The model's ends are tied: on the V they meet on one rank, otherwise on two.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from claw_plan.executor.verify import VerifyResult, verify_plans
from claw_plan.planner.schedules import ASYNCHRONOUS, SCHEDULES
from claw_plan.planner.supported import COMPOSITIONS

pytestmark = [pytest.mark.slow, pytest.mark.sweep]

STEPS = 5

KINDS: dict[str, dict[str, Any]] = {
    "GPipe": {},
    "1F1B": {},
    "Interleaved1F1B": {"stages_per_rank": 2},
    "InterleavedZeroBubble": {"stages_per_rank": 2},
    "ZBVZeroBubble": {"stages_per_rank": 2},
    "DualPipeV": {"stages_per_rank": 2},
}

FULL, MIXED, ZERO1 = {"recompute": "full"}, {"precision": "bfloat16"}, {"zero": 1}
SP = {"sequence_parallel": True}
TOGETHER, FIRST = {"blocks_per_group": 2}, FULL | {"recompute_blocks": 1}
NEAR = {"dp_shard": 4, "reshard_ranks": 2, "microbatch_size": 1}

ALONE: dict[str, list[dict[str, Any]]] = {
    "GPipe": [{}, FULL],
    "1F1B": [{}, FULL, {"cuts": [2]}],
    "Interleaved1F1B": [{}, FULL, {"stages_per_rank": 4}, {"stages_per_rank": 3}],
    "InterleavedZeroBubble": [
        {}, FULL, {"stages_per_rank": 1}, {"stages_per_rank": 4}, {"stages_per_rank": 3},
        MIXED, {"stages_per_rank": 1, "cuts": [3]}, {"cuts": [2, 3, 7]},
    ],
    "ZBVZeroBubble": [{}, FULL, MIXED, {"cuts": [1, 2, 7]}],
    "DualPipeV": [{}, FULL, MIXED],
}  # fmt: skip
"""With pp=2: recompute, stages a rank, uneven stages, and fully_shard on one rank."""

BESIDE: dict[str, tuple[dict[str, int], list[dict[str, Any]]]] = {
    "pp4": ({"pp": 4}, [{}]),
    "pp_dp_shard": ({"pp": 2, "dp_shard": 2}, [{}, ZERO1, TOGETHER, TOGETHER | FIRST]),
    "pp_near": ({"pp": 2, "dp_shard": 4}, [NEAR, NEAR | TOGETHER]),
    "pp_dp_replicate": ({"pp": 2, "dp_replicate": 2}, [{}]),
    "pp_tp": ({"pp": 2, "tp": 2}, [SP]),
    "pp_dp_shard_tp": ({"pp": 2, "dp_shard": 2, "tp": 2}, [{}]),
    "pp_dp_replicate_tp": ({"pp": 2, "dp_replicate": 2, "tp": 2}, [SP]),
    "pp_hsdp": (
        {"pp": 2, "dp_replicate": 2, "dp_shard": 2},
        [ZERO1 | {"microbatch_size": 1}],
    ),
}
"""Product -> (degrees, the ways of running each schedule there)."""

Verified = dict[tuple[str, str], dict[str, VerifyResult]]


@pytest.fixture(scope="module")
def verified(deep_plan: Callable[..., Path]) -> Verified:
    """By product and schedule the results of every plan; one set of processes for a size."""
    wanted: dict[int, list[tuple[str, str, Path]]] = {2: [], 4: [], 8: []}
    for name, knobs in KINDS.items():
        products = {"pp2": ({"pp": 2}, ALONE[name]), **BESIDE}
        for product, (degrees, ways) in products.items():
            size = 1
            for degree in degrees.values():
                size *= degree
            for index, way in enumerate(ways):
                plan = deep_plan(
                    f"{product}-{name}-{index}", schedule=name, global_batch=16,
                    **({"microbatch_size": 2} | knobs | degrees | way),
                )  # fmt: skip
                wanted[size].append((product, name, plan))
    results: Verified = {}
    for plans in wanted.values():
        found = verify_plans([path for _, _, path in plans], steps=STEPS)
        for (product, name, path), result in zip(plans, found, strict=True):
            results.setdefault((product, name), {})[path.stem] = result
    return results


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("product", ["pp2", *BESIDE])
def test_trains_like_one_process(product: str, name: str, verified: Verified) -> None:
    results = verified[product, name]
    assert not {plan: result for plan, result in results.items() if not result.ok}
    assert len(results) == len(ALONE[name] if product == "pp2" else BESIDE[product][1])


def test_what_is_offered_is_what_is_proven_here() -> None:
    assert set(SCHEDULES) == set(KINDS)
    proven = {frozenset(degrees): set(KINDS) for degrees, _ in BESIDE.values()}
    for known in COMPOSITIONS:
        if "pp" in known.axes and known.axes in proven:
            assert known.schedules - set(ASYNCHRONOUS) == proven[known.axes]

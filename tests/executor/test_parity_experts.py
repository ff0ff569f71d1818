"""Plans whose ranks share experts train like one process; PROOFS are the proofs in `supported`.

On small mixtures with a load-balancing loss, whose experts lie in common tensors or in a list of
modules, on routers that send no token to some ranks, and on untouched mixtures of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from claw_plan.executor.verify import VerifyResult, verify_plans
from claw_plan.planner.plan import load_plan
from claw_plan.planner.supported import COMPOSITIONS

pytestmark = [pytest.mark.slow, pytest.mark.sweep]

MODEL = Path(__file__).with_name("expert_model.py")
BLOCKS = [f"blocks.{index}" for index in range(4)]

FULL, HALF = {"recompute": "full"}, {"recompute": "half"}
MIXED, PAIRS, CLIP = {"precision": "bfloat16"}, {"microbatch_size": 2}, {"clip_norm": 0.5}
OFFLOAD, LISTED, SKEWED = {"offload": "optimizer"}, {"kind": "Listed"}, {"skewed": True}
ZERO1, ZERO2 = {"zero": 1}, {"zero": 2}
GPIPE, INTERLEAVED, SPLIT, ZBV, DUAL = (
    {"schedule": name, "stages_per_rank": 1 if name == "GPipe" else 2}
    for name in (
        "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV",
    )
)  # fmt: skip
SP = {"sequence_parallel": True}

PROOFS: dict[str, tuple[dict[str, int], list[dict[str, Any]]]] = {
    "dp_replicate_ep": (
        {"dp_replicate": 2},
        [
            *({"ep": 2}, {"ep": 2} | LISTED | CLIP, {"ep": 2} | SKEWED | CLIP),
            *({"ep": 2} | SKEWED | LISTED, {"ep": 2} | FULL | PAIRS, {"ep": 2} | MIXED | OFFLOAD),
        ],
    ),
    "dp_shard_ep": (
        {"dp_shard": 2},
        [
            *({"ep": 2}, {"ep": 2} | LISTED | ZERO1, {"ep": 2} | SKEWED | ZERO2 | CLIP),
            *({"ep": 2} | SKEWED | LISTED | CLIP, {"ep": 2} | MIXED | HALF | OFFLOAD | CLIP),
        ],
    ),
    "hsdp_ep": (
        {"dp_replicate": 2, "dp_shard": 2},
        [
            *({"ep": 2} | CLIP, {"ep": 4} | LISTED, {"ep": 4} | SKEWED | MIXED | ZERO1),
            *({"dp_replicate": 1, "dp_shard": 4, "ep": 2} | CLIP, LISTED | {"ep": 2} | ZERO2),
            *({"dp_replicate": 4, "dp_shard": 1, "ep": 2} | CLIP | FULL,),
        ],
    ),
    "pp_dp_replicate_ep": (
        {"pp": 2, "dp_replicate": 2},
        [
            *({"ep": 2}, {"ep": 2} | LISTED | CLIP | FULL, {"ep": 2} | GPIPE | SKEWED),
            *({"ep": 2} | INTERLEAVED | CLIP, {"ep": 2} | ZBV | LISTED, {"ep": 2} | DUAL),
        ],
    ),
    "pp_dp_shard_ep": (
        {"pp": 2, "dp_shard": 2},
        [
            *({"ep": 2} | CLIP, {"ep": 2} | LISTED | ZERO1, {"ep": 2} | MIXED | HALF),
            *({"ep": 2} | SPLIT | ZERO1, {"ep": 2} | ZBV | CLIP | SKEWED, {"ep": 2} | DUAL),
        ],
    ),
}
"""Name -> (degrees, the ways of running them)."""

SMALL = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 16,
    "num_experts_per_tok": 2,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "qk_nope_head_dim": 8, "n_routed_experts": 8, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
CONFIGS: dict[str, tuple[dict[str, Any], int, int]] = {
    "mixtral": ({"num_local_experts": 4, "output_router_logits": True}, 4, 0),
    "qwen3_moe": ({"num_experts": 8, "moe_intermediate_size": 24, "head_dim": 8}, 8, 0),
    "deepseek_v2": (LATENT | {"topk_method": "greedy"}, 8, 1),
    "deepseek_v3": (LATENT, 8, 1),
}
"""Of a family of transformers: its own settings, experts, and blocks before the first of them."""

PIPED, BOTH = {"pp": 2, "dp_shard": 2}, {"tp": 2, "ep": 2}

CONFIG_PLANS: dict[str, list[dict[str, Any]]] = {
    "mixtral": [
        *({"dp_replicate": 2, "ep": 2}, {"dp_shard": 2, "ep": 2} | FULL),
        *({"tp": 2, "dp_replicate": 2, "ep": 2}, {"tp": 2, "dp_shard": 2, "ep": 2} | CLIP),
    ],
    "qwen3_moe": [
        {"tp": 2} | CLIP,
        *({"pp": 2, "dp_replicate": 2, "tp": 2, "ep": 2}, PIPED | {"tp": 2, "ep": 2} | CLIP),
        *(PIPED | {"dp_replicate": 2, "ep": 4}, {"dp_replicate": 2, "dp_shard": 2} | BOTH),
        *({"dp_shard": 2, "ep": 2}, {"dp_shard": 4, "ep": 2} | CLIP),
        *({"tp": 2, "dp_replicate": 2, "ep": 2} | SP | CLIP,),
        *({"tp": 2, "dp_shard": 2, "ep": 2} | SP | MIXED,),
    ],
    "deepseek_v2": [{"dp_shard": 2, "ep": 2} | ZERO1, {"dp_replicate": 4, "ep": 4}],
    "deepseek_v3": [
        {"dp_replicate": 2, "ep": 2} | CLIP,
        {"dp_replicate": 2, "dp_shard": 2, "ep": 4},
    ],
}
UNTOUCHED = {
    "dp_replicate_tp_ep": "mixtral-2",
    "dp_shard_tp_ep": "mixtral-3",
    "pp_dp_replicate_tp_ep": "qwen3_moe-1",
    "pp_dp_shard_tp_ep": "qwen3_moe-2",
    "pp_hsdp_ep": "qwen3_moe-3",
    "hsdp_tp_ep": "qwen3_moe-4",
}
"""Other compositions, and the plan of CONFIG_PLANS that proves each."""

AXES = ("pp", "dp_replicate", "dp_shard", "tp", "ep")

Verified = dict[str, dict[str, VerifyResult]]


def _own(write_any: Callable[..., Path], folder: Path) -> Iterator[tuple[str, Path]]:
    model = folder / MODEL.name
    model.write_text(MODEL.read_text())
    for name, (degrees, ways) in PROOFS.items():
        for index, way in enumerate(ways):
            chosen = {**degrees, **way}
            kind, skewed = chosen.pop("kind", "Fused"), chosen.pop("skewed", False)
            rule = {"counted_by": ["number"]} if kind == "Fused" else {"listed": "each"}
            yield name, write_any(
                model, f"{name}-{index}", BLOCKS, build=f"Mixture({kind}, skewed={skewed})",
                inputs="ids=int64[B,12]<61",
                experts=[{"modules": "blocks[*].experts", "experts": 4} | rule], **chosen,
            )  # fmt: skip


def _untouched(model_plan: Callable[..., Path], folder: Path) -> Iterator[tuple[str, Path]]:
    blocks = [f"model.layers.{index}" for index in range(4)]
    for family, (own, experts, dense) in CONFIGS.items():
        name = {"qwen3_moe": "Qwen3Moe"}.get(family, family.title().replace("_", ""))
        config = SMALL | own | {"model_type": family, "architectures": [f"{name}ForCausalLM"]}
        model = folder / f"{family}.json"
        model.write_text(json.dumps(config))
        for index, knobs in enumerate(CONFIG_PLANS[family]):
            shared = [
                {"modules": f"{block}.mlp.experts", "experts": experts,
                 "counted_by": ["num_experts"]}
                for block in blocks[dense:]
            ]  # fmt: skip
            etp = {"etp": knobs.get("tp", 1) if "ep" in knobs else 1}
            way = {} if "tp" in knobs else {"rules": []}
            plan = f"{family}-{index}"
            yield plan, model_plan(model, blocks, plan, experts=shared, **knobs, **etp, **way)


@pytest.fixture(scope="module")
def verified(
    write_any: Callable[..., Path],
    model_plan: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Verified:
    """The results of every plan, by test and plan name; plans of one size run together."""
    folder = tmp_path_factory.mktemp("experts")
    plans = [*_own(write_any, folder), *_untouched(model_plan, folder)]
    results: Verified = {}
    for size in (2, 4, 8):
        chosen = [(name, path) for name, path in plans if _size(path) == size]
        found = verify_plans([path for _, path in chosen], steps=3)
        for (name, path), result in zip(chosen, found, strict=True):
            results.setdefault(name, {})[path.stem] = result
    return results


def _size(path: Path) -> int:
    return load_plan(path).knobs().num_devices


def test_every_composition_with_ep_has_its_proof_here() -> None:
    proven = {known.proven_by for known in COMPOSITIONS if "ep" in known.axes}
    names = [*PROOFS, *UNTOUCHED]
    assert proven == {f"tests/executor/test_parity_experts.py::{name}" for name in names}
    for known in COMPOSITIONS:
        name = known.proven_by.partition("::")[2]
        if name in PROOFS:
            assert frozenset(PROOFS[name][0]) | {"ep"} == known.axes
        elif name in UNTOUCHED:
            family, _, index = UNTOUCHED[name].partition("-")
            knobs = CONFIG_PLANS[family][int(index)]
            assert {axis for axis in AXES if knobs.get(axis, 1) > 1} == known.axes


@pytest.mark.parametrize("name", PROOFS)
def test_trains_like_one_process(name: str, verified: Verified) -> None:
    wrong = {plan: result for plan, result in verified[name].items() if not result.ok}
    assert not wrong
    assert len(verified[name]) == len(PROOFS[name][1])


@pytest.mark.parametrize(
    "name", [f"{family}-{i}" for family, plans in CONFIG_PLANS.items() for i in range(len(plans))]
)
def test_untouched_mixtures_do_too(name: str, verified: Verified) -> None:
    assert not {plan: result for plan, result in verified[name].items() if not result.ok}

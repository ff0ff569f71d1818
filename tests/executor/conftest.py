"""Plans written by hand for small models, so that the executor is tested without the planner."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.plan import Plan, candidate_mapping, save_plan

GPT_RULES = [
    {"modules": "transformer.h[*].attn", "style": "region", "heads": 1},
    {"modules": "transformer.h[*].attn.c_attn", "style": "colwise", "heads": 4, "parts": 3},
]


def write_plan(
    folder: Path,
    name: str,
    model: Path,
    blocks: list[str],
    *,
    global_batch: int = 8,
    seq_len: int | None = None,
    precision: str = "float32",
    build: str | None = None,
    rules: list[dict[str, Any]] | None = None,
    cuts: list[int] | None = None,
    **knobs: Any,
) -> Path:
    """A plan with the given knobs over `blocks`, cut evenly unless `cuts` says where."""
    candidate = Candidate(**knobs)
    pp = candidate.pp
    edges = [0, *(cuts or [len(blocks) * i // pp for i in range(1, pp)]), len(blocks)]
    plan = Plan.model_validate(
        {
            "version": 1,
            "model": {
                "file": str(model),
                "sha256": hashlib.sha256(model.read_bytes()).hexdigest(),
                "build": build,
                "parameters": 1,
            },
            "training": {
                "global_batch": global_batch,
                "seq_len": seq_len,
                "precision": precision,
                "optimizer": "adamw",
                "learning_rate": 1e-3,
            },
            "cluster": {"name": "here", "nodes": [{"count": 1, "type": "cpu"}]},
            "candidate": candidate_mapping(candidate),
            "mesh": {
                "axes": {axis: getattr(candidate, axis) for axis in candidate.mesh_order},
                "devices": [f"0:{i}" for i in range(candidate.num_devices)],
            },
            "schedule": {
                "name": candidate.schedule,
                "stages_per_rank": 1,
                "num_microbatches": candidate.num_microbatches(global_batch),
            },
            "blocks": blocks,
            "stages": [
                {"rank_group": i, "modules": blocks[edges[i] : edges[i + 1]]} for i in range(pp)
            ],
            "tensor_parallel": rules or [],
        }
    )
    path = folder / f"{name}.yaml"
    save_plan(plan, path)
    return path


@pytest.fixture
def plan_writer(tmp_path: Path) -> Callable[..., Path]:
    """`write_plan` into this test's folder."""

    def write(name: str, model: Path, blocks: list[str], **options: Any) -> Path:
        return write_plan(tmp_path, name, model, blocks, **options)

    return write

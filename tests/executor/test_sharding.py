"""fully_shard's precision, and parameters without dimensions, which it refuses."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

from claw_plan.executor.job import VERIFY, Job
from claw_plan.executor.launch import start_ranks
from claw_plan.executor.mesh import make_mesh
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import compile_plan
from claw_plan.executor.ranks import Rank
from claw_plan.executor.sharding import shard_stage
from claw_plan.executor.stages import Stage
from claw_plan.executor.verify import verify_plans
from claw_plan.executor.whole_model import SINGLE, loss_of

CPU = torch.device("cpu")

SCALED = """
import torch
import torch.nn as nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return x + self.gain * self.mlp(self.norm(x))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.scale, self.unused = (nn.Parameter(torch.tensor(1.5)) for _ in range(2))

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.scale.exp() * x


def build_model():
    return Scaled()


def example_batch(batch_size):
    return {"ids": torch.randint(11, (batch_size, 6))}


def loss(output, batch):
    return (output ** 3).mean()
"""
"""Numbers of blocks and of the model itself, as CLIP's logit_scale; one that no loss reaches."""

BLOCKS = [f"blocks.{index}" for index in range(4)]

WAYS: dict[str, dict[str, Any]] = {
    "hsdp": {"dp_shard": 2, "dp_replicate": 2, "clip_norm": 0.1},
    "stages": {"dp_shard": 2, "pp": 2, "clip_norm": 0.1, "microbatch_size": 2},
    "stages-and-back": {"dp_shard": 2, "pp": 2, "schedule": "ZBVZeroBubble", "stages_per_rank": 2},
    "divided": {"dp_shard": 2, "tp": 2, "sequence_parallel": True, "clip_norm": 0.1},
    "lowered": {"dp_shard": 4, "zero": 1, "precision": "bfloat16", "offload": "optimizer"},
    "replicas": {"dp_replicate": 4, "clip_norm": 0.1},
    "replicated-stages": {"dp_replicate": 2, "pp": 2, "clip_norm": 0.1},
}


@pytest.fixture(scope="module")
def scaled_plans(
    model_plan: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> list[Path]:
    model = tmp_path_factory.mktemp("scaled") / "scaled.py"
    model.write_text(SCALED)
    return [model_plan(model, BLOCKS, name, **way) for name, way in WAYS.items()]


@pytest.mark.slow
def test_numbers_without_dimensions_train_like_one_process(scaled_plans: list[Path]) -> None:
    results = dict(zip(WAYS, verify_plans(scaled_plans, steps=3), strict=True))
    assert not {name: found for name, found in results.items() if not found.ok}


@pytest.mark.slow
def test_any_plan_reads_them_from_what_any_other_wrote(
    scaled_plans: list[Path], tmp_path: Path
) -> None:
    worker = [sys.executable, str(Path(__file__).with_name("checkpoint_chain.py"))]
    job = Job(kind=VERIFY, folder=tmp_path, plans=tuple(scaled_plans), steps=1)
    start_ranks(job, 4, worker=worker)


def test_lower_precision_is_computed_by_fsdp_and_stored_in_single(
    tiny_plan: Callable[..., Path], alone: Rank
) -> None:
    plan, loaded = open_plan(tiny_plan("bf16", precision="bfloat16"))
    model = compile_plan(plan, loaded, CPU)
    assert isinstance(model.stages[0], FSDPModule)
    assert {p.dtype for p in model.trainable()} == {torch.float32}
    seen: list[torch.dtype] = []
    layer = model.stages[0].model.get_submodule("transformer.h.0.mlp.c_fc")
    layer.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    model.train_step(loaded.example_batch(8))
    assert set(seen) == {torch.bfloat16}
    single = compile_plan(plan, loaded, CPU, precision=SINGLE)
    layer = single.stages[0].model.get_submodule("transformer.h.0.mlp.c_fc")
    layer.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    single.train_step(loaded.example_batch(8))
    assert seen[-1] == torch.float32


def test_a_run_of_blocks_is_one_group_and_all_groups_share_a_mesh(
    tiny_plan: Callable[..., Path],
) -> None:
    path = tiny_plan("runs", dp_shard=4, reshard_ranks=2, blocks_per_group=3)
    plan, loaded = open_plan(path)
    stage = Stage(loaded.build(), loss_of(loaded))
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    mesh = make_mesh(plan.knobs(), "cpu")
    shard_stage(stage, plan.blocks, plan, mesh, lowers=True, finds_unreached=False)
    blocks = [stage.model.get_submodule(name) for name in plan.blocks]
    first, second, third, last = (block._get_fsdp_state() for block in blocks)  # type: ignore[operator]
    assert first is second is third is not last
    for state in (first, last):
        group = state._fsdp_param_group
        assert group.post_forward_mesh_info.mesh == mesh.neighbours(2)
        assert group.post_forward_mesh_info.mesh.shape == (2, 2)
        for parameter in group.fsdp_params:  # half of the rows, and a quarter where it is at rest
            rows, *others = parameter._orig_size
            assert [*parameter.sharded_post_forward_size] == [rows // 2, *others]
            assert [*parameter.sharded_size] == [rows // 4, *others]
    assert stage._get_fsdp_state()._fsdp_param_group.post_forward_mesh_info is None  # type: ignore[operator]
    dist.destroy_process_group()

"""Reported failures of training runs, each with the outcome that is right; ids: corpus of cases.

Held here is what needs real processes or whole checkpoints and stands in none of the other files.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from claw_plan.executor.batches import ExampleSource
from claw_plan.executor.checkpoint_io import Box, read_boxes, write_boxes
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.verify import verify_plans
from claw_plan.executor.whole_model import SINGLE, build_whole, loss_of
from claw_plan.planner.errors import PlanError
from claw_plan.planner.model_source import load_model
from claw_plan.planner.plan import save_plan
from claw_plan.planner.planning import PlanningRequest, make_plan
from claw_plan.planner.trace import trace


def planned(model: Path, name: str, count: int, folder: Path, **options: Any) -> Path:
    """A plan for `count` CPU ranks in the folder; options are those of a request, or knobs."""
    cluster = folder / f"cluster-{count}.yaml"
    cluster.write_text(
        f"name: here\nnodes: [{{devices: {{type: cpu, cores: 2, count: {count}}}}}]\n"
    )
    naming = {key: options.pop(key) for key in ("build", "inputs") if key in options}
    request = PlanningRequest(
        model=model,
        cluster=str(cluster),
        global_batch=8,
        precision="float32",
        fix={"microbatch_size": 2} | options,
        output_folder=folder,
        **naming,
    )
    path = folder / f"{name}.yaml"
    save_plan(make_plan(request).plan, path)
    return path


BAG = """
import torch, torch.nn as nn
def build_model(): return nn.EmbeddingBag(50, 6, mode="sum")
def example_batch(n): return {"input": torch.randint(0, 50, (n, 5))}
def loss(output, batch): return output.square().mean()
"""


@pytest.mark.slow
def test_plan_unsupported_kind_chosen(tmp_path: Path) -> None:
    """torchrec#602: of a single EmbeddingBag only what runs is offered, and that runs."""
    model = tmp_path / "bag.py"
    model.write_text(BAG)
    for degree, said in (("tp", "there is no chain of blocks"), ("pp", "no chain of blocks")):
        with pytest.raises(PlanError, match=said):
            planned(model, degree, 2, tmp_path, **{degree: 2})
    offered = [
        planned(model, "replicas", 2, tmp_path, dp_replicate=2, dp_shard=1),
        planned(model, "shards", 2, tmp_path, dp_shard=2, dp_replicate=1),
    ]
    for result in verify_plans(offered, steps=3):
        assert result.ok, result.first_difference


def test_experts_per_rank(tmp_path: Path) -> None:
    """DeepSpeed#6589: 60 experts on two ranks, 0 to 29 and 30 to 59, written and read."""
    shape = (60, 2, 3)
    whole = torch.arange(360.0).view(shape)

    def boxes(tensors: list[torch.Tensor]) -> list[Box]:
        each = 60 // len(tensors)
        return [
            Box(path=("model", "experts"), shape=shape, offsets=(index * each, 0, 0), tensor=one)
            for index, one in enumerate(tensors)
        ]

    write_boxes(boxes([whole]), tmp_path / "one", None)
    halves = [torch.zeros(30, 2, 3) for _ in range(2)]
    for box in boxes(halves):  # each rank reads its own alone
        read_boxes([box], tmp_path / "one", None)
    assert torch.equal(halves[0], whole[:30]) and torch.equal(halves[1], whole[30:])
    write_boxes(boxes(halves), tmp_path / "two", None)
    again = torch.zeros(shape)
    read_boxes(boxes([again]), tmp_path / "two", None)
    assert torch.equal(again, whole)


BLOCKS = """
import torch, torch.nn as nn, torch.nn.functional as F

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(61, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 61, bias=False)
        self.head.weight = self.table.weight
        EXTRA
    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        HOOK
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

def build_model(): return Net()
def example_batch(n, seq_len=4): return {"ids": torch.randint(0, 61, (n, seq_len))}
"""

NORMS = """
import json, os, sys, torch, torch.distributed as dist
from pathlib import Path
from claw_plan.executor.batches import ExampleSource, own_slice
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import compile_plan
rank, folder, paths = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
norms = []
for path in paths:
    plan, loaded = open_plan(Path(path))
    compiled = compile_plan(plan, loaded, torch.device("cpu"))
    batch = ExampleSource(plan, loaded).global_batch(0)
    compiled.forward_backward(own_slice(batch, compiled.mesh.data_index, compiled.knobs.dp))
    compiled.finish_gradients()
    norms.append(compiled.gradient_norm().item())
(folder / f"{rank}.json").write_text(json.dumps(norms))
dist.barrier()
os._exit(0)
"""

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
TINY = {
    "build": "GPT(GPTConfig(vocab_size=61, block_size=16, n_layer=2, n_head=4, n_embd=32))",
    "inputs": "idx=int64[B,16]<61 targets=int64[B,16]<61",
}
"""A head that is tied to its table, fused projections, norms that every rank holds."""

CLIPPED: dict[str, dict[str, Any]] = {
    "tp-shards": {"tp": 2, "dp_shard": 2, "sequence_parallel": False},
    "tp-sequence": {"tp": 2, "dp_shard": 2, "sequence_parallel": True},
    "tp-stages": {"tp": 2, "pp": 2, "sequence_parallel": False},
    "shards-replicas": {"dp_replicate": 2, "dp_shard": 2},
    "stages-shards": {"pp": 2, "dp_shard": 2},
}


@pytest.mark.slow
def test_clip_norm_sharded(tmp_path: Path) -> None:
    """Megatron-LM#7452, #5916: the norm of one process, whatever is divided, copied or tied.

    A shard counted twice or left out changes it by a percent or more.
    """
    one = {"pp": 1, "tp": 1, "dp_replicate": 1, "dp_shard": 1, "recompute": "none"}
    paths = [
        planned(GPT, name, 4, tmp_path, **TINY, **(one | knobs)) for name, knobs in CLIPPED.items()
    ]
    worker = tmp_path / "norms.py"
    worker.write_text(NORMS)
    command = [sys.executable, str(worker)]
    processes = [
        subprocess.Popen([*command, str(rank), str(tmp_path), *map(str, paths)])
        for rank in range(4)
    ]
    assert [process.wait(280) for process in processes] == [0] * 4
    plan, loaded = open_plan(paths[0])
    whole = build_whole(plan, loaded, SINGLE)
    loss_of(loaded)(whole, ExampleSource(plan, loaded).global_batch(0)).backward()
    gradients = [p.grad for p in whole.parameters() if p.grad is not None]
    expected = torch.nn.utils.get_total_norm(gradients).item()
    for rank in range(4):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == pytest.approx([expected] * len(paths), rel=1e-5)


def test_ddp_unused_is_named(tmp_path: Path) -> None:
    """pytorch#43259, #68862: the head that this loss does not use stands in the report."""
    model = tmp_path / "net.py"
    model.write_text(
        BLOCKS.replace("EXTRA", "self.other_head = nn.Linear(8, 3)").replace("HOOK", "")
    )
    graph = trace(load_model(model), seq_len=None, dtype="float32")
    [said] = [line for line in graph.assumptions if "without a gradient" in line]
    assert "other_head.weight" in said and "other_head.bias" in said
    assert "a pipeline keeps what is outside the blocks on its first stage" in said


def test_ddp_branch_by_flag_is_told(tmp_path: Path) -> None:
    """DeepSpeed#5070: a branch on values is named before any rank takes another way."""
    model = tmp_path / "net.py"
    branch = "self.other = nn.Linear(8, 8)"
    model.write_text(
        BLOCKS.replace("EXTRA", branch).replace(
            "HOOK", "x = self.other(x) if ids[0, 0] > 6 else x"
        )
    )
    graph = trace(load_model(model), seq_len=None, dtype="float32")
    [said] = [line for line in graph.assumptions if "values decide" in line]
    assert "ranks may go other ways" in said

"""Reported failures of checkpoints in other software, held against ours. Ids: corpus of cases."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from claw_plan.executor.checkpoint_folder import checkpoints_in
from claw_plan.executor.checkpoint_io import Box, read_boxes, tensors_in, write_boxes
from claw_plan.executor.checkpoint_layout import Part, parts_of
from claw_plan.executor.checkpoint_state import share_out
from claw_plan.executor.job import VERIFY, Job
from claw_plan.executor.launch import start_ranks
from claw_plan.executor.preflight import Facts, wrong
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.plan import Plan, candidate_mapping, save_plan
from claw_plan.planner.tensor_parallel import ShardedParameter, TensorParallelModel
from claw_plan.planner.tp_autograd import StandIn
from claw_plan.profiles.units import GIB

CHAIN = Path(__file__).parents[1] / "executor" / "checkpoint_chain.py"
"""A worker whose plans read one another's checkpoints and compare every rank's own bits."""


def plan_of(model: Path, blocks: list[str], parameters: int = 1, **knobs: Any) -> Plan:
    candidate = Candidate(**knobs)
    pp = candidate.pp
    edges = [len(blocks) * index // pp for index in range(pp + 1)]
    return Plan.model_validate(
        {
            "version": 1,
            "model": {
                "file": str(model),
                "sha256": hashlib.sha256(model.read_bytes()).hexdigest(),
                "parameters": parameters,
            },
            "training": {"global_batch": 8, "precision": "float32", "optimizer": "adamw"},
            "cluster": {"name": "here", "nodes": [{"devices": {"type": "cpu", "count": 8}}]},
            "candidate": candidate_mapping(candidate),
            "mesh": {
                "axes": {axis: getattr(candidate, axis) for axis in candidate.mesh_order},
                "devices": [f"0:{index}" for index in range(candidate.num_devices)],
            },
            "schedule": {
                "name": candidate.schedule,
                "stages_per_rank": 1,
                "num_microbatches": candidate.num_microbatches(8),
            },
            "blocks": blocks,
            "stages": [
                {"rank_group": index, "modules": blocks[edges[index] : edges[index + 1]]}
                for index in range(pp)
            ],
        }
    )


def run_chain(folder: Path, model: Path, blocks: list[str], knobs: list[dict[str, int]]) -> Path:
    """Each plan reads what the one before wrote; the last checkpoint."""
    paths = []
    for index, one in enumerate(knobs):
        paths.append(folder / f"plan{index}.yaml")
        save_plan(plan_of(model, blocks, **one), paths[-1])
    size = plan_of(model, blocks, **knobs[0]).knobs().num_devices
    job = Job(kind=VERIFY, folder=folder, plans=tuple(paths), steps=1)
    start_ranks(job, size, worker=[sys.executable, str(CHAIN)])
    return checkpoints_in(folder / paths[-1].stem)[-1]


SIX_ROWS = """
import torch, torch.nn as nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()
def build_model(): return Net()
def example_batch(n): return {"x": torch.randn(n, 6)}
"""


@pytest.mark.slow
def test_ckpt_empty_shard(tmp_path: Path) -> None:
    """Six rows on four ranks, 2, 2, 2, 0: written, read again so, and by ranks that have all."""
    model = tmp_path / "six.py"
    model.write_text(SIX_ROWS)
    blocks = ["layers.0", "layers.1"]
    knobs = [{"dp_shard": 4}, {"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 2}]
    run_chain(tmp_path, model, blocks, knobs)
    stored = tensors_in(checkpoints_in(tmp_path / "plan1")[-1])["model.layers.0.weight"]
    assert sorted(chunk.sizes[0] for chunk in stored.chunks) == [2, 2, 2]


def test_ckpt_512_ranks(tmp_path: Path) -> None:
    """60 rows from 64 ranks to 512: most have none, read nothing, and do not fail."""
    whole = torch.arange(120.0).view(60, 2)

    def boxes(tensor: torch.Tensor, ranks: int) -> list[list[Box]]:
        chunks = tensor.chunk(ranks)
        starts = [sum(len(c) for c in chunks[:index]) for index in range(len(chunks))]
        held = [
            [Box(path=("model", "w"), shape=(60, 2), offsets=(start, 0), tensor=chunk)]
            for start, chunk in zip(starts, chunks, strict=True)
        ]
        return held + [[]] * (ranks - len(held))

    write_boxes([box for held in boxes(whole, 64) for box in held], tmp_path, None)
    found = torch.zeros_like(whole)
    ranks = boxes(found, 512)
    for held in (*ranks[:3], ranks[59], ranks[60], ranks[511]):
        read_boxes(held, tmp_path, None)
    assert ranks[60] == ranks[511] == []
    assert torch.equal(found[:3], whole[:3]) and torch.equal(found[59], whole[59])
    assert not found[3:59].any()
    parts = [{("w", (rank, 0)): 8} if rank < 60 else {} for rank in range(512)]
    assert share_out(parts) == {("w", (rank, 0)): rank for rank in range(60)}


class Padded(TensorParallelModel):
    """Gives every rank of 8 the same number of rows of the table padded to 128512."""

    def local_slice(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        padding = whole.new_zeros(128_512 - 128_256, *whole.shape[1:])
        return torch.cat([whole, padding]).chunk(8)[self.ranks.rank]


@pytest.mark.parametrize(("kind", "rows"), [(Padded, 16_064), (TensorParallelModel, 16_032)])
def test_vocab_ckpt_padded_128256(
    kind: type[TensorParallelModel], rows: int, tmp_path: Path
) -> None:
    """A table of 128256 rows over 8, padded or not: the checkpoint has the true size."""
    shape = (128_256, 2)
    whole = torch.arange(shape[0] * 2, dtype=torch.float32).view(shape)
    boxes = []
    for rank in range(8):
        how = ShardedParameter(dim=0, parts=1, shape=shape)
        divided = kind(ranks=StandIn(8, rank), sharded={"table": how})
        local = divided.local_slice("table", whole)
        assert len(local) == rows
        held: Any = SimpleNamespace(
            parameters={"table": local},
            whole=SimpleNamespace(shapes={"table": shape}, names={"table": "table"}),
            tensor_parallel=divided,
            experts=None,
        )
        boxes += [
            Box(
                path=("model", "table"),
                shape=shape,
                offsets=part.offsets,
                tensor=part.of_local(local),
            )
            for part in parts_of(held, "table")
        ]
    write_boxes(boxes, tmp_path, None)
    assert tuple(tensors_in(tmp_path)["model.table"].size) == shape
    found = torch.zeros_like(whole)
    box = Box(path=("model", "table"), shape=shape, offsets=(0, 0), tensor=found)
    read_boxes([box], tmp_path, None)
    assert torch.equal(found, whole)


def test_mem_oom_at_save() -> None:
    """A 70B's state sharded over 32: what a rank copies, all to its host, is its own 1/32."""
    rows, ranks = 70_000_000_000 // 8192 // 80, 32
    held: list[dict[tuple[str, tuple[int, ...]], int]] = [{} for _ in range(ranks)]
    for layer in range(80):
        for rank in range(ranks):
            key = (f"layers.{layer}", (rows * rank // ranks, 0))
            held[rank][key] = rows // ranks * 8192 * 4
    writer = share_out(held)
    written = [
        sum(held[r][key] for key, r in writer.items() if r == rank) for rank in range(ranks)
    ]
    assert max(written) == min(written) == sum(held[0].values())
    # A part is a view of what is there: nothing is gathered or copied on the device.
    local = torch.zeros(4, 3)
    view = Part((8, 0), (2, 3), (1, 0)).of_local(local)
    assert view.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()


def test_mem_cpu_ram_at_load(tmp_path: Path) -> None:
    """66B built by each of 8 ranks on a host of 1 TiB: predicted, and refused before it begins."""
    model = tmp_path / "six.py"
    model.write_text(SIX_ROWS)
    plan = plan_of(model, ["layers.0", "layers.1"], 66_000_000_000, dp_shard=8)
    facts = [
        Facts(
            rank=rank,
            host="n1",
            versions={},
            device="H100",
            device_free_bytes=80 * GIB,
            host_free_bytes=1024 * GIB,
            environment={},
        )
        for rank in range(8)
    ]
    # 8 ranks x 66e9 parameters x 4 bytes = 1967 GiB.
    said = [one for one in wrong(plan, facts) if "memory free" in one]
    assert len(said) == 1
    assert "n1 has 1.0 TiB" in said[0] or "n1 has 1024" in said[0]
    assert "8 ranks need 1.9 TiB" in said[0] or "8 ranks need 1967" in said[0]


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16,
}


@pytest.mark.slow
def test_rope_nonpersistent_meta(tmp_path: Path) -> None:
    """The rotary table is on every rank what the constructor makes, before and after reading."""
    pytest.importorskip("transformers")
    model = tmp_path / "config.json"
    model.write_text(json.dumps(LLAMA))
    blocks = [f"model.layers.{index}" for index in range(4)]
    last = run_chain(tmp_path, model, blocks, [{"dp_shard": 2}, {"pp": 2}, {"dp_replicate": 2}])
    assert not [key for key in tensors_in(last) if "inv_freq" in key]

"""Trains plans as they are, in their own precision, and writes what they made of it.

Started for each rank by tests as `python rank_losses.py RANK WORLD_SIZE FOLDER PLAN...`; rank 0
writes for each plan the losses and gradient norms of the steps, and all buffers afterwards.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from claw_plan.executor.batches import ExampleSource, own_slice
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import ParallelModel, compile_plan
from claw_plan.executor.reference import without_dropout

STEPS = 5


def trained(path: Path) -> dict[str, object]:
    plan, loaded = open_plan(path)
    compiled = compile_plan(plan, without_dropout(loaded), torch.device("cpu"))
    source = ExampleSource(plan, loaded)
    losses, norms = [], []
    for step in range(STEPS):
        batch = own_slice(source.global_batch(step), compiled.mesh.data_index, compiled.knobs.dp)
        norms.append(watch_norm(compiled))
        losses.append(compiled.train_step(batch))
    [stage] = compiled.stages
    buffers = {name: buffer.double().tolist() for name, buffer in stage.model.named_buffers()}
    return {"losses": losses, "norms": [norm[0] for norm in norms], "buffers": buffers}


def watch_norm(compiled: ParallelModel) -> list[float]:
    """Filled with the norm of the coming step's gradients."""
    found: list[float] = []
    compiled.clip_gradients = (  # type: ignore[method-assign]
        lambda: found.append(compiled.gradient_norm().item())
    )
    return found


def main(rank: int, world_size: int, folder: Path, plans: list[Path]) -> None:
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    found = [trained(path) for path in plans]
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may still run


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), [Path(p) for p in sys.argv[4:]])

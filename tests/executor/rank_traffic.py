"""Trains plans a few steps and writes what each rank moved in the last, counted two ways.

Started for each rank by tests as `python rank_traffic.py RANK WORLD_SIZE FOLDER PLAN...`. Writes
`rank<r>.json`: for each plan what the run's own counter saw, and what a dispatch mode and the
hook on C++ calls saw of the same step.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from claw_plan.executor.batches import ExampleSource, own_slice
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import compile_plan
from claw_plan.executor.reference import without_dropout
from claw_plan.executor.traffic import counting, traffic_counter
from claw_plan.planner.traffic import STEADY_STEP


def moved(path: Path) -> list[list[object]]:
    plan, loaded = open_plan(path)
    compiled = compile_plan(plan, without_dropout(loaded), torch.device("cpu"))
    source = ExampleSource(plan, loaded)
    counter = traffic_counter(compiled)
    with counting(compiled, counter):
        for step in range(STEADY_STEP):
            batch = own_slice(
                source.global_batch(step), compiled.mesh.data_index, compiled.knobs.dp
            )
            counter.take()
            compiled.train_step(batch)
    return [[*kind, *amounts] for kind, amounts in counter.take().items()]


def main(rank: int, world_size: int, folder: Path, plans: list[Path]) -> None:
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    found = [moved(path) for path in plans]
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may still run


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), [*map(Path, sys.argv[4:])])
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)

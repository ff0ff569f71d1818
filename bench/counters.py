"""What counting a step's traffic costs: CPU time of alternating steps with and without it.

Pairs of neighbouring steps of one plan, which of the two counts alternating; the median ratio of
their CPU time (all threads, gloo's too) with its 95 % interval, on all ranks together.

Run: OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 bench/counters.py [--pairs 40]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from claw_plan.executor.batches import ExampleSource, own_slice
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import compile_plan
from claw_plan.executor.traffic import counting, traffic_counter
from claw_plan.planner.candidate import parse_fix
from claw_plan.planner.plan import save_plan
from claw_plan.planner.planning import PlanningRequest, make_plan

sys.path.insert(0, str(Path(__file__).parent))
from overhead import interval

MODEL = Path(__file__).resolve().parents[1] / "examples" / "gpt.py"
CONFIG = "vocab_size=256, block_size=128, n_layer=4, n_head=4, n_embd=256"
KNOBS = (
    "dp_replicate={n},microbatch_size=2",
    "dp_replicate={n},microbatch_size=2,bucket_bytes=1000000",
    "dp_shard={n},microbatch_size=2,zero=3",
    "tp={n},microbatch_size=2",
    "tp={n},microbatch_size=2,sequence_parallel=true",
    "pp={n},microbatch_size=1,schedule=1F1B",
)
NEUTRAL = {"recompute": "none", "dp_replicate": 1, "dp_shard": 1, "tp": 1, "pp": 1}


def write_plan(folder: Path, number: int, knobs: str, ranks: int) -> Path:
    """A plan of these knobs over so many ranks."""
    request = PlanningRequest(
        model=MODEL,
        cluster="cpu",
        build=f"GPT(GPTConfig({CONFIG}))",
        inputs="idx=int64[B,128]<256 targets=int64[B,128]<256",
        global_batch=4 * ranks,
        fix=NEUTRAL | parse_fix(knobs.format(n=ranks)),
        output_folder=folder,
    )
    path = folder / f"plan{number}.yaml"
    save_plan(make_plan(request).plan, path)
    return path


def measure(path: Path, pairs: int) -> tuple[list[float], int, int]:
    """(ratios of CPU time with to without, ns of a step without, calls counted in one)."""
    plan, loaded = open_plan(path)
    compiled = compile_plan(plan, loaded, torch.device("cpu"))
    batch = own_slice(
        ExampleSource(plan, loaded).global_batch(0), compiled.mesh.data_index, compiled.knobs.dp
    )
    counter = traffic_counter(compiled)
    ratios, without, calls = [], [], 0
    for index in range(pairs + 3):
        times = {}
        for counts in (True, False) if index % 2 else (False, True):
            dist.barrier()
            with counting(compiled, counter) if counts else nullcontext():
                start = time.process_time_ns()
                compiled.train_step(batch)
                times[counts] = time.process_time_ns() - start
            if counts:
                calls = sum(moved.calls for moved in counter.take().values())
        ratios.append(times[True] / times[False])
        without.append(times[False])
    return ratios[3:], round(statistics.median(without)), calls


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pairs", type=int, default=40)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    with tempfile.TemporaryDirectory() as name:
        shared = [name]
        dist.broadcast_object_list(shared)
        folder = Path(shared[0])
        for number, knobs in enumerate(KNOBS):
            path = folder / f"plan{number}.yaml"
            if dist.get_rank() == 0:
                write_plan(folder, number, knobs, ranks)
            dist.barrier()
            found: list[tuple[list[float], int, int] | None] = [None] * ranks
            dist.all_gather_object(found, measure(path, options.pairs))
            if dist.get_rank() == 0:
                print(row(knobs.format(n=ranks), [one for one in found if one]), flush=True)
        dist.barrier()
    dist.destroy_process_group()


def row(knobs: str, found: list[tuple[list[float], int, int]]) -> str:
    """A line of the table."""
    ratios = [statistics.mean(each) for each in zip(*(one[0] for one in found), strict=True)]
    low, high = interval(ratios)
    return (
        f"| `{knobs}` | {found[0][2]} | {found[0][1] / 1e6:.0f} "
        f"| {statistics.median(ratios) - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%}) |"
    )


if __name__ == "__main__":
    main()

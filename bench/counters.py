"""What counting a step's traffic costs: CPU time with and without it, all threads, gloo's too.

First of one call, in blocks of many small ones: there counting is most of what happens, so the
interval is narrow. Then of the steps of some plans: the calls of a step at that price, beside its
CPU time; and the same by pairs of whole steps, whose interval is as wide as the machine is
restless. Who counts alternates; intervals are of 95 %, of the median, on all ranks together.

Run: OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 bench/counters.py [--pairs 40]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from claw_plan.executor.batches import ExampleSource, own_slice
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import compile_plan
from claw_plan.executor.traffic import TrafficCounter, counting, traffic_counter
from claw_plan.planner.candidate import parse_fix
from claw_plan.planner.plan import save_plan
from claw_plan.planner.planning import PlanningRequest, make_plan

sys.path.insert(0, str(Path(__file__).parent))
from overhead import interval

WARM_PAIRS = 3
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
BLOCK = 100
"""Calls in a block."""

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
    found = alternated(
        lambda: compiled.train_step(batch), lambda: counting(compiled, counter), pairs
    )
    calls = sum(moved.calls for moved in counter.take().values()) // (pairs + WARM_PAIRS)
    without = round(statistics.median(plain for _, plain in found))
    return [counted / plain for counted, plain in found], without, calls


def alternated(
    step: Callable[[], object],
    counts: Callable[[], AbstractContextManager[None]],
    pairs: int,
) -> list[tuple[int, int]]:
    """CPU time in ns of neighbouring steps (counted, plain); who begins alternates."""
    found = []
    for index in range(pairs + WARM_PAIRS):
        times = {}
        for counted in (True, False) if index % 2 else (False, True):
            dist.barrier()
            with counts() if counted else nullcontext():
                start = time.process_time_ns()
                step()
                times[counted] = time.process_time_ns() - start
        found.append((times[True], times[False]))
    return found[WARM_PAIRS:]


def measure_call(*, of_reducer: bool, pairs: int) -> list[float]:
    """ns that counting adds to one call, of each pair of blocks."""
    counter = TrafficCounter({})
    return [
        (counted - plain) / BLOCK
        for counted, plain in alternated(
            _reduced_block() if of_reducer else _called_block(),
            lambda: counter.counting(sees_reducer=of_reducer),
            pairs,
        )
    ]


def _called_block() -> Callable[[], object]:
    """Collectives called from Python."""
    tensor = torch.zeros(2)

    def run() -> None:
        for _ in range(BLOCK):
            dist.all_reduce(tensor)

    return run


def _reduced_block() -> Callable[[], object]:
    """Collectives that DistributedDataParallel calls from C++, one for each parameter."""
    layers = [nn.Linear(1, 1, bias=False) for _ in range(BLOCK)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=1e-6)  # type: ignore[arg-type]
    value = torch.ones(1, 1)
    return lambda: model(value).sum().backward()


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
        call_ns = {}
        for of_reducer in (False, True):
            per_rank: list[list[float]] = [[]] * ranks
            own = measure_call(of_reducer=of_reducer, pairs=10 * options.pairs)
            dist.all_gather_object(per_rank, own)
            call_ns[of_reducer] = [statistics.mean(each) for each in zip(*per_rank, strict=True)]
            if dist.get_rank() == 0:
                print(call_row(call_ns[of_reducer], of_reducer=of_reducer), flush=True)
        for number, knobs in enumerate(KNOBS):
            path = folder / f"plan{number}.yaml"
            if dist.get_rank() == 0:
                write_plan(folder, number, knobs, ranks)
            dist.barrier()
            found: list[tuple[list[float], int, int] | None] = [None] * ranks
            dist.all_gather_object(found, measure(path, options.pairs))
            if dist.get_rank() == 0:
                own = call_ns["dp_replicate" in knobs]
                print(row(knobs.format(n=ranks), [one for one in found if one], own), flush=True)
        dist.barrier()
    dist.destroy_process_group()


def call_row(added_ns: list[float], *, of_reducer: bool) -> str:
    """What one call costs more."""
    low, high = interval(added_ns)
    whose = "of DistributedDataParallel's reducer" if of_reducer else "from Python"
    middle = statistics.median(added_ns)
    return f"| one call {whose} | {middle / 1e3:+.1f} us ({low / 1e3:+.1f} to {high / 1e3:+.1f}) |"


def row(knobs: str, found: list[tuple[list[float], int, int]], call_ns: list[float]) -> str:
    """A line of the table: calls, CPU time, their price beside it, and the pairs of steps."""
    ratios = [statistics.mean(each) for each in zip(*(one[0] for one in found), strict=True)]
    low, high = interval(ratios)
    step_ns, calls = statistics.mean(one[1] for one in found), found[0][2]
    least, most = (calls * end / step_ns for end in interval(call_ns))
    return (
        f"| `{knobs}` | {calls} | {step_ns / 1e6:.0f} "
        f"| {calls * statistics.median(call_ns) / step_ns:+.3%} ({least:+.3%} to {most:+.3%}) "
        f"| {statistics.median(ratios) - 1:+.1%} ({low - 1:+.1%} to {high - 1:+.1%}) |"
    )


if __name__ == "__main__":
    main()

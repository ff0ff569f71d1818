"""One rank of bench/buckets.py: plans buckets from what it measures, and times them beside DDP.

Started by that bench on every host. All ways of averaging take turns in the same processes, one
step each a round, so that what disturbs the machine disturbs all. A step lasts from all ranks'
meeting until the last has its mean gradients; the longest rank counts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from claw_plan.executor.benchmark_gloo import fit_line
from claw_plan.executor.bucket_times import record_ready
from claw_plan.executor.communication.reducer import Replicas
from claw_plan.planner.bucket_plan import (
    Cost,
    Gradients,
    affine_cost,
    filled_buckets,
    finish_ns,
    plan_buckets,
)

MODEL = Path(__file__).resolve().parents[2] / "examples" / "gpt.py"
MB = 1_000_000
PROBED_BYTES = (1 << 16, 1 << 18, 1 << 20, 1 << 22, 1 << 24)
PROBES, BACKWARDS = 3, 5
ALONE, TORCH, FILLED, PLANNED = "alone", "torch's default", "25 MB", "planned"


def build(config: dict[str, int]) -> nn.Module:
    """The GPT of the example, the same weights on every rank."""
    spec = importlib.util.spec_from_file_location("gpt", MODEL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpt"] = module
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    made: nn.Module = module.GPT(module.GPTConfig(**config))
    for parameter in made.parameters():
        parameter.register_post_accumulate_grad_hook(_let_others_run)
    return made


def _let_others_run(_: torch.Tensor) -> None:
    """gloo's threads share the rank's core, and in real time none takes it from another.

    The fair scheduler lets a thread that slept run at once; here every way yields alike, at each
    gradient.
    """
    os.sched_yield()


def probe() -> tuple[float, float]:
    """Start in ns and bytes per s of an all-reduce, those of rank 0 for all."""
    points = []
    for size in PROBED_BYTES:
        buffer = torch.zeros(size // 4)
        dist.all_reduce(buffer)
        times = []
        for _ in range(PROBES):
            dist.barrier()
            start = time.perf_counter_ns()
            dist.all_reduce(buffer)
            times.append(time.perf_counter_ns() - start)
        points.append((float(size), float(statistics.median(times))))
    told = [fit_line(points)]
    dist.broadcast_object_list(told)
    return told[0]


class Steps:
    """Forward and backward of a wrapped module on this rank's batch."""

    def __init__(self, batch: dict[str, torch.Tensor]) -> None:
        self._batch = batch

    def run(self, module: nn.Module) -> None:
        _, loss = module(**self._batch)
        loss.backward()

    def timed(self, module: nn.Module, *, syncs: bool) -> float:
        """Milliseconds of the slowest rank."""
        module.zero_grad()
        dist.barrier()
        start = time.perf_counter_ns()
        with nullcontext() if syncs else module.no_sync():  # type: ignore[operator]
            self.run(module)
        taken = torch.tensor(float(time.perf_counter_ns() - start))
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        return taken.item() / 1e6


def ddp(module: nn.Module, bucket_mb: float | None) -> DistributedDataParallel:
    return DistributedDataParallel(
        module,
        bucket_cap_mb=None if bucket_mb is None else bucket_mb * MB / 2**20,  # type: ignore[arg-type]
        gradient_as_bucket_view=True,
    )


def planned(gradients: Gradients, cost: Cost) -> tuple[tuple[int, ...], dict[str, Any]]:
    """The boundaries, and what is expected of them and of buckets filled to 25 MB."""
    found = plan_buckets(gradients, cost)
    filled = filled_buckets([4 * numel for numel in gradients.numels], 25 * MB)
    last_ns = gradients.complete_ns[-1]
    return found.sizes, {
        "sizes": found.sizes,
        "filled": filled,
        "exposed_ms": {
            PLANNED: (found.finish_ns - last_ns) / 1e6,
            FILLED: (finish_ns(gradients, filled, cost) - last_ns) / 1e6,
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--config", type=json.loads, required=True, help="of the GPT, as JSON")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    module = build(options.config)
    shape = (options.batch, options.config["block_size"])
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(options.config["vocab_size"], shape)
    steps = Steps({"idx": tokens, "targets": tokens.roll(-1, 1)})
    start_ns, bytes_per_s = probe()
    ready = record_ready(module, lambda: steps.run(module), BACKWARDS, dist.group.WORLD)
    sizes, expected = planned(ready, affine_cost(round(start_ns), 1e9 / bytes_per_s, 4))
    told = [sizes]
    dist.broadcast_object_list(told)
    assert dist.group.WORLD is not None
    ways: dict[str, Callable[[], float]] = {}
    for name, wrapped in {
        TORCH: ddp(build(options.config), None),
        FILLED: ddp(build(options.config), 25.0),
        PLANNED: Replicas(build(options.config), dist.group.WORLD, told[0]),
    }.items():
        ways[name] = lambda wrapped=wrapped: steps.timed(wrapped, syncs=True)  # type: ignore[misc]
        ways.setdefault(ALONE, lambda wrapped=wrapped: steps.timed(wrapped, syncs=False))  # type: ignore[misc]
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.rounds + 2):
        for name, way in ways.items():
            taken = way()
            if turn > 1:  # DistributedDataParallel has laid its buckets out anew
                samples[name].append(taken)
    if not dist.get_rank():
        about = {"parameters": sum(ready.numels), "start_ms": start_ns / 1e6,
                 "mb_per_s": bytes_per_s / MB}  # fmt: skip
        options.result.write_text(json.dumps({**about, **expected, "samples_ms": samples}))
    dist.barrier()


if __name__ == "__main__":
    main()

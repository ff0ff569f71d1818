"""One rank of bench/buckets.py: plans buckets from what it measures, and times them beside DDP.

Started by that bench on every host. Boundaries are planned twice, as from one run to the next:
from gradients' ready times without traffic, then from those beside the traffic of the first plan.
All ways of averaging take turns in the same processes, some steps each a round, so that what
disturbs the machine disturbs all. The first step of a turn warms up: only after it the one before
is still on its way where the next forward waits bucket by bucket. A step is forward, backward,
averaging and AdamW; the longest rank counts.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from claw_plan.executor.benchmark_gloo import fit_line
from claw_plan.executor.bucket_times import record_next, record_ready
from claw_plan.executor.communication.reducer import Replicas
from claw_plan.executor.next_forward import NextForward
from claw_plan.planner.bucket_order import NextStep, OrderedBuckets, ordered_buckets
from claw_plan.planner.bucket_plan import (
    BucketPlan,
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
PROBES, BACKWARDS = 3, 3
ALONE, TORCH, FILLED, PLANNED = "alone", "torch's default", "25 MB", "planned"
ORDERED = "planned, as the next forward needs them"
TIMED = 2
"""Steps of a turn after its first."""


def build(config: dict[str, int]) -> nn.Module:
    """The GPT of the example, the same weights on every rank."""
    spec = importlib.util.spec_from_file_location("gpt", MODEL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpt"] = module
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    made: nn.Module = module.GPT(module.GPTConfig(**config))
    return made


def let_messages_through() -> None:
    """What carries messages runs as soon as it can, as under the fair scheduler.

    gloo's threads and the switch share the cores, and of equals in real time none takes one from
    another: nothing would travel while a rank computes. So the thread that computes goes below,
    once the groups' threads are there, which would follow it.
    """
    scheduling, priority = os.sched_getscheduler(0), os.sched_getparam(0).sched_priority
    if priority > 1:
        os.sched_setscheduler(0, scheduling, os.sched_param(priority - 1))


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

    def turn(self, way: Way, timed: int) -> list[float]:
        """Milliseconds of so many steps in a row after one more, of the slowest rank each."""
        dist.barrier()
        taken = []
        for _ in range(1 + timed):
            start = time.perf_counter_ns()
            way.step(lambda: self.run(way.module))
            taken.append(float(time.perf_counter_ns() - start))
        way.settle()
        longest = torch.tensor(taken[1:])
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        return [spent / 1e6 for spent in longest.tolist()]


class Way:
    """A wrapped module and its optimizer; with `syncs` off gradients stay each rank's own."""

    def __init__(self, module: nn.Module, *, syncs: bool = True, ahead: bool = False) -> None:
        self.module, self._syncs = module, syncs
        self._optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
        self._ahead = None
        if ahead:
            assert isinstance(module, Replicas)
            self._ahead = NextForward(module, self._optimizer)

    def step(self, run: Callable[[], None]) -> None:
        if self._ahead is not None:
            with self._ahead.step(defers=True):
                run()
            return
        with nullcontext() if self._syncs else self.module.no_sync():  # type: ignore[operator]
            run()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def settle(self) -> None:
        if self._ahead is not None:
            self._ahead.settle()


def ddp(module: nn.Module, bucket_mb: float | None) -> DistributedDataParallel:
    return DistributedDataParallel(
        module,
        bucket_cap_mb=None if bucket_mb is None else bucket_mb * MB / 2**20,  # type: ignore[arg-type]
        gradient_as_bucket_view=True,
    )


def planned(
    alone: Gradients, beside: Gradients, following: NextStep, cost: Cost
) -> tuple[BucketPlan, OrderedBuckets, dict[str, Any]]:
    """The boundaries, and what is expected of them and of buckets filled to 25 MB.

    Exposed is what forward and updates end later than without any traffic, those of gradients
    that are ready `beside` it.
    """
    found, ordered = plan_buckets(beside, cost), ordered_buckets(beside, following, cost)
    filled = filled_buckets([4 * numel for numel in alone.numels], 25 * MB)
    last_ns = alone.complete_ns[-1]
    return (
        found,
        ordered,
        {
            "sizes": found.sizes,
            "ordered": ordered.sizes,
            "order": ordered.order,
            "filled": filled,
            "slowed_ms": (beside.complete_ns[-1] - last_ns) / 1e6,
            "exposed_ms": {
                PLANNED: (found.finish_ns - last_ns) / 1e6,
                FILLED: (finish_ns(alone, filled, cost) - last_ns) / 1e6,
                ORDERED: (ordered.finish_ns - last_ns - following.alone_ns) / 1e6,
            },
        },
    )


def make_ways(
    config: dict[str, int],
    groups: Sequence[dist.ProcessGroup],
    sizes: Sequence[int],
    ordered: Sequence[int],
    order: Sequence[int],
) -> dict[str, Way]:
    world, own = groups
    return {
        ALONE: Way(ddp(build(config), None), syncs=False),
        TORCH: Way(ddp(build(config), None)),
        FILLED: Way(ddp(build(config), 25.0)),
        PLANNED: Way(Replicas(build(config), world, sizes)),
        ORDERED: Way(Replicas(build(config), own, ordered, order=order), ahead=True),
    }


def agreed(*sizes: Sequence[int]) -> list[Sequence[int]]:
    """Those of rank 0."""
    told = [*sizes]
    dist.broadcast_object_list(told)
    return told


def make_groups() -> list[dist.ProcessGroup]:
    """All ranks, and all ranks again for buckets that nobody waits for."""
    made = [dist.group.WORLD, dist.new_group()]
    return [group for group in made if isinstance(group, dist.ProcessGroup)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--result", type=Path, required=True)
    parser.add_argument("--config", type=json.loads, required=True, help="of the GPT, as JSON")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    groups = make_groups()
    let_messages_through()
    module = build(options.config)
    shape = (options.batch, options.config["block_size"])
    torch.manual_seed(dist.get_rank())
    tokens = torch.randint(options.config["vocab_size"], shape)
    steps = Steps({"idx": tokens, "targets": tokens.roll(-1, 1)})
    start_ns, bytes_per_s = probe()
    cost = affine_cost(round(start_ns), 1e9 / bytes_per_s, 4)
    alone = record_ready(module, lambda: steps.run(module), BACKWARDS, groups[0])
    still = torch.optim.AdamW(module.parameters(), lr=0.0)
    following = record_next(module, lambda: steps.run(module), still.step, BACKWARDS, groups[0])
    (first,) = agreed(plan_buckets(alone, cost).sizes)
    meeting = Replicas(module, groups[0], first)
    beside = record_ready(meeting, lambda: steps.run(meeting), BACKWARDS, groups[0])
    found, ordered, expected = planned(alone, beside, following, cost)
    ways = make_ways(options.config, groups, *agreed(found.sizes, ordered.sizes, ordered.order))
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.rounds + 1):
        for name, way in ways.items():
            # After its first step DistributedDataParallel lays its buckets out anew.
            samples[name] += steps.turn(way, TIMED if turn else 0)
    if not dist.get_rank():
        about = {"parameters": sum(alone.numels), "start_ms": start_ns / 1e6,
                 "mb_per_s": bytes_per_s / MB}  # fmt: skip
        options.result.write_text(json.dumps({**about, **expected, "samples_ms": samples}))
    dist.barrier()


if __name__ == "__main__":
    main()

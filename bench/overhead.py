"""The executor beside hand-written torch scripts of the same parallelism (bench/hand_written).

For one step of each, on every rank: the collectives (operation, bytes, ranks of the group), the
kernels by name, the peak of live tensors; then the CPU time of all threads of all ranks over pairs
of neighbouring steps, with a 95 % interval of the median ratio. Counts are exact. Steps that last
less than 100 ms are refused: of those the interpreter takes too large a part.

Run: OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 bench/overhead.py [--kinds ddp,pp]
     [--pairs 20] [--write docs/overhead.md]
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import compile_plan
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.model_source import load_model
from claw_plan.planner.plan import Plan, candidate_mapping, save_plan

HAND_WRITTEN = Path(__file__).with_name("hand_written")
BATCH, MICROBATCH = 4, 1
LEAST_STEP_NS = 100_000_000
WARM_PAIRS = 2

KINDS: dict[str, dict[str, Any]] = {
    "ddp": {"dp_replicate": 4},
    "fsdp2": {"dp_shard": 4},
    "tp": {"tp": 4},
    "pp": {"pp": 4},
    "fsdp2_tp": {"dp_shard": 2, "tp": 2},
}
COLLECTIVES = {
    "allreduce_": "all_reduce",
    "all_reduce": "all_reduce",
    "_allgather_base_": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "send": "send",
    "recv_": "recv",
}

TITLES = {"ddp": "DDP", "fsdp2": "FSDP2", "tp": "TP", "pp": "PP", "fsdp2_tp": "FSDP2 x TP"}
SIDES = ("ours", "theirs")
VIEWS = {"detach", "view", "split", "slice", "expand"}
"""Kernels that move nothing."""

Step = Callable[[dict[str, torch.Tensor]], float]


def live() -> dict[int, StorageWeakRef]:
    """Every storage that a tensor of this process holds."""
    found = {}
    for tensor in gc.get_objects():
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not tensor.is_meta:
            storage = tensor.untyped_storage()
            found[storage._cdata] = StorageWeakRef(storage)
    return found


def live_bytes(storages: dict[int, StorageWeakRef]) -> int:
    """Their bytes now; those that are gone are forgotten."""
    total = 0
    for key, reference in list(storages.items()):
        storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        if storage is None:
            del storages[key]
        else:
            total += storage.nbytes()
    return total


def ranks_of(called: dict[str, Any]) -> str:
    """The ranks of the group that is called, and of a message the other end."""
    if "group_name" in called:
        group = _resolve_process_group(called["group_name"])
    else:
        group = dist.ProcessGroup.unbox(called["process_group"])
    ranks = dist.get_process_group_ranks(group)
    for end in ("src", "dst"):
        if end in called:
            return f"{end} {ranks[called[end]]} of {ranks}"
    return f"{ranks}"


class Counted(TorchDispatchMode):
    """Kernels, collectives and the peak of live bytes inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.collectives: Counter[str] = Counter()
        self.storages = live()
        self.peak_bytes = live_bytes(self.storages)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        output = func(*args, **(kwargs or {}))
        name, leaves = func._schema.name, torch.utils._pytree.tree_leaves
        space, _, own = name.partition("::")
        if own in COLLECTIVES and space in ("c10d", "_c10d_functional"):
            # Of two lists of tensors, results and inputs, the larger is what the group moves.
            sizes = [t.nbytes for t in leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
            called = {
                a.name: value for a, value in zip(func._schema.arguments, args, strict=False)
            }
            self.collectives[f"{COLLECTIVES[own]} {max(sizes)} {ranks_of(called)}"] += 1
        elif space == "aten":
            self.kernels[own] += 1
        for tensor in leaves(output):
            if type(tensor) in (torch.Tensor, torch.nn.Parameter):
                storage = tensor.untyped_storage()
                self.storages.setdefault(storage._cdata, StorageWeakRef(storage))
        self.peak_bytes = max(self.peak_bytes, live_bytes(self.storages))
        return output


def plan_file(folder: Path, name: str, knobs: dict[str, Any]) -> Path:
    """A plan of these knobs, with the tensor-parallel rules that the script has."""
    model = HAND_WRITTEN / "model.py"
    count = importlib.import_module("model").LAYERS
    blocks = [f"blocks.{index}" for index in range(count)]
    candidate = Candidate(microbatch_size=MICROBATCH, bucket_bytes=25 * 2**20, **knobs)
    batch = BATCH * candidate.dp
    width = importlib.import_module("model").WIDTH
    regions = [("attention", ("attention.q", "attention.k", "attention.v"), "attention.out", 8)]
    regions.append(("", ("up",), "down", 4 * width))
    rules = []
    for region, columns, row, heads in regions:
        members = [(region, "region", {}), *((c, "colwise", {"weight": 0}) for c in columns)]
        for module, style, dims in [*members, (row, "rowwise", {"weight": 1})]:
            place = f"blocks[*].{module}".rstrip(".")
            rules.append({"modules": place, "style": style, "heads": heads, "weight_dims": dims})
    stages = [blocks[count * i // candidate.pp : count * (i + 1) // candidate.pp]
              for i in range(candidate.pp)]  # fmt: skip
    plan = Plan.model_validate(
        {
            "version": 1,
            "model": {
                "file": str(model),
                "sha256": hashlib.sha256(model.read_bytes()).hexdigest(),
                "parameters": sum(p.numel() for p in load_model(model).build().parameters()),
            },
            "training": {"global_batch": batch, "precision": "float32", "optimizer": "adamw",
                         "learning_rate": 1e-3},
            "cluster": {"name": "here", "nodes": [{"devices": {"type": "cpu", "count": 4}}]},
            "candidate": candidate_mapping(candidate),
            "mesh": {
                "axes": {axis: getattr(candidate, axis) for axis in candidate.mesh_order},
                "devices": [f"0:{index}" for index in range(4)],
            },
            "schedule": {"name": "1F1B", "stages_per_rank": 1,
                         "num_microbatches": candidate.num_microbatches(batch)},
            "blocks": blocks,
            "stages": [{"rank_group": i, "modules": held} for i, held in enumerate(stages)],
            "tensor_parallel": rules if candidate.tp > 1 else [],
        }
    )  # fmt: skip
    path = folder / f"{name}.yaml"
    save_plan(plan, path)
    return path


def ours(path: Path) -> Step:
    return compile_plan(*open_plan(path), torch.device("cpu")).train_step


def theirs(name: str) -> Step:
    torch.manual_seed(0)
    model = load_model(HAND_WRITTEN / "model.py").build()
    made: Step = importlib.import_module(name).make(model, MICROBATCH)
    return made


def counted(make: Callable[[], Step], batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """What one warm step does. The peak is above what was there before the model."""
    gc.collect()
    before = live_bytes(live())
    step = make()
    losses = [step(batch) for _ in range(2)]
    gc.collect()
    with Counted() as seen:
        losses.append(step(batch))
    return {
        "losses": losses,
        "collectives": dict(sorted(seen.collectives.items())),
        "kernels": dict(sorted(seen.kernels.items())),
        "peak_bytes": seen.peak_bytes - before,
    }


def paired(
    first: Step, second: Step, batch: dict[str, torch.Tensor], pairs: int
) -> list[dict[str, list[int]]]:
    """CPU and wall time [first, second] of neighbouring steps; who begins alternates."""
    found = []
    for index in range(pairs + WARM_PAIRS):
        cpu, wall = [0, 0], [0, 0]
        for side in (0, 1) if index % 2 else (1, 0):
            step = (first, second)[side]
            dist.barrier()
            start, start_cpu = time.perf_counter_ns(), time.process_time_ns()
            step(batch)
            cpu[side] = time.process_time_ns() - start_cpu
            wall[side] = time.perf_counter_ns() - start
        found.append({"cpu_ns": cpu, "wall_ns": wall})
    return found[WARM_PAIRS:]


def interval(ratios: list[float]) -> tuple[float, float]:
    """95 % of the medians of resampled pairs (bootstrap, 2000 draws, fixed seed)."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[1949]


def measure(name: str, folder: Path, pairs: int) -> dict[str, Any]:
    """Both sides on this rank, then all ranks' numbers together."""
    path = plan_file(folder, name, KINDS[name])
    torch.manual_seed(dist.get_rank() if "tp" not in name and name != "pp" else 0)
    batch = load_model(HAND_WRITTEN / "model.py").make_batch(BATCH, None)
    found = {
        "ours": counted(lambda: ours(path), batch),
        "theirs": counted(lambda: theirs(name), batch),
    }
    found["pairs"] = paired(ours(path), theirs(name), batch, pairs) if pairs else []
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    return {"name": name, "ranks": everywhere}


def row(result: dict[str, Any]) -> str:
    """The table's line, of all ranks together."""
    ranks = result["ranks"]
    kernels = [
        sum(count for rank in ranks for count in rank[side]["kernels"].values()) for side in SIDES
    ]
    peak = max(rank["ours"]["peak_bytes"] / rank["theirs"]["peak_bytes"] for rank in ranks)
    cells = [
        TITLES[result["name"]],
        _same([[rank[side]["collectives"] for rank in ranks] for side in SIDES]),
        f"{kernels[0]} / {kernels[1]}",
        _same([[_moving(rank[side]["kernels"]) for rank in ranks] for side in SIDES]),
        f"{peak:.4f}",
        *_times(ranks),
    ]
    return f"| {' | '.join(cells)} |"


def _same(sides: list[list[dict[str, int]]]) -> str:
    return "identical" if sides[0] == sides[1] else "DIFFER"


def _moving(kernels: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in kernels.items() if name not in VIEWS}


def _times(ranks: list[dict[str, Any]]) -> list[str]:
    """CPU time of a hand-written step, and ours to it with its interval."""
    pairs = list(zip(*(rank["pairs"] for rank in ranks), strict=True))
    if not pairs:
        return ["-", "-"]
    shortest = statistics.median(min(max(one["wall_ns"]) for one in pair) for pair in pairs)
    if shortest < LEAST_STEP_NS:
        raise SystemExit(f"steps last {shortest / 1e6:.0f} ms; raise BENCH_WIDTH or BENCH_LENGTH")
    sums = [[sum(one["cpu_ns"][side] for one in pair) for side in (0, 1)] for pair in pairs]
    ratios = [ours / theirs for ours, theirs in sums]
    low, high = interval(ratios)
    own_ms = statistics.median(theirs for _, theirs in sums) / 1e6
    return [f"{own_ms:.0f} ms", f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    sys.path.insert(0, str(HAND_WRITTEN))
    dist.init_process_group("gloo")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.kinds.split(","):
            results.append(measure(name, Path(folder), options.pairs))
            if dist.get_rank() == 0:
                print(row(results[-1]), flush=True)
    if dist.get_rank() == 0 and options.json is not None:
        options.json.write_text(json.dumps(results))
    if dist.get_rank() == 0 and options.write is not None:
        write(options.write, [row(result) for result in results])
    dist.barrier()
    dist.destroy_process_group()


def write(path: Path, rows: list[str]) -> None:
    """Puts the rows in the place of those of the same parallelism and as many cells."""
    begins = {(row.split("|")[1], row.count("|")): row for row in rows}
    lines = path.read_text().splitlines()
    kept = [
        begins.get((line.split("|")[1], line.count("|")), line) if "|" in line else line
        for line in lines
    ]
    path.write_text("\n".join(kept) + "\n")


if __name__ == "__main__":
    main()

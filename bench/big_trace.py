"""How long `claw-plan replay` takes for a trace of a gigabyte, and how much memory.

Run: python bench/big_trace.py --folder FOLDER [--gigabytes 1] [--kind gpu|cpu]   (about a minute)

The trace is written as torch.profiler writes one, indented and out of order: steps of a model
whose kernels, launches, operators and collectives are like those of a large training step.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROGRAM = Path(sys.executable).with_name("claw-plan")
LAYERS, OPS_PER_LAYER = 80, 40
GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_nn_align8>"
ELEMENTWISE = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>,"
    " at::detail::Array<char*, 3> >(int, at::native::CUDAFunctor_add<c10::BFloat16>, "
    "at::detail::Array<char*, 3>)"
)
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
NCCL_ARGS = {
    "Collective name": "allreduce", "In msg nelems": 33554432, "Out msg nelems": 33554432,
    "Group size": 8, "dtype": "BFloat16", "Process Group Name": "0",
    "Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]",
}  # fmt: skip


ID, TIME, STEP = 111_111_111, 222_222_222, 333_333_333
"""Stand for a kernel's number, an event's time and a step's number until a step is written."""


def _event(category: str, name: str, dur: float, tid: int, **args: Any) -> Any:
    return {
        "ph": "X", "cat": category, "name": name, "pid": 0 if category == "kernel" else 4711,
        "tid": tid, "ts": TIME, "dur": dur, "args": args,
    }  # fmt: skip


def step(kind: str) -> list[tuple[str, float, int]]:
    """Text, time in microseconds and kernel of each event of a step, which lasts a second."""
    events = [(_event("user_annotation", f"ProfilerStep#{STEP}", 999_000, 1), 0.0, 0)]
    count = LAYERS * OPS_PER_LAYER
    for index in range(count):
        at, place = index * (990_000 / count), index % OPS_PER_LAYER
        shapes = {"Input Dims": [[8192, 4096], [4096, 4096]], "Input type": ["c10::BFloat16"] * 2}
        name = "aten::mm" if place % 4 == 0 else "aten::add"
        common = {"External id": ID, "Record function id": 0, "Ev Idx": index}
        events.append((_event("cpu_op", name, 90.125, 1, **shapes, **common), at, index))
        if kind == "cpu":
            continue
        launched = {"cbid": 211, "correlation": ID, "External id": ID}
        launch = _event("cuda_runtime", "cudaLaunchKernel", 6.25, 1, **launched)
        events += [(launch, at + 5, index), (_kernel(place), at + 40, index)]
    return [(json.dumps(event, indent=2), at, index) for event, at, index in events]


def _kernel(place: int) -> Any:
    is_last = place == OPS_PER_LAYER - 1
    stream = 20 if is_last else 7
    return _event(
        "kernel", NCCL if is_last else GEMM if place % 4 == 0 else ELEMENTWISE, 200.5, stream,
        device=0, context=1, stream=stream, correlation=ID, queued=0,
        **{"registers per thread": 72, "shared memory": 13824, "blocks per SM": 0.8,
           "warps per SM": 3.2, "grid": [32, 2, 1], "block": [128, 1, 1],
           "est. achieved occupancy %": 31, "External id": ID},
        **(NCCL_ARGS if is_last else {}),
    )  # fmt: skip


def write(path: Path, size: int, kind: str) -> int:
    """Writes a trace of at least `size` bytes; answers with the number of its events."""
    count = written = number = 0
    info = {"backend": "nccl" if kind == "gpu" else "gloo", "rank": 0, "world_size": 8}
    head = json.dumps({"schemaVersion": 1, "distributedInfo": info})
    events = step(kind)
    with path.open("w") as file:
        written += file.write(head[:-1] + ', "traceEvents": [\n')
        while written < size:
            number += 1
            for text, at, index in events:
                own = text.replace(str(TIME), f"{number * 1e6 + at:.3f}")
                own = own.replace(str(ID), str(number * len(events) + index))
                own = own.replace(str(STEP), str(number))
                written += file.write((",\n" if count else "") + own)
                count += 1
        file.write("\n]}\n")
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--kind", choices=("gpu", "cpu"), default="gpu")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    path: Path = options.folder / f"big-{options.kind}.json"
    events = write(path, round(options.gigabytes * 1e9), options.kind)
    size = path.stat().st_size
    print(f"{path.name}: {size / 1e9:.2f} GB, {events:,} events", flush=True)
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([str(PROGRAM), "replay", str(path), "--json"], check=True, capture_output=True)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    print(
        f"replayed in {time.perf_counter() - start:.1f} s ({cpu:.1f} s of one core), "
        f"{used.ru_maxrss / (1 << 20):.2f} GiB at most"
    )


if __name__ == "__main__":
    main()

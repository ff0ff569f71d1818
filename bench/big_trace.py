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
from collections.abc import Iterator
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


def _event(category: str, name: str, ts: float, dur: float, tid: int, **args: Any) -> Any:
    return {
        "ph": "X", "cat": category, "name": name, "pid": 0 if category == "kernel" else 4711,
        "tid": tid, "ts": round(ts, 3), "dur": round(dur, 3), "args": args,
    }  # fmt: skip


def step(number: int, kind: str) -> Iterator[Any]:
    """The events of one step, which lasts a second."""
    begin = number * 1e6
    yield _event("user_annotation", f"ProfilerStep#{number}", begin, 999_000, 1)
    count = LAYERS * OPS_PER_LAYER
    for index in range(count):
        at = begin + index * (990_000 / count)
        place, correlation = index % OPS_PER_LAYER, number * count + index
        shapes = {"Input Dims": [[8192, 4096], [4096, 4096]], "Input type": ["c10::BFloat16"] * 2}
        name = "aten::mm" if place % 4 == 0 else "aten::add"
        common = {"External id": correlation, "Record function id": 0, "Ev Idx": index}
        yield _event("cpu_op", name, at, 90, 1, **shapes, **common)
        if kind == "cpu":
            continue
        launched = {"cbid": 211, "correlation": correlation, "External id": correlation}
        yield _event("cuda_runtime", "cudaLaunchKernel", at + 5, 6, 1, **launched)
        is_last = place == OPS_PER_LAYER - 1
        kernel = NCCL if is_last else GEMM if place % 4 == 0 else ELEMENTWISE
        yield _event(
            "kernel", kernel, at + 40, 200, 20 if is_last else 7, device=0, context=1,
            stream=20 if is_last else 7, correlation=correlation, queued=0,
            **{"registers per thread": 72, "shared memory": 13824, "blocks per SM": 0.8,
               "warps per SM": 3.2, "grid": [32, 2, 1], "block": [128, 1, 1],
               "est. achieved occupancy %": 31, "External id": correlation},
            **(NCCL_ARGS if is_last else {}),
        )  # fmt: skip


def write(path: Path, size: int, kind: str) -> int:
    """Writes a trace of at least `size` bytes; answers with the number of its events."""
    count = written = 0
    info = {"backend": "nccl" if kind == "gpu" else "gloo", "rank": 0, "world_size": 8}
    with path.open("w") as file:
        head = {"schemaVersion": 1, "distributedInfo": info}
        written += file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
        number = 0
        while written < size:
            number += 1
            for event in step(number, kind):
                written += file.write((",\n" if count else "") + json.dumps(event, indent=2))
                count += 1
        file.write("\n]}\n")
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--kind", choices=("gpu", "cpu"), default="gpu")
    options = parser.parse_args()
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

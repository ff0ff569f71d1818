"""Feeds damaged recordings to every reader, replay and simulation: nothing but one-line errors.

Run: python bench/fuzz_traces.py [--seconds 300] [--seed 0] [--more FOLDER]

Each reader gets the time. Small valid recordings, and those in FOLDER, are damaged in bytes (cut,
flipped, repeated), in words (numbers to NaN, negative, huge; keys renamed; lists for objects) or
in their packing; what is not refused is replayed and simulated again. Any other exception, a case
that takes over ten seconds, or memory beyond 1 GiB ends the run with the case in a file.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import random
import re
import resource
import sqlite3
import sys
import tarfile
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

from claw_plan.executor.replay import replay
from claw_plan.executor.resimulate import critical_parts, resimulate
from claw_plan.executor.resimulate_transfer import Change
from claw_plan.executor.trace_readers.read import read_traces
from claw_plan.profiles.errors import InputError

LONGEST_S, MOST_BYTES = 10.0, 1 << 30
WORDS = (
    "NaN", "-1", "1e999", "-Infinity", "null", "true", "[]", "{}", '""', "0", "9" * 30,
    "9" * 5000, "1" + "0" * 400, "-0.0", '"ts"', "[[]]", '"\\ud800"', "4611686018427387904",
    "9223372036854775807", '"ncclKernel_AllReduce"', '"[0, 1, ...]"', "2147483647",
)  # fmt: skip
NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")
VALUE = re.compile(rb'-?\d+(?:\.\d+)?|"[^"]{0,40}"|true|null')


def kineto(rank: int = 0) -> bytes:
    """Two steps with kernels, launches, a collective and a data loader."""
    events = []
    for step in (1, 2):
        at = step * 1000
        shapes = {"Input Dims": [[8, 4], [4, 2]], "Input type": ["float", "float"]}
        comm = {"Collective name": "allreduce", "In msg nelems": 64, "Out msg nelems": 64,
                "Group size": 2, "dtype": "Float", "Process Group Ranks": "[0, 1]"}  # fmt: skip
        for category, name, start, duration, args in (
            ("user_annotation", f"ProfilerStep#{step}", 0, 900, {}),
            ("user_annotation", "enumerate(DataLoader)#_Iter.__next__", 1, 50, {}),
            ("cpu_op", "aten::mm", 60, 20, shapes),
            ("cuda_runtime", "cudaLaunchKernel", 65, 5, {"correlation": at}),
            ("cuda_runtime", "cudaLaunchKernel", 72, 5, {"correlation": at + 1}),
            ("kernel", "sgemm", 100, 300, {"correlation": at, "device": 0, "stream": 7}),
            ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 400 + 50 * rank,
             100 - 50 * rank, {"correlation": at + 1, "device": 0, "stream": 9, **comm}),
            ("user_annotation", "Optimizer.step#Adam.step", 600, 100, {}),
            ("cpu_op", "autograd::engine::evaluate_function: M", 300, 50, {}),
            ("user_annotation", "gloo:all_reduce", 500, 40, {"Input Dims": [[8]],
                                                            "Input type": ["float"]}),
        ):  # fmt: skip
            events.append({"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1,
                           "ts": at + start, "dur": duration, "args": args})  # fmt: skip
    info = {"rank": rank, "world_size": 2, "pg_config": [{"pg_name": "0", "pg_size": 2}]}
    return json.dumps(
        {"distributedInfo": info, "deviceProperties": [{"name": "A100"}], "traceEvents": events}
    ).encode()


def timeline() -> bytes:
    spans = []
    for step, rank in ((3, 0), (3, 1), (7, 0), (7, 1)):
        for kind, name, start, end in (
            ("forward", f"{rank}F0", 100 * rank, 100 * rank + 50),
            ("pp_comm", "wait for 1F0", 0, 100),
            ("dp_comm", "all_reduce", 300, 400),
            ("optimizer", "adamw", 400, 450),
        ):
            spans.append({"rank": rank, "stream": "s", "kind": kind, "name": name,
                          "start_ns": start, "end_ns": end, "bytes": 64, "group": [0, 1],
                          "cost_source": "", "step": step})  # fmt: skip
    return json.dumps({"origin": "measured", "spans": spans}).encode()


def chakra() -> bytes:
    node = {"name": "aten::mm", "id": 1, "ts": 5, "dur": 7, "tid": 1, "inputs": [],
            "input_shapes": [[4, 8], [8, 2]], "input_types": ["Tensor(float)"] * 2}  # fmt: skip
    comm = {"name": "record_param_comms", "id": 2,
            "inputs": {"values": ["allreduce"], "shapes": [[[8]]], "types": ["Tensor(float)"]},
            "attrs": [{"name": "pg_size", "value": 2}]}  # fmt: skip
    untimed = {key: value for key, value in node.items() if key not in ("ts", "dur")}
    nodes = [untimed, comm, *([node] if random.random() < 0.5 else [])]
    return json.dumps({"schema": "1.0.1", "rank": 0, "start_ts": 1, "finish_ts": 99,
                       "nodes": nodes}).encode()  # fmt: skip


@cache
def nsight() -> bytes:
    with tempfile.NamedTemporaryFile(suffix=".sqlite") as file:
        with closing(sqlite3.connect(file.name)) as database:
            database.executescript(
                "CREATE TABLE StringIds (id INTEGER, value TEXT);"
                "INSERT INTO StringIds VALUES (1, 'sgemm'), (2, 'ncclKernel_AllReduce');"
                "CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start, end, deviceId, streamId,"
                " correlationId, globalPid, shortName);"
                "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (10, 20, 0, 7, 1, 16777216, 1),"
                " (30, 50, 0, 8, 2, 16777216, 2);"
                "CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start, globalTid, correlationId);"
                "INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (5, 16777217, 1);"
                "CREATE TABLE NVTX_EVENTS (start, end, text, textId, globalTid);"
                "INSERT INTO NVTX_EVENTS VALUES (1, 90, 'step 3', NULL, 16777217);"
            )
        return Path(file.name).read_bytes()


def packed() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for rank in (0, 1):
            content = gzip.compress(kineto(rank)) if rank else kineto(rank)
            info = tarfile.TarInfo(f"rank{rank}.json" + ".gz" * rank)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return out.getvalue()


READERS: dict[str, Callable[[], bytes]] = {
    "kineto.json": kineto,
    "timeline.json": timeline,
    "chakra.json": chakra,
    "rank0.sqlite": nsight,
    "ranks.tar.gz": packed,
    "bomb.json.gz": lambda: gzip.compress(kineto()),
}


def damage(data: bytes, chance: random.Random) -> bytes:
    """Some damages, most of them of words, so that the text stays JSON."""
    for _ in range(chance.choice((1, 1, 2, 4))):
        kind = chance.randrange(12)
        at = chance.randrange(len(data) + 1)
        if kind == 0:
            data = data[:at]
        elif kind == 1 and data:
            at = min(at, len(data) - 1)
            data = data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :]
        elif kind == 2:
            end = at + chance.randrange(200)
            data = data[:at] + data[at:end] * chance.randint(2, 50) + data[end:]
        elif kind == 3:
            data = data[:at] + data[at + chance.randrange(40) :]
        else:
            data = _other_word(data, NUMBER if kind < 8 else VALUE, chance)
    return data


def _other_word(data: bytes, pattern: re.Pattern[bytes], chance: random.Random) -> bytes:
    places = list(pattern.finditer(data[:200_000]))
    if not places:
        return data
    place = chance.choice(places)
    return data[: place.start()] + chance.choice(WORDS).encode() + data[place.end() :]


def cases(name: str, chance: random.Random, more: list[Path]) -> Iterator[bytes]:
    """Damaged recordings of one kind, without end; packed ones also damaged inside."""
    others = [path.read_bytes() for path in more if path.suffix == Path(name).suffix]
    while True:
        whole = chance.choice([READERS[name](), READERS[name](), *others])
        if whole.startswith(b"\x1f\x8b") and chance.random() < 0.7:
            inside = damage(gzip.decompress(whole), chance)
            inside = inside * chance.choice([1, 1, 1, 2000]) if len(inside) < 50_000 else inside
            yield gzip.compress(inside, compresslevel=1)
        else:
            yield damage(whole, chance)


def try_case(path: Path) -> str:
    """How the recording fares: a word for the tally. Raises what must not happen."""
    try:
        traces = read_traces([path], [] if random.random() < 0.7 else [0])
        found = replay(traces)
        if not found.parts_ns:
            return "read, without times"
        resimulate(found, Change(link=2.0, ranks=4))
        critical_parts(found)
    except InputError as error:
        assert "\n" not in str(error) and len(str(error)) < 2000, str(error)[:200]
        return "refused"
    return "replayed"


def fuzz(name: str, seconds: float, seed: int, folder: Path, more: list[Path]) -> Counter[str]:
    """Tries cases for so long; ends the program at the first that misbehaves."""
    chance = random.Random(f"{seed} {name}")
    tally: Counter[str] = Counter()
    path = folder / name
    until = time.monotonic() + seconds
    for case in cases(name, chance, more):
        if time.monotonic() > until:
            return tally
        path.write_bytes(case)
        start = time.process_time()
        try:
            tally[try_case(path)] += 1
        except Exception:
            traceback.print_exc()
            sys.exit(f"{name} broke: the case is in {path}")
        if time.process_time() - start > LONGEST_S:
            sys.exit(f"{name} took {time.process_time() - start:.1f} s: the case is in {path}")
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 > MOST_BYTES:
            sys.exit(f"{name} took more than {MOST_BYTES >> 20} MiB: the case is in {path}")
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="for each reader")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--more", type=Path, help="folder of recordings to damage too")
    options = parser.parse_args()
    more = sorted(options.more.iterdir()) if options.more else []
    folder = Path(tempfile.mkdtemp(prefix="fuzz-traces-"))
    for name in READERS:
        tally: Any = fuzz(name, options.seconds, options.seed, folder, more)
        said = ", ".join(f"{count} {word}" for word, count in tally.most_common())
        print(f"{name}: {sum(tally.values())} cases: {said}", flush=True)


if __name__ == "__main__":
    main()

"""Fuzzing guided by coverage: atheris keeps what reaches new lines of a reader, and goes on there.

    pip install atheris
    python bench/fuzz_guided.py --seconds 300                  # every reader, five minutes each
    python bench/fuzz_guided.py --seconds 60 hostfile          # one of them

It starts from the small right files of `fuzz_readers` (topology) and `fuzz_traces` (recordings)
and damages them half in their way, which keeps words whole, half in libFuzzer's, which changes
bytes. The demands are theirs: an answer, or an InputError of one line; SLOW_S for one case; and
less than MEMORY_MIB in all. A case that breaks them is kept, named and ends the run with 1.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import atheris

import claw_plan.simulator.simulate  # noqa: F401  numba cannot compile what atheris has changed

with atheris.instrument_imports(include=["claw_plan.profiles.topology", "claw_plan.executor"]):
    import fuzz_readers
    import fuzz_traces

SLOW_S, HANGING_S = 10, 60
"""Of one case: the first of computing, the second by the clock, whoever else computes."""

MEMORY_MIB = 2048
LONGEST = 200_000
"""Bytes of a case. libFuzzer's own mutations are useless on longer ones."""


def seeds() -> dict[str, list[bytes]]:
    """Reader -> right files to start from."""
    texts = {name: [text.encode()] for name, text in fuzz_readers.SEEDS.items()}
    return texts | {name: [make(), make()] for name, make in fuzz_traces.READERS.items()}


def read(name: str, path: Path, data: bytes) -> None:
    """Gives one case to the reader; raises what must not happen."""
    start = time.process_time()
    if name in fuzz_readers.SEEDS:
        problem = fuzz_readers.try_one(data.decode("utf-8", "surrogateescape"))
        if problem:
            raise AssertionError(problem)
    else:
        path.write_bytes(data)
        fuzz_traces.try_case(path)
    if time.process_time() - start > SLOW_S:
        raise AssertionError(f"{time.process_time() - start:.1f} s for {len(data)} bytes")


def damage(name: str, data: bytes, most: int, seed: int) -> bytes:
    """One mutation, ours or libFuzzer's."""
    chance = random.Random(seed)
    if chance.random() < 0.5:
        return atheris.Mutate(data, most)
    if name in fuzz_readers.SEEDS:
        text = fuzz_readers.mutated(data.decode("utf-8", "replace"), chance)
        return text.encode("utf-8", "replace")[:most]
    return fuzz_traces.damage(data, chance)[:most]


def fuzz_one(name: str, seconds: int, folder: Path) -> None:
    """Fuzzes in this process, which libFuzzer ends."""
    corpus = folder / f"{name}.corpus"
    corpus.mkdir(parents=True)
    for index, data in enumerate(seeds()[name]):
        (corpus / f"seed{index}").write_bytes(data)
    case: Callable[[bytes], None] = partial(read, name, folder / name)
    options = {
        "max_total_time": seconds,
        "timeout": HANGING_S,
        "rss_limit_mb": MEMORY_MIB,
        "max_len": LONGEST,
        "artifact_prefix": f"{folder}/{name}-broken-",
        "print_final_stats": 1,
    }
    atheris.Setup(
        [sys.argv[0], str(corpus), *(f"-{key}={value}" for key, value in options.items())],
        case,
        custom_mutator=partial(damage, name),
    )
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("readers", nargs="*", default=list(seeds()), metavar="READER")
    parser.add_argument("--seconds", type=int, default=300, help="for each reader")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        fuzz_one(options.readers[0], options.seconds, options.folder)
    folder = Path(tempfile.mkdtemp(prefix="fuzz-guided-"))
    failed = False
    for name in options.readers:
        command = (*(sys.executable, __file__, name), *("--seconds", str(options.seconds)),
                   *("--folder", str(folder)))  # fmt: skip
        run = subprocess.run(command, capture_output=True, text=True, errors="replace")
        tried = re.findall(r"number_of_executed_units: (\d+)", run.stderr)
        reached = re.findall(r"cov: (\d+) .*?corp: (\d+)", run.stderr)
        print(
            f"{name:14} {tried[-1] if tried else '?':>8} cases, places reached and cases kept "
            f"{' and '.join(reached[-1]) if reached else '?'}: "
            f"{'broken' if run.returncode else 'sound'}",
            flush=True,
        )
        if run.returncode:
            failed = True
            print(run.stderr[-3000:], f"kept in {folder}", sep="\n", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

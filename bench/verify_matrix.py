"""Every product of data, tensor and pipeline parallelism that is offered, against one process.

The plans are those of tests/executor/test_parity.py (PROOFS): the tiny GPT, its head tied, under
each composition in several ways. Each is trained five steps in fp64 and in fp32 and compared with
one process. Prints a Markdown table; with --write it goes into docs/verified.md.

Run: python bench/verify_matrix.py [--write] [--sizes 1,2,4,8]
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from claw_plan.executor.verify import verify_plans

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "verified.md"
STEPS = 5
HEAD = (
    "| ranks | product | ways | equal | fp64 losses | fp64 parameters | fp32 losses |",
    "|---|---|---|---|---|---|---|",
)


def of_tests(name: str) -> ModuleType:
    """A module of tests/executor, which is no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tests/executor/{name}.py")
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(size: int, folder: Path) -> Iterator[str]:
    """Verifies all plans of so many processes, composition by composition."""
    plans, parity = of_tests("conftest"), of_tests("test_parity")
    model, blocks = plans.EXAMPLES / "gpt.py", plans.TINY_BLOCKS
    rules = plans.found_rules(model, blocks, **plans.TINY_GPT)
    for name, (degrees, ways) in parity.PROOFS.items():
        if 2 ** len(degrees) != size:
            continue
        paths = [
            plans.write_plan(
                folder,
                f"{name}-{i}",
                model,
                blocks,
                rules=rules,
                **plans.TINY_GPT,
                **degrees,
                **way,
            )
            for i, way in enumerate(ways)
        ]
        for way, result in zip(ways, verify_plans(paths, STEPS), strict=True):
            yield (
                f"| {size} | {said(degrees) or 'one device'} | {said(way)} "
                f"| {'yes' if result.ok else 'NO'} | {result.fp64_max_loss_diff:.1e} "
                f"| {result.fp64_max_param_diff:.1e} | {result.fp32_max_loss_diff:.1e} |"
            )


def said(knobs: dict[str, Any]) -> str:
    return ", ".join(f"{knob}={value}" for knob, value in knobs.items())


def page(lines: list[str]) -> str:
    return (
        "# Plans against one process\n\n"
        f"Largest differences from one process after {STEPS} AdamW steps, by\n"
        f"`python bench/verify_matrix.py --write` with torch {torch.__version__} on CPUs (gloo).\n"
        "Allowed are 1e-10 in fp64 and 1e-5 for losses in fp32. The model is examples/gpt.py with "
        "four\nblocks of width 32, its head tied to a table of 61 rows, which two ranks share "
        "unevenly. Where\nnothing is said: zero=3, 1F1B, microbatches of one sample, no recompute."
        " precision=bfloat16 is\nverified with its wrapping and without its rounding.\n\n"
        + "\n".join([*HEAD, *lines])
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--sizes", default="1,2,4,8")
    options = parser.parse_args()
    print(*HEAD, sep="\n", flush=True)
    lines = []
    with tempfile.TemporaryDirectory() as name:
        for size in map(int, options.sizes.split(",")):
            for line in rows(size, Path(name)):
                lines.append(line)
                print(line, flush=True)
    if options.write:
        TARGET.write_text(page(lines))


if __name__ == "__main__":
    main()

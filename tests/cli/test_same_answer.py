"""The same request has the same answer: whatever the hash seed, the threads and the cores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = Path(sys.executable).with_name("claw-plan")

GPT3 = (
    "--cluster", "128xdgx-a100-80gb", "--global-batch", "1536",
    "--build",
    "GPT(GPTConfig(vocab_size=51200, block_size=2048, n_layer=96, n_head=96, n_embd=12288))",
    "--inputs", "idx=int64[B,2048]<51200 targets=int64[B,2048]<51200",
)  # fmt: skip
SMALL = (
    "--cluster", "2xdgx-a100-80gb", "--global-batch", "64", "--fix", "pp=4",
    "--build", "GPT(GPTConfig(vocab_size=512, block_size=256, n_layer=8, n_head=4, n_embd=256))",
    "--inputs", "idx=int64[B,256]<512 targets=int64[B,256]<512",
)  # fmt: skip


def planned(folder: Path, request: tuple[str, ...], number: int) -> tuple[str, dict[str, Any]]:
    """plan.yaml and the report, less times, of a process unlike others."""
    plan = folder / f"{number}.yaml"
    cores = sorted(os.sched_getaffinity(0))[: 1 + number]
    own = {"PYTHONHASHSEED": str(number), "OMP_NUM_THREADS": str(1 + number)}
    done = subprocess.run(
        [COMMAND, ROOT / "examples" / "gpt.py", *request, "--json", "-o", plan],
        capture_output=True,
        text=True,
        env=os.environ | own | {"NUMBA_NUM_THREADS": str(1 + number)},
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    assert done.returncode == 0, done.stderr
    text = plan.read_text()
    lines = [line for line in text.splitlines() if not line.strip().startswith("seconds:")]
    return "\n".join(lines), _without_times(json.loads(done.stdout))


def _without_times(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _without_times(value) for name, value in tree.items() if name != "seconds"}
    return [_without_times(value) for value in tree] if isinstance(tree, list) else tree


@pytest.mark.slow
@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(GPT3, id="gpt3"),
        pytest.param((*SMALL, "--search", "auto"), id="exact"),
        *(
            pytest.param((*SMALL, "--search", name, "--seed", "7"), id=name)
            for name in ("tpe", "cmaes", "nsga2", "rl", "anneal")
        ),
    ],
)
def test_the_same_request_has_the_same_answer(tmp_path: Path, request_: tuple[str, ...]) -> None:
    one, other = (planned(tmp_path, request_, number) for number in (0, 1))
    assert one == other

"""`claw-plan run` as a process of its own, asked to end by signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from claw_plan.executor.run_log import read_log

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_sigterm_ends_all_after_a_step_and_the_code_says_so(tmp_path: Path) -> None:
    program = [sys.executable, "-c", "from claw_plan.cli.main import main; main()"]
    small = "GPT(GPTConfig(vocab_size=61, block_size=16, n_layer=2, n_head=2, n_embd=32))"
    inputs = "idx=int64[B,16]<61 targets=int64[B,16]<61"
    planned = [str(EXAMPLES / "gpt.py"), "--build", small, "--inputs", inputs, "--cluster", "cpu"]
    planned += ["--global-batch", "8", "--fix", "dp_shard=2,pp=1,tp=1,dp_replicate=1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*program, *planned, "-o", "p.yaml"], cwd=tmp_path, env=environment, check=True)
    run = subprocess.Popen(
        [*program, "run", "p.yaml", "--steps", "1000000"],
        cwd=tmp_path,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        while run.poll() is None and not list(tmp_path.glob("runs/*/steps.jsonl")):
            time.sleep(0.05)
        run.send_signal(signal.SIGTERM)
        _, said = run.communicate(timeout=120)
    finally:
        run.kill()
    assert run.returncode == 143, said
    assert "ending after this step" in said and "interrupted after step" in said
    [folder] = tmp_path.glob("runs/*-p")
    losses = json.loads((folder / "result.json").read_text())["losses"]
    assert f"interrupted after step {len(losses)}; what was done is in" in said
    assert read_log(folder, 1)[-1]["event"] == "ending"

"""Bad input through the whole program: one clear line, the right exit code, nothing written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from claw_plan.cli.main import cli

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "gpt_small.py")

RAISES = """
def build_model():
    raise RuntimeError("weights not found\\nand a second line")
def example_batch(batch_size):
    return {}
"""

MODULE = """
import torch, torch.nn as nn
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
    def forward(self, x):
        return self.fc(x).square().mean()
"""
BATCH = "def example_batch(n):\n    return {'x': torch.randn(n, 4)}\n"

FILES = {
    "module.py": MODULE.encode(),
    "narrow.py": (MODULE + BATCH.replace("4)", "3)")).encode(),
    "forward.py": (MODULE.replace("return", "raise KeyError('wte'); return") + BATCH).encode(),
    "no_grad.py": (
        MODULE.replace("    def forw", "    @torch.no_grad()\n    def forw") + BATCH
    ).encode(),
    "frozen.py": (
        MODULE + BATCH + "def build_model(): return M().requires_grad_(False)\n"
    ).encode(),
    "class.py": (MODULE + BATCH + "def build_model(): return M\n").encode(),
    "several.py": (MODULE + BATCH + "class N(M): pass\n").encode(),
    "package.py": b"import no_such_package_anywhere\n",
    "fixed.py": (MODULE + BATCH.replace("n, 4", "8, 4")).encode(),
    "whole.py": (MODULE + BATCH).encode(),
    "cut.json": b'{"model_type": "llama", "hidden',
    "twice.yaml": b"name: a\nname: b\n",
    "tabs.yaml": b"name: a\nnodes:\n\t- type: dgx-h100\n",
    "rate.yaml": b"nodes: [{devices: {type: h100, bandwidth: 450 GB}}]\n",
    "fast.yaml": b"nodes: [{devices: {type: h100, bandwidth: 1e30 GB/s}}]\n",
    "binary.yaml": b"\x00\x01\xff",
    "list.yaml": b"- a\n",
    "recursive.yaml": b"a: &x [*x]\n",
    "empty.yaml": b"",
    "misspelt.yaml": b"name: a\nnodes: [{count: 1, typ: dgx-h100}]\n",
    "bits.yaml": b"name: a\nnodes: [{devices: {type: custom, count: 1, memory: 80 GB/s}}]\n",
    "none.yaml": b"name: a\nnodes: [{count: 0, type: dgx-h100}]\n",
    "infinite.yaml": b"name: a\nnodes: [{count: .inf, type: dgx-h100}]\n",
    "raises.py": RAISES.encode(),
    "cuda.py": b"import torch\ntorch.zeros(1, device='cuda')\n",
    "syntax.py": b"def build_model(:\n",
}

CASES = [
    (["missing.py", "-c", "cpu"], "missing.py"),
    ([EXAMPLE, "-c", "missing.yaml"], "missing.yaml"),
    ([EXAMPLE, "-c", "binary.yaml"], "not a text file"),
    ([EXAMPLE, "-c", "list.yaml"], "must hold a mapping"),
    ([EXAMPLE, "-c", "recursive.yaml"], "recursive.yaml:1: a[0] contains itself"),
    ([EXAMPLE, "-c", "empty.yaml"], "empty.yaml is empty"),
    ([EXAMPLE, "-c", "misspelt.yaml"], "misspelt.yaml:2"),
    ([EXAMPLE, "-c", "bits.yaml"], "bits.yaml:2"),
    ([EXAMPLE, "-c", "none.yaml"], "none.yaml:2"),
    ([EXAMPLE, "-c", "infinite.yaml"], "infinite.yaml:2"),
    ([EXAMPLE, "-c", "2xdgx-h10"], "did you mean 'dgx-h100'"),
    ([EXAMPLE, "-c", "0xdgx-h100"], "number of nodes"),
    ([EXAMPLE, "-c", "twice.yaml"], "twice.yaml:2: the key name stands twice"),
    ([EXAMPLE, "-c", "tabs.yaml"], "tabs.yaml:3: not valid YAML"),
    ([EXAMPLE, "-c", "rate.yaml"], "use bytes (GB/s) or bits (Gb/s)"),
    ([EXAMPLE, "-c", "fast.yaml"], "1e30 GB/s is implausible"),
    ([EXAMPLE, "-c", "cpu", "--global-batch", "0"], "0 is not in the range"),
    ([EXAMPLE, "-c", "cpu", "--global-batch", "2.5"], "'2.5' is not a valid integer"),
    ([EXAMPLE, "-c", "cpu", "--memory-headroom", "nan"], "nan is not a fraction"),
    ([EXAMPLE, "-c", "cpu", "--fix", "tpp=2"], "did you mean 'tp'"),
    ([EXAMPLE, "-c", "cpu", "--fix", "schedule=1f1b"], "use one of 1F1B, GPipe"),
    ([EXAMPLE, "-c", "cpu", "--fix", "dp_shard=64"], "asks for 64 devices"),
    ([EXAMPLE, "-c", "cpu", "--global-batch", "9", "--fix", "dp_shard=2"], "nearest: 8 or 10"),
    ([EXAMPLE, "-c", "cpu", "--trace", "plan.yaml"], "uses that file otherwise too"),
    (["module.py", "-c", "cpu"], "add example_batch(batch_size)"),
    (["module.py", "-c", "cpu", "--inputs", "x=float33[B,4]"], "did you mean 'float32'"),
    (["module.py", "-c", "cpu", "--inputs", "y=float32[B,4]"], "forward takes (x)"),
    (["whole.py", "-c", "cpu", "--build", "M("], "'(' was never closed"),
    (["narrow.py", "-c", "cpu"], "running its forward failed: RuntimeError"),
    (["forward.py", "-c", "cpu"], "KeyError: 'wte' (forward.py line 8)"),
    (["no_grad.py", "-c", "cpu"], "forward runs under no_grad"),
    (["frozen.py", "-c", "cpu"], "none of its parameters requires a gradient"),
    (["class.py", "-c", "cpu"], "gave the class M"),
    (["several.py", "-c", "cpu"], "several modules could be the model (M, N)"),
    (["package.py", "-c", "cpu"], "No module named 'no_such_package_anywhere'"),
    (["fixed.py", "-c", "cpu"], "must be the batch"),
    (["cut.json", "-c", "cpu"], "cut.json is not JSON"),
    (["a" * 5000 + ".py", "-c", "cpu"], "File name too long"),
    (["raises.py", "-c", "cpu"], "raises.py"),
    (["cuda.py", "-c", "cpu"], "cuda.py"),
    (["syntax.py", "-c", "cpu"], "syntax.py"),
    ([EXAMPLE, "-c", "cpu", "--profile", "missing.profile"], "there is no profile"),
    ([EXAMPLE, "-c", "cpu", "--profile", "list.yaml"], "is not a profile"),
    (["run", "missing.yaml"], "missing.yaml"),
    (["run", "binary.yaml"], "not a text file"),
    (["verify", "list.yaml"], "must hold a mapping"),
    (["simulate", "empty.yaml"], "empty.yaml is empty"),
    (["simulate", "none.yaml"], "none.yaml"),
    (["learn", "nowhere"], "no finished run"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize(
    ("args", "said"), CASES, ids=[" ".join(args[-3:])[-60:] for args, _ in CASES]
)
def test_bad_input_is_one_clear_line(args: list[str], said: str, folder: Path) -> None:
    is_plan = args[0] not in ("run", "verify", "simulate", "learn")
    result = CliRunner().invoke(cli, [*args, *(["-o", "plan.yaml"] if is_plan else [])])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1 and said in result.stderr, result.stderr
    assert "Traceback" not in result.stderr and "our fault" not in result.stderr
    left = {path.name for path in folder.iterdir()} - {"__pycache__"}
    assert left == FILES.keys()


@pytest.mark.slow
def test_the_installed_program_prints_only_json(tmp_path: Path) -> None:
    # A model that prints when imported and built, planned by the real program in a new process.
    noisy = "print('noise at import')\nfrom gpt_small import *\n"
    (tmp_path / "noisy.py").write_text(noisy)
    program = Path(sys.executable).parent / "claw-plan"
    done = subprocess.run(
        [program, "noisy.py", "--cluster", "cpu", "--global-batch", "4", "--json"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(EXAMPLE).parent), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert value["plan"]["model"]["parameters"] > 10_000_000
    assert value["search"]["optimal"] is True
    assert "noise at import" in done.stderr


@pytest.mark.slow
def test_the_installed_program_exits_with_2_and_one_line(tmp_path: Path) -> None:
    program = Path(sys.executable).parent / "claw-plan"
    done = subprocess.run(
        [program, "missing.py", "--cluster", "cpu"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "missing.py" in done.stderr

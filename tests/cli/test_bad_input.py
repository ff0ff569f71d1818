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

FILES = {
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


@pytest.mark.parametrize(("args", "said"), CASES, ids=[" ".join(args[-3:]) for args, _ in CASES])
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

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.slurm import sbatch_text, tasks_per_node


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4(x2),3", [4, 4, 3]), ("8", [8]), ("1(x3)", [1, 1, 1]), ("", []), ("4(y2)", [])],
)
def test_tasks_per_node_are_written_out(text: str, counts: list[int]) -> None:
    assert tasks_per_node(text) == counts


def test_every_line_of_the_batch_script_is_explained_and_bash_takes_it(tmp_path: Path) -> None:
    text = sbatch_text("gpt", [8, 8], ["claw-plan", "run", "a b.yaml"], gpus=True)
    lines = text.splitlines()
    options = [place for place, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert all(lines[place - 1].startswith("# ") for place in options)
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=8", "#SBATCH --gpus-per-node=8"} < set(
        lines
    )
    assert lines[-1] == "srun --kill-on-bad-exit=1 claw-plan run 'a b.yaml'"
    script = tmp_path / "job.sbatch"
    script.write_text(text)
    subprocess.run(["bash", "-n", str(script)], check=True)


def test_hosts_with_unequally_many_ranks_are_refused() -> None:
    with pytest.raises(ExecutionError, match="have 4, 2 ranks, but one batch job"):
        sbatch_text("gpt", [4, 2], ["claw-plan"], gpus=False)

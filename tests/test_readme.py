"""README says what is true: its commands are those CI runs, its options and files exist."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from claw_plan.cli.main import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("examples/**/*.md")]
)


def readme_command(name: str) -> str:
    """What scripts/ci runs under the name."""
    script = ROOT / "scripts" / "readme-command"
    done = subprocess.run([script, name], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout


def claw_plan_commands() -> list[list[str]]:
    """Every claw-plan command that README shows, as words."""
    shown = re.findall(r"`(claw-plan [^`]*)`", README)
    for block in re.findall(r"```sh\n(.*?)```", README, re.S):
        shown += re.findall(r"bin/(claw-plan .*?)(?: &&)?$", block, re.M)
    return [shlex.split(command)[1:] for command in shown]


@pytest.mark.parametrize("name", ["use", "test"])
def test_ci_runs_the_commands_as_readme_shows_them(name: str) -> None:
    command = readme_command(name)
    assert f"<!-- command: {name} -->\n```sh\n{command}```" in README
    assert f"run_readme {name}" in (ROOT / "scripts" / "ci").read_text(encoding="utf-8")
    assert command.startswith("scripts/install .venv")


def test_the_two_commands_do_what_readme_promises() -> None:
    use = readme_command("use")
    for word in ("examples/gpt.py", "examples/gpt_small.py --cluster cpu", "claw-plan run"):
        assert word in use
    assert "scripts/test" in readme_command("test")


@pytest.mark.parametrize("words", claw_plan_commands(), ids=" ".join)
def test_every_command_and_option_of_readme_exists(words: list[str]) -> None:
    command = cli.commands.get(words[0], cli.commands["plan"])
    known = {name for option in command.params for name in option.opts}
    for word in words:
        if word.startswith("-"):
            assert word in known, f"{command.name} has no {word}"


def test_files_that_the_commands_name_exist() -> None:
    for word in shlex.split(readme_command("use") + readme_command("test")):
        if word.startswith(("examples/", "scripts/")):
            assert (ROOT / word).exists(), word


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_command_is_in_readme() -> None:
    for name in cli.commands:
        assert name == "plan" or f"claw-plan {name}" in README


def test_exit_codes_are_the_same_everywhere() -> None:
    for text in (README, (ROOT / "docs" / "json.md").read_text(encoding="utf-8")):
        assert re.search(r"\*{0,2}0\*{0,2} done; \*{0,2}1\*{0,2} no plan fits", text)


def test_architecture_names_files_that_exist() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for name in re.findall(r"`((?:\w+/)+\w+\.(?:py|yaml))`", text):
        assert (ROOT / name).exists(), name


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 256,
}

MEGATRON = """torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py \\
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 \\
    --micro-batch-size 1 --global-batch-size 64 --seq-length 1024 --bf16
"""


@pytest.mark.slow
def test_every_command_in_the_text_runs(tmp_path: Path) -> None:
    # The two blocks are run by scripts/ci. Here plan.yaml is small enough to train in seconds.
    shutil.copy(ROOT / "examples" / "gpt.py", tmp_path / "model.py")
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    make_plan = (
        "claw-plan examples/gpt_small.py --cluster cpu --global-batch 2 --seq-len 16"
        " --fix dp_replicate=2,tp=1,pp=1 -o plan.yaml"
    )
    (tmp_path / "topology.txt").write_text("\tGPU0\tGPU1\nGPU0\t X \tNV4\nGPU1\tNV4\t X \n")
    (tmp_path / "measured.yaml").write_text(
        "nccl_tests:\n"
        "- {collective: all_reduce, gpu: H100, ranks: 8, bytes: 1048576, time_us: 50.0}\n"
    )
    (tmp_path / "train.sh").write_text(MEGATRON)
    meant = {
        "profile MODEL": "profile examples/gpt_small.py --batch 1 --seq-len 32",
        "MODEL": "model.py",
        "--cluster C": "--cluster 2xdgx-h100",
        "topology FILE…": "topology topology.txt",
        "validate FILE…": "validate measured.yaml",
        "TRACE…": "$(ls -d runs/* | tail -n 1)",
    }
    shown = re.findall(r"`(claw-plan [^`]*)`", README)
    for name, file in meant.items():
        shown = [command.replace(name, file) for command in shown]
    for command in [make_plan, *shown]:
        if any(other.startswith(f"{command} ") for other in shown):
            continue  # the same command is run with more options
        done = subprocess.run(
            ["bash", "-c", f"{Path(sys.executable).parent}/{command}"],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert yaml.safe_load((tmp_path / "cluster.yaml").read_text())["nodes"]

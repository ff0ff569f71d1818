from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from claw_plan.executor.opened_plan import open_plan
from claw_plan.planner.errors import PlanError
from claw_plan.planner.plan import load_plan, save_plan


def test_a_plan_comes_with_its_model(tiny_plan: Callable[..., Path]) -> None:
    plan, loaded = open_plan(tiny_plan("whole"))
    assert loaded.name == "gpt"
    assert plan.blocks[0] == "transformer.h.0"


def test_a_changed_model_file_is_refused(tiny_plan: Callable[..., Path], tmp_path: Path) -> None:
    plan = load_plan(tiny_plan("changed"))
    copy = tmp_path / "gpt.py"
    shutil.copy(plan.model.file, copy)
    with copy.open("a") as file:
        file.write("\n# another line\n")
    model = plan.model.model_copy(update={"file": "gpt.py"})
    save_plan(plan.model_copy(update={"model": model}), tmp_path / "plan.yaml")
    with pytest.raises(PlanError, match="not the file that was planned"):
        open_plan(tmp_path / "plan.yaml")


def test_a_composition_without_proof_is_refused(tiny_plan: Callable[..., Path]) -> None:
    path = tiny_plan("unproven", cp=2, tp=2)
    with pytest.raises(PlanError, match="cp x tp: no test proves"):
        open_plan(path)


def test_a_candidate_edited_apart_from_the_rest_is_refused(
    tiny_plan: Callable[..., Path], tmp_path: Path
) -> None:
    plan = load_plan(tiny_plan("edited"))
    edited = plan.model_copy(update={"candidate": plan.candidate | {"microbatch_size": 4}})
    save_plan(edited, tmp_path / "plan.yaml")
    with pytest.raises(PlanError, match="microbatches of 4 makes 2; change it"):
        open_plan(tmp_path / "plan.yaml")

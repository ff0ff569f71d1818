"""The error tree: drawn in profiles/errors.py, and every class of the program stands in it."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

from claw_plan.profiles import errors

ROOT = Path(__file__).parents[1]
ROOMS = ("cli", "executor", "kernels", "planner", "profiles", "simulator")


def drawn() -> dict[str, str]:
    """Class name to the module that the drawing names."""
    rows = re.findall(
        r"^[\s│├└─]*(\w+)(?: \(\w+\))?\s{2,}([a-z_]+\.[a-z_]+)", errors.__doc__ or "", re.M
    )
    return dict(rows)


def defined() -> dict[str, str]:
    """Every class below ClawPlanError, wherever it stands."""
    found: dict[str, str] = {"ClawPlanError": "profiles.errors"}
    classes = [
        (node, ".".join(path.relative_to(ROOT).with_suffix("").parts))
        for room in ROOMS
        for path in sorted((ROOT / room).rglob("*.py"))
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    ]
    size = 0
    while size != len(found):
        size = len(found)
        for node, module in classes:
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            if bases & found.keys():
                found[node.name] = module
    return found


def test_the_drawing_is_true() -> None:
    assert drawn() == defined()


def test_every_error_is_caught_by_the_root() -> None:
    for name, module in defined().items():
        cls = getattr(importlib.import_module(f"claw_plan.{module}"), name)
        assert issubclass(cls, errors.ClawPlanError)


def test_near_matches_names_the_nearest() -> None:
    assert errors.near_matches("dgx-h10", ["dgx-h100", "cpu"]) == "did you mean 'dgx-h100'?"
    assert errors.near_matches("zzz", ["b", "a"]) == "known are a, b"

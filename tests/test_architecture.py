"""The shape of the code: who may import whom, how long things are, which test mirrors what."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

ROOMS = ("cli", "executor", "kernels", "planner", "profiles", "simulator")

ALLOWED_ROOMS = {
    "profiles": set(),
    "kernels": {"profiles.codecs"},
    "simulator": {"profiles.units", "profiles.errors", "profiles.files"},
    "planner": {"simulator", "profiles"},
    "executor": {"planner", "simulator", "profiles", "kernels"},
    "cli": {"executor", "planner", "simulator", "profiles", "kernels"},
}
"""Rooms, or single modules of them, that a room may import besides itself."""

ALLOWED_PACKAGES = {
    "profiles": {"numpy", "pydantic", "yaml"},
    "kernels": {"llvmlite", "numba", "numpy", "torch", "triton"},
    "simulator": {"numba", "numpy", "simpy"},
    "planner": {
        *("networkx", "numpy", "optuna", "pydantic", "torch", "transformers", "yaml"),
        "typing_extensions",
    },
    "executor": {"numpy", "pydantic", "pynvml", "safetensors", "torch", "yaml"},
    "cli": {"click", "rich", "yaml"},
}
"""Packages beside the standard library."""

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

NOT_MIRRORED = {
    "planner/errors.py": "classes only; raised in the tests of whoever raises them",
    "simulator/errors.py": "classes only; raised in the tests of whoever raises them",
    "executor/errors.py": "classes only; raised in the tests of whoever raises them",
    "profiles/cost.py": "an interface; its implementations are tested",
    "kernels/compiled_loops.py": "the loops of compiled, tested in its test",
    "planner/head_shard_ops.py": "translations of head_shard, tested op by op in its test",
    "planner/head_shard_views.py": "translations of head_shard, tested op by op in its test",
    "planner/context_parallel_attention.py": "translations of context_parallel, tested there",
    "planner/context_parallel_division.py": "parts of context_parallel, tested there",
    "planner/context_parallel_ops.py": "translations of context_parallel, tested there",
    "planner/sequence_parallel_search.py": "a part of the search, tested in its test",
}
"""Modules without a test of their own, and why."""

PRIVATE_TORCH = {"planner/torch_private.py", "executor/torch_private.py"}


def modules() -> list[Path]:
    return sorted(
        path.relative_to(ROOT)
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        if "__pycache__" not in path.parts
    )


def checked_files() -> list[Path]:
    others = (
        path for folder in ("tests", "bench", "examples") for path in (ROOT / folder).rglob("*.py")
    )
    return modules() + sorted(path.relative_to(ROOT) for path in others)


def tree_of(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def imports_of(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(name: str, allowed: set[str]) -> bool:
    return any(name == one or name.startswith(one + ".") for one in allowed)


@pytest.mark.parametrize("path", modules(), ids=str)
def test_a_room_imports_only_what_lies_below_it(path: Path) -> None:
    room = path.parts[0]
    for name in imports_of(tree_of(path)):
        top, _, rest = name.partition(".")
        if top == "claw_plan":
            allowed = ALLOWED_ROOMS[room] | {room}
            assert is_within(rest, allowed), f"{path}: {room} may not import {name}"
        elif top not in sys.stdlib_module_names:
            assert top in ALLOWED_PACKAGES[room], f"{path}: {room} may not import {top}"


@pytest.mark.parametrize("path", modules(), ids=str)
def test_private_names_of_torch_stand_in_one_file_a_room(path: Path) -> None:
    if str(path) in PRIVATE_TORCH:
        return
    private = [
        name
        for name in imports_of(tree_of(path))
        if name.startswith("torch.") and any(part.startswith("_") for part in name.split("."))
    ]
    assert not private, f"{path}: import {private} in torch_private.py and give them a name there"


@pytest.mark.parametrize("path", checked_files(), ids=str)
def test_files_and_functions_are_short(path: Path) -> None:
    lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES, f"{path} has {lines} lines"
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{path}: {node.name} has {length} lines"


def test_every_module_has_its_mirrored_test() -> None:
    missing = []
    for path in modules():
        test = ROOT / "tests" / path.parent / f"test_{path.stem.lstrip('_')}.py"
        if path.name != "__init__.py" and str(path) not in NOT_MIRRORED and not test.exists():
            missing.append(str(path))
    assert not missing, f"write tests/<room>/test_<module>.py, or say why not, for {missing}"


def test_modules_excused_from_a_test_exist() -> None:
    gone = [name for name in NOT_MIRRORED if not (ROOT / name).exists()]
    assert not gone


def test_tests_are_no_packages() -> None:
    # An __init__.py under tests/ would let tests/planner shadow the room of that name.
    assert not list((ROOT / "tests").rglob("__init__.py"))


@pytest.mark.parametrize("room", ["profiles", "simulator"])
def test_the_lower_rooms_run_without_torch(room: str) -> None:
    names = [
        "claw_plan." + ".".join(path.with_suffix("").parts)
        for path in modules()
        if path.parts[0] == room and path.name != "__init__.py"
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_help_does_not_wait_for_torch() -> None:
    code = (
        "import sys, claw_plan.cli.main as main\n"
        "assert 'torch' not in sys.modules and 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

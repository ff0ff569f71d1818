"""The wheel holds every room and its data, and works without the repository beside it."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("cli", "executor", "kernels", "planner", "profiles", "simulator")
DATA_SUFFIXES = {".yaml", ".typed", ".json", ".csv"}


def shipped_files() -> set[str]:
    """What the wheel should hold: the rooms' modules and data, under the import namespace."""
    return {
        f"claw_plan/{path.relative_to(ROOT).as_posix()}"
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.suffix in {".py", *DATA_SUFFIXES} and "__pycache__" not in path.parts
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Built from a copy: setuptools would pack what an earlier build left under build/.
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for room in ROOMS:
        shutil.copytree(
            ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__", "*.nb*")
        )
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w"]
    subprocess.run([*command, str(target), str(source)], check=True, timeout=300)
    (built,) = target.glob("claw_plan-*.whl")
    return built


def test_every_file_of_the_rooms_is_in_the_wheel(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packed = {name for name in names if ".dist-info/" not in name}
    assert packed == shipped_files()


def test_the_licence_is_in_the_wheel(wheel: Path) -> None:
    assert any(name.endswith("licenses/LICENSE") for name in zipfile.ZipFile(wheel).namelist())


def test_the_rooms_are_imported_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    # -S leaves out the .pth files of the environment, and with them the editable installation.
    code = (
        "import sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        f"sys.path.append({sysconfig.get_path('purelib')!r})\n"
        "import claw_plan.cli.main as main\n"
        f"assert main.__file__.startswith({str(tmp_path)!r}), main.__file__\n"
        "main.cli.main(['--help'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: claw-plan" in done.stdout


def test_one_namespace_and_nothing_else_is_installed(wheel: Path) -> None:
    # Flat names such as `kernels` would overwrite other people's packages.
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"claw_plan"}

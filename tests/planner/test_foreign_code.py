from __future__ import annotations

import logging
from pathlib import Path

import pytest

from claw_plan.planner.errors import TraceError
from claw_plan.planner.foreign_code import LONGEST_MESSAGE, ForeignCode, import_file
from claw_plan.planner.torch_private import FakeTensorMode, fake_tensor_log
from claw_plan.profiles.errors import InputError


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_file_imports_its_sibling_and_not_another_folders(tmp_path: Path) -> None:
    for folder in ("one", "two"):
        write(tmp_path / folder / "part_of_model.py", f"NAME = {folder!r}")
        write(tmp_path / folder / "model.py", "from part_of_model import NAME")
    assert import_file(tmp_path / "one" / "model.py").NAME == "one"
    assert import_file(tmp_path / "two" / "model.py").NAME == "two"


def test_a_file_of_a_package_is_imported_as_its_part(tmp_path: Path) -> None:
    """By relative names and by those of the package; two packages may have the same names."""
    for repository, text in (
        ("one", "from .parts import NAME"),
        ("two", "from nets.inner.parts import NAME"),
    ):
        folder = tmp_path / repository / "nets"
        for part in (folder, folder / "inner"):
            part.mkdir(parents=True)
            write(part / "__init__.py", "")
        write(folder / "inner" / "parts.py", f"NAME = {repository!r}")
        write(folder / "inner" / "model.py", f"{text}\nclass Net: pass")
    for repository in ("one", "two", "one"):
        module = import_file(tmp_path / repository / "nets" / "inner" / "model.py")
        assert (module.NAME, module.__name__) == (repository, "nets.inner.model")
        assert module.Net.__module__ == module.__name__


def test_what_a_part_of_a_package_lacks_is_said_as_ever(tmp_path: Path) -> None:
    write(tmp_path / "nets" / "__init__.py", "")
    file = write(tmp_path / "nets" / "model.py", "from . import other\nimport no_such_module_here")
    write(tmp_path / "nets" / "other.py", "")
    with pytest.raises(TraceError, match=r"No module named 'no_such_module_here' .*install"):
        import_file(file)


def test_dataclasses_with_postponed_annotations_work(tmp_path: Path) -> None:
    text = "from __future__ import annotations\nfrom dataclasses import dataclass\n"
    text += "@dataclass\nclass Config:\n    layers: int = 3\n"
    assert import_file(write(tmp_path / "model.py", text)).Config().layers == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\nraise ValueError('seven\\nmore')", r": ValueError: seven \(model.py line 2\)"),
        ("def f(:", r": SyntaxError: invalid syntax \(model.py line 1\)$"),
        ("open('no_such_file')", "No such file .*'no_such_file' .*run it in its folder"),
        ("import no_such_module_here", "ModuleNotFoundError: No module named 'no_such.*install"),
        ("raise ValueError('not valid:\\n  size is text\\nmore')", "not valid: size is text"),
        ("raise RuntimeError('x is on device meta')", "let the file build on the CPU"),
        ("raise AssertionError('Torch not compiled with CUDA enabled')", "planning needs no GPU"),
        ("from .layers import Net", "ImportError: attempted relative.*a file beside the package"),
        ("import sys\nsys.exit(3)", "SystemExit: 3.*guard it with __main__"),
    ],
)  # fmt: skip
def test_errors_are_the_files_own_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        import_file(write(tmp_path / "model.py", text))


def test_long_messages_are_shortened(tmp_path: Path) -> None:
    with pytest.raises(TraceError) as caught, ForeignCode(tmp_path / "model.py", "running"):
        raise RuntimeError("x" * 10_000)
    assert len(str(caught.value)) < LONGEST_MESSAGE + 200


def test_our_own_errors_and_interrupts_pass(tmp_path: Path) -> None:
    for error in (InputError("ours"), KeyboardInterrupt()):
        with pytest.raises(type(error)), ForeignCode(tmp_path / "model.py", "running"):
            raise error


def test_torch_logs_no_traceback_beside_our_sentence(tmp_path: Path) -> None:
    before = fake_tensor_log.level
    with ForeignCode(tmp_path / "model.py", "running"), FakeTensorMode():
        assert not fake_tensor_log.isEnabledFor(logging.ERROR)
    assert fake_tensor_log.level == before

"""Running the user's model file: import it, and turn what it raises into one readable sentence.

Whatever the file raises, while imported, built or called, is the user's own error: its type,
message and line are kept, the traceback through this program is not.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, TracebackType

from claw_plan.planner.errors import TraceError
from claw_plan.planner.torch_private import fake_tensor_log
from claw_plan.profiles.errors import ClawPlanError

LONGEST_MESSAGE = 300
"""Characters of the user's own error that are shown; torch's messages run to pages."""

_siblings: dict[str, Path] = {}
"""Modules that model files imported from their own folders: name -> folder."""

_added: list[str] = []
"""Folders of model files that sys.path did not have before."""


class ForeignCode:
    """A context in which the user's code runs: its errors leave as a TraceError of one line."""

    def __init__(self, path: Path, doing: str) -> None:
        self.path, self.doing = path, doing

    def __enter__(self) -> None:
        """Torch would log the traceback of an error that is said here in one line."""
        self._level = fake_tensor_log.level
        fake_tensor_log.setLevel(logging.CRITICAL)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        fake_tensor_log.setLevel(self._level)
        if error is None or isinstance(error, ClawPlanError | MemoryError):
            return
        if not isinstance(error, Exception | SystemExit):
            return
        raise TraceError(f"{self.path}: {self.doing} failed: {self.shortened(error)}") from error

    def shortened(self, error: BaseException) -> str:
        """Type, first line of the message, the last line of the user's own files, advice."""
        own = error.msg if isinstance(error, SyntaxError) else str(error)
        lines = str(own).strip().splitlines() or [""]
        if lines[0].endswith(":") and len(lines) > 1:  # the sentence goes on in the next line
            lines[0] += " " + lines[1].strip()
        message = (
            lines[0] if len(lines[0]) <= LONGEST_MESSAGE else lines[0][:LONGEST_MESSAGE] + "…"
        )
        text = f"{type(error).__name__}: {message}".removesuffix(": ")
        if where := self._line(error):
            text += f" ({where})"
        if isinstance(error, SystemExit):
            return f"{text}; the file runs a program when imported: guard it with __main__"
        if isinstance(error, ModuleNotFoundError):
            return f"{text}; install what the file imports beside claw-plan, or name its folder"
        if isinstance(error, FileNotFoundError) and not Path(str(error.filename)).is_absolute():
            return f"{text}; it is looked for from where claw-plan runs: run it in its folder"
        if "attempted relative import" in str(error):
            return (
                f"{text}; it is a part of a package: give a file beside the package that imports "
                "the model from it"
            )
        if "device meta" in str(error):
            return f"{text}; let the file build on the CPU: nothing is allocated while planning"
        if any(word in str(error) for word in ("CUDA", "cuda", "NVIDIA")):
            return (
                f"{text}; planning needs no GPU: let the file build the model on the CPU, and "
                "move nothing to CUDA when it is imported"
            )
        return text

    def _line(self, error: BaseException) -> str:
        if isinstance(error, SyntaxError) and error.lineno and error.filename:
            return f"{Path(error.filename).name} line {error.lineno}"
        folder = str(self.path.resolve().parent)
        frames = traceback.extract_tb(error.__traceback__)
        own = [
            f
            for f in frames
            if f.filename.startswith(folder) and "site-packages" not in f.filename
        ]
        return f"{Path(own[-1].filename).name} line {own[-1].lineno}" if own else ""


def import_file(path: Path) -> ModuleType:
    """The file as a module, with its own folder on sys.path as `python` does.

    A file that imports from the package it lies in is imported as a part of that package.
    """
    file = path.resolve()
    with ForeignCode(path, "importing it"):
        try:
            return _import_alone(file)
        except ImportError as error:
            if not _misses_package(error, file):
                raise
        return _import_in_package(file)


def _import_alone(file: Path) -> ModuleType:
    """Under a private name, so that it shadows nothing."""
    name = f"_claw_plan_model_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # a .py file always has a loader
    module = importlib.util.module_from_spec(spec)
    with _on_path(file.parent, file.parent):
        sys.modules[name] = module  # dataclasses and pickle look a class's module up here
        try:
            spec.loader.exec_module(module)
        except ImportError:
            del sys.modules[name]
            raise
    return module


def _misses_package(error: ImportError, file: Path) -> bool:
    """Whether the error is that of a file of a package that was run without it."""
    names = _package_of(file)
    own = names and (error.name or "").partition(".")[0] == names[0]
    return bool(own or (names and "attempted relative import" in str(error)))


def _import_in_package(file: Path) -> ModuleType:
    names = _package_of(file)
    root = file.parents[len(names)]
    with _on_path(root, root / names[0]):
        last = () if file.stem == "__init__" else (file.stem,)
        return importlib.import_module(".".join((*names, *last)))


def _package_of(file: Path) -> list[str]:
    """The packages around the file, outermost first."""
    names: list[str] = []
    for folder in file.parents:
        if not (folder / "__init__.py").is_file():
            break
        names.insert(0, folder.name)
    return names


@contextmanager
def _on_path(folder: Path, own: Path) -> Iterator[None]:
    """`folder` first on sys.path; what is imported from `own` is forgotten for other models."""
    _forget_others(folder)
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
    else:
        _added.append(str(folder))
    sys.path.insert(0, str(folder))
    before = set(sys.modules)
    try:
        yield
    finally:
        for new in set(sys.modules) - before:
            origin = getattr(sys.modules[new], "__file__", None)
            is_own = origin and Path(origin).resolve().is_relative_to(own)
            if is_own and "site-packages" not in own.parts:
                _siblings[new] = folder


def _forget_others(folder: Path) -> None:
    """Two model folders may each have a `gpt.py`: the second must not get the first one's."""
    for name in [name for name, home in _siblings.items() if home != folder]:
        sys.modules.pop(name, None)
        del _siblings[name]
    for other in [added for added in _added if added != str(folder)]:
        _added.remove(other)
        if other in sys.path:
            sys.path.remove(other)

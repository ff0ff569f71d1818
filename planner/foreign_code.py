"""Running the user's model file: import it, and turn what it raises into one readable sentence.

Whatever the file raises, while imported, built or called, is the user's own error: its type,
message and line are kept, the traceback through this program is not.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import sys
import traceback
from pathlib import Path
from types import ModuleType, TracebackType

from claw_plan.planner.errors import TraceError
from claw_plan.planner.torch_private import fake_tensor_log
from claw_plan.profiles.errors import ClawPlanError

LONGEST_MESSAGE = 300
"""Characters of the user's own error that are shown; torch's messages run to pages."""

_siblings: dict[str, Path] = {}
"""Modules that model files imported from their own folders: name -> folder."""


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
    """The file as a module of a private name, with its own folder on sys.path as `python` does."""
    file = path.resolve()
    folder = file.parent
    _forget_siblings_of_others(folder)
    name = f"_claw_plan_model_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None  # a .py file always has a loader
    module = importlib.util.module_from_spec(spec)
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
    sys.path.insert(0, str(folder))
    before = set(sys.modules)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up here
    with ForeignCode(path, "importing it"):
        spec.loader.exec_module(module)
    for new in set(sys.modules) - before:
        origin = getattr(sys.modules[new], "__file__", None)
        if origin and Path(origin).resolve().is_relative_to(folder):
            _siblings[new] = folder
    return module


def _forget_siblings_of_others(folder: Path) -> None:
    """Two model folders may each have a `gpt.py`: the second must not get the first one's."""
    for name in [name for name, home in _siblings.items() if home != folder]:
        sys.modules.pop(name, None)
        del _siblings[name]

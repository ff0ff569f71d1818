"""Checkpoints as folders: names, header, the order of writing, which is the latest.

    <folder>/step-00000100/checkpoint.json   what it is of; lists all files with their sizes
                           .metadata         DCP's own list of tensors
                           __<rank>_0.distcp what a rank wrote
    <folder>/.step-00000200.<n>.partial/     one that is being written

A checkpoint gets its name by renaming, after all its files are on the disk, so one that has a
name is whole, and a kill at any moment leaves the older ones as they were.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from claw_plan.executor.checkpoint_io import METADATA
from claw_plan.executor.errors import ExecutionError
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.files import read_limited, sync_folder, write_atomic

HEADER = "checkpoint.json"
LATEST = "latest"
CHECKPOINTS = "checkpoints"
"""The folder of a run's own checkpoints inside its run folder."""

HEADER_LIMIT_BYTES = 100_000_000
"""A line for each of some hundred thousand tensors."""

REMEDY = "resume from an older checkpoint, or copy this one again"

_NAME = re.compile(r"step-(\d{8,})")
_LEFT_OVER = re.compile(r"\.step-\d{8,}\.(\d+\.partial|old)")


class Header(BaseModel):
    """checkpoint.json.

    `step` optimizer steps are done and `samples` read. `groups` are the numbers of the optimizer's
    parameter groups that training itself has changed. `names` maps the keys of the model's
    state_dict to the tensors that are stored. `files` has sizes in bytes.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int = Field(default=1, ge=1, le=1)
    step: int = Field(gt=0)
    samples: int
    saved_at_ns: int
    model: dict[str, Any]
    training: dict[str, Any]
    candidate: dict[str, Any]
    optimizer: str
    groups: list[dict[str, int | float]]
    loss_scale: dict[str, float] | None
    names: dict[str, str]
    versions: dict[str, str]
    files: dict[str, int] = Field(default_factory=dict)


def name_of(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step-{step:08d}"


def partial_path(folder: Path, step: int, attempt: int) -> Path:
    """Where a checkpoint is written before it gets its name.

    A new folder for each attempt: one that all ranks write to cannot be cleared without a race.
    """
    return folder / f".{name_of(step)}.{attempt}.partial"


def commit(partial: Path, header: Header, keep: int | None) -> Path:
    """Gives what all ranks have written its name, and removes all but the `keep` newest.

    Raises ExecutionError when files are missing that other ranks say they wrote.
    """
    folder = partial.parent
    files = {path.name: path.stat().st_size for path in partial.iterdir()}
    if METADATA not in files:
        raise ExecutionError(
            f"the ranks' files are not all in {folder}; --checkpoint-dir must be a folder that "
            "all nodes share"
        )
    header = header.model_copy(update={"files": files, "saved_at_ns": time.time_ns()})
    write_atomic(partial / HEADER, header.model_dump_json(indent=1))
    sync_folder(partial)
    target, old = folder / name_of(header.step), folder / f".{name_of(header.step)}.old"
    shutil.rmtree(old, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        target.rename(old)
    partial.rename(target)
    sync_folder(folder)
    shutil.rmtree(old, ignore_errors=True)
    if keep is not None:
        for path in checkpoints_in(folder)[:-keep]:
            remove(path)
    return target


def remove(path: Path) -> None:
    """Removes a checkpoint; at every moment it is whole or has no name."""
    hidden = path.with_name(f".{path.name}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.rename(hidden)
        shutil.rmtree(hidden)


def prepare_folder(folder: Path) -> None:
    """Makes sure that checkpoints can be written there, and clears what a killed run left."""
    probe = folder / f".probe-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise ExecutionError(
            f"cannot write checkpoints to {folder}: {error.strerror}; choose another "
            "--checkpoint-dir"
        ) from None
    clear_left_over(folder)


def clear_left_over(folder: Path) -> None:
    """Removes what ranks that were ended had begun to write or to remove."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if _LEFT_OVER.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)


def checkpoints_in(folder: Path) -> list[Path]:
    """The whole checkpoints of a folder, oldest first by the time they were written."""
    try:
        named = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    except OSError:
        return []
    return sorted((path for path in named if (path / HEADER).is_file()), key=_age)


def _age(path: Path) -> tuple[int, str]:
    try:
        return read_header(path).saved_at_ns, path.name
    except InputError:  # shows itself when it is opened; it must not hide the others
        return 0, path.name


def read_header(path: Path) -> Header:
    """checkpoint.json of one checkpoint; raises InputError for what is none."""
    file = path / HEADER
    if not file.is_file():
        raise InputError(
            f"{path} is no whole checkpoint: it has no {HEADER}; name a folder step-<N>, or what "
            "holds such folders"
        )
    content = read_limited(file, HEADER_LIMIT_BYTES, ": wrong file?")
    try:
        return Header.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise InputError(f"{file}: {where}: {first['msg'].lower()}; {REMEDY}") from None


def check_files(path: Path, header: Header) -> None:
    """Every file is there, as long as it was when it was written; else InputError names it."""
    for name, size_bytes in header.files.items():
        file = path / name
        try:
            found = file.stat().st_size
        except FileNotFoundError:
            raise InputError(f"{file} is missing; {REMEDY}") from None
        if found != size_bytes:
            raise InputError(f"{file} has {found} bytes, but {size_bytes} were written; {REMEDY}")


def find_checkpoint(where: str, places: Sequence[Path]) -> Path:
    """The checkpoint that --resume means: `latest` of the places, or in or at the named folder.

    The folder may be a checkpoint, hold checkpoints, or be a run's own.
    """
    if where != LATEST:
        folder = Path(where)
        if (folder / HEADER).is_file():
            return folder
        places = [folder, folder / CHECKPOINTS]
    found = sorted((path for place in places for path in checkpoints_in(place)), key=_age)
    if not found:
        names = " or ".join(str(place) for place in places) or "the runs"
        raise InputError(
            f"--resume {where}: no checkpoint in {names}; write some with --checkpoint-every N"
        )
    return found[-1]

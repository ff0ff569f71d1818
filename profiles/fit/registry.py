"""Which fitter makes profile files of which kind of data file.

A fitter recognises a file by its content and turns all files of its kind together into texts,
each with the name of the profile file it belongs in. Rooms above add theirs through the entry
point group `claw_plan.fitters`, since this one cannot import them.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import yaml

from claw_plan.profiles.errors import InputError

BUILT_IN = ("claw_plan.profiles.fit.collectives", "claw_plan.profiles.fit.kernels")
"""Modules of this room whose `FITTER` is one."""

GROUP = "claw_plan.fitters"

MAX_DATA_BYTES = 64_000_000
"""Larger files are no tables of measurements: the largest known has 1 MB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """A file of measurements: parsed YAML (a mapping or a list), or the rows of a CSV."""

    path: Path
    data: Any
    sha256: str

    @property
    def provenance(self) -> str:
        """Name and digest, to be written into what is made from the file."""
        return f"{self.path.name} (sha256 {self.sha256[:16]})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitter:
    """One kind of data file.

    `fit` returns the text of each profile file, by name; `folder` is where they belong.
    """

    kind: str
    recognises: Callable[[DataFile], bool]
    fit: Callable[[Sequence[DataFile]], Mapping[str, str]]
    folder: Path


def fitters() -> tuple[Fitter, ...]:
    """All there are, in the order of their kinds."""
    found = [import_module(name).FITTER for name in BUILT_IN]
    found += [point.load() for point in entry_points(group=GROUP)]
    return tuple(sorted(found, key=lambda fitter: str(fitter.kind)))


def read_data(path: Path) -> DataFile:
    """Reads YAML or CSV; raises InputError when it is neither."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {error.strerror}") from None
    if len(raw) > MAX_DATA_BYTES:
        raise InputError(f"{path.name} has {len(raw)} bytes; at most {MAX_DATA_BYTES} are read")
    try:
        text = raw.decode("utf-8")
        if path.suffix.lower() == ".csv":
            data: Any = list(csv.DictReader(text.splitlines()))
        else:
            data = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"{path.name} is no table of measurements: {reason}") from None
    return DataFile(path=path, data=data, sha256=hashlib.sha256(raw).hexdigest())


def assign(
    files: Sequence[DataFile], known: Sequence[Fitter]
) -> list[tuple[Fitter, list[DataFile]]]:
    """The files of each fitter; raises InputError for a file that none recognises."""
    of_kind: dict[str, list[DataFile]] = {}
    by_kind = {fitter.kind: fitter for fitter in known}
    for file in files:
        kinds = [fitter.kind for fitter in known if fitter.recognises(file)]
        if not kinds:
            raise InputError(
                f"{file.path.name} holds no measurements that a fitter knows; known kinds: "
                + ", ".join(by_kind)
            )
        of_kind.setdefault(kinds[0], []).append(file)
    return [(by_kind[kind], some) for kind, some in sorted(of_kind.items())]

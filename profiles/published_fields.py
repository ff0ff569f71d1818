"""Values of one row of a published file, with messages that say which file, row and key.

Rows come from YAML or CSV that other people wrote. `Fields` reads one mapping of a row strictly:
a missing key or a value of another kind is an `InputError` that names file, line, row and key.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.files import read_text


@dataclass(frozen=True, slots=True)
class Row:
    """Where a row stands: the file, its path of keys in it, and what it calls itself."""

    path: Path
    keys: tuple[str | int, ...]
    name: str

    def fail(self, key: str, rule: str) -> InputError:
        """The error for a value of this row."""
        line = line_of(self.path, self.keys)
        place = f"{self.path.name}:{line}" if line else self.path.name
        at = f" {key}" if key else ""
        return InputError(f"{place}: row {self.name!r}:{at} {rule}")


@dataclass(frozen=True, slots=True)
class Fields:
    """One mapping of a row. `prefix` is its path of keys in the row: 'model.moe.'."""

    row: Row
    values: Mapping[str, Any]
    prefix: str = ""

    def __contains__(self, key: str) -> bool:
        return self.values.get(key) is not None

    def fail(self, key: str, rule: str) -> InputError:
        """The error for the value of `key`."""
        return self.row.fail(self.prefix + key, rule)

    def part(self, key: str) -> Fields:
        """The mapping under `key`."""
        value = self._needed(key)
        if not isinstance(value, Mapping):
            raise self.fail(key, f"must hold keys and values; got {value!r}")
        return Fields(self.row, value, f"{self.prefix}{key}.")

    def whole(self, key: str, default: int | None = None, *, at_least: int = 1) -> int:
        """A whole number, `default` where the key is absent."""
        value = self._needed(key, default)
        is_whole = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_whole or not math.isfinite(value) or value != int(value) or value < at_least:
            raise self.fail(key, f"must be a whole number of at least {at_least}; got {value!r}")
        return int(value)

    def number(self, key: str) -> float:
        """A positive, finite number."""
        value = self._needed(key)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 < value < math.inf:
            raise self.fail(key, f"must be a positive number; got {value!r}")
        return float(value)

    def text(self, key: str, default: str | None = None) -> str:
        """A text; numbers are taken as they are written."""
        value = self._needed(key, default)
        if isinstance(value, (Mapping, list)):
            raise self.fail(key, f"must be a text; got {value!r}")
        return str(value)

    def truth(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._needed(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"must be true or false; got {value!r}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts, empty where the key is absent."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self.fail(key, f"must be a list; got {value!r}")
        return tuple(str(one) for one in value)

    def _needed(self, key: str, default: object = None) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(key, "is missing")
        return value


def load_yaml(path: Path) -> Any:
    """The plain data of a YAML file, quickly; InputError with the line where it is not YAML."""
    try:
        return yaml.load(read_text(path), Loader=yaml.CSafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path.name}:{mark.line + 1}" if mark else path.name
        problem = getattr(error, "problem", None) or "cannot be read"
        raise InputError(f"{place}: not YAML: {problem}") from None
    except RecursionError:
        raise InputError(f"{path.name} is nested too deeply") from None


def line_of(path: Path, keys: Sequence[str | int]) -> int | None:
    """The line of a part of a YAML file, found by reading it once more; None if not there."""
    if path.suffix.lower() == ".csv":
        return keys[0] if keys and isinstance(keys[0], int) else None
    node: Any = yaml.compose(read_text(path), Loader=yaml.CSafeLoader)
    for key in keys:
        node = _child(node, key)
        if node is None:
            return None
    return int(node.start_mark.line) + 1


def _child(node: Any, key: str | int) -> Any:
    if isinstance(key, int):
        values = node.value if isinstance(node, yaml.SequenceNode) else []
        return values[key] if key < len(values) else None
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next((value for name, value in pairs if name.value == key), None)

"""Values of one row of a published file, with messages that say which file, row and key.

Rows come from YAML or CSV that other people wrote. `Fields` reads one mapping of a row strictly:
a missing key or a value of another kind is an `InputError` that names file, line, row and key.
`BrokenRows` lists such rows beside the sound ones.
"""

from __future__ import annotations

import contextlib
import math
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.files import read_text
from claw_plan.profiles.published_rows import NotExpressed

_LARGEST = 10**15
"""No size, count or batch of a run reaches it; numbers beyond are slips of the pen."""


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
            raise self.fail(key, f"must hold keys and values; got {shown(value)}")
        return Fields(self.row, value, f"{self.prefix}{key}.")

    def whole(self, key: str, default: int | None = None, *, at_least: int = 1) -> int:
        """A whole number, `default` where the key is absent."""
        value = self._needed(key, default)
        number = _number_in(value)
        if number is None or not at_least <= number < _LARGEST or number != int(number):
            raise self.fail(
                key, f"must be a whole number of at least {at_least}; got {shown(value)}"
            )
        return int(number)

    def number(self, key: str) -> float:
        """A positive, finite number."""
        value = self._needed(key)
        number = _number_in(value)
        if number is None or number <= 0:
            raise self.fail(key, f"must be a positive number; got {shown(value)}")
        return float(number)

    def text(self, key: str, default: str | None = None) -> str:
        """A text; numbers are taken as they are written."""
        value = self._needed(key, default)
        if isinstance(value, (Mapping, list)):
            raise self.fail(key, f"must be a text; got {shown(value)}")
        return str(value)

    def truth(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self._needed(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"must be true or false; got {shown(value)}")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts, empty where the key is absent."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self.fail(key, f"must be a list; got {shown(value)}")
        return tuple(shown(one) if isinstance(one, (Mapping, list)) else str(one) for one in value)

    def _needed(self, key: str, default: object = None) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(key, "is missing")
        return value


def shown(value: object) -> str:
    """A value as messages quote it: cut short, as aliases and digits can stand for gigabytes."""
    try:
        return reprlib.repr(value)
    except ValueError:  # Python prints no integer of more than 4,300 digits
        return "a number of thousands of digits"


def _number_in(value: object) -> int | float | None:
    """A finite number, also one written as text ('4096', '1e3'); None for anything else."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:  # an integer beyond every float
        return None


@dataclass(slots=True)
class BrokenRows:
    """Rows of one file that cannot be read: one slip must not cost the rows around it."""

    listed: list[NotExpressed] = field(default_factory=list)
    errors: list[InputError] = field(default_factory=list)

    @contextlib.contextmanager
    def caught(self, name: str, family: str) -> Iterator[None]:
        """Lists the row when what runs inside finds it broken."""
        try:
            yield
        except InputError as error:
            self.listed.append(NotExpressed(id=name, family=family, reason=str(error)))
            self.errors.append(error)

    def among(self, others: int) -> list[NotExpressed]:
        """The broken rows; raises the first one's error where the file has no other rows."""
        if self.errors and not others:
            raise self.errors[0]
        return self.listed


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
    except (ValueError, OverflowError) as error:  # a date or number that cannot be
        raise InputError(f"{path.name}: not YAML: {error}") from None


def line_of(path: Path, keys: Sequence[str | int]) -> int | None:
    """The line of a part of a YAML file, found by reading it once more; None if not there."""
    if path.suffix.lower() == ".csv":
        return keys[0] if keys and isinstance(keys[0], int) else None
    node: Any = _composed(read_text(path))
    for key in keys:
        node = _child(node, key)
        if node is None:
            return None
    return int(node.start_mark.line) + 1


@lru_cache(maxsize=1)
def _composed(text: str) -> Any:
    """The nodes of a YAML text; kept for the next broken row of the same file."""
    return yaml.compose(text, Loader=yaml.CSafeLoader)


def _child(node: Any, key: str | int) -> Any:
    if isinstance(key, int):
        values = node.value if isinstance(node, yaml.SequenceNode) else []
        return values[key] if key < len(values) else None
    pairs = node.value if isinstance(node, yaml.MappingNode) else []
    return next((value for name, value in pairs if name.value == key), None)

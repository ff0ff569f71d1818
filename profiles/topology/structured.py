"""JSON and YAML of other tools to a `Document`: plain data with lines, bounded in size.

Step between `source` and the readers `galvatron`, `calculon`, `astra_sim` and `proteus`, and the
helpers with which they take numbers out of it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.files import Document, parse_yaml
from claw_plan.profiles.topology.source import Source

MAX_YAML, MAX_JSON = 400_000, 8_000_000
"""Characters. Configurations are small; a YAML parser needs seconds for more."""

_MAX_DEPTH = 50
_MAX_LINES = 2000
"""Keys whose lines are looked up; no tool's description has more."""


def load(source: Source) -> Document | None:
    """The file's mapping; None when it is neither JSON nor YAML with keys.

    Raises InputError for JSON that is broken, and for what is too large.
    """
    text = source.text.lstrip("\ufeff \t\r\n")
    if text.startswith("{"):
        return _json(source)
    if not re.search(r"^[A-Za-z_][\w .-]{0,60}:(?:\s|$)", source.text, re.MULTILINE):
        return None
    if len(text) > MAX_YAML:
        return None
    try:
        return parse_yaml(source.text, Path(source.name))
    except InputError:
        return None


def _json(source: Source) -> Document:
    if len(source.text) > MAX_JSON:
        raise InputError(
            f"{source.name}: more than {MAX_JSON // 1_000_000} MB of JSON describe no machine"
        )
    try:
        data = json.loads(source.text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{source.where(error.lineno)}: not valid JSON ({error.msg}); is the file whole?"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source.where(1)}: JSON that is refused: {str(error)[:120]}") from None
    finder = _KeyLines(source.text)
    finder.find(data, ())
    return Document(path=Path(source.name), data=data, lines=finder.lines)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


class _KeyLines:
    """The line of every key of JSON: keys stand in the text in the order of the data."""

    def __init__(self, text: str) -> None:
        self.lines: dict[tuple[Any, ...], int] = {}
        self._text = text
        self._place = 0
        self._line = 1

    def find(self, data: Any, path: tuple[Any, ...]) -> None:
        if len(path) > _MAX_DEPTH:
            raise InputError(f"JSON nested deeper than {_MAX_DEPTH} levels describes no machine")
        items = list(data.items()) if isinstance(data, Mapping) else []
        if isinstance(data, list):
            items = list(enumerate(data))
        for key, value in items:
            if isinstance(key, str):
                self._step(key, (*path, key))
            self.find(value, (*path, key))

    def _step(self, key: str, path: tuple[Any, ...]) -> None:
        place = self._text.find(json.dumps(key), self._place)
        if place < 0 or len(self.lines) >= _MAX_LINES:
            return
        self._line += self._text.count("\n", self._place, place)
        self._place = place
        self.lines[path] = self._line


def number(document: Document, *keys: str | int, limit: float, least: float = 0.0) -> float:
    """The number at `keys`, above `least` and up to `limit`. Raises InputError with its line."""
    value: Any = document.data
    for key in keys:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            raise InputError(f"{document.where(keys)}: this key is missing") from None
    if isinstance(value, str):
        value = _plain_number(value)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or (isinstance(value, float) and not math.isfinite(value))
    ):
        raise InputError(f"{document.where(keys)}: must be a number; got {str(value)[:40]!r}")
    if not least < value <= limit:
        raise InputError(
            f"{document.where(keys)}: {float(min(value, 1e300)):g} is implausible: not above "
            f"{least:g} and up to {limit:g}; is the unit right?"
        )
    return float(value)


def _plain_number(text: str) -> Any:
    try:
        return float(text) if len(text) < 40 else text
    except ValueError:
        return text


def whole(document: Document, *keys: str | int, limit: int) -> int:
    """The whole number from 1 to `limit` at `keys`."""
    value = number(document, *keys, limit=limit)
    if value != int(value):
        raise InputError(f"{document.where(keys)}: must be a whole number; got {value:g}")
    return int(value)


def numbers(document: Document, key: str, limit: float) -> list[float]:
    """A list of numbers (or one number) at `key`."""
    value = document.data.get(key)
    if isinstance(value, Sequence) and not isinstance(value, str):
        if not 0 < len(value) <= 16:
            raise InputError(f"{document.where([key])}: must be a list of 1 to 16 numbers")
        return [number(document, key, index, limit=limit) for index in range(len(value))]
    return [number(document, key, limit=limit)]

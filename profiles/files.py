"""Reading and writing of files, for all rooms.

`read_yaml` turns a file that a person wrote into a `Document`: plain data that remembers the line
of every key, so that whoever finds a mistake in it can say where. `validate` makes a pydantic
model of it. Whatever is wrong with a file becomes one `InputError`. `write_atomic` leaves either
the old file or the whole new one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from claw_plan.profiles.errors import InputError, near_matches

MAX_FILE_BYTES = 4_000_000
"""Larger files are no cluster, plan or configuration: the largest plan known has 60 KB."""

_MAX_VALUES = 100_000
"""With aliases a small file can stand for more values than memory holds (the 'billion laughs')."""

_MAX_DEPTH = 100

Key = str | int | float | bool | None
Path_ = tuple[Any, ...]
Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True, kw_only=True)
class Document:
    """The data of one file and where each part of it stands.

    `lines` maps a path of keys and list positions to a line, counted from 1.
    """

    path: Path
    data: Mapping[str, Any]
    lines: Mapping[Path_, int] = field(default_factory=dict, repr=False)

    def where(self, keys: Sequence[str | int] = ()) -> str:
        """'cluster.yaml:7: nodes[0].type'; for an absent key the line of what should hold it."""
        known = tuple(keys)
        while known and known not in self.lines:
            known = known[:-1]
        line = self.lines.get(known)
        place = self.path.name if line is None else f"{self.path.name}:{line}"
        return f"{place}: {format_keys(keys)}" if keys else place


def format_keys(keys: Sequence[Any]) -> str:
    """A path as people write it: ('nodes', 0, 'type') is 'nodes[0].type'."""
    text = ""
    for key in keys:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else str(key)
    return text


def read_limited(path: Path, limit_bytes: int, advice: str) -> bytes:
    """A file's content; raises InputError where it cannot be read or is larger than the limit.

    `advice` is what to do about a file that is too large.
    """
    try:
        with path.open("rb") as file:
            content = file.read(limit_bytes + 1)
    except FileNotFoundError:
        raise InputError(f"there is no file {str(path)!r}; check the path") from None
    except IsADirectoryError:
        raise InputError(f"{str(path)!r} is a folder; name a file in it") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read {str(path)!r}: {reason}") from None
    if len(content) > limit_bytes:
        raise InputError(f"{path.name} is larger than {limit_bytes // 1_000_000} MB{advice}")
    return content


def read_text(path: Path) -> str:
    """A text file of at most MAX_FILE_BYTES; raises InputError for anything else."""
    content = read_limited(path, MAX_FILE_BYTES, ": wrong file?")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path.name} is not a text file (byte {error.start} is not UTF-8)"
        ) from None


def read_yaml(path: Path) -> Document:
    """Reads a YAML (or JSON) mapping. Raises InputError with the file and, if known, the line.

    Tags other than YAML's own plain types, merge keys and several documents are refused; dates
    stay text.
    """
    path = Path(path)
    text = read_text(path)
    if not text.strip():
        raise InputError(f"{path.name} is empty")
    return parse_yaml(text, path)


def parse_yaml(text: str, path: Path) -> Document:
    """`read_yaml` of a text that is already here; `path` names it in messages."""
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            raise InputError(f"{path.name} is empty")
        if not isinstance(root, yaml.MappingNode):
            raise InputError(f"{path.name} must hold a mapping (key: value), not {_what(root)}")
        reader = _NodeReader(loader, path.name)
        data = reader.read(root, ())
    except yaml.YAMLError as error:
        raise InputError(_syntax_message(path, error)) from None
    except RecursionError:
        raise InputError(f"{path.name} is nested too deeply") from None
    finally:
        if loader is not None:
            loader.dispose()
    return Document(path=path, data=data, lines=reader.lines)


def _what(node: yaml.Node) -> str:
    return "a list" if isinstance(node, yaml.SequenceNode) else "a single value"


def _syntax_message(path: Path, error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
    place = path.name if mark is None else f"{path.name}:{mark.line + 1}"
    return f"{place}: not valid YAML: {' '.join(str(problem).split())}"


class _NodeReader:
    """Turns YAML nodes into plain data, keeping the line of every value."""

    def __init__(self, loader: yaml.SafeLoader, name: str) -> None:
        self.lines: dict[Path_, int] = {}
        self._loader = loader
        self._name = name
        self._open: set[int] = set()

    def read(self, node: yaml.Node, path: Path_) -> Any:
        line = node.start_mark.line + 1
        # A key's own line, set by `_mapping`, wins over that of a value written below it.
        self.lines.setdefault(path, line)
        if len(self.lines) > _MAX_VALUES:
            raise InputError(f"{self._name} stands for more than {_MAX_VALUES} values")
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node)
        if id(node) in self._open:
            raise InputError(f"{self._name}:{line}: {format_keys(path)} contains itself")
        if len(path) > _MAX_DEPTH:
            raise InputError(f"{self._name}:{line}: nested deeper than {_MAX_DEPTH} levels")
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            if node.tag != "tag:yaml.org,2002:seq":
                raise InputError(f"{self._name}:{line}: the tag {node.tag!r} is not allowed")
            return [self.read(item, (*path, index)) for index, item in enumerate(node.value)]
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: Path_) -> dict[Any, Any]:
        if node.tag != "tag:yaml.org,2002:map":
            line = node.start_mark.line + 1
            raise InputError(f"{self._name}:{line}: the tag {node.tag!r} is not allowed")
        data: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise InputError(f"{self._name}:{line}: a key must be one word, not {key_node.id}")
            key = self._scalar(key_node)
            if key in data:
                raise InputError(
                    f"{self._name}:{line}: the key {format_keys((*path, key))} stands twice"
                )
            self.lines[(*path, key)] = line
            data[key] = self.read(value_node, (*path, key))
        return data

    def _scalar(self, node: yaml.ScalarNode) -> Key:
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if kind in ("str", "timestamp", "merge", "value"):
            return str(node.value)
        try:
            if kind in ("null", "bool", "int", "float"):
                value: Key = self._loader.construct_object(node)
                return value
        except (ValueError, LookupError, OverflowError):
            kind = f"value {node.value[:40]!r}"
        else:
            kind = f"tag {node.tag!r}"
        line = node.start_mark.line + 1
        raise InputError(f"{self._name}:{line}: the {kind} is not allowed")


def validate(document: Document, model: type[Model]) -> Model:
    """The document as `model`. Raises InputError about the first mistake and counts the others."""
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    # Unknown keys first: a misspelled key also makes the right one missing.
    problems.sort(key=lambda problem: problem["type"] != "extra_forbidden")
    message = _problem_message(document, model, problems[0])
    rest = len(problems) - 1
    raise InputError(message + (f" (and {rest} more)" if rest else "")) from None


def _problem_message(
    document: Document, model: type[BaseModel], problem: Mapping[str, Any]
) -> str:
    keys = problem["loc"]
    where = document.where(_keys_in(document.data, keys))
    if problem["type"] == "extra_forbidden":
        return f"{where}: unknown key {keys[-1]!r}; " + near_matches(
            str(keys[-1]), _field_names(model, keys[:-1])
        )
    if problem["type"] == "missing":
        parent = document.where(_keys_in(document.data, keys[:-1]))
        return f"{parent}: the key {str(keys[-1])!r} is missing"
    came = repr(problem["input"])
    came = came if len(came) <= 60 else came[:57] + "..."
    text = problem["msg"].removeprefix("Value error, ")
    text = f"{where}: {text[:1].lower()}{text[1:]}"
    return text if f"got {came}" in text else f"{text}; got {came}"


def _keys_in(data: Any, keys: Sequence[Any]) -> tuple[Any, ...]:
    """Leaves out the names of union branches that pydantic puts between the keys."""
    found: list[Any] = []
    for position, key in enumerate(keys):
        is_last = position == len(keys) - 1
        if isinstance(data, Mapping) and key in data:
            data = data[key]
        elif isinstance(data, list) and isinstance(key, int) and key < len(data):
            data = data[key]
        elif not is_last or not isinstance(data, Mapping):
            continue
        found.append(key)
    return tuple(found)


def _field_names(model: type[BaseModel], keys: Sequence[Any]) -> list[str]:
    """The keys that the part of `model` at `keys` allows."""
    parts: list[Any] = [model]
    for key in keys:
        parts = [inner for part in parts for inner in _inside(part, key)]
    return sorted({name for part in parts if _is_model(part) for name in part.model_fields})


def _is_model(part: Any) -> bool:
    return isinstance(part, type) and issubclass(part, BaseModel)


def _inside(part: Any, key: Any) -> Iterator[Any]:
    if _is_model(part):
        if key in part.model_fields:
            yield from _alternatives(part.model_fields[key].annotation)
        elif part.__name__ == key:
            yield part
        return
    for argument in typing.get_args(part):
        yield from _alternatives(argument)


def _alternatives(annotation: Any) -> Iterator[Any]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        for argument in typing.get_args(annotation):
            yield from _alternatives(argument)
    else:
        yield annotation


def write_atomic(path: Path, text: str) -> None:
    """Writes `text` so that a kill leaves the old file or the whole new one.

    Raises InputError when the folder is missing or cannot be written to, and for what is no
    regular file: renaming over it would replace a device such as /dev/null.
    """
    target = Path(os.path.realpath(path))
    if why := why_not_replaceable(target):
        raise InputError(f"cannot write {str(path)!r}: {why}")
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
        sync_folder(target.parent)
    except FileNotFoundError:
        raise InputError(f"cannot write {str(path)!r}: its folder does not exist") from None
    except OSError as error:
        raise InputError(f"cannot write {str(path)!r}: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def why_not_replaceable(path: Path) -> str:
    """Why a whole new file cannot take the place of `path`; empty when it can."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        return str(getattr(error, "strerror", None) or error)
    if stat.S_ISDIR(mode):
        return "it is a folder; name a file"
    return "" if stat.S_ISREG(mode) else "it is a device or pipe; name a file"


def sync_folder(folder: Path) -> None:
    """Makes the rename itself last; some file systems refuse to sync a folder."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

"""A path becomes the recordings in it: a file, a gzip of one, a tar of ranks, or a folder.

Everything is read as a stream. What unpacks to far more than any recording does is refused as a
compression bomb, before it fills memory or time.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from claw_plan.profiles.errors import InputError

MAX_RATIO = 300
"""Kineto traces unpack to 10 to 40 times their size (gzip -9, traces of six sources); a text
that repeats itself goes up to 1,032 times, deflate's limit."""

FREE_BYTES = 64 << 20
"""What may be unpacked whatever the ratio is: small, and small files pack oddly."""

MAX_BYTES = 64 << 30
"""Of one recording, unpacked."""

MAX_FILES = 4096
"""Of one tar or folder: one a rank."""

GZIP, TAR_OFFSET = b"\x1f\x8b", 257


class Recording(NamedTuple):
    """An open recording. `name` is for messages; `path` a file that holds nothing else."""

    name: str
    file: BinaryIO
    path: Path | None


def open_recordings(path: Path) -> Iterator[Recording]:
    """The recordings at `path`, each open until the next is asked for."""
    if path.is_dir():
        yield from _of_folder(path)
        return
    try:
        with path.open("rb") as file:
            yield from _of_stream(path.name, cast("BinaryIO", file), path, path.stat().st_size)
    except FileNotFoundError:
        raise InputError(f"there is no file {str(path)!r}; check the path") from None
    except tarfile.TarError as error:
        raise InputError(f"{path.name} is no whole tar ({error}); pack it again") from None
    except OSError as error:
        raise InputError(f"cannot read {str(path)!r}: {error.strerror or error}") from None


def _of_folder(folder: Path) -> Iterator[Recording]:
    files = sorted(
        path
        for path in folder.iterdir()
        if path.is_file() and path.name.endswith((".json", ".json.gz"))
    )
    if not files:
        raise InputError(f"{str(folder)!r} holds no .json or .json.gz file; name the traces")
    if len(files) > MAX_FILES:
        raise InputError(f"{str(folder)!r} holds {len(files)} files, more than {MAX_FILES}")
    for path in files:
        yield from open_recordings(path)


def _of_stream(name: str, file: BinaryIO, path: Path | None, packed: int) -> Iterator[Recording]:
    head = file.read(2)
    file.seek(0)
    if head == GZIP:
        unpacked = _Limited(cast("BinaryIO", gzip.GzipFile(fileobj=file)), name, packed)
        plain = io.BufferedReader(unpacked, 1 << 20)
        yield from _plain(name, plain, None, unpacked)
        return
    if head == b"BZ" or head == b"PK" or head == b"\xfd7" or head == b"(\xb5":
        raise InputError(f"{name} is packed in another way than gzip; unpack it first")
    yield from _plain(name, io.BufferedReader(cast("io.RawIOBase", file), 1 << 20), path, None)


def _plain(
    name: str, file: io.BufferedReader[Any], path: Path | None, limited: _Limited | None
) -> Iterator[Recording]:
    if file.peek(TAR_OFFSET + 5)[TAR_OFFSET : TAR_OFFSET + 5] != b"ustar":
        yield Recording(name, cast("BinaryIO", file), path)
        return
    count = 0
    with tarfile.open(fileobj=file, mode="r|") as tar:
        for member in tar:
            if not member.isfile() or Path(member.name).name.startswith("."):
                continue
            count += 1
            if count > MAX_FILES:
                raise InputError(f"{name} holds more than {MAX_FILES} files: no tar of ranks")
            inner = tar.extractfile(member)
            assert inner is not None
            inside = f"{name}: {member.name}"
            yield from _member(inside, cast("BinaryIO", inner), member.size)
    if not count:
        raise InputError(f"{name} is a tar without files; pack the traces of the ranks into it")


def _member(name: str, file: BinaryIO, size: int) -> Iterator[Recording]:
    """A file of a tar stream, which cannot go back: its head is looked at in a buffer."""
    buffered: io.BufferedReader[Any] = io.BufferedReader(_Limited(file, name, size), 1 << 20)
    if buffered.peek(2)[:2] == GZIP:
        unpacked = gzip.GzipFile(fileobj=cast("BinaryIO", buffered))
        limited = _Limited(cast("BinaryIO", unpacked), name, size)
        buffered = io.BufferedReader(limited, 1 << 20)
    yield Recording(name, cast("BinaryIO", buffered), None)


class _Limited(io.RawIOBase):
    """A stream that refuses to give more than a recording of that packed size holds."""

    def __init__(self, file: BinaryIO, name: str, packed_bytes: int) -> None:
        super().__init__()
        self._file = file
        self._name = name
        self._limit = min(MAX_BYTES, max(FREE_BYTES, packed_bytes * MAX_RATIO))
        self._packed = packed_bytes
        self._given = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(buffer)  # type: ignore[arg-type]  # what io hands over is a buffer
        try:
            data = self._file.read(len(view))
        except EOFError:
            raise InputError(f"{self._name} is truncated: the packed data ends early") from None
        except (gzip.BadGzipFile, zlib.error, tarfile.TarError) as error:
            raise InputError(f"{self._name} is damaged ({error}); copy or pack it again") from None
        self._given += len(data)
        if self._given > self._limit:
            raise InputError(
                f"{self._name} unpacks to more than {self._limit >> 20} MiB from "
                f"{self._packed} bytes: a compression bomb? Unpack it yourself if you trust it"
            )
        view[: len(data)] = data
        return len(data)

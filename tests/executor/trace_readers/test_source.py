from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from claw_plan.executor.trace_readers import source
from claw_plan.executor.trace_readers.source import open_recordings
from claw_plan.profiles.errors import InputError

TEXT = b'{"traceEvents": []}'


def read(path: Path) -> dict[str, bytes]:
    return {recording.name: recording.file.read() for recording in open_recordings(path)}


def tar(path: Path, mode: str, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def test_a_file_and_a_packed_one(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.json", tmp_path / "b.json.gz"
    plain.write_bytes(TEXT)
    packed.write_bytes(gzip.compress(TEXT))
    assert read(plain) == {"a.json": TEXT}
    assert read(packed) == {"b.json.gz": TEXT}


@pytest.mark.parametrize(("name", "mode"), [("r.tar", "w"), ("r.tar.gz", "w:gz")])
def test_a_tar_of_ranks_each_packed_or_not(tmp_path: Path, name: str, mode: str) -> None:
    members = {"t/rank0.json": TEXT, "t/rank1.json.gz": gzip.compress(TEXT), "t/.junk": b"no"}
    path = tar(tmp_path / name, mode, members)
    assert read(path) == {f"{name}: t/rank0.json": TEXT, f"{name}: t/rank1.json.gz": TEXT}


def test_a_folder_is_its_traces_in_order(tmp_path: Path) -> None:
    for name in ("b.json", "a.json", "notes.txt"):
        (tmp_path / name).write_bytes(TEXT)
    assert list(read(tmp_path)) == ["a.json", "b.json"]


def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b" " * (source.FREE_BYTES + 1)))
    with pytest.raises(InputError, match=r"bomb\.json\.gz unpacks to more than 64 MiB .* bomb\?"):
        read(path)
    inside = tar(tmp_path / "bomb.tar", "w", {"rank0.json.gz": path.read_bytes()})
    with pytest.raises(InputError, match="compression bomb"):
        read(inside)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("cut.json.gz", gzip.compress(TEXT * 50)[:-20], "cut.json.gz is truncated"),
        ("bad.json.gz", b"\x1f\x8b" + b"\x00" * 30, "bad.json.gz is damaged"),
        ("a.zip", b"PK\x03\x04", "packed in another way than gzip"),
    ],
)
def test_damaged_files_are_one_line(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=said):
        read(tmp_path / name)


def test_missing_and_empty_places(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no file"):
        read(tmp_path / "none.json")
    with pytest.raises(InputError, match=r"holds no \.json"):
        read(tmp_path)
    with pytest.raises(InputError, match="tar without files"):
        read(tar(tmp_path / "empty.tar", "w", {".hidden": TEXT}))

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.files import (
    MAX_FILE_BYTES,
    parse_yaml,
    read_yaml,
    validate,
    write_atomic,
)


def written(folder: Path, content: str | bytes) -> Path:
    path = folder / "some.yaml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def test_every_key_keeps_its_line(tmp_path: Path) -> None:
    document = read_yaml(written(tmp_path, "a: 1\nnodes:\n- count: 2\n  type: x\n- type: y\n"))
    assert document.data == {"a": 1, "nodes": [{"count": 2, "type": "x"}, {"type": "y"}]}
    assert document.where(["nodes", 0, "type"]) == "some.yaml:4: nodes[0].type"
    assert document.where(["nodes", 1]) == "some.yaml:5: nodes[1]"
    assert document.where(["nodes"]) == "some.yaml:2: nodes"


def test_an_absent_key_has_the_line_of_what_should_hold_it(tmp_path: Path) -> None:
    document = read_yaml(written(tmp_path, "a: 1\nnodes:\n- count: 2\n"))
    assert document.where(["nodes", 0, "devices", "memory"]) == (
        "some.yaml:3: nodes[0].devices.memory"
    )


def test_json_is_read_too(tmp_path: Path) -> None:
    path = written(tmp_path, '{"a": [1, 2.5, null, true],\n "b": "x"}')
    assert read_yaml(path).data == {"a": [1, 2.5, None, True], "b": "x"}


def test_dates_stay_text(tmp_path: Path) -> None:
    assert read_yaml(written(tmp_path, "when: 2026-11-29")).data == {"when": "2026-11-29"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "some.yaml is empty"),
        ("# only a comment\n", "some.yaml is empty"),
        ("- 1\n- 2\n", "some.yaml must hold a mapping (key: value), not a list"),
        ("word", "some.yaml must hold a mapping (key: value), not a single value"),
        (b"a: \xff\xfe", "some.yaml is not a text file (byte 3 is not UTF-8)"),
        (b"\x7fELF\x02\x01\x00\x00", "not valid YAML: special characters are not allowed"),
        ("a: 1\nb: [1,\n", "some.yaml:3: not valid YAML"),
        ("a: 1\nb: 2\na: 3\n", "some.yaml:3: the key a stands twice"),
        ("n:\n  x: 1\n  x: 2\n", "some.yaml:3: the key n.x stands twice"),
        ("a: &x\n  b: *x\n", "a.b contains itself"),
        ("a: 1\n---\nb: 2\n", "but found another document"),
        ("a: !!python/object/apply:os.system [ls]", "some.yaml:1: the tag"),
        ("? [1, 2]\n: 3\n", "some.yaml:1: a key must be one word"),
        ("a: " + "[" * 5000, "some.yaml is nested too deeply"),
        ("a: " + "[" * 150 + "]" * 150, "nested deeper than 100 levels"),
        ("a: !!int zwei", "some.yaml:1: the value 'zwei' is not allowed"),
        ("a: " + "9" * 6000, "some.yaml:1: the value"),
        ("x" * (MAX_FILE_BYTES + 1), "some.yaml is larger than 4 MB"),
    ],
    ids=lambda value: str(value)[:20].encode("unicode_escape").decode(),
)
def test_bad_files_get_one_clear_line(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_yaml(written(tmp_path, content))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_aliases_may_not_stand_for_more_than_memory_holds(tmp_path: Path) -> None:
    laughs = ["a0: &a0 [" + ", ".join("x" * 9) + "]"]
    for level in range(1, 9):
        laughs.append(f"a{level}: &a{level} [" + ", ".join([f"*a{level - 1}"] * 9) + "]")
    with pytest.raises(InputError, match="stands for more than 100000 values"):
        read_yaml(written(tmp_path, "\n".join(laughs)))


def test_plain_aliases_are_read(tmp_path: Path) -> None:
    data = read_yaml(written(tmp_path, "a: &x {k: 1}\nb: *x\n")).data
    assert data == {"a": {"k": 1}, "b": {"k": 1}}


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no file '.*gone\.yaml'"):
        read_yaml(tmp_path / "gone.yaml")
    with pytest.raises(InputError, match="is a folder"):
        read_yaml(tmp_path)
    with pytest.raises(InputError, match="null byte"):
        read_yaml(Path("a\0b"))


@given(st.binary(max_size=300))
@settings(max_examples=150)
def test_bytes_of_any_kind_raise_nothing_else(content: bytes) -> None:
    text = content.decode("latin-1")
    try:
        parse_yaml(text, Path("any.yaml"))
    except InputError as error:
        assert "any.yaml" in str(error)


@given(st.text(alphabet="{}[]&*!|>-?:,#'\"%@` \n\tab01.~<=", max_size=60))
@settings(max_examples=200)
def test_yaml_like_text_raises_nothing_else(text: str) -> None:
    try:
        document = parse_yaml(text, Path("any.yaml"))
    except InputError:
        return
    assert isinstance(document.data, dict)


class Wheel(BaseModel):
    model_config = ConfigDict(extra="forbid")
    size: int
    kind: Literal["steel", "wood"] = "steel"


class Car(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str
    wheels: list[Wheel] = []
    spare: Wheel | None = None


def test_validate_gives_the_model(tmp_path: Path) -> None:
    car = validate(read_yaml(written(tmp_path, "name: T\nwheels: [{size: 3}]")), Car)
    assert car == Car(name="T", wheels=[Wheel(size=3)])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "name: T\nwheels:\n- size: 3\n- size: 4\n  knd: wood\n",
            "some.yaml:5: wheels[1].knd: unknown key 'knd'; did you mean 'kind'?",
        ),
        (
            "name: T\nspare:\n  siez: 3\n",
            "some.yaml:3: spare.siez: unknown key 'siez'; did you mean 'size'? (and 1 more)",
        ),
        ("name: T\nspare: {kind: wood}", "some.yaml:2: spare: the key 'size' is missing"),
        (
            "name: T\nwheels: [{size: 3, kind: iron}]",
            "some.yaml:2: wheels[0].kind: input should be 'steel' or 'wood'; got 'iron'",
        ),
        (
            "wheels: [{size: x}]",
            "(and 1 more)",
        ),
    ],
)
def test_validate_says_where_what_came_and_what_is_allowed(
    tmp_path: Path, content: str, message: str
) -> None:
    with pytest.raises(InputError) as caught:
        validate(read_yaml(written(tmp_path, content)), Car)
    assert message in str(caught.value)


def test_validate_names_union_branches_never(tmp_path: Path) -> None:
    document = read_yaml(written(tmp_path, "name: T\nspare: 7\n"))
    with pytest.raises(InputError, match=r"^some\.yaml:2: spare: "):
        validate(document, Car)


def test_write_atomic_replaces_the_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    write_atomic(path, "old\n")
    write_atomic(path, "new ä\n")
    assert path.read_bytes() == "new ä\n".encode()
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.yaml"]


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.yaml"
    write_atomic(path, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InputError, match="No space left on device"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.yaml"]


def test_a_kill_before_the_rename_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.yaml"
    write_atomic(path, "old")

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, "new")
    assert path.read_text() == "old"


def test_write_atomic_says_what_is_wrong_with_the_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="its folder does not exist"):
        write_atomic(tmp_path / "no" / "plan.yaml", "x")
    with pytest.raises(InputError, match="it is a folder"):
        write_atomic(tmp_path, "x")


def test_write_atomic_follows_links_and_obeys_the_umask(tmp_path: Path) -> None:
    target = tmp_path / "real.yaml"
    target.write_text("old")
    link = tmp_path / "link.yaml"
    link.symlink_to(target)
    write_atomic(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    umask = os.umask(0o027)
    try:
        write_atomic(tmp_path / "fresh.yaml", "x")
    finally:
        os.umask(umask)
    assert (tmp_path / "fresh.yaml").stat().st_mode & 0o777 == 0o640


def test_write_atomic_replaces_no_device_or_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InputError, match="it is a device or pipe"):
        write_atomic(pipe, "x")
    assert pipe.is_fifo()
    assert [entry.name for entry in tmp_path.iterdir()] == ["pipe"]

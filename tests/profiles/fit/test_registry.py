from __future__ import annotations

from pathlib import Path

import pytest

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.fit.registry import Fitter, assign, fitters, read_data


def fitter(kind: str, key: str) -> Fitter:
    return Fitter(
        kind=kind,
        recognises=lambda file: key in (file.data[0] if file.path.suffix == ".csv" else file.data),
        fit=lambda files: {},
        folder=Path(),
    )


def test_files_are_read_with_their_digest(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("rows: [1, 2]\n")
    file = read_data(path)
    assert file.data == {"rows": [1, 2]}
    # printf 'rows: [1, 2]\n' | sha256sum
    assert file.provenance == "a.yaml (sha256 c9a3e59e44aca1f7)"
    table = tmp_path / "b.csv"
    table.write_text("x,y\n1,2\n")
    assert read_data(table).data == [{"x": "1", "y": "2"}]


def test_each_file_goes_to_the_fitter_that_knows_it(tmp_path: Path) -> None:
    names = {"a.yaml": "one: []\n", "b.csv": "two,x\n1,2\n", "c.yaml": "one: [3]\n"}
    for name, text in names.items():
        (tmp_path / name).write_text(text)
    files = [read_data(tmp_path / name) for name in names]
    found = assign(files, [fitter("second", "two"), fitter("first", "one")])
    assert [(f.kind, [d.path.name for d in some]) for f, some in found] == [
        ("first", ["a.yaml", "c.yaml"]),
        ("second", ["b.csv"]),
    ]


def test_a_file_nobody_knows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("three: 1\n")
    with pytest.raises(InputError, match=r"a\.yaml holds no measurements .* known kinds: first"):
        assign([read_data(tmp_path / "a.yaml")], [fitter("first", "one")])


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [1\n")
    with pytest.raises(InputError, match=r"bad\.yaml is no table"):
        read_data(tmp_path / "bad.yaml")
    with pytest.raises(InputError, match="cannot read"):
        read_data(tmp_path / "none.yaml")


def test_kernels_have_a_fitter() -> None:
    assert "kernels" in [fitter.kind for fitter in fitters()]

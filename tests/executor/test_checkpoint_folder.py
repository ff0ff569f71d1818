from __future__ import annotations

import json
from pathlib import Path

import pytest

from claw_plan.executor.checkpoint_folder import (
    CHECKPOINTS,
    HEADER,
    Header,
    check_files,
    checkpoints_in,
    commit,
    find_checkpoint,
    name_of,
    partial_path,
    prepare_folder,
    read_header,
)
from claw_plan.executor.errors import ExecutionError
from claw_plan.profiles.errors import InputError


def header(step: int) -> Header:
    return Header(
        step=step,
        samples=step,
        saved_at_ns=0,
        model={},
        training={},
        candidate={},
        optimizer="AdamW",
        groups=[{"lr": 0.5, "k": 3}],
        loss_scale=None,
        names={},
        versions={},
    )


def written(folder: Path, step: int, keep: int | None = None) -> Path:
    partial = partial_path(folder, step, 1)
    partial.mkdir(parents=True)
    (partial / ".metadata").write_bytes(b"list")
    (partial / "__0_0.distcp").write_bytes(bytes(100))
    return commit(partial, header(step), keep)


def test_the_newest_stay_and_the_header_lists_the_files(tmp_path: Path) -> None:
    for step in (3, 6, 9):
        path = written(tmp_path, step, keep=2)
    assert path.name == "step-00000009"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000006", "step-00000009"]
    read = read_header(path)
    assert read.files == {".metadata": 4, "__0_0.distcp": 100}
    assert read.groups == [{"lr": 0.5, "k": 3}] and isinstance(read.groups[0]["k"], int)


def test_latest_is_what_was_written_last_not_the_highest_step(tmp_path: Path) -> None:
    written(tmp_path, 10)
    again = written(tmp_path, 8)
    assert find_checkpoint("latest", [tmp_path]) == again
    assert written(tmp_path, 10) == checkpoints_in(tmp_path)[-1]  # replaced


def test_a_half_written_one_is_no_checkpoint_and_is_cleared(tmp_path: Path) -> None:
    whole = written(tmp_path, 1)
    partial_path(tmp_path, 2, 77).mkdir()
    (tmp_path / name_of(3)).mkdir()  # without a header
    (tmp_path / ".step-00000001.old").mkdir()
    (tmp_path / "mine.partial").mkdir()
    assert checkpoints_in(tmp_path) == [whole]
    prepare_folder(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "mine.partial",
        "step-00000001",
        "step-00000003",
    ]


def test_ranks_that_wrote_elsewhere_are_noticed(tmp_path: Path) -> None:
    partial = partial_path(tmp_path, 1, 1)
    partial.mkdir()
    with pytest.raises(ExecutionError, match="a folder that all nodes share"):
        commit(partial, header(1), None)


def test_a_checkpoint_is_found_from_its_run_too(tmp_path: Path) -> None:
    path = written(tmp_path / CHECKPOINTS, 4)
    for where in (path, path.parent, tmp_path):
        assert find_checkpoint(str(where), []) == path
    with pytest.raises(InputError, match=r"no checkpoint in .*; write some with"):
        find_checkpoint(str(tmp_path / "none"), [])


def test_files_that_changed_are_named(tmp_path: Path) -> None:
    path = written(tmp_path, 4)
    data = path / "__0_0.distcp"
    data.write_bytes(bytes(40))
    with pytest.raises(InputError, match=r"__0_0\.distcp has 40 bytes, but 100 were written"):
        check_files(path, read_header(path))
    data.unlink()
    with pytest.raises(InputError, match=r"__0_0\.distcp is missing; resume from an older"):
        check_files(path, read_header(path))


@pytest.mark.parametrize("change", [{"step": 0}, {"version": 2}, {"more": 1}])
def test_a_wrong_header_is_one_line(change: dict[str, int], tmp_path: Path) -> None:
    path = written(tmp_path, 4)
    values = json.loads((path / HEADER).read_text()) | change
    (path / HEADER).write_text(json.dumps(values))
    with pytest.raises(InputError, match=next(iter(change))) as raised:
        read_header(path)
    assert "\n" not in str(raised.value)


def test_a_folder_that_cannot_be_written_is_said_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ExecutionError, match=r"choose another --checkpoint-dir"):
        prepare_folder(tmp_path / "file" / "below")

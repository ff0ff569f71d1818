"""CSV files of iteration times."""

from __future__ import annotations

from pathlib import Path

import pytest

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.published_iterations import is_iterations, read_iterations

DATA = Path(__file__).parents[3] / "shared" / "data"

HEADER = (
    "# GPUs,global batch,micro batch,hidden size,attention heads,# layers,sequence length,"
    "tensor parallelism,data parallelism,pipeline parallelism,iteration time (ms)"
)
LINE = "16,16,8,1024,16,24,1024,2,2,4,372.160408"


def write(folder: Path, *lines: str) -> Path:
    path = folder / "a100.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_line_is_a_run(tmp_path: Path) -> None:
    (one,) = read_iterations(write(tmp_path, HEADER, LINE)).training
    assert (one.id, one.family, one.group) == ("a100:2", "a100.csv", "1024x24")
    assert one.step_time_ns == 372_160_408
    assert (one.plan.tp, one.plan.dp, one.plan.pp) == (2, 2, 4)
    assert one.plan.recompute == "full"
    assert one.cluster.num_devices == 16
    assert any("vocabulary" in text for text in one.assumed)


def test_columns_stand_in_any_order(tmp_path: Path) -> None:
    names, cells = HEADER.split(","), LINE.split(",")
    path = write(tmp_path, ",".join(reversed(names)), ",".join(reversed(cells)))
    (one,) = read_iterations(path).training
    assert one.step_time_ns == 372_160_408


def test_a_broken_line_does_not_cost_the_others(tmp_path: Path) -> None:
    published = read_iterations(write(tmp_path, HEADER, LINE, LINE.replace("1024", "9" * 10**5)))
    assert [one.id for one in published.training] == ["a100:2"]
    (other,) = published.not_expressed
    assert other.reason.startswith("a100.csv:3: row 'a100:3': hidden size must be a whole number")
    assert len(other.reason) < 200


def test_a_cell_larger_than_csv_takes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a100\.csv is no table of iteration times"):
        read_iterations(write(tmp_path, HEADER, LINE.replace("1024", "9" * 10**6)))
    assert not is_iterations("9" * 10**6)


def test_contradictions_are_listed(tmp_path: Path) -> None:
    published = read_iterations(write(tmp_path, HEADER, LINE.replace("16,16,8", "8,16,8")))
    (other,) = published.not_expressed
    assert other.reason == "tp * dp * pp is 16, not the 8 GPUs"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([HEADER.replace("# GPUs,", ""), LINE], "a100.csv:1: the column '# gpus' is missing"),
        ([HEADER, LINE + ",7"], "a100.csv:2: row 'a100:2': has 12 cells for 11 columns"),
        ([HEADER, LINE.replace("1024", "big")], "hidden size must be a whole number"),
        ([HEADER, LINE.replace("372.160408", "nan")], "iteration time (ms) must be a positive"),
    ],
)
def test_broken_files(tmp_path: Path, lines: list[str], message: str) -> None:
    with pytest.raises(InputError) as error:
        read_iterations(write(tmp_path, *lines))
    assert message in str(error.value)


def test_recognition() -> None:
    assert is_iterations(HEADER)
    assert not is_iterations("step,loss\n1,2")
    assert not is_iterations("")


@pytest.mark.skipif(not DATA.exists(), reason="the shared tables are not beside this checkout")
def test_vtrains_files_are_read_whole() -> None:
    for name, rows in (("single", 720), ("multi", 73)):
        published = read_iterations(DATA / f"vtrain_a100_{name}_node.csv")
        assert len(published.training) == rows
        assert published.not_expressed == ()

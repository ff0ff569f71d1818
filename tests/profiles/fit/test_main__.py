from __future__ import annotations

from pathlib import Path

import pytest

from claw_plan.profiles.fit.__main__ import main
from claw_plan.profiles.kernel_tables import FOLDER

DATA = Path(__file__).parents[4] / "shared" / "data" / "kernels.yaml"


def test_unknown_files_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.yaml").write_text("a: 1\n")
    assert main([str(tmp_path / "x.yaml"), "-o", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: x.yaml holds no measurements")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.yaml"]


@pytest.mark.slow
@pytest.mark.skipif(not DATA.exists(), reason="the shared tables are not beside this checkout")
def test_the_committed_tables_are_made_from_the_data(tmp_path: Path) -> None:
    assert main([str(DATA), "-o", str(tmp_path)]) == 0
    for path in sorted(tmp_path.iterdir()):
        assert path.read_bytes() == (FOLDER / path.name).read_bytes(), path.name

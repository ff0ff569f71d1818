"""The table of what compression costs in loss: rows that were not measured again stay."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
PAGE = """above
<!-- losses -->
| method | loss |
|---|---|
| AdamW | 1.40 |
| int8 | 1.41 |
<!-- /losses -->
below
"""


def test_rows_that_were_not_measured_again_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    from convergence_table import write_table

    page = tmp_path / "page.md"
    page.write_text(PAGE)
    write_table(page, "| method | loss |\n| --- | --- |\n| AdamW | 1.39 |")
    assert page.read_text().splitlines() == [
        *["above", "<!-- losses -->", "| method | loss |", "| --- | --- |"],
        *["| int8 | 1.41 |", "| AdamW | 1.39 |", "<!-- /losses -->", "below"],
    ]
    with pytest.raises(ValueError, match="int8"):
        write_table(page, "| method |\n|---|\n| AdamW |")
    for name in ("convergence_table", "convergence_methods"):
        sys.modules.pop(name, None)

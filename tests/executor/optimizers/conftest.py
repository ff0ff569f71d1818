"""What four real ranks found, started once for all tests of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

RANKS = Path(__file__).with_name("rank_optimizers.py")

Found = list[dict[str, Any]]
"""Of each rank, what each case found."""


@pytest.fixture(scope="session")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("optimizers")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANKS), str(rank), "4", str(folder)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(4)
    ]
    assert [rank.wait(timeout=280) for rank in ranks] == [0] * 4
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(4)]

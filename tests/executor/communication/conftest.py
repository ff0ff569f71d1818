"""What three real ranks found of means of gradients, started once for the tests of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

RANKS = Path(__file__).with_name("rank_hooks.py")


@pytest.fixture(scope="session")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Of each rank, what each case found."""
    folder = tmp_path_factory.mktemp("hooks")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANKS), str(rank), "3", str(folder)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(3)
    ]
    assert [rank.wait(timeout=280) for rank in ranks] == [0] * 3
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(3)]

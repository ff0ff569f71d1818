"""One start of four ranks for all tests of groups, probes, selectors and checksums."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

RANK = Path(__file__).with_name("rank_group.py")


@pytest.fixture(scope="session")
def on_four_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What `rank_group.py` wrote on each rank."""
    folder = tmp_path_factory.mktemp("group")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(rank), "4", str(folder)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(4)
    ]
    assert [rank.wait(timeout=280) for rank in ranks] == [0] * 4
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(4)]


@pytest.fixture(scope="session")
def hooked(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each case of `rank_hooks.py` found on each of three ranks."""
    folder, program = tmp_path_factory.mktemp("hooks"), RANK.with_name("rank_hooks.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), "3", str(folder)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(3)
    ]
    assert [rank.wait(timeout=280) for rank in ranks] == [0] * 3
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(3)]

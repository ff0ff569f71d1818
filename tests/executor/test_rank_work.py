from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import HashStore

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.nccl_environment import read_environment
from claw_plan.executor.rank_work import set_environment, told_by_rank_0
from claw_plan.executor.ranks import Rank
from claw_plan.planner.plan import load_plan


def of(number: int) -> Rank:
    return Rank(rank=number, world_size=2, local_rank=number, local_world_size=2)


def test_what_rank_0_finds_all_are_told() -> None:
    store, told = HashStore(), []
    other = threading.Thread(
        target=lambda: told.append(told_by_rank_0(store, of(1), lambda: "never"))
    )
    other.start()
    assert told_by_rank_0(store, of(0), lambda: "runs/1") == "runs/1"
    other.join(30)
    assert told == ["runs/1"]


def test_an_error_of_rank_0_is_everybodys() -> None:
    store = HashStore()

    def fails() -> str:
        raise ExecutionError("cannot write the run")

    for number in (0, 1):
        with pytest.raises(ExecutionError, match=r"^cannot write the run$"):
            told_by_rank_0(store, of(number), fails)


def test_a_joined_rank_chooses_for_its_own_host(
    tiny_plan: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MASTER_ADDR", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "set back after the test")
        monkeypatch.delenv(name)
    said: list[str] = []
    set_environment(load_plan(tiny_plan("joined", dp_shard=2)), of(0), tmp_path, said.append)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" in {setting.name for setting in read_environment(tmp_path)}
    assert any("all ranks are on this machine" in line for line in said)

"""Where ranks meet, and what is said of those who do not come."""

from __future__ import annotations

import threading

import pytest

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.rendezvous import (
    free_store,
    master_address,
    meet,
    missing_text,
    own_keys,
    ranks_text,
    reach_store,
)


def place(port: int) -> dict[str, str]:
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def test_each_starter_says_where_in_its_own_way() -> None:
    assert master_address({"MASTER_ADDR": "n1", "MASTER_PORT": "4000"}, 8, 4) == ("n1", 4000)
    slurm = {"SLURM_PROCID": "3", "SLURM_STEP_NODELIST": "n[07-08]", "SLURM_JOB_ID": "12345"}
    assert master_address(slurm, 8, 4) == ("n07", 29845)
    assert master_address({}, 4, 4) == ("127.0.0.1", 29500)
    with pytest.raises(ExecutionError, match="mpirun -x MASTER_ADDR=node1"):
        master_address({}, 8, 4)
    with pytest.raises(ExecutionError, match="MASTER_PORT must be a port from 1 to 65535"):
        master_address({"MASTER_PORT": "70000"}, 4, 4)


def test_ranks_that_come_get_one_store() -> None:
    kept = free_store()
    stores = {}

    def come(rank: int) -> None:
        stores[rank] = meet(rank, 2, 2, 20.0, place(kept.port))

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stores[0].set("word", "here")
    assert stores[1].get("word") == b"here"
    assert own_keys(reach_store(place(kept.port), 5.0)).get("word") == b"here"


def test_a_rank_that_does_not_come_is_named() -> None:
    kept = free_store()
    with pytest.raises(ExecutionError, match=r"ranks 0, 2 of 3 did not come within 0\.2 s"):
        meet(1, 3, 3, 0.2, place(kept.port))


def test_a_restarted_attempt_does_not_meet_the_one_before() -> None:
    kept = free_store()
    own_keys(kept, "0").set("here/1", "")
    again = place(kept.port) | {"TORCHELASTIC_RESTART_COUNT": "1"}
    with pytest.raises(ExecutionError, match="rank 1 of 2 did not come"):
        meet(0, 2, 2, 0.2, again)


def test_a_store_that_nobody_holds_is_one_line() -> None:
    kept = free_store()
    port = kept.port
    del kept
    with pytest.raises(
        ExecutionError, match=r"rank 1 cannot reach 127\.0\.0\.1:.* rank 0 did not"
    ):
        meet(1, 2, 2, 0.5, place(port))


def test_many_ranks_are_shortened() -> None:
    assert ranks_text([3]) == "rank 3"
    assert ranks_text(range(20)) == "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more"
    assert missing_text([0], 2, 30.0).startswith("rank 1 of 2 did not come within 30 s")

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from claw_plan.executor.job import TRAIN, Job, Progress
from claw_plan.executor.ranks import Rank
from claw_plan.executor.train import STEPS_FILE, train
from claw_plan.profiles.profile import load_profile
from claw_plan.profiles.work import CollectiveWork, OpWork


def test_one_rank_trains_and_tells(
    tiny_plan: Callable[..., Path], alone: Rank, tmp_path: Path
) -> None:
    plan = tiny_plan("train")
    job = Job(kind=TRAIN, folder=tmp_path, plans=(plan,), steps=6)
    progress, told = Progress(), list[float]()
    [record] = train(job, alone, progress, lambda line: told.append(line["loss"]))
    assert progress.step == 6
    assert told == record.losses
    assert len(record.wall_ns) == len(record.process_ns) == 6
    lines = (tmp_path / STEPS_FILE).read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    optimizer = [w for w in record.samples if isinstance(w, OpWork) and w.kind == "optimizer"]
    parameters = 61 * 32 + 16 * 32 + 2 * 32 + 4 * (12 * 32 * 32 + 13 * 32)
    # AdamW touches seven fp32 values for each parameter.
    assert [work.bytes for work in optimizer] == [28 * parameters]
    assert list(record.spans) == [3]
    assert {span.kind for span in record.spans[3]} == {"forward", "backward", "optimizer"}


@pytest.mark.slow
def test_replicas_on_two_hosts_time_what_they_did_not_do(
    tiny_plan: Callable[..., Path], tmp_path: Path
) -> None:
    """Their step has all-reduces alone; other plans use other operations, and codecs."""
    plan = tiny_plan("two-hosts", dp_replicate=2)
    command = [sys.executable, "-c", "from claw_plan.cli.main import main; main()", "run"]
    command += [str(plan), "--steps", "6", "--runs", str(tmp_path), "--json"]
    told = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    told |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29643", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(command, env={**os.environ, **told, "RANK": str(rank)})
        for rank in range(2)
    ]
    assert [process.wait(timeout=180) for process in ranks] == [0, 0]
    (found,) = tmp_path.glob("*/measurements.profile")
    works = [one.work for one in load_profile(found).measurements]
    between = {(w.op, w.group_size) for w in works if isinstance(w, CollectiveWork)}
    assert between == {(op, 2) for op in ("all_reduce", "all_gather", "all_to_all", "send")}
    kernels = {w.target for w in works if isinstance(w, OpWork)}
    assert {"codec.int8.encode", "codec.one_bit.mean", "codec.top_k.decode"} <= kernels

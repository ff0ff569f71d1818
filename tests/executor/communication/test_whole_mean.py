"""`claw-plan run` with --selector and --check-buckets, on real ranks, one of which has a fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from claw_plan.executor.communication.algorithms import NAMES
from claw_plan.executor.run_log import read_log

MODEL = Path(__file__).parents[3] / "examples" / "gpt.py"

FAULT = """

# A card of rank 1 turns a bit of the third bucket's sum in step 5.
import os
import torch
import torch.distributed as dist
from claw_plan.executor.communication.whole_mean import WholeMean

if os.environ.get("RANK") == "1":
    where = {"step": 0, "bucket": 0}
    call, receive, add_up = WholeMean.__call__, dist.batch_isend_irecv, dist.all_reduce

    def counted(self, index, flat):
        where["step"] += index == 0
        where["bucket"] = index
        return call(self, index, flat)

    def turned(tensor):
        if (where["step"], where["bucket"]) == (5, 2) and tensor.dtype == torch.float32:
            tensor.view(-1).view(torch.int32)[3] ^= 1 << 20

    def received(operations):
        for work in receive(operations):
            work.wait()
        for operation in operations:
            if operation.op is dist.irecv:
                turned(operation.tensor)
        return []

    def added_up(tensor, *args, **kwargs):
        work = add_up(tensor, *args, **kwargs)
        if work is None:
            turned(tensor)
        return work

    WholeMean.__call__ = counted
    dist.batch_isend_irecv, dist.all_reduce = received, added_up
"""


@pytest.fixture(scope="module")
def plans(
    tmp_path_factory: pytest.TempPathFactory, model_plan: Callable[..., Path]
) -> Callable[..., Path]:
    """Writes a plan of the tiny GPT among replicas: `plans(name, fault, dp_replicate=2, …)`."""
    folder = tmp_path_factory.mktemp("whole-mean")

    def write(name: str, fault: str, **knobs: Any) -> Path:
        model = folder / f"{name}.py"
        model.write_text(MODEL.read_text() + fault)
        return model_plan(
            model,
            [f"transformer.h.{index}" for index in range(4)],
            name,
            build="GPT(GPTConfig(vocab_size=61, block_size=16, n_layer=4, n_head=4, n_embd=32))",
            inputs="idx=int64[B,16]<61 targets=int64[B,16]<61",
            rules=[],
            bucket_bytes=40_000,
            **knobs,
        )

    return write


def run(plan: Path, *options: str) -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).with_name("claw-plan"))
    command = [program, "run", str(plan), "--no-preflight"]
    command += ["--runs", str(plan.with_suffix("")), "--json", *options]
    return subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


def folder_of(plan: Path) -> Path:
    return next(plan.with_suffix("").iterdir())


@pytest.mark.slow
def test_a_run_chooses_algorithms_and_trains_as_without(plans: Callable[..., Path]) -> None:
    plain = plans("plain", "", dp_replicate=2)
    chosen = plans("chosen", "", dp_replicate=2)
    expected = json.loads(run(plain, "--steps", "150").stdout)
    asked = "check_interval=1ms,bandwidth_threshold=1TBps,fallback_topology=tree"
    told = run(chosen, "--steps", "150", "--check-buckets", "--selector", asked)
    found = json.loads(told.stdout)
    # Sums of two numbers are the same in any order.
    assert found["losses"] == expected["losses"]
    assert expected["algorithms"] == {}
    assert set(found["algorithms"].values()) <= set(NAMES)
    assert found["traffic_differences"] == []
    events = [read_log(folder_of(chosen), rank) for rank in range(2)]
    switches = [
        [
            {key: value for key, value in event.items() if key not in ("time", "rank")}
            for event in log
            if event["event"] == "collective"
        ]
        for log in events
    ]
    assert switches[0] == switches[1]
    assert {"tree", "native"} & {switch["after"] for switch in switches[0]}
    settled = [switch for switch in switches[0] if not switch["is_trial"]]
    # At most 9 calls of 6 ways are tried of each size, and what they end with is told.
    assert {str(switch["size_bytes"]) for switch in settled} == set(found["algorithms"])
    for switch in settled:
        assert f"{switch['after']} " in switch["reason"]
        assert (
            f"all-reduces of {switch['size_bytes']} bytes go by {switch['after']}" in told.stderr
        )
    probed = [event for event in events[0] if event["event"] == "links probed"]
    assert probed[0]["reason"] == "before the first step"
    assert expected["unlike_plan"] is None
    assert "selector" in found["unlike_plan"]


@pytest.mark.slow
def test_a_bit_turned_on_the_way_ends_the_run(plans: Callable[..., Path]) -> None:
    plan = plans("turned", FAULT, dp_replicate=2, collective="ring")
    ended = run(plan, "--steps", "12", "--check-buckets", "--checkpoint-every", "2")
    assert ended.returncode == 2
    told = "step 5: bits of bucket 2 changed on the way from rank 0 to rank 1: a card, its memory"
    assert told in ended.stderr
    # The run has gone on to step 6 at most; nothing was kept of what followed the fault.
    kept = [path.name for path in folder_of(plan).glob("**/*step*") if path.is_dir()]
    assert kept and all("6" not in name for name in kept)


@pytest.mark.slow
def test_a_rank_whose_sum_differs_is_named(plans: Callable[..., Path]) -> None:
    """The library's own all-reduce shows no messages; its results are compared."""
    ended = run(plans("differs", FAULT, dp_replicate=4), "--steps", "12", "--check-buckets")
    assert ended.returncode == 2
    assert "step 5: bucket 2 of rank 1 differs from that of the others" in ended.stderr


@pytest.mark.slow
def test_what_options_cannot_act_on_is_refused(plans: Callable[..., Path]) -> None:
    for name, knobs, options, why in [
        ("shards", {"dp_shard": 2}, ["--selector", "check_interval=1s"], "fully_shard reduces"),
        (
            "thin",
            {"dp_replicate": 2, "codec": "low_rank"},
            ["--selector", ""],
            "from step to step",
        ),
        ("alone", {}, ["--check-buckets"], "dp_replicate above 1, or leave --check-buckets out"),
        ("typed", {"dp_replicate": 2}, ["--selector", "interval"], "takes option=value pairs"),
    ]:
        ended = run(plans(name, "", **knobs), *options)
        assert ended.returncode == 2
        assert why in ended.stderr, name

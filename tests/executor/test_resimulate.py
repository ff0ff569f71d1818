from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from claw_plan.executor.replay import Replay, replay
from claw_plan.executor.resimulate import critical_parts, resimulate
from claw_plan.executor.resimulate_transfer import Change
from claw_plan.executor.run import run_plan
from claw_plan.executor.trace_readers.rank_trace import Collective, RankTrace, Step, activities
from claw_plan.executor.trace_readers.read import read_traces
from claw_plan.profiles.errors import InputError

CORPUS = Path(__file__).parents[3] / "shared" / "corpus" / "kineto"
MS = 1_000_000


def run(first_ms: int, second_ms: int, transfer_ms: int) -> Replay:
    """Two ranks compute, meet in an all-reduce, and compute 10 ms more."""
    met = max(first_ms, second_ms)
    traces = []
    for rank, own in enumerate((first_ms, second_ms)):
        end = met + transfer_ms
        rows = [
            (0, own * MS, "gemm", "forward", 0),
            (end * MS, (end + 10) * MS, "gemm", "other", 0),
        ]
        one = Collective(
            op="all_reduce", bytes=1 << 20, group_size=2, ranks=(0, 1), group="",
            start_ns=own * MS, end_ns=end * MS, issue_ns=own * MS, stream="n",
        )  # fmt: skip
        traces.append(
            RankTrace(
                source="t",
                rank=rank,
                world_size=2,
                device="",
                is_gpu=True,
                has_timing=True,
                activities=activities(rows, ("k",)),
                collectives=(one,),
                steps=(Step(number=0, start_ns=0, end_ns=(end + 10) * MS),),
            )
        )
    return replay(traces)


@pytest.mark.parametrize(
    ("change", "expected_ms"),
    [
        (Change(), 70),  # 30 + 30 + 10
        (Change(link=2.0), 55),
        (Change(link=0.5), 100),
        (Change(compute=2.0), 50),
        (Change(compute_by_kind={"gemm": 4.0}), 40),
    ],
)
def test_the_step_under_a_change(change: Change, expected_ms: int) -> None:
    predicted = resimulate(run(20, 30, 30), change)
    assert predicted.step_time_ns == expected_ms * MS
    assert predicted.unchanged_ns == predicted.recorded_ns == 70 * MS


def test_the_critical_path_leads_through_the_slower_rank() -> None:
    parts = {(part.rank, part.kind): part.ns // MS for part in critical_parts(run(20, 30, 30))}
    assert parts == {(1, "forward"): 30, (0, "dp_comm"): 30, (0, "computation"): 10}


def test_a_pause_is_the_hosts_part_of_the_critical_path() -> None:
    step = Step(number=0, start_ns=0, end_ns=15)
    trace = RankTrace(
        source="t", rank=0, world_size=1, device="", is_gpu=True, has_timing=True,
        activities=activities([(0, 5, "gemm", "other", 0), (12, 15, "gemm", "other", 0)], ("k",)),
        collectives=(), steps=(step,),
    )  # fmt: skip
    parts = {part.kind: part.ns for part in critical_parts(replay([trace]))}
    assert parts == {"computation": 8, "host": 7}


def test_recordings_without_times_cannot_be_played() -> None:
    found = run(20, 30, 30)
    object.__setattr__(found, "parts_ns", {})
    with pytest.raises(InputError, match="no times"):
        resimulate(found, Change())


@pytest.mark.skipif(not CORPUS.exists(), reason="the shared corpus is not beside this checkout")
@pytest.mark.parametrize(
    "name", ["dlrm_8ranks_v100_kineto.tar.gz", "sampled_world128_rank0.json.gz"]
)
def test_published_steps_play_as_they_were(name: str) -> None:
    predicted = resimulate(replay(read_traces([CORPUS / name])), Change())
    assert predicted.unchanged_ns == pytest.approx(predicted.recorded_ns, rel=0.05)
    slower = resimulate(replay(read_traces([CORPUS / name])), Change(link=0.5))
    assert slower.step_time_ns > predicted.step_time_ns


@pytest.mark.slow
def test_a_run_recorded_here_plays_as_it_was(
    tiny_plan: Callable[..., Path], tmp_path: Path
) -> None:
    result = run_plan(tiny_plan("replayed", dp_replicate=2), 4, runs=tmp_path / "runs")
    assert result is not None
    found = replay(read_traces([Path(result.run)]))
    assert found.ranks == (0, 1)
    reduced = [row for row in found.collectives if row.op == "all_reduce"]
    assert reduced and all(row.bytes and row.group_size == 2 for row in reduced)
    predicted = resimulate(found, Change())
    assert predicted.unchanged_ns == pytest.approx(predicted.recorded_ns, rel=0.05)
    assert resimulate(found, Change(link=0.5)).step_time_ns > predicted.unchanged_ns


LOOP = """
import sys
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

rank, folder = int(sys.argv[1]), sys.argv[2]
store = dist.FileStore(folder + "/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer, message = torch.optim.SGD(model.parameters()), torch.ones(100)
with profile(
    activities=[ProfilerActivity.CPU],
    record_shapes=True,
    schedule=schedule(wait=1, warmup=1, active=2),
    on_trace_ready=lambda p: p.export_chrome_trace(f"{folder}/rank{rank}.json"),
) as profiler:
    for _ in range(5):
        model(torch.ones(64, 256)).sum().backward()
        optimizer.step()
        dist.send(message, 1) if rank == 0 else dist.recv(message, 0)
        profiler.step()
dist.destroy_process_group()
"""
"""A loop as people write it, with torch's profiler around it."""


@pytest.mark.slow
def test_profiled_ranks_play_as_they_were(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOOP]
    ranks = [subprocess.Popen([*command, str(rank), str(tmp_path)]) for rank in range(2)]
    assert [rank.wait(timeout=240) for rank in ranks] == [0, 0]
    found = replay(read_traces([tmp_path / "rank0.json", tmp_path / "rank1.json"]))
    assert found.ranks == (0, 1) and len(found.steps) == 2
    in_step = [row for row in found.collectives if row.step == found.typical]
    assert {(row.op, row.bytes, row.group_size) for row in in_step} == {
        ("all_reduce", 4 * (256 * 256 + 256), 2),
        ("send", 400, 2),
    }
    predicted = resimulate(found, Change())
    assert predicted.unchanged_ns == pytest.approx(predicted.recorded_ns, rel=0.05)

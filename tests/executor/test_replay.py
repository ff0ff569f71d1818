from __future__ import annotations

import json
from pathlib import Path

import pytest

from claw_plan.executor.replay import replay
from claw_plan.executor.trace_readers.rank_trace import (
    Collective,
    RankTrace,
    Step,
    activities,
)
from claw_plan.executor.trace_readers.read import read_traces
from claw_plan.profiles.errors import InputError

CORPUS = Path(__file__).parents[3] / "shared" / "corpus" / "kineto"


def trace(rank: int, steps: list[tuple[int, int, int]], *comm: tuple[int, int]) -> RankTrace:
    return RankTrace(
        source=f"rank{rank}.json",
        rank=rank,
        world_size=2,
        device="",
        is_gpu=True,
        has_timing=True,
        activities=activities([(0, 40, "gemm", "forward", 0)], ("k",)),
        collectives=tuple(
            Collective(
                op="all_reduce", bytes=8, group_size=2, ranks=(0, 1), group="", start_ns=start,
                end_ns=end, issue_ns=start, stream="n",
            )
            for start, end in comm
        ),
        steps=tuple(Step(number=n, start_ns=s, end_ns=e) for n, s, e in steps),
        warnings=("said of each",) if rank else ("said of each", "said of one"),
    )  # fmt: skip


def test_the_typical_step_and_its_parts() -> None:
    first = trace(0, [(1, 0, 100), (2, 100, 300), (3, 300, 305)], (40, 100))
    second = trace(1, [(1, 0, 90), (2, 90, 280), (3, 280, 284)], (80, 100))
    found = replay([first, second])
    assert [(step.number, step.time_ns) for step in found.steps] == [(1, 100), (2, 200), (3, 5)]
    assert (found.typical, found.step_time_ns) == (1, 100)
    assert sum(found.parts_ns.values()) == 100
    assert found.parts_ns["gemm"] == 40
    assert found.utilisation == {0: 0.4, 1: 40 / 90}
    (row,) = found.collectives
    assert (row.step, row.count, row.transfer_ns, row.waiting_ns, row.duration_ns) == (
        1, 1, 20, 20, 40,
    )  # fmt: skip
    assert found.warnings[:2] == ("said of each", "rank 0: said of one")
    assert "steps 3 are recorded in part only" in found.warnings[2]


def test_recordings_of_other_steps_are_refused() -> None:
    with pytest.raises(InputError, match=r"rank0\.json and rank1\.json share no step"):
        replay([trace(0, [(1, 0, 100)]), trace(1, [(2, 0, 100)])])


def test_missing_ranks_are_said() -> None:
    said = " ".join(replay([trace(0, [(1, 0, 100)], (40, 60))]).warnings)
    assert "1 of 2 ranks are recorded" in said and "cannot be told from transfer" in said


@pytest.mark.skipif(not CORPUS.exists(), reason="the shared corpus is not beside this checkout")
def test_eight_ranks_wait_and_hardly_transfer() -> None:
    found = replay(read_traces([CORPUS / "dlrm_8ranks_v100_kineto.tar.gz"]))
    compute = ("gemm", "memory", "optimizer", "copy")
    # The corpus says 1.03 to 1.25 ms of kernels on each rank, 1.7 to 11.3 ms in NCCL.
    assert 1.03e6 <= sum(found.parts_ns[name] for name in compute) <= 1.25e6
    assert found.parts_ns["waiting"] > 20 * found.parts_ns["transfer_exposed"]
    assert sum(row.count for row in found.collectives) == 8
    assert [one.rank for one in found.stragglers] == [7]


@pytest.mark.skipif(not CORPUS.exists(), reason="the shared corpus is not beside this checkout")
def test_collectives_outside_of_the_step_are_kept() -> None:
    found = replay(read_traces([CORPUS / "gloo_cpu_rank34_of_300.pt.trace.json.gz"]))
    assert found.ranks == (34,)
    assert sum(row.count for row in found.collectives) == 10
    assert "8 collectives lie outside of the recorded steps" in found.warnings


def test_a_slow_data_loader_is_named(tmp_path: Path) -> None:
    """Of four ranks, rank 2 loads each batch 150 ms longer; its GPU computes like the others."""
    paths = []
    for rank in range(4):
        events = []
        for step in (1, 2):
            at, load = step * 300_000, 155_000 if rank == 2 else 5_000
            loader = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
            arrives, ends = at + load + 50_000, at + 215_000
            for category, name, start, end, stream in (
                ("user_annotation", f"ProfilerStep#{step}", at, at + 299_000, 1),
                ("user_annotation", loader, at, at + load, 1),
                ("kernel", "sgemm", at + load, arrives, 7),
                ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", arrives, ends, 9),
            ):
                args = {"stream": stream, "device": 0}
                events.append({"ph": "X", "cat": category, "name": name, "pid": 1, "tid": stream,
                               "ts": start, "dur": end - start, "args": args})  # fmt: skip
        info = {"rank": rank, "world_size": 4}
        path = tmp_path / f"{rank}.json"
        path.write_text(json.dumps({"distributedInfo": info, "traceEvents": events}))
        paths.append(path)
    (one,) = replay(read_traces(paths)).stragglers
    assert (one.rank, one.cause, one.late_ns) == (2, "input", 150_000_000)

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from claw_plan.executor.ranks import Rank
from claw_plan.executor.run_files import (
    MEASUREMENTS,
    make_run_folder,
    measurements_of,
    median_timeline,
    memory_table,
    parts_ms,
    read_result,
    read_timelines,
    result_of,
    timelines_of,
    write_run,
)
from claw_plan.executor.train import RankRecord
from claw_plan.planner.plan import load_plan
from claw_plan.profiles.profile import load_profile
from claw_plan.profiles.work import CollectiveWork, OpWork
from claw_plan.simulator.timeline import Span

GEMM = OpWork(kind="gemm", dims=(1, 2, 2, 2), dtype="float32", flops=16, bytes=48)
REDUCE = CollectiveWork(op="all_reduce", bytes=64, group_size=2, nodes=1, backend="gloo")
RANKS = Rank(rank=0, world_size=2, local_rank=0, local_world_size=2)


def span(rank: int, kind: str, start_ms: int, end_ms: int) -> Span:
    return Span(
        rank=rank,
        stream="compute",
        kind=kind,
        name=kind,
        start_ns=start_ms * 10**6,
        end_ns=end_ms * 10**6,
    )


def records() -> list[RankRecord]:
    made = []
    for rank in range(2):
        made.append(
            RankRecord(
                rank=rank,
                losses=[3.0, 2.0, 1.0],
                wall_ns=[90_000_000, 10_000_000 + rank, 12_000_000],
                process_ns=[5_000_000] * 3,
                ways=["plain", "plain", "plain"],
                phases=["steady"] * 3,
                peak_memory_bytes=(rank + 1) << 30,
                spans={
                    3: [span(rank, "forward", 1, 3 + rank), span(rank, "optimizer", 4, 5)],
                    7: [span(rank, "forward", 1, 90)],
                    9: [span(rank, "forward", 1, 2)],
                },
                samples={GEMM: [10, 12], REDUCE: [100 + rank, 300 - rank]},
                data="nothing",
            )
        )
    return made


def test_a_collective_lasts_as_long_as_on_its_slowest_rank(tiny_plan: Callable[..., Path]) -> None:
    found = measurements_of(load_plan(tiny_plan("measure")), records(), RANKS)
    by_work = {m.work: m for m in found}
    assert by_work[REDUCE].samples_ns == (101, 300)
    assert by_work[GEMM].samples_ns == (10, 12, 10, 12)
    assert by_work[REDUCE].device == f"{by_work[GEMM].device}/loopback"
    assert {m.ranks_per_host for m in found} == {2}


def test_ready_times_are_kept_for_profiles(tiny_plan: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path / "runs", tiny_plan("ready", microbatch_size=2))
    one, two = records()
    one.ready_ns = {"head": 5, "table": 9}
    write_run(folder, [one, two], RANKS)
    (times,) = load_profile(folder / MEASUREMENTS).gradients
    assert (times.microbatch_size, times.ready_ns) == (2, {"head": 5, "table": 9})


def test_the_first_step_does_not_count_and_the_slowest_rank_does(
    tiny_plan: Callable[..., Path], tmp_path: Path
) -> None:
    plan = load_plan(tiny_plan("result", global_batch=8, seq_len=16))
    timeline = median_timeline(timelines_of(records()))
    result = result_of(plan, records(), timeline, tmp_path)
    assert result.step_time_ms == {"median": 11.0, "min": 10.000001, "max": 12.0}
    assert result.samples_per_s == pytest.approx(8 / 0.011)
    assert result.tokens_per_s == pytest.approx(16 * 8 / 0.011)
    assert result.losses == [3.0, 2.0, 1.0]


def test_parts_are_those_of_the_median_step_and_the_rank_that_computes_longest() -> None:
    assert parts_ms(median_timeline(timelines_of(records()))) == {"forward": 3.0, "optimizer": 1.0}
    assert parts_ms(median_timeline({})) == {}


def test_memory_stands_beside_the_prediction_of_its_stage(
    tiny_plan: Callable[..., Path], tmp_path: Path
) -> None:
    plan, timeline = load_plan(tiny_plan("memory")), median_timeline(timelines_of(records()))
    result = result_of(plan, records(), timeline, tmp_path)
    assert memory_table(result) == [(0, 1.0, None), (1, 2.0, None)]


def test_a_run_is_read_as_it_was_written(tiny_plan: Callable[..., Path], tmp_path: Path) -> None:
    folder = make_run_folder(tmp_path / "runs", tiny_plan("written"))
    result = write_run(folder, records(), RANKS)
    assert read_result(folder) == result
    assert list(read_timelines(folder)) == [3, 7, 9]
    assert read_timelines(folder) == timelines_of(records())


def test_two_runs_of_one_second_have_two_folders(
    tiny_plan: Callable[..., Path], tmp_path: Path
) -> None:
    plan = tiny_plan("twice")
    folders = {make_run_folder(tmp_path, plan) for _ in range(3)}
    assert len(folders) == 3
    for folder in folders:
        written = load_plan(folder / "plan.yaml")
        assert (folder / written.model.file).resolve() == Path(load_plan(plan).model.file)

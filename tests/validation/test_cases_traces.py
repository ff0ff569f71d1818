"""Cases about recordings that users of other tools reported, each with the outcome they wanted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from claw_plan.executor.replay import replay
from claw_plan.executor.trace_readers.read import read_traces
from claw_plan.profiles.errors import InputError


def kernel(start_us: int, duration_us: int, name: str = "gemm") -> dict[str, Any]:
    return {
        "ph": "X", "cat": "kernel", "name": name, "ts": start_us, "dur": duration_us,
        "pid": 0, "tid": 7, "args": {"device": 0, "stream": 7},
    }  # fmt: skip


def reduce() -> dict[str, Any]:
    return kernel(60, 20, "ncclDevKernel_AllReduce_Sum_f32_RING_LL")


def written(path: Path, *events: dict[str, Any], **head: Any) -> Path:
    path.write_text(json.dumps({**head, "traceEvents": events}))
    return path


KNOWN = {"distributedInfo": {"rank": 1, "world_size": 2}}


def test_a_trace_without_its_rank_is_named_and_its_rank_asked_for(tmp_path: Path) -> None:
    # pytorch/kineto issue 974, facebookresearch/HolisticTraceAnalysis issue 107.
    path = written(tmp_path / "host.json", kernel(0, 50), reduce())
    with pytest.raises(InputError, match=r"host\.json does not say which rank.*--rank N"):
        read_traces([path])
    assert read_traces([path], [6])[0].rank == 6
    named = written(tmp_path / "rank6.json", kernel(0, 50), reduce())
    assert read_traces([named])[0].rank == 6


def test_a_trace_without_step_marks_is_one_window_and_says_so(tmp_path: Path) -> None:
    # facebookresearch/HolisticTraceAnalysis issue 238.
    found = replay(read_traces([written(tmp_path / "t.json", kernel(0, 50), reduce(), **KNOWN)]))
    assert [step.time_ns for step in found.steps] == [80_000]
    assert any("the whole recording counts as one step" in said for said in found.warnings)


def test_a_cut_file_is_refused_where_it_ends(tmp_path: Path) -> None:
    # Lightning-AI/pytorch-lightning issue 16634.
    path = written(tmp_path / "t.json", kernel(0, 50), kernel(60, 20), **KNOWN)
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    with pytest.raises(InputError, match=rf"t\.json is truncated at byte {len(whole) - 40}:"):
        read_traces([path])


def test_ranges_that_intersect_are_tolerated_and_count_once(tmp_path: Path) -> None:
    # Lightning-AI/pytorch-lightning issue 16634.
    path = written(tmp_path / "t.json", kernel(0, 50), kernel(40, 30), **KNOWN)
    found = replay(read_traces([path]))
    assert found.step_time_ns == found.parts_ns["gemm"] == 70_000

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from claw_plan.executor.replay import Replay, replay
from claw_plan.executor.replay_hardware import change_to, recorded_cluster
from claw_plan.executor.trace_readers.rank_trace import RankTrace, Step, activities
from claw_plan.profiles.cluster_file import load_cluster
from claw_plan.profiles.errors import InputError


def found(device: str, world: int = 8) -> Replay:
    trace = RankTrace(
        source="t.json",
        rank=0,
        world_size=world,
        device=device,
        is_gpu=True,
        has_timing=True,
        activities=activities([(0, 40, "gemm", "forward", 0)], ("k",)),
        collectives=(),
        steps=(Step(number=0, start_ns=0, end_ns=100),),
    )
    return replay([trace])


def test_a_gpu_is_known_by_its_name() -> None:
    cluster = recorded_cluster(found("Tesla V100-SXM2-32GB"), ())
    assert cluster is not None
    assert (cluster.nodes[0].device.name, cluster.num_devices) == ("v100-sxm-32gb", 8)
    assert recorded_cluster(found("AMD Radeon Graphics"), ()) is None
    assert recorded_cluster(found(""), ()) is None


def test_a_cpu_is_this_machine() -> None:
    trace = found("")
    cpu = replace(trace, traces=(replace(trace.traces[0], is_gpu=False),))
    cluster = recorded_cluster(cpu, ())
    assert cluster is not None and cluster.nodes[0].device.name == "cpu-core"


def test_a_run_holds_its_cluster(tmp_path: Path) -> None:
    assert recorded_cluster(found(""), [tmp_path]) is None  # no plan in it


def test_computation_follows_the_devices_rates() -> None:
    recording = found("NVIDIA A100-SXM4-80GB")
    here = recorded_cluster(recording, ())
    change, said = change_to(recording, here, load_cluster("dgx-h100"), {"host": 2.0}, None)
    # Sustained bf16: 686 and 243 TFLOP/s; memory 3350 and 2039 GB/s (catalogue).
    assert change.compute_by_kind["gemm"] == pytest.approx(686 / 243, rel=0.1)
    assert change.compute_by_kind["memory"] == pytest.approx(3350 / 2039, rel=0.01)
    assert (change.host, change.link, change.recorded_on is not None) == (2.0, 1.0, True)
    assert len(said) == 1


def test_what_is_not_known_is_said() -> None:
    with pytest.raises(InputError, match="no figures for the GPU 'AMD Radeon Graphics'"):
        change_to(found("AMD Radeon Graphics"), None, load_cluster("dgx-h100"), {}, None)
    with pytest.raises(InputError, match="does not tell its device"):
        change_to(found(""), None, load_cluster("dgx-h100"), {}, None)
    with pytest.raises(InputError, match="has 8 devices, but the run has 16 ranks"):
        change_to(found("A100 80GB", 16), None, load_cluster("dgx-h100"), {}, None)


def test_more_ranks_need_their_number() -> None:
    nameless = replace(found("A100 80GB"), world_size=None)
    with pytest.raises(InputError, match="--ranks needs recordings"):
        change_to(nameless, None, None, {}, 16)

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from claw_plan.executor.ranks import Rank
from claw_plan.executor.recorder import MOST_SAMPLES, StepRecorder
from claw_plan.profiles.work import OpWork

CPU = torch.device("cpu")


def made(*, times_work: bool = False) -> StepRecorder:
    world = dist.group.WORLD if dist.is_initialized() else None
    groups = {str(world.group_name): "tp"} if world is not None else {}
    return StepRecorder(3, CPU, groups, {"tp": 1}, times_work=times_work)


def test_spans_follow_each_other_in_order() -> None:
    recorder = made()
    with recorder:
        with recorder.span("forward", "0F0"):
            torch.ones(10).sum()
        with recorder.span("backward", "0B0"):
            torch.ones(10).sum()
    forward, backward = recorder.spans
    assert (forward.kind, forward.name, forward.rank) == ("forward", "0F0", 3)
    assert 0 <= forward.start_ns < forward.end_ns <= backward.start_ns < backward.end_ns
    assert not recorder.samples


def test_waiting_for_a_neighbour_is_a_span_of_its_own() -> None:
    recorder = made()
    with recorder:
        with recorder.span("forward", "1F0"):
            pass
        time.sleep(0.002)
        with recorder.span("backward", "1B0", awaits_peer=True):
            pass
    forward, wait, backward = recorder.spans
    assert wait.kind == "pp_comm"
    assert (wait.start_ns >= forward.end_ns) and (wait.end_ns == backward.start_ns)
    assert wait.duration_ns >= 2_000_000


def test_a_collective_interrupts_the_computation_around_it(alone: Rank) -> None:
    recorder = made()
    with recorder, recorder.span("forward", "0F0"):
        torch.ones(2).sum()
        dist.all_reduce(torch.ones(2))
        torch.ones(2).sum()
    assert [(span.kind, span.name) for span in recorder.spans] == [
        ("forward", "0F0"),
        ("tp_comm", "all_reduce"),
        ("forward", "0F0"),
    ]
    before, during, after = recorder.spans
    assert before.end_ns <= during.start_ns and during.end_ns <= after.start_ns


def test_few_samples_of_each_work_are_kept() -> None:
    recorder = made(times_work=True)
    with recorder, recorder.span("forward", "0F0"):
        for _ in range(2 * MOST_SAMPLES):
            torch.ones(4).add(1)
    assert max(len(samples) for samples in recorder.samples.values()) == MOST_SAMPLES
    assert all(min(samples) > 0 for samples in recorder.samples.values())


def test_the_optimizer_is_one_piece_of_work() -> None:
    work = OpWork(kind="optimizer", dims=(), dtype="float32", flops=0, bytes=28, target="adamw")
    recorder = made(times_work=True)
    with recorder.optimizer(work):
        pass
    assert len(recorder.samples[work]) == 1
    assert [span.kind for span in recorder.spans] == ["optimizer"]


def test_collectives_start_when_all_that_share_their_link_are_there(
    alone: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever else is named, then their own group; and only where work is timed."""
    met: list[object] = []
    monkeypatch.setattr(dist, "barrier", met.append)
    world, others = dist.group.WORLD, dist.new_group([0])
    for times_work, meets in ((False, others), (True, None), (True, others)):
        groups = {str(world.group_name): "tp"}
        with StepRecorder(0, CPU, groups, {"tp": 1}, times_work=times_work, meets=meets):
            dist.all_reduce(torch.ones(2))
    assert met == [world, others, world]

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.nn as nn

from claw_plan.planner.errors import TraceError
from claw_plan.planner.model_source import load_model
from claw_plan.planner.recorder import RecordedExchange
from claw_plan.planner.subject import Subject, cast_parameters

MODELS = Path(__file__).parent / "models"


def prepare(build: str, fold: int | None = 2, real: bool = False) -> Subject:
    model = load_model(MODELS / "stack.py", build=build)
    return Subject.prepare(model, seq_len=None, dtype=torch.float32, fold=fold, real=real)


def test_long_runs_are_folded_and_all_names_known() -> None:
    subject = prepare("Stack(8)")
    assert subject.block_names == [f"blocks.{index}" for index in range(8)]
    assert subject.kept == [0, 1, 7]
    assert subject.stands_for == [0, 1, 1, 1, 1, 1, 1, 7]
    assert subject.alike == [(1, 7)]
    assert [subject.names[id(block)] for block in subject.blocks] == [
        "blocks.0",
        "blocks.1",
        "blocks.7",
    ]
    assert len(subject.module.blocks) == 3


def test_short_runs_and_forwards_that_count_are_not() -> None:
    assert prepare("Stack(3)").kept == [0, 1, 2]
    assert prepare("Stack(8)", fold=None).kept == list(range(8))
    assert prepare("Counting(8)").kept == list(range(8))


def test_a_container_that_is_no_chain_keeps_its_blocks() -> None:
    subject = prepare("Shared(6)")
    assert subject.block_names == [] and len(subject.module.blocks) == 6


def test_batches_are_fake_where_the_model_is() -> None:
    assert prepare("Stack(3)").batch(2)["x"].fake_mode is not None
    assert type(prepare("Stack(3)", real=True).batch(2)["x"]) is torch.Tensor


def test_recording_leaves_no_gradients_and_can_be_repeated() -> None:
    subject = prepare("Stack(3)", real=True)
    first = subject.record(2)
    assert all(parameter.grad is None for parameter in subject.module.parameters())
    assert subject.record(2).ops == first.ops


def test_around_may_change_the_module_and_report_exchanges() -> None:
    subject = prepare("Stack(3)")

    @contextmanager
    def around(module: nn.Module, exchanged: Callable[[str, int, str], None]) -> Iterator[None]:
        hook = module.blocks[1].register_forward_pre_hook(
            lambda block, args: exchanged("all_gather", 12, "blocks.1")
        )
        yield
        hook.remove()

    found = [op for op in subject.record(2, around).ops if isinstance(op, RecordedExchange)]
    assert [(op.unit, op.op, op.bytes) for op in found] == [(2, "all_gather", 12)]
    assert not [op for op in subject.record(2).ops if isinstance(op, RecordedExchange)]


def test_an_error_in_forward_is_the_models_own() -> None:
    with pytest.raises(TraceError, match=r"stack.py line"):
        prepare("Raising()")


def test_casting_keeps_ties_and_buffers() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    module[1].weight = module[0].weight
    cast_parameters(module, torch.bfloat16)
    assert {p.dtype for p in module.parameters()} == {torch.bfloat16}
    assert module[1].weight is module[0].weight
    assert module[2].running_mean.dtype == torch.float32


def test_a_model_without_trained_parameters_is_refused() -> None:
    subject = prepare("Stack(3)")
    for parameter in subject.module.parameters():
        parameter.requires_grad_(False)
    forward = subject.forward
    subject.forward = lambda batch: forward(batch).requires_grad_()  # type: ignore[method-assign]
    with pytest.raises(TraceError, match="none of its parameters requires a gradient"):
        subject.record(2)

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.executor.checkpoint import Checkpointer
from claw_plan.executor.checkpoint_io import tensors_in
from claw_plan.executor.checkpoint_state import share_out
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import ParallelModel, compile_plan
from claw_plan.executor.ranks import Rank

holdings = st.lists(
    st.dictionaries(st.tuples(st.sampled_from("abcdef"), st.just((0,))), st.just(8), max_size=6),
    min_size=1,
    max_size=4,
)


@given(holdings)
def test_each_part_is_written_once_by_a_rank_that_has_it(
    held: list[dict[tuple[str, tuple[int, ...]], int]],
) -> None:
    writer = share_out(held)
    assert set(writer) == {key for parts in held for key in parts}
    assert all(key in held[rank] for key, rank in writer.items())


def test_replicas_share_the_writing() -> None:
    parts = {(name, (0,)): size for name, size in {"a": 8, "b": 5, "c": 4, "d": 1}.items()}
    writer = share_out([parts, parts])
    # Largest first, to whom has least: a | b c | d goes to the first, which has 8 against 9.
    assert [writer[name, (0,)] for name in "abcd"] == [0, 1, 1, 0]


MODEL = """
import torch, torch.nn as nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("calls", torch.zeros(()), persistent=False)
    def forward(self, x):
        self.calls += 1
        return (self.norm(self.inner(x + self.table)) * self.scale).square().mean()
def build_model(): return Net()
def example_batch(n): return {"x": torch.randn(n, 4)}
"""


class Odd(torch.optim.SGD):
    """Keeps a plain number, None and a statistic of another shape for each parameter."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
            state["none"] = None
            if parameter.ndim == 2:
                state["row"] = parameter.detach().sum(1).clone()


@pytest.fixture
def make(
    write_any: Callable[..., Path], tmp_path: Path, alone: Rank
) -> Callable[[], ParallelModel]:
    file = tmp_path / "net.py"
    file.write_text(MODEL)
    plan = write_any(file, "plan", ["inner"], global_batch=4, microbatch_size=4)

    def compiled() -> ParallelModel:
        opened = open_plan(plan)
        result = compile_plan(opened[0], opened[1], alone.device)
        result.optimizer = Odd(result.trainable(), lr=0.1, momentum=0.9)
        return result

    return compiled


def buffers(compiled: ParallelModel) -> dict[str, torch.Tensor]:
    return dict(compiled.stages[0].model.named_buffers())


def test_buffers_numbers_and_other_shapes_come_back(
    make: Callable[[], ParallelModel], tmp_path: Path
) -> None:
    trained = make()
    saving = Checkpointer(trained, tmp_path / "c")
    for seed in range(3):
        torch.manual_seed(seed)
        trained.train_step({"x": torch.randn(4, 4)})
    saving.save(3)
    assert saving.finish() == ""
    path = tmp_path / "c" / "step-00000003"
    stored = tensors_in(path)
    assert "buffers.calls" in stored  # training changed it; the table is as it was built
    assert "buffers.table" not in stored and "model.table" not in stored
    other = make()
    Checkpointer(other, None).load(path)
    for name, value in buffers(trained).items():
        assert torch.equal(value, buffers(other)[name]), name
    assert buffers(other)["calls"] == 3 and buffers(other)["norm.num_batches_tracked"] == 3
    for name, parameter in trained.parameters.items():
        assert torch.equal(parameter, other.parameters[name])
        expected = trained.optimizer.state[parameter]
        found = other.optimizer.state[other.parameters[name]]
        assert found["count"] == 3 and isinstance(found["count"], int)
        assert torch.equal(found["momentum_buffer"], expected["momentum_buffer"])
        if parameter.ndim == 2:
            assert torch.equal(found["row"], expected["row"])
    batch = {"x": torch.randn(4, 4)}
    assert trained.train_step(batch) == other.train_step(batch)


def test_state_that_is_no_number_is_refused(
    make: Callable[[], ParallelModel], tmp_path: Path
) -> None:
    compiled = make()
    compiled.optimizer.state[compiled.parameters["scale"]]["text"] = "abc"
    with pytest.raises(ExecutionError, match="'text' of scale is a str, neither tensor nor"):
        Checkpointer(compiled, tmp_path / "c").save(1)


def test_dropout_goes_on_where_it_was(make: Callable[[], ParallelModel], tmp_path: Path) -> None:
    compiled = make()
    saving = Checkpointer(compiled, tmp_path / "c")
    drop = nn.Dropout(0.5)
    drop(torch.ones(3))
    saving.save(1)
    expected = drop(torch.ones(50))
    assert saving.finish() == ""
    other = make()
    Checkpointer(other, None).load(tmp_path / "c" / "step-00000001")
    assert torch.equal(drop(torch.ones(50)), expected)

"""Reported failures of pipelines, each with the outcome that is right; names are the cases'."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn as nn

from claw_plan.executor.gradients import share_of_mean
from claw_plan.executor.pipeline import RecordedStage, make_pipeline
from claw_plan.executor.rank_stages import TiedCopy
from claw_plan.executor.recording import record
from claw_plan.executor.stages import Stage
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.plan import PlanSchedule
from claw_plan.planner.schedules import schedule_actions
from claw_plan.planner.stage_cut import cut_chain

WIDTH = 4


def test_vpp_microbatches() -> None:
    """Interleaved, pp=4, 6 microbatches: PyTorch takes one round of six; nine are refused.

    Megatron wants multiples of pp. Rounds of 4 and more that are equal run as well, so the rule
    is the equal rounds, and the message names a multiple and 1F1B.
    """
    assert len(schedule_actions("Interleaved1F1B", 4, 6, 2)[0]) == 2 * 2 * 6
    with pytest.raises(PlanError, match=r"take a multiple of 4, or schedule=1F1B"):
        schedule_actions("Interleaved1F1B", 4, 9, 2)


@pytest.mark.parametrize(("layers", "stages"), [(30, 4), (27, 4), (27, 8), (61, 4), (61, 16)])
def test_pp_30_on_4_and_pp_deepseek_27(layers: int, stages: int) -> None:
    """Every layer once, and the largest stage as small as it can be."""
    times = [0, *[10] * layers, 0]
    cuts = cut_chain(times, stages, range(2, layers + 1))
    assert cuts is not None
    assert [unit for start, stop in cuts for unit in range(start, stop)] == list(range(layers + 2))
    blocks = [sum(times[start:stop]) // 10 for start, stop in cuts]
    assert sum(blocks) == layers and max(blocks) == -(-layers // stages)


def test_pp_embedding_weight() -> None:
    """6 layers, pp=4, two stages a rank: ends count as load; eight stages need eight blocks.

    A stage without a block is not made; the reason says how many there can be.
    """
    times = [25, *[10] * 6, 35]  # a table worth 2.5 layers, a head worth 3.5
    cuts = cut_chain(times, 4, range(2, 7))
    assert cuts is not None
    loads = [sum(times[start:stop]) for start, stop in cuts]
    assert max(loads) == 45  # the head and one layer; an even cut would put 55 there
    assert cut_chain(times, 8, range(2, 7)) is None


class Tied(nn.Module):
    """A table that is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.table(x)
        for block in self.blocks:
            hidden = block(hidden).tanh()
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), x.flatten())


def call(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    output = model(**batch)
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
    return loss


def rank_with(
    build: Callable[[], nn.Module], batch: dict[str, torch.Tensor], cuts: list[int]
) -> list[Stage]:
    """All stages on this one rank, each of its own copy of the model."""
    edges = [0, *cuts, 4]
    stages = []
    for start, end in itertools.pairwise(edges):
        torch.manual_seed(0)
        model = build().double()
        recording = record(model, BLOCKS, lambda module: call(module, batch))
        stages.append(Stage(model, call, recording, (start, end)))
    return stages


BLOCKS = [f"blocks.{index}" for index in range(4)]
TOKENS = {"x": torch.arange(12).view(4, 3) % 7}


def run(stages: list[Stage], batch: dict[str, torch.Tensor], name: str) -> float:
    group = torch.distributed.group.WORLD
    assert group is not None

    def recorded(kind: str, name: str, *, awaits_peer: bool = False) -> object:
        import contextlib

        return contextlib.nullcontext()

    pieces = [
        RecordedStage(stage, i, len(stages), torch.device("cpu"), group, recorded)  # type: ignore[arg-type]
        for i, stage in enumerate(stages)
    ]
    schedule = PlanSchedule(name=name, stages_per_rank=len(stages), num_microbatches=2)
    step = make_pipeline(pieces, schedule, torch.device("cpu"), share_of_mean)
    halves = [{k: v[i : i + 2] for k, v in batch.items()} for i in (0, 2)]
    return float(step(halves))


@pytest.fixture
def alone(tmp_path: Path):
    """This process as the only rank."""
    store = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"])
def test_pp_tied_drift_and_tied_two_steps(name: str) -> None:
    """Both ends on one rank: the gradient is the sum, one optimizer state, equal ever after."""
    torch.manual_seed(0)
    whole = Tied().double()
    stages = rank_with(Tied, TOKENS, [2])
    tied = TiedCopy(stages[1].model.head.weight, stages[0].model.table.weight)
    own = {id(p): p for stage in stages for p in stage.parameters()}
    own.pop(id(tied.copy))
    ours = torch.optim.AdamW(list(own.values()), lr=0.1)
    theirs = torch.optim.AdamW(whole.parameters(), lr=0.1)
    for _ in range(3):
        theirs.zero_grad()
        loss = call(whole, TOKENS)
        loss.backward()
        theirs.step()
        tied.take_value()
        ours.zero_grad()
        assert run(stages, TOKENS, name) == pytest.approx(loss.item(), abs=1e-12)
        tied.give_gradient()
        assert whole.table.weight.grad is not None
        torch.testing.assert_close(tied.original.grad, whole.table.weight.grad, rtol=0, atol=1e-13)
        ours.step()
    torch.testing.assert_close(tied.original, whole.table.weight, rtol=0, atol=1e-12)
    assert len(ours.state) == len(theirs.state)


def test_tied_shard_same() -> None:
    """Both ends of a tied table are cut alike when tensor parallelism divides them."""
    from claw_plan.planner.vocabulary_parallel_search import find_vocabulary

    torch.manual_seed(0)
    model = Tied()
    rules = find_vocabulary(model, BLOCKS, lambda: call(model, TOKENS), 2).rules
    dims = {rule.module: dict(rule.weight_dims) for rule in rules}
    assert dims == {"table": {"weight": 0}, "head": {"weight": 0}}


class UNet(nn.Module):
    """The last block reads the first one's result again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skip = hidden = self.blocks[0](x)
        for block in self.blocks[1:]:
            hidden = block(hidden).tanh()
        return self.leave(hidden * skip).mean()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("name", ["Interleaved1F1B", "InterleavedZeroBubble"])
def test_pp_skip_connection(name: str) -> None:
    """Made on stage 0, used on stage 3: relayed forward and backward."""
    torch.manual_seed(0)
    whole, batch = UNet().double(), {"x": torch.randn(4, WIDTH, dtype=torch.double)}
    loss = call(whole, batch)
    loss.backward()
    stages = rank_with(UNet, batch, [1, 2, 3])
    assert run(stages, batch, name) == pytest.approx(loss.item(), abs=1e-14)
    held = {n: p for stage in stages for n, p in stage.model.named_parameters()}
    for parameter_name, parameter in whole.named_parameters():
        torch.testing.assert_close(
            held[parameter_name].grad, parameter.grad, rtol=0, atol=1e-14, msg=parameter_name
        )


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_pp_none_hidden() -> None:
    """A sequence-classification head on the last stage is fed, not met with None."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=7, n_embd=8, n_layer=4, n_head=2, n_positions=8, num_labels=3, pad_token_id=0,
        resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False,
    )  # fmt: skip
    blocks = [f"transformer.h.{index}" for index in range(4)]
    batch = {"input_ids": TOKENS["x"] + 0, "labels": torch.arange(4) % 3}
    stages = []
    for span in ((0, 2), (2, 4)):
        torch.manual_seed(0)
        model = transformers.GPT2ForSequenceClassification(config).double()
        recording = record(model, blocks, lambda module: call(module, batch))
        stages.append(Stage(model, call, recording, span))
    torch.manual_seed(0)
    whole = transformers.GPT2ForSequenceClassification(config).double()
    halves = [call(whole, {k: v[i : i + 2] for k, v in batch.items()}) for i in (0, 2)]
    expected = sum(half.item() for half in halves) / 2
    assert run(stages, batch, "Interleaved1F1B") == pytest.approx(expected, abs=1e-12)


def test_a_schedule_that_does_not_fit_its_stages_is_no_candidate() -> None:
    """The knobs are refused before anything is traced."""
    from claw_plan.planner.supported import knob_refusal

    wrong = dataclasses.replace(Candidate(pp=4), schedule="ZBVZeroBubble")
    assert "runs with 2" in knob_refusal(wrong)

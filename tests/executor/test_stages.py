"""Stages in a row in one process: losses and gradients must be those of the whole model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.profiler import ProfilerActivity, profile

from claw_plan.executor.recording import record
from claw_plan.executor.stages import Stage
from claw_plan.executor.whole_model import first_names
from claw_plan.planner.errors import PlanError

Build = Callable[[], nn.Module]
Batch = dict[str, torch.Tensor]

WIDTH, VOCABULARY = 8, 31


class TiedGPT(nn.Module):
    """Tied ends, a learned position owned by the model itself, blocks that return tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(16, WIDTH))
        self.blocks = nn.ModuleList(TupleBlock() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x) + self.position[: x.shape[1]]
        mask = torch.ones(x.shape[1], x.shape[1], dtype=hidden.dtype).tril()
        for block in self.blocks:
            hidden, _ = block(hidden, mask=mask)
        logits = self.head(self.norm(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten())


class TupleBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, *, mask: torch.Tensor) -> tuple[torch.Tensor, None]:
        mixed = mask @ self.mix(hidden)
        return hidden + mixed.tanh(), None


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    output = model(**batch)
    if isinstance(output, dict) and not hasattr(output, "loss"):
        return output["loss"]
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
    return loss


def built(build: Build) -> nn.Module:
    torch.manual_seed(0)
    return build().double().train()


def made_stages(
    build: Build, blocks: list[str], cuts: list[int], batch: Batch
) -> tuple[list[Stage], list[dict[str, nn.Parameter]]]:
    edges = [0, *cuts, len(blocks)]
    stages, held = [], []
    for start, end in itertools.pairwise(edges):
        model = built(build)
        names = first_names(model)
        recording = record(model, blocks, lambda module: loss_of(module, batch))
        stage = Stage(model, loss_of, recording, (start, end))
        stages.append(stage)
        held.append({names[n]: p for n, p in stage.model.named_parameters()})
    return stages, held


def run_in_a_row(stages: list[Stage], batch: Batch) -> float:
    """Forward through all, backward through all in reverse, as a pipeline does."""
    sent: tuple[torch.Tensor, ...] = ()
    chain: list[tuple[tuple[torch.Tensor, ...], Any]] = []
    for stage in stages:
        received = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in sent)
        sent = stage(*received, **batch)
        chain.append((received, sent))
    loss = chain[-1][1]
    outputs, gradients = (loss,), None
    for received, result in reversed(chain):
        outputs = (result,) if isinstance(result, torch.Tensor) else result
        pairs = list(zip(outputs, gradients or [None], strict=True))
        pairs = [pair for pair in pairs if pair[0].requires_grad]
        torch.autograd.backward(*zip(*pairs, strict=True))
        gradients = [torch.zeros_like(t) if t.grad is None else t.grad for t in received]
    return float(loss.item())


def assert_equal_to_whole(build: Build, blocks: list[str], cuts: list[int], batch: Batch) -> None:
    whole = built(build)
    loss = loss_of(whole, batch)
    loss.backward()
    stages, held = made_stages(build, blocks, cuts, batch)
    assert run_in_a_row(stages, batch) == pytest.approx(loss.item(), abs=1e-12)
    for name, parameter in whole.named_parameters():
        parts = [own[name].grad for own in held if name in own and own[name].grad is not None]
        assert bool(parts) == (parameter.grad is not None), name
        if not parts:
            assert any(name in own for own in held), name
            continue
        torch.testing.assert_close(sum(parts), parameter.grad, rtol=0, atol=1e-12, msg=name)


TOKENS = {"x": torch.arange(12).view(2, 6) % VOCABULARY}
BLOCKS = [f"blocks.{index}" for index in range(4)]


@pytest.mark.parametrize("cuts", [[2], [1], [3], [1, 2, 3]])
def test_stages_together_are_the_model(cuts: list[int]) -> None:
    assert_equal_to_whole(TiedGPT, BLOCKS, cuts, TOKENS)


def test_a_stage_keeps_its_own_parameters_only() -> None:
    _, held = made_stages(TiedGPT, BLOCKS, [1, 3], TOKENS)
    own = {"position"}  # no module's call tells which stage reads it
    assert set(held[0]) == own | {"embed.weight", "blocks.0.mix.weight", "blocks.0.mix.bias"}
    assert {name.split(".")[1] for name in set(held[1]) - own} == {"1", "2"}
    assert {name for name in set(held[2]) - own if "blocks" not in name} == {
        "embed.weight",  # the head, under the first name of the tie
        "norm.weight",
        "norm.bias",
    }


def test_a_model_that_catches_exceptions_does_not_catch_the_early_exit() -> None:
    class Careful(TiedGPT):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return super().forward(x)
            except Exception as error:
                raise AssertionError("the stage's own exit was caught") from error

    assert_equal_to_whole(Careful, BLOCKS, [2], TOKENS)


class Reading(TiedGPT):
    """Reads settings off modules that lie on other stages, one module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.also = self.embed
        for index, block in enumerate(self.blocks):
            block.scale = 1.0 + index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.also(x % self.embed.num_embeddings).to(self.head.weight.dtype)
        hidden = hidden + self.position[: x.shape[1]]
        mask = torch.ones(x.shape[1], x.shape[1], dtype=hidden.dtype).tril()
        for block in self.blocks:
            assert block.mix.weight.shape == (WIDTH, WIDTH)
            hidden, _ = block(hidden * block.scale, mask=mask)
        logits = self.head(self.norm(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten())


def test_settings_of_modules_elsewhere_can_be_read() -> None:
    assert_equal_to_whole(Reading, BLOCKS, [1, 3], TOKENS)


class InPlace(TiedGPT):
    """Changes in place what stages before made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        hidden += self.position[: x.shape[1]]
        mask = torch.ones(x.shape[1], x.shape[1], dtype=hidden.dtype).tril()
        for block in self.blocks:
            hidden, _ = block(hidden, mask=mask)
            hidden.mul_(0.5)
        logits = self.head(self.norm(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten())


@pytest.mark.parametrize("cuts", [[2], [1, 2, 3]])
def test_models_may_change_results_in_place(cuts: list[int]) -> None:
    assert_equal_to_whole(InPlace, BLOCKS, cuts, TOKENS)


def kernels(stage: Stage, *received: torch.Tensor) -> set[str]:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        stage(*received, **TOKENS)
    return {event.name for event in seen.events()}


def test_stand_ins_for_other_stages_are_made_once() -> None:
    _, stage = made_stages(TiedGPT, BLOCKS, [2], TOKENS)[0]
    received = torch.randn(2, 6, WIDTH, dtype=torch.double)
    assert "aten::zeros" in kernels(stage, received)
    assert "aten::zeros" not in kernels(stage, received)
    assert "aten::zeros" in kernels(stage.to(torch.float64), received)  # where it lies then


class UNet(nn.Module):
    """Each block of the second half reads the output of its mirror image in the first."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH * (1 + (i > 2)), WIDTH) for i in range(6))
        self.enter, self.leave = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.act = nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, skips = self.enter(x), []
        for index, block in enumerate(self.blocks):
            if index > 2:
                hidden = torch.cat([hidden, self.act(skips.pop())], -1)
            hidden = block(hidden)
            skips.append(hidden)
        return self.leave(self.act(hidden)).mean()


@dataclasses.dataclass
class State:
    """What a block hands on; one field is None, one depends on no input."""

    hidden: torch.Tensor
    bias: torch.Tensor | None
    note: str = "kept"


class StateBlock(nn.Module):
    def __init__(self, *, makes_bias: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH)) if makes_bias else None

    def forward(self, state: State) -> State:
        bias = (self.bias * 2).tanh() if self.bias is not None else state.bias
        assert bias is not None and state.note == "kept"
        return State((self.layer(state.hidden) + bias).tanh(), bias)


class DataclassModel(nn.Module):
    """Blocks in dataclasses; the bias of the second is made of weights alone and read by all."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(StateBlock(makes_bias=i == 0) for i in range(4))
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        state = State(self.enter(x), None)
        for block in self.blocks:
            state = block(state)
        return {"loss": self.leave(state.hidden).mean()}


class DictBlock(nn.Module):
    """Takes None and a frozen layer's result, hands on a dict with None in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.frozen = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frozen.requires_grad_(False)

    def forward(self, state: dict[str, Any], past: None = None) -> dict[str, Any]:
        hidden = self.frozen(self.layer(state["hidden"]).tanh())
        return {"past": past, "hidden": hidden, "norms": hidden.norm()}


class DictModel(nn.Module):
    """Shares a table of its own between all stages, and holds a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.randn(16, WIDTH))
        self.spare = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(DictBlock() for _ in range(4))
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = {"hidden": x}
        for block in self.blocks:
            state["hidden"] = state["hidden"] + self.table[: x.shape[1]]
            state = block(state, past=None)
        return self.leave(state["hidden"]).mean()


REALS = {"x": torch.randn(2, 6, WIDTH, dtype=torch.double)}


@pytest.mark.parametrize("build", [UNet, DataclassModel, DictModel])
@pytest.mark.parametrize("cuts", [[2], [1, 3], [1, 2, 3]])
def test_skips_dataclasses_dicts_and_none_cross_cuts(build: Build, cuts: list[int]) -> None:
    model = build()
    blocks = [f"blocks.{index}" for index in range(len(model.blocks))]
    assert_equal_to_whole(build, blocks, cuts, REALS)


def test_a_skip_crosses_five_stages() -> None:
    assert_equal_to_whole(UNet, [f"blocks.{i}" for i in range(6)], [1, 2, 3, 4, 5], REALS)


def test_what_nothing_uses_stays_on_the_first_stage_alone() -> None:
    _, held = made_stages(DictModel, BLOCKS, [1, 2], REALS)
    assert [sum(name.startswith("spare") for name in own) for own in held] == [2, 0, 0]


class Normed(nn.Module):
    """Batch norms inside the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x.mean()


def test_batch_norms_count_each_microbatch_once() -> None:
    batch = {"x": torch.randn(5, WIDTH, dtype=torch.double)}
    whole = built(Normed)
    loss_of(whole, batch)
    stages, _ = made_stages(Normed, BLOCKS, [1, 3], batch)
    run_in_a_row(stages, batch)
    for stage, own in zip(stages, (range(1), range(1, 3), range(3, 4)), strict=True):
        for index in own:
            norm, expected = stage.model.blocks[index][1], whole.blocks[index][1]
            assert norm.num_batches_tracked == 1
            torch.testing.assert_close(norm.running_var, expected.running_var)


def hugging_face(family: str) -> tuple[Build, list[str]]:
    import transformers

    shape = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32}
    rope = shape | {
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "use_cache": False,
    }
    if family == "mixtral with its router loss":
        config = transformers.MixtralConfig(
            num_local_experts=2, output_router_logits=True, experts_implementation="eager", **rope
        )
        return lambda: transformers.MixtralForCausalLM(config), LAYERS
    if family == "llama":
        llama = transformers.LlamaConfig(**rope)
        return lambda: transformers.LlamaForCausalLM(llama), LAYERS
    t5 = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=4,
        d_ff=32,
        num_layers=2,
        num_heads=4,
        dropout_rate=0,
        decoder_start_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )
    blocks = [f"{side}.block.{index}" for side in ("encoder", "decoder") for index in range(2)]
    return lambda: transformers.T5ForConditionalGeneration(t5), blocks


LAYERS = [f"model.layers.{index}" for index in range(4)]
IDS = {"input_ids": TOKENS["x"], "labels": TOKENS["x"]}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "t5"])
@pytest.mark.parametrize("cuts", [[2], [3], [1, 2, 3]])
def test_untouched_models_are_cut_right(family: str, cuts: list[int]) -> None:
    build, blocks = hugging_face(family)
    assert_equal_to_whole(build, blocks, cuts, IDS)


@pytest.mark.slow
def test_a_loss_gathered_over_all_blocks_refuses_the_cut() -> None:
    build, blocks = hugging_face("mixtral with its router loss")
    with pytest.raises(PlanError, match="no pipeline cut may lie before"):
        made_stages(build, blocks, [2], IDS)

from __future__ import annotations

import pytest
import torch
import torch.nn as nn

from claw_plan.executor.recording import Recording, record
from claw_plan.planner.errors import PlanError

WIDTH = 4


class Chain(nn.Module):
    """An embedding, four blocks, a head; `extra` lets a test go around the blocks."""

    def __init__(self, extra: str = "") -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)
        self.extra = extra

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = start = self.first(x)
        for index, block in enumerate(self.blocks):
            if self.extra == "skip" and index == 2:
                hidden = hidden + start
            if self.extra == "looks" and hidden.sum().item() > 1e9:
                hidden = hidden * 2
            hidden = block(hidden)
        return self.head(hidden).mean()


BLOCKS = [f"blocks.{index}" for index in range(4)]


def recorded(model: nn.Module, blocks: list[str] = BLOCKS) -> Recording:
    return record(model, blocks, lambda module: module(torch.ones(2, WIDTH)))


def test_a_chain_can_be_cut_anywhere_and_sends_the_hidden_state() -> None:
    recording = recorded(Chain())
    assert [recording.crossing(cut) for cut in (1, 2, 3)] == [(name,) for name in BLOCKS[:3]]
    assert recording.gaps == {"first": {0}, "head": {4}}
    assert recording.outputs["blocks.1"].shape == (2, WIDTH)
    assert recording.outputs["blocks.1"].device.type == "meta"


def test_a_skip_connection_is_relayed_over_the_cuts_it_goes_around_and_no_other() -> None:
    recording = recorded(Chain("skip"))
    assert recording.around == {}
    assert [recording.crossing(cut) for cut in (1, 2, 3)] == [
        ("blocks.0", "first"),
        ("blocks.1", "first"),
        ("blocks.2",),
    ]


class Changing(Chain):
    """Changes results in place: directly, by a module, through a view."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        hidden *= 2
        hidden = nn.functional.relu(self.blocks[0](hidden), inplace=True)
        hidden = self.blocks[1](hidden)
        hidden[:, 0].zero_()
        hidden = self.blocks[3](self.blocks[2](hidden).relu())
        return self.head(hidden).mean()


def test_results_that_are_changed_in_place_are_told_from_others() -> None:
    assert recorded(Changing()).changed == {"first", "blocks.0", "blocks.1"}
    assert recorded(Chain()).changed == frozenset()


class Gathered(Chain):
    """The loss reads what a layer inside each block made."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: list[torch.Tensor] = []
        hooks = [
            block[0].register_forward_hook(lambda module, args, out: seen.append(out.exp()))
            for block in self.blocks
        ]
        loss = super().forward(x)
        for hook in hooks:
            hook.remove()
        return loss + torch.stack(seen).mean()


def test_what_cannot_be_sent_refuses_the_cut_with_its_name() -> None:
    recording = recorded(Gathered())
    with pytest.raises(PlanError, match=r"no pipeline cut may lie before blocks\.2.*blocks\.1"):
        recording.crossing(2)


def test_a_module_called_twice_is_not_sent_but_what_it_read() -> None:
    class Twice(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            start = self.first(x)
            hidden = self.act(start)
            for index, block in enumerate(self.blocks):
                hidden = block(hidden + self.act(start) if index == 3 else hidden)
            return self.head(hidden).mean()

    model = Twice()
    model.act = nn.Tanh()
    recording = recorded(model)
    assert recording.crossing(2) == ("blocks.1", "first")


def test_modules_that_nothing_uses_are_known() -> None:
    model = Chain()
    model.spare = nn.Linear(WIDTH, WIDTH)
    assert recorded(model).unused == ("spare",)


def test_a_model_that_looks_at_values_is_recorded_on_real_tensors() -> None:
    assert recorded(Chain("looks")).crossing(2) == ("blocks.1",)


def test_recording_leaves_weights_buffers_and_random_numbers_alone() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    record(model, ["0", "1"], lambda module: module(torch.ones(2, WIDTH)).mean())
    assert torch.equal(state, torch.get_rng_state())
    for name, value in model.state_dict().items():
        assert torch.equal(before[name], value), name
    assert not any(module._forward_hooks for module in model.modules())


class Decoder(nn.Module):
    """Blocks that all read an encoder's result beside the hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Bilinear(WIDTH, WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory, hidden = self.encoder(x), self.embed(x)
        for block in self.blocks:
            hidden = block(hidden, memory)
        return hidden.mean()


def test_what_later_blocks_read_is_carried_over_every_cut() -> None:
    recording = recorded(Decoder())
    assert recording.carried == {"encoder": (0, 3)}
    assert [recording.crossing(cut) for cut in (1, 3)] == [
        ("blocks.0", "encoder"),
        ("blocks.2", "encoder"),
    ]


def test_packed_tensors_come_out_under_their_names() -> None:
    recording = recorded(Decoder())
    values = {"blocks.0": torch.rand(2, WIDTH), "encoder": torch.rand(2, WIDTH)}
    names = recording.crossing(1)
    packed = recording.pack(names, values)
    assert [tensor.data_ptr() for tensor in packed] == [v.data_ptr() for v in values.values()]
    unpacked = recording.unpack(names, packed)
    assert all(unpacked[name] is values[name] for name in names)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (["blocks.1", "blocks.0"], "blocks.0 ran where blocks.1 was expected"),
        ([*BLOCKS, "unused"], "names 5 blocks, but one forward of the model ran 4"),
    ],
)
def test_a_plan_of_another_model_is_refused(blocks: list[str], message: str) -> None:
    model = Chain()
    model.add_module("unused", nn.Linear(WIDTH, WIDTH))
    with pytest.raises(PlanError, match=message):
        recorded(model, blocks)


def test_what_a_forward_keeps_on_its_module_is_taken_off() -> None:
    """CLIP's blocks keep their mask, word_language_model's the last; a fake one would stay."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask, self.calls = torch.ones(3), 0
            self.register_buffer("seen", torch.zeros(3))
            self.block = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mask, self.calls, self.extra = self.mask * x[0], self.calls + 1, x
            self.seen = self.seen + 1
            return self.block(x * self.mask).sum()

    model = Keeps()
    mask, seen = model.mask, model.seen
    record(model, ["block"], lambda module: module(torch.ones(2, 3)))
    assert model.mask is mask and model.calls == 0 and not hasattr(model, "extra")
    assert model.seen is seen and not seen.any()

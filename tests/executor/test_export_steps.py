"""The flags that an exported step sets; what they amount to is trained in test_export."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from claw_plan.executor.export_model import ModelText
from claw_plan.executor.export_steps import loop_text, model_text, optimizer_text, step_text
from claw_plan.planner.plan import load_plan

TEXT = ModelText(
    load="",
    build="MODEL.build_model()",
    batch="    return {}",
    call="**batch",
    loss="output",
    optimizer=None,
    trains_on_file=False,
)

FLAGS: list[tuple[dict[str, Any], set[str]]] = [
    ({"dp_shard": 2}, set()),
    ({"dp_shard": 2, "zero": 2}, {"set_is_last_backward", "set_reshard_after_backward"}),
    (
        {"dp_shard": 2, "zero": 1},
        {"set_is_last_backward", "set_reshard_after_backward", "set_requires_gradient_sync"},
    ),
    ({"dp_shard": 2, "dp_replicate": 2}, {"set_requires_all_reduce"}),
    ({"dp_replicate": 2}, {"no_sync"}),
    ({"dp_replicate": 2, "tp": 2}, {"average_over_replicas"}),
]


@pytest.mark.parametrize(("knobs", "flags"), FLAGS)
def test_a_step_sets_what_its_plan_needs(
    knobs: dict[str, Any], flags: set[str], tiny_plan: Callable[..., Path]
) -> None:
    text = step_text(load_plan(tiny_plan("flags", **knobs)), ties=False)
    known = {flag for _, others in FLAGS for flag in others}
    assert {flag for flag in known if flag in text} == flags
    assert ("is_last" in text) == bool(flags - {"average_over_replicas"})


def test_fused_updates_are_left_out_beside_divided_weights(
    tiny_plan: Callable[..., Path],
) -> None:
    whole, divided = (load_plan(tiny_plan(f"tp{tp}", tp=tp)) for tp in (1, 2))
    assert "foreach" not in optimizer_text(whole, TEXT)
    assert "foreach=False" in optimizer_text(divided, TEXT)


def test_the_files_own_data_is_cut_into_global_batches(tiny_plan: Callable[..., Path]) -> None:
    import torch

    class Model:
        @staticmethod
        def train_data(rank: int, world_size: int) -> Any:
            yield from ({"x": torch.arange(start, start + 3)} for start in (0, 3, 6))

    text = ModelText(
        **{name: getattr(TEXT, name) for name in TEXT.__slots__} | {"trains_on_file": True}
    )
    names: dict[str, Any] = {"torch": torch, "MODEL": Model, "GLOBAL_BATCH": 4}
    exec(model_text(load_plan(tiny_plan("data")), text), names)
    stream = names["batches"](1)
    assert [next(stream)["x"].tolist() for _ in range(2)] == [[4, 5, 6, 7], [8, 0, 1, 2]]


def test_a_rank_takes_its_own_share(tiny_plan: Callable[..., Path]) -> None:
    def share(**knobs: Any) -> str:
        text = loop_text(load_plan(tiny_plan("share", **knobs)), ties=False)
        return text.partition("data_rank = ")[2].partition("\n")[0]

    assert share(tp=2) == "0"
    assert share(dp_shard=2) == 'mesh.get_local_rank("dp_shard")'
    assert share(dp_shard=2, dp_replicate=2) == (
        'mesh.get_local_rank("dp_replicate") * 2 + mesh.get_local_rank("dp_shard")'
    )

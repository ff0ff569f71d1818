from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from claw_plan.executor import reduced_model
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.reduced_model import blocks_to_keep, reduced
from claw_plan.planner.plan_stages import stage_spans


def test_fewer_blocks_are_kept_where_memory_is_short(
    deep_plan: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _ = open_plan(deep_plan("memory", pp=2))
    # One process: 5 copies; two ranks build a whole one each and then train one together.
    needed = 1000 * 8 * (5 + 2 + 5)
    for free_bytes, kept in ((needed, None), (needed - 1, 4), (0, None)):
        monkeypatch.setattr(reduced_model, "host_free_bytes", lambda free=free_bytes: free)
        assert blocks_to_keep(plan, 1000) == kept


def test_what_is_left_is_the_model_with_fewer_blocks(deep_plan: Callable[..., Path]) -> None:
    plan, loaded = open_plan(deep_plan("left", pp=2))
    smaller, shortened = reduced(plan, loaded, 4)
    assert stage_spans(smaller) == [(0, 2), (2, 4)]
    torch.manual_seed(0)
    model = shortened.build()
    assert [name for name, _ in model.transformer.h.named_children()] == ["0", "1", "2", "3"]  # type: ignore[union-attr]
    assert model.transformer.wte.weight is model.lm_head.weight  # type: ignore[union-attr]
    whole = dict(loaded.build().named_parameters())
    for name, parameter in model.named_parameters():
        assert parameter.shape == whole[name].shape and parameter.isfinite().all()
    assert loaded.loss(model(**loaded.example_batch(2)), {}).isfinite()


def test_blocks_that_are_no_list_are_refused(plain_plan: Callable[..., Path]) -> None:
    plan, loaded = open_plan(plain_plan("no-list"))
    strange = plan.model_copy(update={"blocks": ["first", "second"]})
    with pytest.raises(ExecutionError, match="no list that could be shortened"):
        reduced(strange, loaded, 1)

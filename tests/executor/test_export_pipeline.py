from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.export_model import observe
from claw_plan.executor.export_pipeline import has_tied, pipeline_text
from claw_plan.executor.opened_plan import open_plan

V = {"schedule": "ZBVZeroBubble", "stages_per_rank": 2}


def _text(path: Path) -> str:
    plan, loaded = open_plan(path)
    module, batch, _ = observe(plan, loaded)
    return pipeline_text(plan, loaded, module, batch)


def _constant(text: str, name: str) -> object:
    start = text.index(f"\n{name} = ")
    names: dict[str, object] = {}
    exec(text[start : text.index("\n# ", start)], names)
    return names[name]


def test_what_each_stage_holds(plain_plan: Callable[..., Path]) -> None:
    text = _text(plain_plan("stages", pp=2, cuts=[3], microbatch_size=2))
    assert _constant(text, "SPANS") == [(0, 3), (3, 8)]
    assert "OUTSIDE" in text
    assert '"tokens": ([0], [2, 16, 32])' in text
    assert '"head": ([1], [2, 16, 61])' in text
    assert "return [rank]" in text and not has_tied(text)


def test_stages_go_round_or_there_and_back(plain_plan: Callable[..., Path]) -> None:
    loop = {"schedule": "Interleaved1F1B", "stages_per_rank": 2}
    assert "list(range(rank, 4, 2))" in _text(plain_plan("loop", pp=2, **loop))
    assert "[rank, 3 - rank]" in _text(plain_plan("v", pp=2, **V))


def test_ties_across_stages(tiny_plan: Callable[..., Path]) -> None:
    text = _text(tiny_plan("tie", pp=2))
    assert has_tied(text)
    assert '{0: "transformer.wte.weight", 1: "lm_head.weight"}' in text
    with pytest.raises(ExecutionError, match="tied between two stages of one rank"):
        _text(tiny_plan("tie-v", pp=2, **V))


def test_a_model_that_relays_more_is_refused(
    plain_plan: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, loaded = open_plan(plain_plan("relay", pp=2))
    module, batch, _ = observe(plan, loaded)
    block = module.get_submodule("blocks.3")
    forward = type(block).forward
    monkeypatch.setattr(block, "forward", lambda x: (forward(block, x),))
    later = module.get_submodule("blocks.4")
    monkeypatch.setattr(later, "forward", lambda x: forward(later, x[0]))
    with pytest.raises(ExecutionError, match=r"block blocks\.3 returns a tuple"):
        pipeline_text(plan, loaded, module, batch)

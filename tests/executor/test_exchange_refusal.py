"""Each plan whose codec or algorithm has nothing to act on is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from claw_plan.executor.communication.selector_options import SelectorOptions
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.exchange_refusal import refuse_exchange
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.replica_exchange import ExchangeOptions

REFUSED = {
    "clip": ({"codec": "one_bit", "dp_replicate": 2, "clip_norm": 1.0}, "no rank has the mean"),
    "offload": ({"codec": "one_bit", "dp_replicate": 2, "offload": "optimizer"}, "on the host"),
    "shards": ({"codec": "one_bit", "dp_shard": 2}, "of shards itself; use dp_replicate in place"),
    "lower": ({"codec": "one_bit", "dp_replicate": 2, "precision": "bfloat16"}, "in precision bf"),
    "stages": ({"codec": "one_bit", "dp_replicate": 2, "pp": 2}, "where whole replicas meet"),
    "divided": (
        {"codec": "one_bit", "dp_replicate": 2, "tp": 2, "collective": "ring"},
        "where replicas alone meet",
    ),
    "matrices": ({"codec": "low_rank", "dp_shard": 2}, "fully_shard reduces gradients of shards"),
    "factors": ({"codec": "low_rank", "dp_replicate": 2, "tp": 2}, "replicas alone meet"),
    "moves": ({"codec": "zero_one", "dp_replicate": 2, "tp": 2}, "not proven with tensor"),
    "corrected": ({"codec": "top_k:0.1,0.9", "dp_replicate": 2}, "momentum of plain SGD"),
    "nobody": ({"codec": "int8"}, "where gradients are averaged"),
    "scaled": ({"codec": "int8", "dp_shard": 2, "precision": "float16"}, "scale that moves"),
    "host": ({"codec": "int8", "dp_replicate": 2, "pp": 2, "offload": "optimizer"}, "not proven"),
    "alone": ({"collective": "ring"}, "where replicas alone meet"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_codec_cannot_act_on_is_refused(tiny_plan: Callable[..., Path], name: str) -> None:
    knobs, why = REFUSED[name]
    knobs = dict(knobs)
    asked = {key: knobs.pop(key) for key in ("codec", "collective") if key in knobs}
    plan, loaded = open_plan(tiny_plan(f"refused-{name}", **knobs))
    plan = plan.model_copy(update={"candidate": plan.candidate | asked})
    with pytest.raises(ExecutionError, match=why):
        refuse_exchange(plan, loaded)


SELECTED = {
    "nodes": ({"codec": "int8", "collective": "hierarchical"}, "belongs to no other algorithm"),
    "factors": ({"codec": "low_rank"}, "means of equal buckets"),
}


@pytest.mark.parametrize("name", SELECTED)
def test_a_selector_leaves_what_is_encoded_as_it_is(
    tiny_plan: Callable[..., Path], name: str
) -> None:
    """Between algorithms of which codes and errors are the same it may choose."""
    asked, why = SELECTED[name]
    plan, loaded = open_plan(tiny_plan(f"selected-{name}", dp_replicate=4))
    options = ExchangeOptions(selector=SelectorOptions())
    refuse_exchange(
        plan.model_copy(update={"candidate": plan.candidate | {"codec": "int8"}}), loaded, options
    )
    plan = plan.model_copy(update={"candidate": plan.candidate | asked})
    with pytest.raises(ExecutionError, match=why):
        refuse_exchange(plan, loaded, options)

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from claw_plan.executor.export_wrapping import averages, is_sharded, uses_ddp, wrapping_text
from claw_plan.planner.plan import Plan, load_plan

STYLES = {"q": "colwise", "out": "rowwise"}


def _plan(tiny_plan: Callable[..., Path], **knobs: object) -> Plan:
    return load_plan(tiny_plan("-".join(map(str, knobs.values())) or "one", **knobs))


def test_replicas_meet_in_ddp_where_it_can_see_them(tiny_plan: Callable[..., Path]) -> None:
    replicas = _plan(tiny_plan, dp_replicate=2)
    assert uses_ddp(replicas) and not averages(replicas)
    for knobs in ({"pp": 2, "dp_replicate": 2}, {"tp": 2, "dp_replicate": 2}):
        plan = _plan(tiny_plan, **knobs)
        assert averages(plan) and not uses_ddp(plan)
    hybrid = _plan(tiny_plan, dp_replicate=2, dp_shard=2)
    assert is_sharded(hybrid) and not averages(hybrid) and not uses_ddp(hybrid)


def test_each_zero_says_what_it_frees(tiny_plan: Callable[..., Path]) -> None:
    for zero, reshard in ((1, "False"), (2, "False"), (3, "True")):
        text = wrapping_text(_plan(tiny_plan, dp_shard=2, zero=zero), {})
        assert f"fully_shard(block, mesh=data, reshard_after_forward={reshard})" in text
        assert f"(ZeRO-{zero})" in text


def test_split_backwards_never_meet_freed_parameters(tiny_plan: Callable[..., Path]) -> None:
    knobs = {"pp": 2, "dp_shard": 2, "schedule": "ZBVZeroBubble", "stages_per_rank": 2}
    text = wrapping_text(_plan(tiny_plan, **knobs), {})
    assert "reshard_after_forward=True" not in text and "split backwards" in text


def test_one_device_in_lower_precision_is_sharded_over_itself(
    tiny_plan: Callable[..., Path],
) -> None:
    text = wrapping_text(_plan(tiny_plan, precision="bfloat16"), {})
    assert "torch.bfloat16, torch.float32" in text and "mp_policy=policy" in text


def test_divided_weights_come_before_recompute(tiny_plan: Callable[..., Path]) -> None:
    text = wrapping_text(_plan(tiny_plan, tp=2, recompute="full"), STYLES)
    assert text.index('"q": ColwiseParallel()') < text.index("partial(checkpoint")
    assert "holds them whole" in text.replace("\n    # ", " ")


def test_finer_knobs_are_torch_s_own(tiny_plan: Callable[..., Path]) -> None:
    near = wrapping_text(_plan(tiny_plan, dp_shard=4, reshard_ranks=2), {})
    assert "fully_shard(block, mesh=data, reshard_after_forward=2)" in near
    assert "2 neighbours keep" in near
    together = wrapping_text(_plan(tiny_plan, dp_shard=2, zero=2, blocks_per_group=3), {})
    assert "for first in range(0, len(blocks), 3):" in together
    assert "fully_shard(blocks[first : first + 3], mesh=data, reshard" in together
    some = wrapping_text(_plan(tiny_plan, recompute="full", recompute_blocks=2), {})
    assert "for block in blocks[:2]:" in some

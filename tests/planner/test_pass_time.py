"""Soft corners, parts of passes and what is recomputed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from claw_plan.planner.graph import Amount, Exchange, Op, UnitCost
from claw_plan.planner.pass_time import (
    MOE_SHARE,
    PassTimer,
    exchange_scale,
    items_of,
    kernel_part,
    kernel_scale,
    merge,
    stretch_of,
)
from claw_plan.profiles.cost import CollectiveCost, scaled
from claw_plan.profiles.trainer import NEUTRAL, Trainer
from claw_plan.profiles.work import OpWork

COSTS = st.builds(
    CollectiveCost,
    latency_ns=st.integers(0, 10**6),
    bytes=st.integers(0, 10**9),
    rate_cap_bytes_per_s=st.floats(1e6, 1e12),
    link=st.just("intra"),
    source=st.just("analytic"),
)
KERNELS = st.tuples(
    st.integers(0, 10**7), st.sampled_from(["memory", "gemm:bfloat16"]), st.just("fitted")
)


def latency(ns: int) -> CollectiveCost:
    return CollectiveCost(
        latency_ns=ns, bytes=0, rate_cap_bytes_per_s=1.0, link="intra", source="measured"
    )


def timed(host_ns: float, *kernels_ns: float):
    timer = PassTimer(host_ns=host_ns)
    for ns in kernels_ns:
        timer.kernel(ns, "memory", "fitted")
    return timer.time()


@pytest.mark.parametrize(
    ("host_ns", "total_ns"),
    [
        (0, 6_000_000),  # the device alone
        (1000, 6_000_000),  # far below: the device alone
        (2_000_000, round(6_000_000 * 2 ** (1 / 6))),  # both alike: 12 % more
        (200_000_000, 600_000_000),  # far above: the host alone
    ],
)
def test_a_pass_lasts_as_long_as_the_slower_of_device_and_host(host_ns, total_ns):
    time = timed(host_ns, 1_000_000, 2_000_000, 3_000_000)
    assert time.total_ns == pytest.approx(total_ns, abs=2)


A_MICROSECOND = CollectiveCost(
    latency_ns=0, bytes=1, rate_cap_bytes_per_s=1e6, link="intra", source="analytic"
)


@given(st.lists(KERNELS, min_size=1, max_size=8), COSTS, st.floats(0, 1e6))
@example(kernels=[(0, "memory", "fitted")], exchange=A_MICROSECOND, host_ns=1.0)
def test_parts_add_up_to_the_computation(kernels, exchange, host_ns):
    timer = PassTimer(host_ns=host_ns)
    for kernel in kernels:
        timer.kernel(*kernel)
    timer.exchange(exchange, "tp")
    timer.kernel(*kernels[0])
    time = timer.time()
    device = sum(ns for ns, _, _ in kernels) + kernels[0][0]
    assert time.compute_ns == pytest.approx(sum(time.parts_ns.values()), abs=2, rel=1e-9)
    assert device - 2 <= time.compute_ns
    host = host_ns * (len(kernels) + 2)
    whole = device + exchange.alone_ns
    assert max(whole, host * (whole > 0)) - 2 <= time.total_ns
    assert time.total_ns <= (max(whole, host) * 2 ** (1 / 6)) + 2
    assert all(ns >= 0 for ns in time.parts_ns.values())
    assert time.axes == ("tp",) and time.exchange_ns == exchange.alone_ns


@given(st.floats(1.0, 1e5), st.floats(1.0, 1e5))
def test_the_hosts_part_says_how_the_pass_grows_with_it(host_ns, kernel_ns):
    """A percent more host time makes the pass longer by a percent of the host's part."""
    scale = 1e6  # so that rounding to nanoseconds is no matter
    now = timed(host_ns * scale, kernel_ns * scale)
    later = timed(host_ns * scale * 1.001, kernel_ns * scale)
    expected = 0.001 * now.parts_ns["host"]
    assert later.total_ns - now.total_ns == pytest.approx(expected, rel=0.01, abs=10)


@given(st.lists(COSTS, min_size=1, max_size=6))
def test_collectives_together_last_as_long_alone_as_one_after_the_other(costs):
    whole = merge(costs)
    assert whole.bytes == sum(cost.bytes for cost in costs)
    apart = sum(cost.alone_ns for cost in costs)
    assert apart - len(costs) <= whole.alone_ns <= apart + 1  # each alone is rounded up


def test_a_stretch_is_the_sum_of_its_passes():
    timer = PassTimer(host_ns=0.0)
    timer.kernel(100, "attention", "measured")
    timer.exchange(latency(7), "tp")
    timer.exchange(latency(20), "ep")
    one, other = timer.time(), timed(0.0, 40)
    stretch = stretch_of([one, other, other])
    assert (stretch.compute_ns, stretch.source) == (180, "measured")
    assert stretch.parts_ns == {"attention": 100, "memory": 80}
    assert stretch.exchange is not None and stretch.exchange.alone_ns == 27
    assert stretch.exchange_parts_ns == {"tp": 7, "ep": 20}
    assert stretch_of([other]).exchange is None and stretch_of([]).compute_ns == 0


def op(target: str, kind: str = "memory") -> Op:
    return Op(
        kind=kind, target=target, module="", dims=(), dtype="bfloat16", flops=Amount(1),
        read_bytes=Amount(), written_bytes=Amount(),
    )  # fmt: skip


EXCHANGE = Exchange(op="all_reduce", bytes=Amount(1), module="")
FORWARD = (
    op("aten.mm", "gemm"), op("claw_plan.attention", "attention"), op("aten.bmm", "gemm"),
    op("aten._softmax"), op("aten.mm", "gemm"), EXCHANGE, op("aten.add"),
)  # fmt: skip
COST = UnitCost(
    forward=FORWARD, backward=(op("aten.gelu_backward"),), saved_bytes=Amount(),
    input_bytes=Amount(), output_bytes=Amount(), forward_peak_bytes=Amount(),
    backward_peak_bytes=Amount(), num_recomputed=5,
)  # fmt: skip


def test_what_a_checkpoint_runs_again():
    early = replace(NEUTRAL, recompute_stops_early=True)
    late = replace(NEUTRAL, recompute_stops_early=False)
    assert [item for item, _ in items_of(COST, "full", early)] == list(FORWARD[:5])
    assert [item for item, _ in items_of(COST, "full", late)] == list(FORWARD)
    unknown = replace(COST, num_recomputed=None)
    assert len(list(items_of(unknown, "full", early))) == len(FORWARD)
    assert [item for item, _ in items_of(COST, "forward", early)] == list(FORWARD)
    assert [item for item, _ in items_of(COST, "backward", early)] == list(COST.backward)


def test_selective_recomputation_runs_the_attentions_core_again():
    found = [item for item, share in items_of(COST, "attention", NEUTRAL) if share == 1.0]
    assert found == [FORWARD[1], FORWARD[2], FORWARD[3]]


def test_other_policies_run_a_share_again_and_exchange_nothing():
    half = list(items_of(COST, "half", replace(NEUTRAL, half_recompute=0.4)))
    assert [share for _, share in half] == [0.4] * 6 and EXCHANGE not in dict(half)
    assert {share for _, share in items_of(COST, "moe", NEUTRAL)} == {MOE_SHARE}


def test_a_trainers_factors_act_on_their_kernels_and_axes():
    def work(kind: str, target: str = "") -> OpWork:
        return OpWork(kind=kind, dims=(), dtype="float8", flops=0, bytes=1, target=target)

    trainer = Trainer(
        name="t", memory_scale=2.0, attention_scale=3.0, grouped_scale=5.0, tp_scale=7.0,
        cp_scale=0.5, ep_scale=0.25,
    )  # fmt: skip
    parts = [
        kernel_part(work("memory")),
        kernel_part(work("attention")),
        kernel_part(work("gemm", "aten.mm")),
        kernel_part(work("gemm", "claw_plan.grouped_mm")),
    ]
    assert parts == ["memory", "attention", "gemm:float8", "grouped:float8"]
    assert [kernel_scale(trainer, part) for part in parts] == [2.0, 3.0, 1.0, 5.0]
    assert [exchange_scale(trainer, axis) for axis in ("tp", "cp", "ep")] == [7.0, 0.5, 0.25]


@given(COSTS, st.floats(0.01, 8.0))
def test_scaled_collectives_last_so_much_longer_and_never_ask_for_more_than_their_link(
    cost: CollectiveCost, factor: float
) -> None:
    """What an exchange is waited for may shrink; the link's capacity does not grow by that."""
    found = scaled(cost, factor)
    rounding = 2 + factor + 1e9 / cost.rate_cap_bytes_per_s
    assert found.alone_ns == pytest.approx(factor * cost.alone_ns, rel=1e-6, abs=rounding)
    assert found.rate_cap_bytes_per_s <= cost.rate_cap_bytes_per_s
    assert found.bytes <= cost.bytes

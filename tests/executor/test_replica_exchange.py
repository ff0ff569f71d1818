"""Plans with a codec or an algorithm train on four real ranks, skip and resume to the last bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.replica_exchange import (
    sends_momentum,
    warmup_note,
    without_codec,
)
from claw_plan.kernels.low_rank import first_factor
from claw_plan.planner.supported import ALGORITHMS, CODECS
from claw_plan.planner.traffic import Kind, Moved, differences
from claw_plan.profiles.codecs import factors_of

RANKS = Path(__file__).with_name("rank_exchange.py")

OF_GRADIENTS = {"fp16": 1e-4, "fp8": 0.02, "int8": 2e-3, "int4": 0.05}
"""How far losses may be from those of whole gradients after eight steps."""

OF_MOMENTUM = ("one_bit", "top_k:0.05", "threshold:0.001")
LOW_RANK, ZERO_ONE = "low_rank:2", "zero_one:2"
CORRECTED = "top_k:0.01,0.9"
OPTIMIZERS = {"sgd": "sgd", "lamb": "lamb", "lamb_bit": "lamb"}
"""Of plans that are not trained with AdamW."""

WARMUP = 3

BUCKETS = (2, 12, 12, 12, 14)
"""The last norm, three blocks, and the first with both tables."""

Found = list[dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tiny_plan: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Of each rank, what it found of each plan."""
    folder = tmp_path_factory.mktemp("exchange")
    options: dict[str, dict[str, Any]] = {"whole": {}}
    options |= {name.partition(":")[0]: {"codec": name} for name in (*OF_MOMENTUM, *OF_GRADIENTS)}
    options |= {"low_rank": {"codec": LOW_RANK, "bucket_bytes": 9000}}
    options |= {"sgd": {"codec": CORRECTED}}
    options |= {"lamb": {}, "lamb_bit": {"codec": "one_bit"}}
    options |= {"zero_one": {"codec": ZERO_ONE}}
    options |= {"low_rank_ring": {"codec": LOW_RANK, "collective": "ring"}}
    options |= {name: {"collective": name} for name in ALGORITHMS}
    options |= {"small_buckets": {"codec": "int8", "bucket_bytes": 9000}}
    options |= {"in_turn": {"buckets": BUCKETS}}
    options |= {"ordered": {"buckets": BUCKETS, "bucket_order": (0, 1, 4, 2, 3)}}
    options |= {"one_bit_other": {"codec": "one_bit", "bucket_bytes": 9000}}
    plans = [tiny_plan(name, dp_replicate=4, **knobs) for name, knobs in options.items()]
    for plan in plans:
        optimizer = OPTIMIZERS.get(plan.stem, "adamw")
        plan.write_text(plan.read_text().replace("optimizer: adamw", f"optimizer: {optimizer}"))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANKS), str(rank), "4", str(folder), *map(str, plans)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(4)
    ]
    assert [rank.wait(timeout=900) for rank in ranks] == [0] * 4
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(4)]


@pytest.mark.slow
@pytest.mark.parametrize("codec", [*OF_GRADIENTS])
def test_gradients_through_a_codec_train_like_whole_ones(found: Found, codec: str) -> None:
    whole = found[0]["whole"]["losses"]
    assert found[0][codec]["losses"] == pytest.approx(whole, abs=OF_GRADIENTS[codec])
    assert found[0][codec]["losses"] != whole


@pytest.mark.slow
@pytest.mark.parametrize("codec", [name.partition(":")[0] for name in OF_MOMENTUM])
def test_momentum_through_a_codec_trains_after_a_warm_up(found: Found, codec: str) -> None:
    losses, whole = found[0][codec]["losses"], found[0]["whole"]["losses"]
    # The loss of a step is that of the parameters before it.
    assert losses[: WARMUP + 1] == pytest.approx(whole[: WARMUP + 1], abs=1e-6)
    assert losses[-1] < losses[WARMUP]


@pytest.mark.slow
def test_low_rank_gradients_are_those_of_power_sgd_after_a_warm_up(found: Found) -> None:
    losses, whole = found[0]["low_rank"]["losses"], found[0]["whole"]["losses"]
    assert losses[: WARMUP + 1] == pytest.approx(whole[: WARMUP + 1], abs=1e-6)
    assert losses[-1] < losses[WARMUP]
    assert found[0]["low_rank_ring"]["losses"] == pytest.approx(losses, abs=1e-5)
    ranks = [rank["low_rank"]["low_rank"] for rank in found]
    factored = [name for name in ranks[0]["state"] if name.startswith("factor")]
    # The tied table, the positions, and four products in each of four blocks.
    assert len(factored) == 2 + 4 * 4
    for number, mean in enumerate(ranks[0]["means"]):
        own = np.stack([rank["own"][number].double().numpy() for rank in ranks])
        expected = own.mean(0)
        if f"factor.{number}" in factored:
            start = first_factor(expected.shape, 2, number, torch.empty(0)).double().numpy()
            left, _ = np.linalg.qr((own @ start).mean(0))
            expected = left @ (own.transpose(0, 2, 1) @ left).mean(0).T
            error = ranks[1]["state"][f"error.{number}"].numpy()
            np.testing.assert_allclose(error, own[1] - expected, atol=1e-5)
        np.testing.assert_allclose(mean.numpy(), expected, atol=1e-5)


@pytest.mark.slow
def test_a_run_records_when_gradients_are_ready_the_same_on_all_ranks(found: Found) -> None:
    for way in ("whole", "in_turn", "ordered"):
        times = found[0][way]["ready"]
        assert all(rank[way]["ready"] == times for rank in found)
        # Blocks one after the other, the tied table with the first layer of all.
        blocks = [
            max(ns for name, ns in times.items() if name.startswith(f"transformer.h.{block}."))
            for block in (3, 2, 1, 0)
        ]
        assert 0 < blocks[0] < blocks[1] < blocks[2] < blocks[3]
        assert times["transformer.wte.weight"] >= blocks[2]
    assert not found[0]["int8"]["ready"] and not found[0]["ring"]["ready"]


@pytest.mark.slow
def test_low_rank_moves_and_keeps_what_planning_says(
    found: Found,
    tiny_plan: Callable[..., Path],
    predicted_traffic: Callable[[Path], list[dict[Kind, Moved]]],
) -> None:
    plan = tiny_plan("low_rank", dp_replicate=4, codec=LOW_RANK, bucket_bytes=9000)
    ranks = [rank["low_rank"]["low_rank"] for rank in found]
    counted = [{Kind(*row[:3]): Moved(*row[3:]) for row in rank["moved"]} for rank in ranks]
    assert not differences(predicted_traffic(plan), counted)
    factors = factors_of([tuple(mean.shape) for mean in ranks[0]["means"]], 2)
    kept = sum(tensor.nbytes for tensor in ranks[0]["state"].values())
    assert kept == factors.state_bytes()


@pytest.mark.slow
def test_replicas_of_zero_one_adam_meet_as_planned(
    found: Found,
    tiny_plan: Callable[..., Path],
    predicted_traffic: Callable[[Path], list[dict[Kind, Moved]]],
) -> None:
    """Of three steps of warm-up the last sends a bit; then they meet in steps 4, 6 and 8."""
    losses, whole = found[0]["zero_one"]["losses"], found[0]["whole"]["losses"]
    assert losses[:3] == pytest.approx(whole[:3], abs=1e-6)
    assert losses == pytest.approx(whole, abs=0.05)
    ranks = [rank["zero_one"]["apart"] for rank in found]
    plan = tiny_plan("zero_one", dp_replicate=4, codec=ZERO_ONE)
    planned = predicted_traffic(plan)
    for step in range(8):
        flats = [rank["flats"][step] for rank in ranks]
        meets, is_warm = step + 1 not in (5, 7), step >= WARMUP
        phase = ("met" if meets else "apart") if is_warm else "warm-up"
        assert [rank["equal"][step] for rank in ranks] == [(meets, phase)] * 4
        assert all(torch.equal(flat, flats[0]) for flat in flats) == meets
        counted = [
            {Kind(*row[:3]): Moved(*row[3:]) for row in rank["moved"][step]} for rank in ranks
        ]
        # A warm-up's bit is as long as a meeting's.
        assert bool(differences(planned, counted)) != (meets and step >= 2)
        kinds = {kind.op for kind in counted[0]}
        assert kinds == ({"all_reduce"} if not meets or step < 2 else {*kinds, "all_to_all"})
    assert torch.equal(ranks[1]["again"], ranks[1]["flats"][-1])


@pytest.mark.slow
def test_momentum_before_top_k_is_deep_gradient_compressions(found: Found) -> None:
    """Its recursion in one process: u = .9 u + g, v += u; what of v is large goes, of both."""
    ranks = [rank["sgd"]["steps"] for rank in found]
    numel = ranks[0][0]["own"].numel()
    edges = [min(numel, 8 * (-(-numel // 8) * part // 4)) for part in range(5)]
    velocity, unsent = np.zeros((4, numel)), np.zeros((4, numel))
    left = np.zeros(numel)
    for step in range(len(ranks[0])):
        velocity = 0.9 * velocity + np.stack([rank[step]["own"].numpy() for rank in ranks])
        unsent += velocity
        mean = left.copy()
        for start, stop in pairwise(edges):
            kept = -(-(stop - start) // 100)
            for rank in range(4):
                large = start + np.argsort(-abs(unsent[rank, start:stop]))[:kept]
                mean[large] += unsent[rank, large] / 4
                unsent[rank, large] = velocity[rank, large] = 0
            large = start + np.argsort(-abs(mean[start:stop]))[:kept]
            left[start:stop] = mean[start:stop]
            left[large] = 0
        expected = 0.1 * (mean - left)
        for rank in ranks:
            np.testing.assert_allclose(rank[step]["moved"].numpy(), expected, atol=1e-6)
    assert np.count_nonzero(expected) == sum(-(-(b - a) // 100) for a, b in pairwise(edges))


@pytest.mark.slow
def test_lamb_sends_its_momentum_as_bits_after_a_warm_up(found: Found) -> None:
    bits, whole = found[0]["lamb_bit"]["losses"], found[0]["lamb"]["losses"]
    assert bits[: WARMUP + 1] == pytest.approx(whole[: WARMUP + 1], abs=1e-6)
    assert bits == pytest.approx(whole, abs=0.05) and bits != whole
    assert whole[2] != found[0]["whole"]["losses"][2]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [*ALGORITHMS])
def test_another_algorithm_trains_like_the_librarys(found: Found, algorithm: str) -> None:
    whole = found[0]["whole"]["losses"]
    assert found[0][algorithm]["losses"] == pytest.approx(whole, abs=1e-5)


@pytest.mark.slow
def test_steps_inside_the_next_forward_change_no_bit(found: Found) -> None:
    for rank in found:
        assert rank["ordered"]["losses"] == rank["in_turn"]["losses"]
        assert torch.equal(rank["ordered"]["flat"], rank["in_turn"]["flat"])


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_same_bits_on_every_rank(found: Found) -> None:
    for rank in found:
        for name, own in rank.items():
            if "flat" in own:
                assert torch.equal(own["flat"], found[0][name]["flat"]), name
            if "resumed" in own:
                assert torch.equal(own["resumed"], own["flat"]), name
                assert own["note"] == ""
        assert len([own for own in rank.values() if "resumed" in own]) == 15


@pytest.mark.slow
def test_errors_of_another_plan_are_left_out_and_told(found: Found) -> None:
    assert found[0]["other"]["note"] == (
        "what codec=one_bit had not sent when 5 steps were done is left out: it belongs to the "
        "ranks of another plan"
    )


@pytest.mark.slow
@pytest.mark.parametrize("codec", [*OF_GRADIENTS, "small_buckets", "low_rank"])
def test_all_ranks_leave_out_a_step_in_which_one_overflowed(found: Found, codec: str) -> None:
    for rank in found:
        step = rank[codec]["skipped"]
        assert torch.equal(step["kept"], step["before"])
        assert torch.equal(step["after"], found[0][codec]["skipped"]["after"])
        assert step["after"].isfinite().all()
        assert not torch.equal(step["after"], step["kept"])


def test_a_run_says_when_momentum_begins_to_travel(tiny_plan: Callable[..., Path]) -> None:
    plan, loaded = open_plan(tiny_plan("noted", codec="one_bit", dp_replicate=2))
    said = (
        "codec=one_bit: the first 300 steps send whole gradients (training.codec_warmup_steps of "
        "the plan)"
    )
    assert warmup_note(plan, loaded, 301) == said
    assert warmup_note(plan, loaded, 300) == f"{said}, and this run ends after 300"
    plan, loaded = open_plan(tiny_plan("noted-too", codec="low_rank:2", dp_replicate=2))
    assert warmup_note(plan, loaded, 301) == said.replace("one_bit", "low_rank:2")
    for codec in ("none", "int8"):
        plan, loaded = open_plan(tiny_plan(f"not-noted-{codec}", codec=codec, dp_replicate=2))
        assert warmup_note(plan, loaded, 5) == ""


def test_what_is_compared_with_one_process_has_no_codec(tiny_plan: Callable[..., Path]) -> None:
    plan, _ = open_plan(tiny_plan("coded", codec="int8", dp_replicate=2, bucket_bytes=9000))
    left = without_codec(plan).knobs()
    assert (left.codec, left.bucket_bytes, left.dp_replicate) == ("none", 9000, 2)


def test_which_codecs_carry_momentum(tiny_plan: Callable[..., Path]) -> None:
    carried = set()
    for codec in CODECS:
        text = "threshold:0.1" if codec == "threshold" else codec
        plan, loaded = open_plan(tiny_plan(f"carries-{codec}", codec=text, dp_replicate=2))
        if sends_momentum(plan, loaded):
            carried.add(codec)
        sgd = plan.training.model_copy(update={"optimizer": "sgd"})
        assert not sends_momentum(plan.model_copy(update={"training": sgd}), loaded)
    assert carried == {"one_bit", "top_k", "threshold", "zero_one"}

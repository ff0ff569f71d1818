"""Multiples of steps at, between and beyond the parameters that were measured."""

from __future__ import annotations

import pytest

from claw_plan.profiles.codec_penalty import MEASURED, step_penalty
from claw_plan.profiles.codecs import CODEC_NAMES, describe_codec


def test_what_was_measured_is_said_as_measured() -> None:
    for codec, (name, points) in MEASURED.items():
        for value, multiple in points:
            assert step_penalty(codec, {name: value}) == pytest.approx(multiple)


def test_halfway_between_logarithms_is_halfway_between_multiples() -> None:
    (low, first), (high, last) = MEASURED["top_k"][1]
    middle = step_penalty("top_k", {"density": (low * high) ** 0.5})
    assert middle == pytest.approx((first + last) / 2)


def test_beyond_what_was_measured_nothing_is_made_up() -> None:
    low, high = MEASURED["low_rank"][1][0][1], MEASURED["low_rank"][1][-1][1]
    assert (step_penalty("low_rank", {"rank": 1}), step_penalty("low_rank", {"rank": 64})) == (
        low,
        high,
    )


def test_sparser_and_thinner_never_train_faster() -> None:
    for codec, values in {"top_k": (0.001, 0.01, 0.1, 1.0), "low_rank": (2, 4, 6, 12, 24)}.items():
        multiples = [step_penalty(codec, {MEASURED[codec][0]: value}) for value in values]
        assert multiples == sorted(multiples, reverse=True)


@pytest.mark.parametrize("codec", ["fp16", "int8", "int4", "fp8", "threshold:0.1", "none"])
def test_others_cost_no_steps(codec: str) -> None:
    assert describe_codec(codec).step_penalty == 1.0


def test_each_name_is_a_codec_and_its_parameter_one_of_it() -> None:
    assert set(MEASURED) <= set(CODEC_NAMES)
    for codec, (name, _) in MEASURED.items():
        descriptor = describe_codec(codec)
        assert not name or name in descriptor.parameters
        assert descriptor.step_penalty == step_penalty(codec, descriptor.parameters)

"""What a trainer is when nothing is known of it."""

from __future__ import annotations

from dataclasses import fields

from claw_plan.profiles.trainer import CONSTANTS, NEUTRAL, SHARED, Trainer


def test_the_neutral_trainer_adds_nothing():
    factors = {key: getattr(NEUTRAL, key) for key in (*CONSTANTS, *SHARED)}
    assert {key for key, value in factors.items() if value == 1.0} == {
        "memory_scale", "attention_scale", "tp_scale", "dp_scale", "cp_scale", "ep_scale",
        "grouped_scale",
    }  # fmt: skip
    assert {key for key, value in factors.items() if value == 0.0} == {
        "overlap_loss", "host_ns", "zero_rank_ns", "step_ns",
    }  # fmt: skip


def test_constants_are_fields_of_their_own():
    names = {field.name for field in fields(Trainer)}
    assert names.issuperset(CONSTANTS) and names.issuperset(SHARED)
    assert not set(CONSTANTS) & set(SHARED)

from __future__ import annotations

from claw_plan.profiles.errors import ClawPlanError, InputError, near_matches


def test_near_matches_names_up_to_three() -> None:
    assert near_matches("nodse", ["nodes", "network", "name"]) == "did you mean 'nodes'?"
    assert near_matches("a100", ["a100-40gb", "a100-80gb", "h100"]) == (
        "did you mean 'h100' or 'a100-80gb' or 'a100-40gb'?"
    )


def test_without_a_near_one_all_are_named() -> None:
    assert near_matches("zebra", ["b", "a"]) == "known are a, b"


def test_an_input_error_is_addressed_to_the_user() -> None:
    assert issubclass(InputError, ClawPlanError)

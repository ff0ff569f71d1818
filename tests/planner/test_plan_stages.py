"""Names of blocks folded for plan.yaml and read back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.planner.plan_stages import expand_names
from claw_plan.planner.plan_writer import fold_names


@pytest.mark.parametrize(
    "names, folded",
    [
        (["h.0", "h.1", "h.2"], ["h[0:3]"]),
        (["h.3"], ["h.3"]),
        (["h.0", "h.2", "h.3"], ["h.0", "h[2:4]"]),
        (["enc.1", "enc.2", "dec.0", "dec.1"], ["enc[1:3]", "dec[0:2]"]),
        (["wte", "h.0", "h.1", "ln_f"], ["wte", "h[0:2]", "ln_f"]),
        ([], []),
    ],
)
def test_folded(names, folded):
    assert fold_names(names) == folded


@given(st.lists(st.sampled_from(["wte", "h.0", "h.1", "h.2", "a.b.1", "a.b.2"]), unique=True))
def test_expanding_undoes_folding(names):
    assert expand_names(fold_names(names)) == names

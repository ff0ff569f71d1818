"""Values of configuration files, and what a setting says of itself."""

from __future__ import annotations

import pytest

from claw_plan.planner.baselines.setting import REST, Draft, truth, whole
from claw_plan.profiles.errors import InputError


def test_whole_numbers_come_as_text_or_number():
    assert (whole("8", "f:1: tp"), whole(4, "f:1: tp"), whole("-1", "f", least=-1)) == (8, 4, REST)


@pytest.mark.parametrize("value", ["two", "1.5", "", None, 0, "-3"])
def test_what_is_no_whole_number_is_refused_with_its_place(value):
    with pytest.raises(InputError, match=r"^train\.sh:3: --tp must be"):
        whole(value, "train.sh:3: --tp")


def test_switches_are_written_in_many_ways():
    assert all(truth(value) for value in (True, "true", "True", "yes", 1))
    assert not any(truth(value) for value in (False, "false", "no", 0, None))


def test_a_setting_knows_where_its_values_stand():
    draft = Draft("torchtitan", "a.toml")
    draft.knob("tp", 2, "a.toml:4: parallelism.tensor_parallel_degree")
    draft.leave_out("a.toml:9: compile.enable", "no knob")
    setting = draft.done()
    assert setting.name == "torchtitan: a.toml"
    assert setting.place("tp").startswith("a.toml:4") and setting.place("pp") == "a.toml"
    assert setting.left_out == ("a.toml:9: compile.enable: no knob",)

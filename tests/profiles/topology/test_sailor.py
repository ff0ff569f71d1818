from __future__ import annotations

import json
from typing import Any

from claw_plan.profiles.topology.recognise import read_text
from claw_plan.profiles.topology.sailor import recognise
from claw_plan.profiles.topology.source import Source
from claw_plan.profiles.topology.structured import load

INNER = {"us-a": {"A100-40": {"4": [[0.1, 2.0, 3.0], [1.0]]}}}


def document(data: dict[str, Any]) -> Any:
    return load(Source("multizone.json", json.dumps(data)))


def test_machines_are_named_and_coefficients_are_no_rates() -> None:
    data = {"us-a": {"A100-40": {"4": INNER}}, "eu-b": {"A100-40": {"4": INNER}}}
    (reading,) = read_text(Source("multizone.json", json.dumps(data)))
    assert reading.gpu_count == 4
    assert reading.gpu_types == ("A100-40",) * 4
    assert reading.rates == ()
    assert reading.facts[0] == "zones: us-a, eu-b"
    assert "fitted coefficients" in reading.unknown[0]


def test_several_kinds_leave_count_and_type_open() -> None:
    data = {"us-a": {"A100-40": {"1": INNER, "4": INNER}, "V100-16": {"2": INNER}}}
    (reading,) = read_text(Source("multizone.json", json.dumps(data)))
    assert (reading.gpu_count, reading.gpu_types) == (None, ())
    assert "1 x A100-40, 4 x A100-40, 2 x V100-16" in reading.facts[1]


def test_other_nestings_are_not_sailors() -> None:
    assert not recognise(document({"a": {"b": {"c": 1}}}))
    assert not recognise(document({"a": {"b": {"4": {"x": 1}}}}))
    assert not recognise(document({"a": 1}))

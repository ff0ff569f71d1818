"""Options as operators write them, and the sentence that says how they are read."""

from __future__ import annotations

import pytest

from claw_plan.executor.communication.selector_options import SelectorOptions, parse_options
from claw_plan.executor.errors import ExecutionError
from claw_plan.profiles.errors import InputError


def test_the_usual_configuration() -> None:
    options = parse_options(
        {"bandwidth_threshold": "50MBps", "fallback_topology": "tree", "check_interval": "500ms"}
    )
    assert options == SelectorOptions(
        bandwidth_threshold_bytes_per_s=50e6,
        fallback_topology="tree",
        check_interval_ns=500_000_000,
    )
    said = options.explained()
    assert "500 ms" in said
    assert "0.05 GB/s" in said
    assert "tree is tried then and used only if it is the fastest" in said


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [("50MBps", 50e6), ("50Mbps", 6.25e6), ("50 MB/s", 50e6), ("1GiBps", 2**30), ("2 Gb/s", 25e7)],
)
def test_bytes_and_bits_are_told_apart(text: str, bytes_per_s: float) -> None:
    options = parse_options({"bandwidth_threshold": text})
    assert options.bandwidth_threshold_bytes_per_s == bytes_per_s


def test_without_options_only_times_count() -> None:
    assert parse_options({}) == SelectorOptions()
    assert "tried" not in SelectorOptions().explained()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"check_intervall": "1s"}, ExecutionError, "did you mean 'check_interval'"),
        ({"fallback_topology": "tre"}, ExecutionError, "did you mean 'tree'"),
        ({"check_interval": "500"}, InputError, "unit"),
        ({"bandwidth_threshold": "fast"}, InputError, "a bandwidth must be a number"),
    ],
)
def test_mistakes_are_named(options: dict[str, str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse_options(options)

"""Options as operators write them, and the sentence that says how they are read."""

from __future__ import annotations

from pathlib import Path

import pytest

from claw_plan.executor.communication.selector_options import (
    SelectorOptions,
    parse_options,
    read_options,
)
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
    assert (
        "by half the links are measured again, and when a bandwidth falls below 0.05 GB/s" in said
    )
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
        ({"fallback_topology": "TREE"}, ExecutionError, "there is no 'TREE'; known are .*, tree$"),
        ({"fallback_topology": "['ring']"}, ExecutionError, "there is no .*; did you mean 'ring'"),
        ({"check_interval": "500"}, InputError, "option check_interval: .* has the unit 'none'"),
        ({"check_interval": "0ms"}, InputError, "check_interval: .* positive and finite"),
        ({"check_interval": "-1s"}, InputError, "check_interval: .* positive and finite"),
        ({"check_interval": "None"}, InputError, "check_interval: a duration must be a number"),
        ({"check_interval": "nan s"}, InputError, "check_interval: a duration must be a number"),
        ({"bandwidth_threshold": "fast"}, InputError, "bandwidth_threshold: .* must be a number"),
        ({"bandwidth_threshold": "50"}, InputError, "has the unit 'none' in '50'; use bytes"),
        ({"bandwidth_threshold": "50MB"}, InputError, "has the unit 'MB' in '50MB'; use bytes"),
        ({"bandwidth_threshold": "50mbps"}, InputError, "has the unit 'mbps' in '50mbps'"),
        ({"bandwidth_threshold": "-5MBps"}, InputError, "positive and finite"),
    ],
)
def test_mistakes_are_named(options: dict[str, str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message) as raised:
        parse_options(options)
    assert "\n" not in str(raised.value)


USUAL = {"bandwidth_threshold": "50MBps", "fallback_topology": "tree", "check_interval": "500ms"}


@pytest.mark.parametrize(
    "text",
    [
        "bandwidth_threshold=50MBps,fallback_topology=tree,check_interval=500ms",
        "bandwidth_threshold: 50MBps, fallback_topology: tree, check_interval: 500ms",
        " check_interval = 500ms , bandwidth_threshold = 50MBps,fallback_topology = tree,",
    ],
)
def test_one_line_as_articles_and_shells_write_it(text: str) -> None:
    assert read_options(text) == USUAL


def test_a_file_as_articles_write_it(tmp_path: Path) -> None:
    file = tmp_path / "selector.yaml"
    file.write_text("".join(f"{name}: {value}\n" for name, value in USUAL.items()))
    assert read_options(str(file)) == USUAL


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nowhere.yaml", "option=value pairs.*got 'nowhere.yaml', and there is no such file"),
        ("check_interval=", "option=value pairs.*got 'check_interval='"),
        ("check_interval=1s,check_interval=2s", "gives check_interval twice; give it once"),
    ],
)
def test_text_that_is_neither_is_refused(text: str, message: str) -> None:
    with pytest.raises(ExecutionError, match=message):
        read_options(text)

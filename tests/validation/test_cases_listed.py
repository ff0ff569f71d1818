"""docs/reported_failures.md has every reported case that concerns running or checkpoints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reported_failures.md"
CORPUS = ROOT.parent / "shared" / "corpus" / "cases.yaml"

EXECUTION = {
    "batch-not-divisible", "batchnorm-ddp", "buffers", "checkpoint-reshard",
    "degree-not-divisible", "elastic-restart", "fp16-overflow", "gradient-mismatch", "hang",
    "oom-host-memory", "pipeline-skip", "pipeline-tied-embedding", "pipeline-unsupported-head",
    "plan-not-executable", "straggler", "tied-parameters", "tp-heads-not-divisible",
    "uneven-layers", "uneven-shard", "unused-parameters", "vocab-not-divisible",
}  # fmt: skip
"""Kinds of cases that are about execution or checkpoints."""


def threads(source: str) -> list[str]:
    """Of "pytorch/pytorch#43259 / #68862" the first, without the owner: pytorch#43259."""
    return re.findall(r"[\w.-]+/([\w.-]+#\d+)", source)


def test_every_case_of_the_collection_is_listed() -> None:
    if not CORPUS.is_file():
        pytest.skip("the collection of reported cases is not beside this checkout")
    page = PAGE.read_text()
    cases = [c for c in yaml.safe_load(CORPUS.read_text())["cases"] if c["kind"] in EXECUTION]
    missing = [c["id"] for c in cases if not any(t in page for t in threads(c["source"]))]
    assert len(cases) > 35
    assert missing == []


def test_the_tests_it_names_are_there() -> None:
    rows = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    for row in rows:
        for name in row[3].split(","):
            found = name.strip()
            own = [f"test_cases_{found}.py", f"{found}.py"]
            places = [ROOT / "tests" / "validation" / one for one in own] + [ROOT / found]
            assert any(path.is_file() for path in places), found

"""Broken files through the topology readers, shortly; bench/fuzz_readers.py does it for longer."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "fuzz_readers.py"
FILES = 25


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_readers", BENCH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name",
    ["nvidia_smi", "rocm_smi", "nccl_xml", "nccl_log", "bench_log", "hostfile", "slurm",
     "galvatron", "calculon", "proteus", "astra_sim", "htsim", "sailor"],
)  # fmt: skip
def test_damaged_files_are_read_or_refused(fuzz: ModuleType, name: str) -> None:
    assert fuzz.try_one(fuzz.SEEDS[name]) == ""
    for seed in range(FILES):
        text = fuzz.mutated(fuzz.SEEDS[name], random.Random(f"{name} {seed}"))
        assert fuzz.try_one(text) == "", f"{name} seed {seed}"

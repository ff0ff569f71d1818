"""A sample of bench/models.py: models of packages are planned and train like one process."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "models.py"

NAMES = ("whisper", "vit")
"""An encoder-decoder with functional dropout that reads settings of modules on other stages, and
one whose weights are drawn by rejection."""

PLAN = "pp=2"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_models", BENCH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_models_of_packages_train_like_one_process(bench: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the models are of the package transformers")
    chosen = [source for source in bench.sources() if source.name in NAMES]
    assert {source.name for source in chosen} == set(NAMES)
    planned = []
    for source in chosen:
        folder = tmp_path / source.name
        folder.mkdir()
        result, paths = bench.plan_model(source, folder, tmp_path)
        assert not result.refusal
        assert result.parameters == result.own_count > 0
        planned.append((result, {PLAN: paths[PLAN]}))
    bench.verify_all(planned)
    for result, _ in planned:
        assert result.verified[PLAN]["ok"], result

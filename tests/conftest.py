"""For all tests: what loading a model does to the import path ends with the test."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def own_import_path() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before

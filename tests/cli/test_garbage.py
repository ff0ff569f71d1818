"""The collector inside and after."""

from __future__ import annotations

import gc
import weakref

import pytest

from claw_plan.cli.garbage import OBJECTS, collect_rarely


class Knot:
    """An object that only the collector can free."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture(autouse=True)
def _as_before():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_only_the_first_threshold_changes():
    before = gc.get_threshold()
    collect_rarely()
    assert gc.isenabled() and gc.get_threshold() == (OBJECTS, *before[1:])


def test_cycles_cannot_pile_up_for_ever():
    collect_rarely()
    knot = weakref.ref(Knot())
    kept: list[list[int]] = []
    while knot() is not None:
        kept.append([])
        assert len(kept) <= OBJECTS
    assert len(kept) > 100_000

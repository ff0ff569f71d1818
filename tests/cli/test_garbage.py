"""The collector inside and after."""

from __future__ import annotations

import gc
import weakref

import pytest

from claw_plan.cli.garbage import OBJECTS, collected_rarely


class Knot:
    """An object that only the collector can free."""

    def __init__(self) -> None:
        self.own = self


def test_cycles_are_looked_for_rarely_and_as_before_afterwards():
    before = gc.get_threshold()
    with pytest.raises(ZeroDivisionError), collected_rarely():
        assert gc.isenabled() and gc.get_threshold()[0] == OBJECTS
        raise ZeroDivisionError
    assert gc.get_threshold() == before


def test_cycles_cannot_pile_up_for_ever():
    with collected_rarely():
        knot = weakref.ref(Knot())
        kept: list[list[int]] = []
        while knot() is not None:
            kept.append([])
            assert len(kept) <= OBJECTS
    assert len(kept) > 100_000

"""Python's collector of reference cycles, kept from looking at millions of live objects.

A search makes objects by the million, nearly all of which live to the end, and Python looks at
all of them again each time they have grown by a quarter. That was a quarter of the time of
planning GPT-3 175B on 1,024 devices.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

OBJECTS = 1_000_000
"""As many new ones are looked at together, so that cycles still cannot pile up for ever."""


@contextmanager
def collected_rarely() -> Iterator[None]:
    """Inside, reference cycles are looked for after every `OBJECTS` new objects only."""
    before = gc.get_threshold()
    gc.set_threshold(OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)

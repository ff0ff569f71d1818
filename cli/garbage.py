"""Python's collector of reference cycles, kept from looking at millions of live objects.

A search makes objects by the million, nearly all of which live to the end, and Python looks at
all of them again each time they have grown by a quarter. That was a quarter of the time of
planning GPT-3 175B on 1,024 devices; a last look, at what is about to end, cost another .3 s.
"""

from __future__ import annotations

import gc

OBJECTS = 4_000_000
"""As many new ones are looked at together, so that cycles still cannot pile up for ever."""


def collect_rarely() -> None:
    """From now on cycles of this process are looked for after every `OBJECTS` new objects only."""
    gc.set_threshold(OBJECTS, *gc.get_threshold()[1:])

"""Counts and shares as people read them; sizes and durations are in `profiles.units`."""

from __future__ import annotations


def percent(fraction: float, *, sign: bool = False) -> str:
    """A share for people: '41 %', below ten with one decimal, '+3.2 %' with `sign`."""
    digits = 1 if abs(fraction) < 0.0995 else 0
    return f"{fraction * 100:{'+' if sign else ''}.{digits}f} %"


def format_count(number: float) -> str:
    """A count for people: '124.5 M', '6,139', '12.3'."""
    for suffix, factor in ((" T", 1e12), (" B", 1e9), (" M", 1e6)):
        if abs(number) >= factor:
            return f"{number / factor:.{1 if number / factor >= 100 else 2}f}{suffix}"
    if abs(number) >= 100:
        return f"{number:,.0f}"
    return f"{number:.1f}" if abs(number) >= 1 else f"{number:.3f}"

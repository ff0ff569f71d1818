"""Which magnitudes of an array are large, in one pass over memory: for compiled.py.

A sample tells about where the largest begin, a little low; one pass collects what lies above,
sixty-four numbers at a time; a histogram of the few that were collected tells the exact edge.
A sample that misled costs a second pass, over all.
"""

from __future__ import annotations

import math

import numpy as np

from claw_plan.kernels.compiled_loops import MAGNITUDE, Floats, I, Ints, vectorized
from claw_plan.kernels.compiled_words import (
    MASK_WIDTH,
    at_least_mask,
    larger_magnitude,
    trailing_zeros,
)

SAMPLES = 1 << 14
"""Of the magnitudes, to guess where the largest begin."""

DEVIATIONS = 5
"""How many standard deviations of the number found in a sample the guess lies low."""

BIN_BITS = 12
"""The histogram has two to this bins."""


def largest(x: Floats, count: int) -> tuple[Ints, Floats]:
    """Indices, ascending, and values of the `count` largest magnitudes; NaN is above all.

    Of equal magnitudes at the edge those that come first.
    """
    bits = x.view(np.int32)
    guessed = _guessed(bits, count)
    places, values = guessed or (None, bits)
    edge = _edge(values, count)
    chosen, raw = _at_least(values, edge, values.size)
    surplus = chosen.size - count
    if surplus:
        last_ties = np.flatnonzero(raw & MAGNITUDE == edge)[-surplus:]
        chosen, raw = np.delete(chosen, last_ties), np.delete(raw, last_ties)
    return chosen if places is None else places[chosen], raw.view(np.float32)


def above(x: Floats, threshold: float) -> tuple[Ints, Floats]:
    """Indices, ascending, and values of the magnitudes above the threshold; NaN is."""
    bits = x.view(np.int32)
    limit = np.float32(threshold).view(np.int32) + np.int32(1)
    places, values = _at_least(bits, limit, count_at_least(bits, limit))
    return places, values.view(np.float32)


def _guessed(bits: Ints, count: int) -> tuple[Ints, Ints] | None:
    """Somewhat more than the largest; None where a sample is of no use, or misled."""
    expected = -(-count * SAMPLES // bits.size)
    wanted = expected + math.ceil(DEVIATIONS * math.sqrt(expected)) + DEVIATIONS
    if bits.size < 4 * SAMPLES or wanted > SAMPLES // 2:
        return None
    sample = bits[:: bits.size // SAMPLES] & MAGNITUDE
    limit = np.partition(sample, sample.size - wanted)[sample.size - wanted]
    room = 2 * wanted * bits.size // SAMPLES
    places, values = _at_least(bits, limit, room)
    # As many as there is room: more may have been left.
    return (places, values) if count <= places.size < room else None


def _at_least(bits: Ints, limit: np.int32, room: int) -> tuple[Ints, Ints]:
    """Indices, ascending, and bits of magnitudes at or above the limit; about the first `room`."""
    places = np.empty(room + MASK_WIDTH, np.int32)
    values = np.empty_like(places)
    found = collect(bits, limit, room, places, values)
    return places[:found], values[:found]


def _edge(bits: Ints, count: int) -> np.int32:
    """The `count`-th largest magnitude."""
    low, high = (int(one) for one in magnitude_range(bits))
    shift = max(0, (high - low).bit_length() - BIN_BITS)
    histogram = np.zeros(1 << BIN_BITS, np.int32)
    chosen, before = find_bin(bits, count, low, shift, histogram)
    if shift == 0:
        return np.int32(low + chosen)
    keys = np.empty(histogram[chosen] + 1, np.int32)
    keys = keys[: collect_bin(bits, low, shift, chosen, keys)]
    rank = keys.size - (count - before)
    return np.int32(np.partition(keys, rank)[rank])


@vectorized
def collect(bits: Ints, limit: np.int32, room: int, places: Ints, values: Ints) -> int:
    """Fills in what is at or above the limit, and how many; stops once `room` are found."""
    found = 0
    whole = bits.size // MASK_WIDTH * MASK_WIDTH
    for start in range(0, whole, MASK_WIDTH):
        mask = at_least_mask(bits, start, limit)
        if mask == 0:
            continue
        if found >= room:
            return found
        while mask != 0:
            place = start + trailing_zeros(mask)
            places[found] = place
            values[found] = bits[place]
            found += 1
            mask &= mask - np.uint64(1)
    for place in range(whole, bits.size):
        if found < room and bits[place] & MAGNITUDE >= limit:
            places[found] = place
            values[found] = bits[place]
            found += 1
    return found


@vectorized
def count_at_least(bits: Ints, limit: np.int32) -> int:
    """How many magnitudes are at or above the limit."""
    count = I(0)
    for i in range(bits.size):
        count += I(1) if bits[i] & MAGNITUDE >= limit else I(0)
    return int(count)


@vectorized
def magnitude_range(bits: Ints) -> tuple[np.int32, np.int32]:
    """The least and the largest magnitude."""
    low, high = MAGNITUDE, I(0)
    for i in range(bits.size):
        low = min(low, bits[i] & MAGNITUDE)
        high = larger_magnitude(high, bits[i])
    return low, high


@vectorized
def find_bin(bits: Ints, count: int, low: int, shift: int, histogram: Ints) -> tuple[int, int]:
    """The bin of the `count`-th largest magnitude, and how many lie in those above it."""
    for i in range(bits.size):
        histogram[((bits[i] & MAGNITUDE) - low) >> shift] += 1
    before, chosen = 0, histogram.size - 1
    while before + histogram[chosen] < count:
        before += histogram[chosen]
        chosen -= 1
    return chosen, before


@vectorized
def collect_bin(bits: Ints, low: int, shift: int, chosen: int, out: Ints) -> int:
    """Fills in the magnitudes of one bin, and how many; `out` has room for one more."""
    found = 0
    for i in range(bits.size):
        # Without a branch, which would be guessed wrong too often.
        magnitude = bits[i] & MAGNITUDE
        out[found] = magnitude
        found += 1 if (magnitude - low) >> shift == chosen else 0
    return found

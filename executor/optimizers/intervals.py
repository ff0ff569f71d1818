"""Steps at growing distances, known in advance: nothing about them needs to be saved.

The j-th distance, from 0, is 2^⌊j/κ⌋ steps, at most `longest`: 0/1 Adam's rule for both its
variances and its meetings (Lu et al., "Maximizing Communication Efficiency for Large-scale
Training via 0/1 Adam", arXiv 2202.06009, section 6; DeepSpeed's documentation prints another, its
code doubles as here).
"""

from __future__ import annotations


def is_marked(step: int, repeats: int, longest: int | None = None) -> bool:
    """Whether the step, from 0, is one of those; `repeats` is κ, and step 0 always is one."""
    start, distance, _ = _period(step, repeats, longest)
    return (step - start) % distance == 0


def count_marked(step: int, repeats: int, longest: int | None = None) -> int:
    """How many there are before the step."""
    start, distance, earlier = _period(step, repeats, longest)
    return earlier + -(-(step - start) // distance)


def _period(step: int, repeats: int, longest: int | None) -> tuple[int, int, int]:
    """(first step, distance, marked steps before it) of the run of equal distances it lies in."""
    start, distance, marked = 0, 1, 0
    while step >= start + repeats * distance and (longest is None or 2 * distance <= longest):
        start += repeats * distance
        marked += repeats
        distance *= 2
    return start, distance, marked

"""A codec and its parameters to the steps until the same loss, as a multiple of those without it.

What `bench/convergence.py` measured of a small GPT (docs/compressed_training.md has the table and
how multiples come from losses). Between parameters that were measured the multiple is linear in
the parameter's logarithm; beyond them it is that of the last one. Codecs that are not here showed
no loss that seeds do not make.

Not modelled: larger models. A rank is one of matrices whose smaller side has 64 elements, and
means less of larger ones; all other codecs are known to lose less there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType

Points = tuple[tuple[float, float], ...]

MEASURED: Mapping[str, tuple[str, Points]] = MappingProxyType(
    {
        # Loss +0.27 %.
        "one_bit": ("", ((1, 1.01),)),
        # +2.2 % and +2.1 %, 64 variances at each distance.
        "zero_one": ("longest_away", ((1, 1.11), (4, 1.10))),
        # +28.7 %, of the momentum.
        "top_k": ("density", ((0.001, 3.18), (1.0, 1.0))),
        # +4.3 %, +2.2 %, +0.1 %; the last two at 1,000 steps (bench/low_rank_variants.py).
        "low_rank": ("rank", ((4, 1.21), (8, 1.10), (16, 1.01))),
    }
)
"""By codec: the parameter that decides, and its values that were measured, with the multiples."""


def step_penalty(codec: str, parameters: Mapping[str, str | int | float]) -> float:
    """1 for codecs that train as well as whole gradients, and for those nobody has measured."""
    name, points = MEASURED.get(codec, ("", ((1, 1.0),)))
    given = parameters.get(name, 1)
    assert not isinstance(given, str), "parameters that decide are numbers"
    if given <= points[0][0]:
        return points[0][1]
    for (low, first), (high, last) in pairwise(points):
        if given <= high:
            return first + (last - first) * math.log(given / low) / math.log(high / low)
    return points[-1][1]

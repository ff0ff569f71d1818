"""A codec and its parameters to the steps until the same loss, as a multiple of those without it.

What `bench/convergence.py` measured of a small GPT (docs/compressed_training.md has the table and
how multiples come from losses). Between parameters that were measured the multiple is linear in
the parameter's logarithm; beyond them it is that of the last one. Codecs that are not here showed
no loss that seeds do not make.

Not modelled: larger models, and other optimizers than AdamW. A rank is one of matrices whose
smaller side has 64 elements, and means less of larger ones; all other codecs are known to lose
less there.
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
        # +2.22 % and +2.14 %, 64 variances at each distance.
        "zero_one": ("longest_away", ((1, 1.11), (4, 1.11))),
        # +28.7 %, of the momentum; beyond 15 % the multiple is extrapolated.
        "top_k": ("density", ((0.001, 3.45), (1.0, 1.0))),
        # +4.26 % (by torch's hook), +2.31 %, +0.79 %.
        "low_rank": ("rank", ((4, 1.23), (8, 1.12), (16, 1.04))),
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

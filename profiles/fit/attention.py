"""Measured attention kernels to `AttentionShape`s.

SimuMax times causal kernels and counts their whole square. Its shortest times do not fall with
the number of heads any more: they are its host's, and a floor is fitted beside the kernel's time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from claw_plan.profiles.attention_cost import BACKWARD_FLOPS, AttentionShape
from claw_plan.profiles.fit.least_squares import Array, fit_parameters

EXPONENTIALS = {"a100": 17.0, "h100": 35.0, "b200": 130.0}
"""e: head size 64 reaches .89 of 128's rate with FlashAttention-2, .77 with -3, .72 with cuDNN on
H100 (arXiv 2407.08608, figure 5, causal, 16k tokens: 299 of 335, 473 of 616, 388 of 539), .66 with
-4 on B200 (github Dao-AILab/flash-attention, pull request 2605: 1243 of 1882). A100 runs the
first; H100 what lies between the first three."""

FLOOR_BLEND = 4
NOISE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRow:
    """One timed causal kernel; `value_size` is v's head size."""

    dims: tuple[int, int, int, int, int, int, int]
    value_size: int
    phase: str
    seconds: float

    @property
    def flops(self) -> int:
        """Of the whole square."""
        batch, heads, _, queries, keys, size, _ = self.dims
        both = 2 * batch * heads * queries * keys * (size + self.value_size)
        return round(both * (BACKWARD_FLOPS if self.phase == "backward" else 1.0))


def attention_rows(data: Mapping[str, Any], gpu: str) -> list[AttentionRow]:
    """SimuMax's rows of one GPU. Rates above the peak count the mask's half: they are usable."""
    rows = []
    for row in data.get("simumax_efficiency", {}).get("rows", ()):
        if row["gpu"] != gpu or row["op"] not in ("sdp_fwd", "sdp_bwd"):
            continue
        names = ("batch", "head_num", "kv_head_num", "seq_len", "seq_len", "qk_head_dim")
        batch, heads, kv_heads, queries, keys, size = (int(row[name]) for name in names)
        made = AttentionRow(
            dims=(batch, heads, kv_heads, queries, keys, size, 1),
            value_size=int(row["v_head_dim"]),
            phase="forward" if row["op"] == "sdp_fwd" else "backward",
            seconds=1.0,
        )
        seconds = made.flops / (row["tflops"] * 1e12)
        rows.append(
            AttentionRow(
                dims=made.dims, value_size=made.value_size, phase=made.phase, seconds=seconds
            )
        )
    return rows


def fit_attention(
    rows: Sequence[AttentionRow], processors: int, *, generation: str, source: str
) -> tuple[AttentionShape, tuple[float, ...]]:
    """The shape, and each row's error with its number of heads and sequence left out."""
    shape = _fitted(rows, processors, generation, source)[0]
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        groups[(*row.dims, row.value_size)].append(index)
    errors = np.zeros(len(rows))
    for left in groups.values():
        kept = [row for index, row in enumerate(rows) if index not in set(left)]
        _, predict = _fitted(kept, processors, generation, source)
        for index in left:
            errors[index] = predict(rows[index]) / rows[index].seconds - 1
    spread = float(f"{np.quantile(np.abs(errors), 2 / 3):.3g}")
    fields = {name: getattr(shape, name) for name in shape.__slots__} | {"spread": spread}
    return AttentionShape(**fields), tuple(float(error) for error in errors)


def _fitted(
    rows: Sequence[AttentionRow], processors: int, generation: str, source: str
) -> tuple[AttentionShape, Any]:
    rates, tails, floors = {}, {}, {}
    for phase in ("forward", "backward"):
        some = [row for row in rows if row.phase == phase]
        rates[phase], tails[phase], floors[phase] = _phase(some, processors, generation)
    whole = (1 + BACKWARD_FLOPS) / (1 / rates["forward"] + BACKWARD_FLOPS / rates["backward"])
    shape = _shape(
        generation,
        float(f"{whole:.4g}"),
        {phase: float(f"{rate / whole:.4g}") for phase, rate in rates.items()},
        {phase: float(f"{tail:.4g}") for phase, tail in tails.items()},
        {phase: float(f"{floor:.4g}") for phase, floor in floors.items()},
        source,
    )

    def predict(row: AttentionRow) -> float:
        kernel = _seconds(shape, row, processors)
        return float(_floored(np.array([kernel]), floors[row.phase])[0])

    return shape, predict


def _phase(
    rows: Sequence[AttentionRow], processors: int, generation: str
) -> tuple[float, float, float]:
    """Rate, tail and floor of one phase."""
    logs = np.log([row.seconds for row in rows])
    top = max(row.flops / row.seconds for row in rows) / 2

    def predicted(values: Array) -> Array:
        rate, tail, floor = (float(value) for value in np.exp(values))
        one = {"forward": 1.0, "backward": 1.0}
        shape = _shape(generation, rate, one, dict.fromkeys(one, tail), one, "")
        kernels = np.array([_seconds(shape, row, processors) for row in rows])
        return np.asarray(np.log(_floored(kernels, floor)) - logs)

    prior = np.log([top, 0.5, 50e-6])
    spread = np.array([1.0, 1.0, 1.0])
    found = fit_parameters(predicted, prior, prior=prior, spread=spread, noise=NOISE)
    rate, tail, floor = (float(value) for value in np.exp(found))
    return rate, tail, floor


def _shape(
    generation: str,
    rate: float,
    shares: Mapping[str, float],
    tails: Mapping[str, float],
    floors: Mapping[str, float],
    source: str,
) -> AttentionShape:
    return AttentionShape(
        table=generation,
        flops_per_s=rate,
        forward=shares["forward"],
        backward=shares["backward"],
        forward_tail=tails["forward"],
        backward_tail=tails["backward"],
        exponentials=EXPONENTIALS[generation],
        forward_floor_s=floors["forward"],
        backward_floor_s=floors["backward"],
        source=source,
    )


def _seconds(shape: AttentionShape, row: AttentionRow, processors: int) -> float:
    return shape.seconds(
        processors, row.dims, phase=row.phase, flops_per_s=shape.flops_per_s, flops=row.flops
    )


def _floored(kernels: Array, floor: float) -> Array:
    return np.asarray((kernels**FLOOR_BLEND + floor**FLOOR_BLEND) ** (1 / FLOOR_BLEND))

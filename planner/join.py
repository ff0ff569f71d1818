"""From costs at two tensor-parallel degrees to costs at any: what is divided and what is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import SequenceMatcher

from claw_plan.planner.graph import Amount, Exchange, Op, UnitCost


class Join:
    """Amounts of the form a + b/tp through the values at the degrees `one` < `other`.

    `inexact` collects the operators whose numbers are not of that form. Few are: at some degrees
    a tensor happens to lie in memory as the next operator wants it and a copy falls away.
    """

    def __init__(self, one: int, other: int) -> None:
        self.one, self.other = one, other
        self.inexact: set[str] = set()

    def amount(self, one: Amount, other: Amount, what: str = "") -> Amount:
        """The amount with these values, lines in the batch, at the two degrees."""
        fixed, split_fixed = self._split(one.fixed, other.fixed, what)
        slope, split_slope = self._split(one.per_sample, other.per_sample, what)
        return Amount(fixed, slope, split_fixed, split_slope)

    def _split(self, one: int, other: int, what: str) -> tuple[int, int]:
        whole, rest = divmod(other * self.other - one * self.one, self.other - self.one)
        if rest and what:
            self.inexact.add(what)
        return whole, (one - whole) * self.one

    def unit(self, one: UnitCost, other: UnitCost) -> UnitCost:
        """One unit's cost; the order of operators is that of the first degree."""
        amounts = (
            "saved_bytes",
            "input_bytes",
            "output_bytes",
            "forward_peak_bytes",
            "backward_peak_bytes",
        )
        return UnitCost(
            forward=self._ops(one.forward, other.forward),
            backward=self._ops(one.backward, other.backward),
            num_recomputed=one.num_recomputed,
            **{name: self.amount(getattr(one, name), getattr(other, name)) for name in amounts},
        )

    def _ops(
        self, one: Sequence[Op | Exchange], other: Sequence[Op | Exchange]
    ) -> tuple[Op | Exchange, ...]:
        ours, theirs = ([_key(op) for op in ops] for ops in (one, other))
        same = SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks()
        result = list(one)
        matched = [False] * len(one)
        for at, with_, size in same:
            for step in range(size):
                result[at + step] = self._op(one[at + step], other[with_ + step])
                matched[at + step] = True
        self.inexact |= {_name(op) for op, met in zip(one, matched, strict=True) if not met}
        return tuple(result)

    def _op(self, one: Op | Exchange, other: Op | Exchange) -> Op | Exchange:
        if isinstance(one, Exchange) and isinstance(other, Exchange):
            return replace(one, bytes=self.amount(one.bytes, other.bytes, _name(one)))
        assert isinstance(one, Op) and isinstance(other, Op)  # their keys are equal
        name = _name(one)
        return replace(
            one,
            dims=tuple(self.amount(a, b, name) for a, b in zip(one.dims, other.dims, strict=True)),
            flops=self.amount(one.flops, other.flops, name),
            read_bytes=self.amount(one.read_bytes, other.read_bytes, name),
            written_bytes=self.amount(one.written_bytes, other.written_bytes, name),
        )


def _key(op: Op | Exchange) -> tuple[str, ...]:
    if isinstance(op, Exchange):
        return (op.op, op.module)
    return (op.kind, op.target, op.module, op.dtype)


def _name(op: Op | Exchange) -> str:
    kind = op.op if isinstance(op, Exchange) else op.target
    return f"{kind} in {op.module or 'the model'}"

"""The states of a tensor among the ranks of a tensor-parallel group, and what it costs to change.

A `State` says what a rank holds of a tensor in the forward pass and of its gradient in the
backward pass; the two are conjugate (Korthikanti et al., arXiv 2205.05198, fig. 5):

state    forward                    backward
whole    the whole                  the whole gradient
shared   the whole                  a part of a sum: each rank's work saw a part of the result
partial  a part of a sum            the whole gradient
cut      a rank's part of a dim     a rank's part of that dim

`change_of` names the collectives that bring a tensor from one to another. `ways` tells
which states an operator takes and gives, `program` chooses among them.
"""

from __future__ import annotations

from typing import NamedTuple


class State(NamedTuple):
    """`dim` and `parts` of a cut: the dimension is `parts` pieces laid one after another (q, k, v
    of a fused weight: 3), and a rank holds its chunk of every piece.
    """

    kind: str
    dim: int = -1
    parts: int = 1

    def __str__(self) -> str:
        if self.kind != "cut":
            return self.kind
        return f"cut({self.dim})" if self.parts == 1 else f"cut({self.dim}, {self.parts} pieces)"


WHOLE, SHARED, PARTIAL = State("whole"), State("shared"), State("partial")


def cut(dim: int, parts: int = 1) -> State:
    """A rank's part of a dimension."""
    return State("cut", dim, parts)


class Change(NamedTuple):
    """The collectives of a change of state in the two passes, '' for none."""

    forward: str = ""
    backward: str = ""


_CHANGES = {
    ("whole", "shared"): Change("", "all_reduce"),
    ("whole", "cut"): Change("", "all_gather"),
    ("shared", "cut"): Change(),  # a rank's part of the gradient, zero elsewhere, is one summand
    ("partial", "whole"): Change("all_reduce", ""),
    ("partial", "shared"): Change("all_reduce", "all_reduce"),
    ("partial", "cut"): Change("reduce_scatter", "all_gather"),
    ("cut", "whole"): Change("all_gather", ""),
    ("cut", "shared"): Change("all_gather", "reduce_scatter"),
}
"""What is not here does not exist: a rank's summand cannot be told from the whole again."""


def change_of(origin: State, target: State, needs_grad: bool = True) -> Change | None:
    """The collectives of the change, without a gradient forward's alone; None where none is."""
    if origin == target:
        return Change()
    if origin.kind == target.kind == "cut":
        change = Change("all_to_all", "all_to_all")
    else:
        found = _CHANGES.get((origin.kind, target.kind))
        if found is None:
            return None
        change = found
    return change if needs_grad else change._replace(backward="")


def fits(shape: tuple[int, ...], state: State, degree: int) -> bool:
    """Whether the tensor can be in the state at that degree."""
    if state.kind != "cut":
        return True
    return (
        state.dim < len(shape)
        and shape[state.dim] % (state.parts * degree) == 0
        and bool(shape[state.dim])
    )

import torch
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.planner.context_parallel_ranks import (
    ContextStandIn,
    Pieces,
    by_rank,
    from_ranks,
    own_chunks,
)


def test_of_two_mirrored_pieces_each_rank_has_an_early_and_a_late_chunk() -> None:
    whole = torch.arange(8)
    parts = by_rank(whole, 0, Pieces(2, mirrored=True), 4)
    assert parts.tolist() == [[0, 7], [1, 6], [2, 5], [3, 4]]


def test_causal_work_of_mirrored_chunks_is_equal() -> None:
    """Position t sees t + 1 keys; of one run the last rank would have seven times the first's."""
    seen = torch.arange(1, 17)
    balanced = by_rank(seen, 0, Pieces(2, mirrored=True), 4).sum(1)
    runs = by_rank(seen, 0, Pieces(1, mirrored=False), 4).sum(1)
    assert balanced.tolist() == [34, 34, 34, 34]
    assert runs.tolist() == [10, 26, 42, 58]


@given(
    degree=st.integers(1, 4),
    pairs=st.integers(1, 3),
    size=st.integers(1, 3),
    dim=st.integers(0, 2),
    mirrored=st.booleans(),
)
def test_what_is_cut_comes_together_again(
    degree: int, pairs: int, size: int, dim: int, mirrored: bool
) -> None:
    pieces = Pieces(2 * pairs if mirrored else pairs, mirrored)
    shape = [2, 3, 2]
    shape[dim] = pieces.number * degree * size
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    parts = by_rank(whole, dim, pieces, degree)
    assert torch.equal(from_ranks(parts, dim, pieces), whole)
    for rank in range(degree):
        own = own_chunks(whole, dim, pieces, ContextStandIn(degree, rank))
        assert torch.equal(own, parts[rank])
        assert torch.equal(own, own_chunks(whole, dim - 3, pieces, ContextStandIn(degree, rank)))


def test_a_stand_in_tells_full_buffers() -> None:
    told: list[tuple[str, int]] = []
    ranks = ContextStandIn(4, exchange=lambda op, size: told.append((op, size)))
    own = torch.zeros(3, 2)
    assert ranks.all_gather(own).shape == (4, 3, 2)
    assert ranks.reduce_scatter(torch.zeros(4, 3, 2)).shape == (3, 2)
    assert ranks.all_to_all(torch.zeros(4, 3)).shape == (4, 3)
    assert ranks.all_reduce(own).shape == (3, 2)
    assert told == [
        ("all_gather", 96),
        ("reduce_scatter", 96),
        ("all_to_all", 48),
        ("all_reduce", 24),
    ]

from __future__ import annotations

import pytest

from claw_plan.executor.replay_collectives import Matched
from claw_plan.executor.resimulate_transfer import Change, Transfers
from claw_plan.executor.trace_readers.rank_trace import Collective
from claw_plan.profiles.cluster_file import load_cluster
from claw_plan.profiles.cost_model import ClusterCostModel
from claw_plan.profiles.work import CollectiveWork


def matched(size: int | None, ns: int, group: int = 4) -> Matched:
    one = Collective(
        op="all_reduce", bytes=size, group_size=group, ranks=(), group="", start_ns=0, end_ns=ns,
        issue_ns=0, stream="n",
    )  # fmt: skip
    return Matched(
        op="all_reduce",
        bytes=size,
        group_size=group,
        step=0,
        by_rank={0: one},
        is_whole=False,
    )


# T(S) = 1000 ns + S/2: two sizes tell it exactly.
SEEN = [matched(2000, 2000), matched(20_000, 11_000)]


def test_a_faster_link_leaves_the_start_up() -> None:
    transfers = Transfers(SEEN, Change(link=2.0), 4)
    assert transfers.ns(SEEN[1], 11_000) == pytest.approx(1000 + 10_000 / 2, rel=1e-6)
    assert Transfers(SEEN, Change(), 4).ns(SEEN[1], 11_000) == 11_000


def test_more_ranks_lengthen_the_ring() -> None:
    transfers = Transfers(SEEN, Change(ranks=8), 4)
    # Hops 3 to 7, bytes 3/4 to 7/8.
    expected = 1000 * 7 / 3 + 10_000 * (7 / 8) / (3 / 4)
    assert transfers.ns(SEEN[1], 11_000) == pytest.approx(expected, rel=1e-6)
    # A group of two among the four ranks is no group of all: it stays.
    assert transfers.ns(matched(2000, 2000, group=2), 2000) == 2000


def test_one_size_alone_is_all_bytes() -> None:
    transfers = Transfers([matched(1 << 20, 8000)], Change(link=0.5), 4)
    assert transfers.ns(matched(1 << 20, 8000), 8000) == 16_000


def test_another_cluster_scales_by_the_models_ratio_or_replaces() -> None:
    here, there = (ClusterCostModel(load_cluster(name)) for name in ("dgx-a100-80gb", "dgx-h100"))
    size = 1 << 28
    work = CollectiveWork(op="all_reduce", bytes=size, group_size=4, nodes=1)
    ratio = there.collective(work).alone_ns / here.collective(work).alone_ns
    m = matched(size, 5_000_000)
    scaled = Transfers([m], Change(moved_to=there, recorded_on=here), 4).ns(m, 5_000_000)
    assert scaled == pytest.approx(5_000_000 * ratio, rel=1e-6)
    replaced = Transfers([m], Change(moved_to=there), 4).ns(m, 5_000_000)
    assert replaced == there.collective(work).alone_ns
    unknown = matched(None, 7)
    assert Transfers([m], Change(moved_to=there), 4).ns(unknown, 7) == 7

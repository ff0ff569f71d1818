"""The fit's columns give the times that planning gives."""

from __future__ import annotations

import numpy as np
import pytest

from claw_plan.profiles.cluster import Network
from claw_plan.profiles.cluster_file import load_cluster
from claw_plan.profiles.collective_constants import library, link_constants
from claw_plan.profiles.collective_cost import analytic_collective
from claw_plan.profiles.fit.collective_terms import CollectiveTiming, terms_of, times_ns
from claw_plan.profiles.work import CollectiveWork

WORKS = [
    CollectiveWork(op=op, bytes=size, group_size=ranks, nodes=nodes)
    for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    for size in (1 << 10, 1 << 20, 1 << 24, 1 << 32)
    for ranks, nodes in ((2, 1), (6, 1), (8, 1), (32, 4))
]


def constant(name: str) -> float:
    """A constant of the committed table by the name that the fit gives it."""
    first, _, rest = name.partition(" ")
    if name == "one":
        return 1.0
    if first in ("hop", "launch", "rate"):
        family, _, op = rest.partition(" ")
        link = link_constants(family)
        assert link is not None
        if first == "rate":
            return link.share.get(op, link.share["other"])
        value = link.hop_ns if first == "hop" else link.launch_ns
        assert value is not None
        return float(value)
    nccl = library("cuda")
    if rest.startswith("fill "):
        return nccl.fill[rest.removeprefix("fill ")]
    if " " in rest:
        protocol, what = rest.split(" ")
        return float(getattr(nccl.protocols[protocol], what))
    return {"piece": nccl.piece_ns, "drain": nccl.drain, "exchange": nccl.exchange_ns}[rest]


def test_columns_repeat_the_cost_model() -> None:
    node = load_cluster("4xdgx-h100").nodes[0]
    timings = [
        CollectiveTiming(
            node=node, network=Network(), work=work, library="nccl", measured_ns=1.0, group=""
        )
        for work in WORKS
    ]
    terms = terms_of(timings)
    found = times_ns(terms, np.array([constant(name) for name in terms.names]))
    expected = [analytic_collective(node, Network(), work).alone_ns for work in WORKS]
    assert found == pytest.approx(expected, rel=1e-3, abs=3)

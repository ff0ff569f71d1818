from __future__ import annotations

from typing import Any

from claw_plan.profiles.topology.measured import apply
from claw_plan.profiles.topology.reading import Rate


def rate(gb_per_s: float, ranks: int = 8, nodes: int | None = 1, **changes: Any) -> Rate:
    values = {"op": "all_reduce", "kind": "bus", "where": "log:3"} | changes
    return Rate(ranks=ranks, nodes=nodes, bytes_per_s=gb_per_s * 1e9, **values)


def entry(intra: str = "nvswitch4") -> dict[str, Any]:
    return {
        "devices": {"type": "h100", "count": 8},
        "intra": {"type": intra},
        "nics": {"type": "ib-ndr", "count": 8},
    }


def test_the_plateau_within_a_node_goes_to_its_link() -> None:
    node = entry()
    warnings = apply(node, [rate(3), rate(400), rate(390)])
    assert node["intra"]["achieved"] == {"all_reduce": "400 GB/s"}
    assert node["intra"]["achieved_source"] == "measured: all_reduce log:3"
    assert warnings == []  # 400 is within 25 % of 450


def test_rates_between_nodes_are_shared_by_the_cards() -> None:
    node = entry()
    assert apply(node, [rate(340, ranks=16, nodes=2)]) == []
    assert node["nics"]["achieved"] == {"all_reduce": "42.5 GB/s"}
    assert "achieved" not in node["intra"]


def test_a_difference_of_more_than_a_quarter_is_told() -> None:
    # PIX peers at 6 GB/s: NVIDIA/nccl issue 1817.
    node = entry("pcie4-x16")
    (warning,) = apply(node, [rate(6)])
    assert node["intra"]["achieved"] == {"all_reduce": "6 GB/s"}
    assert warning == (
        "intra pcie4-x16, all_reduce: measured 6 GB/s (log:3) overrides the nominal 31.5 GB/s, "
        "from which it differs by -81%"
    )


def test_what_goes_over_a_link_is_no_more_than_its_rate() -> None:
    node = entry("pcie4-x16")
    apply(node, [rate(124)])
    assert node["intra"]["bandwidth"] == "124 GB/s"


def test_an_algorithm_bandwidth_counts_as_its_ranks_tell() -> None:
    node = entry()
    apply(node, [rate(200, kind="algorithm", ranks=4)])
    assert node["intra"]["achieved"] == {"all_reduce": "300 GB/s"}  # 2 x 3/4


def test_what_is_of_unknown_ranks_is_left_out_and_said() -> None:
    node = entry()
    unknown = [rate(9, kind="algorithm", ranks=None), rate(9, ranks=16, nodes=None)]
    (warning,) = apply(node, unknown)
    assert warning.startswith("measured all_reduce, 9 GB/s (log:3), is not used: nothing")
    assert "achieved" not in node["intra"]

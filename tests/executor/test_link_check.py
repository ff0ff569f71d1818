from __future__ import annotations

from claw_plan.executor.link_check import LinkRate, expected_rate, slow_links
from claw_plan.profiles.cluster_file import load_cluster


def rate(source: str, target: str, gigabytes: float) -> LinkRate:
    return LinkRate(
        source=source, target=target, bytes_per_s=gigabytes * 1e9, expected_bytes_per_s=1.25e9
    )


def test_links_as_fast_as_planned_are_not_named() -> None:
    assert slow_links([rate("a", "b", 1.2), rate("b", "a", 0.63)]) == []


def test_a_slow_pair_is_named_with_both_figures() -> None:
    [there, back] = slow_links([rate("a", "b", 0.1), rate("b", "a", 0.11), rate("b", "c", 1.2)])
    assert there.startswith(
        "slow link: from a to b 0.1 GB/s were measured, the plan counts on 1.25 GB/s"
    )
    assert "from b to a 0.11 GB/s" in back


def test_a_wrong_card_is_slow_one_way_only() -> None:
    """10 Gb/s one way and 1 Gb/s back, as when answers leave by the other card."""
    [text] = slow_links([rate("a", "b", 1.2), rate("b", "a", 0.12)])
    assert text.startswith("slow link: one way only: the messages may leave by another card; from")


def test_what_is_expected_is_the_card_of_the_plan() -> None:
    cluster = load_cluster("2xdgx-h100")
    assert 0 < expected_rate(cluster, 0) <= cluster.nodes[0].nic.bytes_per_s

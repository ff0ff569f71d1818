from __future__ import annotations

import pytest

from claw_plan.profiles import catalogue
from claw_plan.profiles.cluster_schema import LinkFigures
from claw_plan.profiles.collective_constants import (
    library,
    link_constants,
    link_family,
    provenance,
)
from claw_plan.profiles.nccl_cost import PROTOCOLS


@pytest.mark.parametrize("kind", ["cuda", "rocm"])
def test_libraries_are_plausible(kind: str) -> None:
    found = library(kind)
    assert 1_000 < found.launch_ns < 200_000
    assert set(found.protocols) == {*PROTOCOLS, "nvls"}
    assert found.protocols["ll"].rate < found.protocols["ll128"].rate < 1
    assert all(protocol.hop <= 1 for name, protocol in found.protocols.items() if name != "nvls")
    assert 0 < found.spread_large < found.spread_small < 1


def test_networks_of_one_kind_share_constants() -> None:
    assert link_family("ib-ndr") == link_family("roce-400") == "infiniband"
    assert link_family("efa-100") == "efa"
    assert link_constants("ib-hdr") == link_constants("ib-400")
    assert link_constants("pcie4-x16") is None
    assert "collectives.yaml" in provenance()


def test_the_catalogue_takes_over_what_was_fitted() -> None:
    constants = link_constants("nvswitch4")
    link = catalogue.link("nvswitch4")
    assert constants is not None
    assert link.nvls
    assert (link.latency_ns, link.launch_ns) == (constants.hop_ns, constants.launch_ns)
    assert link.rate("nvls") == pytest.approx(450e9 * constants.share["nvls"])
    # H800's switch is H100's at another rate; a file's own bandwidth keeps the shares too.
    assert catalogue.link("nvswitch4-h800").rate("other") == pytest.approx(
        200e9 * constants.share["other"]
    )
    own = LinkFigures.model_validate({"bandwidth": "100 GB/s", "latency": "9 us"})
    changed = catalogue.link("nvswitch4", own)
    assert changed.rate("other") == pytest.approx(100e9 * constants.share["other"])
    assert changed.latency_ns == 9000


def test_what_the_file_says_was_achieved_wins() -> None:
    own = LinkFigures.model_validate({"achieved": {"other": "300 GB/s"}})
    assert catalogue.link("nvswitch4", own).rate("all_gather") == 300e9

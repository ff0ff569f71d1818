from __future__ import annotations

import pytest

from claw_plan.profiles.fit.collective_priors import FILLS, link_kind, prior_of


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("nvswitch5-nvl72", "switch"),
        ("nvlink2-mesh", "switch"),
        ("infinity-fabric-mi250", "mesh"),
        ("efa", "efa"),
        ("infiniband", "network"),
        ("ethernet-100", "network"),
    ],
)
def test_kinds_of_links(family: str, kind: str) -> None:
    assert link_kind(family) == kind
    assert prior_of(f"hop {family}").mean == f"hop {kind}"


def test_rates_are_shares() -> None:
    nvls = prior_of("rate nvswitch4 nvls")
    assert (nvls.mean, nvls.value, nvls.is_share) == ("rate switch nvls", 0.58, True)
    assert prior_of("nccl ll rate").is_share
    assert not prior_of("nccl ll hop").is_share


def test_libraries_share_the_means_of_their_constants() -> None:
    for fill in FILLS:
        assert prior_of(f"nccl fill {fill}").mean == prior_of(f"rccl fill {fill}").mean
    assert prior_of("nccl piece").mean != prior_of("rccl piece").mean

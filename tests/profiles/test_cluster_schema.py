from __future__ import annotations

import pytest
from pydantic import ValidationError

from claw_plan.profiles.cluster_schema import (
    ClusterSpec,
    DeviceFigures,
    DevicesSpec,
    NodeSpec,
    PriceSpec,
    given,
)


def test_quantities_become_base_units() -> None:
    devices = DevicesSpec.model_validate(
        {
            "type": "custom",
            "memory": "1 GiB",
            "bandwidth": "8 Gb/s",
            "peak": {"float32": "2 TFLOPS"},
        }
    )
    assert devices.memory == 1 << 30
    assert devices.bandwidth == 1e9
    assert devices.peak == {"float32": 2e12}


def test_a_link_may_be_its_name_alone() -> None:
    node = NodeSpec.model_validate({"type": "dgx-h100", "intra": "nvswitch4", "nics": "ib-ndr"})
    assert node.intra is not None and node.intra.type == "nvswitch4"
    assert node.nics is not None and (node.nics.type, node.nics.count) == ("ib-ndr", 1)


def test_given_are_the_keys_of_the_file() -> None:
    assert given(DeviceFigures.model_validate({"source": "me"})) == {"source": "me"}


@pytest.mark.parametrize("price", ["32.77", "32.77 EUR", "-1 USD", "inf USD", "nan USD", 3])
def test_prices_are_in_dollars(price: object) -> None:
    assert PriceSpec.model_validate({"per_node_hour": "32.77 USD"}).per_node_hour == 32.77
    with pytest.raises(ValidationError, match=r"32\.77 USD"):
        PriceSpec.model_validate({"per_node_hour": price})


@pytest.mark.parametrize("size", ["0.1 B", "1025 GiB", "2 TB"])
def test_sizes_of_a_device_are_plausible(size: str) -> None:
    with pytest.raises(ValidationError, match=r"implausible|less than one"):
        DeviceFigures.model_validate({"memory": size})


def test_a_cluster_has_nodes() -> None:
    with pytest.raises(ValidationError, match="at least 1 item"):
        ClusterSpec.model_validate({"nodes": []})

from __future__ import annotations

from typing import Any

import pytest

from claw_plan.profiles.topology.node_links import intra_of, nics_of
from claw_plan.profiles.topology.reading import Nic, Reading, all_pairs


def machine(pairs: dict[str, Any], count: int = 4, **changes: Any) -> Reading:
    return Reading(source="t", format="f", gpu_count=count, pairs=pairs, **changes)


ALL = tuple(all_pairs(4))
BOND = "nvlink3 x12"
BRIDGES = {"NV12": ((0, 1), (2, 3)), "SYS": ((0, 2), (0, 3), (1, 2), (1, 3))}


@pytest.mark.parametrize(
    ("device", "pairs", "intra"),
    [
        ("h100-sxm-80gb", {"NV18": ALL}, {"type": "nvswitch4"}),
        ("v100-sxm-32gb", {"NV6": ALL}, {"type": "nvlink2-mesh"}),
        ("mi300x", {"XGMI": ALL}, {"type": "infinity-fabric-mi300x"}),
        ("l4", {"PHB": ALL}, {"type": "pcie4-x16"}),
        (
            "a100-pcie-80gb",
            BRIDGES,
            {"default": {"type": "pcie4-x16"}, "pairs": [[0, 1, BOND], [2, 3, BOND]]},
        ),
    ],
)  # fmt: skip
def test_links_of_a_node(device: str, pairs: dict[str, Any], intra: dict[str, Any]) -> None:
    assert intra_of(machine(pairs, nvlink="absent"), device, 4, []) == intra


def test_a_bridged_pair_is_a_bond() -> None:
    pair = machine({"NV12": ((0, 1),)}, 2)
    assert intra_of(pair, "a100-pcie-80gb", 2, []) == {"type": "nvlink3 x12"}


def test_a_mesh_keeps_its_slow_pairs() -> None:
    pairs = {"NV2": ((0, 1), (1, 2), (2, 3)), "SYS": ((0, 2), (0, 3), (1, 3))}
    intra = intra_of(machine(pairs), "v100-sxm-16gb", 4, [])
    assert intra["default"] == {"type": "nvlink2-mesh"}
    assert intra["pairs"][0] == [0, 2, "pcie3-x16"]


def test_a_view_that_hides_nvlink_is_no_proof_of_its_absence() -> None:
    assumed: list[str] = []
    hidden = machine({"SYS": ALL}, nvlink="unknown")
    assert intra_of(hidden, "a100-sxm-40gb", 4, assumed) == {"type": "nvswitch3"}
    assert "no file shows the NVLinks" in assumed[0]
    absent = machine({"SYS": ALL}, nvlink="absent")
    assert intra_of(absent, "a100-sxm-40gb", 4, [])["type"] == "pcie4-x16"


def test_pairs_that_cannot_be_read_are_assumed_aloud() -> None:
    assumed: list[str] = []
    cut = machine({"NV12": ALL[:5]}, pairs_unknown=ALL[5:])
    assert intra_of(cut, "a100-sxm-40gb", 4, assumed) == {"type": "nvswitch3"}
    assert "1 GPU pairs that cannot be read" in assumed[0]


def test_near_cards_with_a_rate_are_the_nodes() -> None:
    nics = {
        "far": Nic(to_gpus=("SYS", "SYS"), bytes_per_s=50e9),
        "mlx5_0": Nic(to_gpus=("PIX", "SYS"), bytes_per_s=25e9),
        "wlan": Nic(to_gpus=("PIX", "PIX"), bytes_per_s=1e9),
    }
    node = nics_of(machine({}, 2, nics=nics), None, True, 2, [])
    assert (node["name"], node["bandwidth"], node["count"]) == ("mlx5_0", "200 Gb/s", 1)


def test_cards_without_a_rate_are_asked_for() -> None:
    nics = {"NIC0": Nic(to_gpus=("PIX",)), "NIC1": Nic(to_gpus=("PIX",))}
    assumed: list[str] = []
    assert nics_of(machine({}, 2, nics=nics), None, False, 2, assumed) == {}
    assert nics_of(machine({}, 2, nics=nics), "ib-hdr", False, 2, [])["count"] == 2
    assert nics_of(machine({}, 2, nics=nics), None, True, 2, assumed)["type"] == "ethernet-10"
    assert "--nic TYPE" in assumed[0]

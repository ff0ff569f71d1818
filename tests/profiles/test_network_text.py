"""Networks in words; the expected NICs are those the sentences speak of."""

from __future__ import annotations

import pytest

from claw_plan.profiles.network_text import nics_of
from claw_plan.profiles.units import parse_bytes_per_s


@pytest.mark.parametrize(
    ("text", "size", "count", "gbit_per_s", "kind"),
    [
        ("1600 Gbps/node RoCE", 8, 8, 200, "roce"),
        ("400 Gb/s RDMA per GPU", 8, 8, 400, "roce"),
        ("8x HDR 200 Gb/s InfiniBand per node (fat tree)", 8, 8, 200, "ib"),
        ("4x OmniPath 100 Gb/s per node", 8, 4, 100, "ib"),
        ("8x50 GB/s InfiniBand per node", 8, 8, 400, "ib"),
        ("400 Gb/s per node", 8, 4, 100, "ib"),
        ("50 Gb/s Ethernet (AWS)", 4, 1, 50, "ethernet"),
        ("EFA 32x100 Gb/s = 3200 Gb/s (p5)", 8, 32, 100, "efa"),
        ("8x EFAv4 400 Gb/s per node", 8, 8, 400, "efa"),
        ("AMD Pollara 400 Gb/s per GPU RoCE", 8, 8, 400, "roce"),
        ("1x Ethernet 100Gb/Sec, 8x NVIDIA Quantum-2 CX7 InfiniBand (400Gb/s)", 8, 8, 400, "ib"),
        (
            "Storage: 2x BF3 ConnectX-7 400Gb/s, Compute: 4x BF3 ConnectX-7 400Gb/s, "
            "Management: 100Gb/s Ethernet NIC",
            *(8, 4, 400, "ib"),
        ),
        ("8x NDR InfiniBand", 8, 8, 400, "ib"),
        ("InfiniBand NDR400", 8, 8, 400, "ib"),
        ("8 NICs of 400 Gb/s per node", 8, 8, 400, "ib"),
        ("3.2 Tbps per node EFA", 8, 8, 400, "efa"),
        ("2x 100GbE RoCE", 8, 2, 100, "roce"),
        ("InfiniBand HDR", 8, 8, 200, "ib"),
    ],
)
def test_nics_that_carry_training(
    text: str, size: int, count: int, gbit_per_s: float, kind: str
) -> None:
    nics, note = nics_of(text, size, size, 25.0)
    assert note == ""
    assert nics["count"] == count
    assert parse_bytes_per_s(nics["bandwidth"]) == gbit_per_s / 8 * 1e9
    assert nics["name"].startswith(kind)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "InfiniBand (per-node rate not recorded)",
        "ROCE2; Data bandwidth for GPU-PCIe: 504 GB/s; PCIe-NIC: 500 GB/s",
        "100GbE InfiniBand",
        "RDMA across NVLink domains (GKE A4X Max)",
    ],
)
def test_without_a_rate_the_usual_one_is_taken_and_said(text: str) -> None:
    nics, note = nics_of(text, 8, 8, 50.0)
    assert (nics["count"], parse_bytes_per_s(nics["bandwidth"])) == (8, 50e9)
    assert "50 GB/s per GPU" in note


def test_a_domain_of_several_hosts_has_the_nics_of_all() -> None:
    nics, _ = nics_of("4x ConnectX-7 IB NDR 400Gb/s", 64, 4, 50.0)
    assert nics["count"] == 64

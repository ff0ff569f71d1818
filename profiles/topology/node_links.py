"""Path kinds and NICs of a Reading to `intra:` and `nics:` of a cluster file."""

from __future__ import annotations

import re
from typing import Any

from claw_plan.profiles.topology.reading import Nic, Pair, Reading, is_nvlink

SWITCHES = {"a100": "nvswitch3", "h100": "nvswitch4", "h200": "nvswitch4"}
SWITCHES |= {"b200": "nvswitch5", "gb200": "nvswitch5-nvl72", "v100": "nvlink2-mesh"}
_GENERATION = {"v100": 2, "a100": 3, "h100": 4, "h200": 4, "b200": 5, "gb200": 5}
_PCIE = {"v100": "pcie3-x16", "t4": "pcie3-x16", "h100": "pcie5-x16", "h200": "pcie5-x16"}
_PCIE |= {"b200": "pcie5-x16", "gb200": "pcie5-x16", "mi300x": "pcie5-x16"}
_FABRIC = "infinity-fabric-mi300x"
_NIC_LATENCY = "16 us"
"""Of the catalogue's RDMA links."""


def intra_of(
    machine: Reading | None, device: str, gpus: int, assumed: list[str]
) -> dict[str, Any]:
    """The link among the GPUs of a node; `machine` None: nothing is read of so many GPUs."""
    family = device.partition("-")[0]
    pcie = _PCIE.get(family, "pcie4-x16")
    if gpus == 1:
        return {"type": pcie}
    kinds: dict[Pair, str] = {}
    if machine is not None:
        kinds = {pair: kind for kind, pairs in machine.pairs.items() for pair in pairs}
    fast = {pair: kind for pair, kind in kinds.items() if is_nvlink(kind) or kind == "XGMI"}
    if not fast:
        return _without_nvlink(machine, device, pcie, assumed)
    total = gpus * (gpus - 1) // 2
    if machine is not None and len(fast) + len(machine.pairs_unknown) == total:
        if machine.pairs_unknown:
            assumed.append(
                f"{len(machine.pairs_unknown)} GPU pairs that cannot be read are as the others"
            )
        return {"type": _switch(device, family, fast, gpus)}
    if family == "v100" and machine is not None and _spans(fast, gpus):
        rest = [[*pair, pcie] for pair in sorted(kinds) if pair not in fast]
        return {"default": {"type": "nvlink2-mesh"}, "pairs": rest}
    if machine is not None and machine.pairs_unknown:
        assumed.append(f"{len(machine.pairs_unknown)} GPU pairs that cannot be read are {pcie}")
    pairs = [[*pair, _bonded(device, family, kind)] for pair, kind in sorted(fast.items())]
    assumed.append(f"{pcie} between GPUs without NVLink: the file does not name the generation")
    return {"default": {"type": pcie}, "pairs": pairs}


def _without_nvlink(
    machine: Reading | None, device: str, pcie: str, assumed: list[str]
) -> dict[str, Any]:
    family = device.partition("-")[0]
    hidden = machine is None or machine.nvlink == "unknown"
    if hidden and family in SWITCHES and "-pcie-" not in device:
        switch = SWITCHES[family]
        assumed.append(f"{switch} among {device}s, which have it; no file shows the NVLinks")
        return {"type": switch}
    assumed.append(f"{pcie} among the GPUs: no file names PCIe's generation and width")
    return {"type": pcie}


def _spans(fast: dict[Pair, str], gpus: int) -> bool:
    return {gpu for pair in fast for gpu in pair} == set(range(gpus))


def _switch(device: str, family: str, fast: dict[Pair, str], gpus: int) -> str:
    kinds = set(fast.values())
    if kinds == {"XGMI"}:
        return _FABRIC
    if family in SWITCHES and "-pcie-" not in device and (gpus > 2 or family != "v100"):
        return SWITCHES[family]
    return _bonded(device, family, min(kinds, key=_links))


def _bonded(device: str, family: str, kind: str) -> str:
    if kind == "XGMI":
        return _FABRIC
    count = _links(kind) or (12 if "-pcie-" in device else 6)
    return f"nvlink{_GENERATION.get(family, 3)} x{count}"


def _links(kind: str) -> int:
    match = re.fullmatch(r"NV(\d{1,3})", kind)
    return int(match[1]) if match else 0


def nics_of(
    machine: Reading, nic: str | None, networked: bool, gpus: int, assumed: list[str]
) -> dict[str, Any]:
    """The node's `nics:`; empty for one node of which nothing about NICs is known."""
    usable = {name: card for name, card in machine.nics.items() if _usable(name, card)}
    near = {
        name: card
        for name, card in usable.items()
        if not card.to_gpus or {"PIX", "PXB", "PHB", "NODE"} & set(card.to_gpus)
    }
    chosen = near or usable
    rates = [card.bytes_per_s for card in chosen.values() if card.bytes_per_s]
    if nic is not None:
        return {"type": nic, "count": max(1, min(len(chosen), gpus))}
    if rates and len(rates) == len(chosen):
        fastest = max(rates)
        return {
            "name": next(iter(chosen)),
            "bandwidth": f"{fastest * 8 / 1e9:g} Gb/s",
            "latency": _NIC_LATENCY,
            "count": rates.count(fastest),
            "source": f"{machine.source}; latency assumed",
        }
    if networked:
        assumed.append(
            "one 10 Gb/s network card a node: no file says their rate; say which with --nic TYPE"
        )
        return {"type": "ethernet-10", "count": 1}
    return {}


def _usable(name: str, card: Nic) -> bool:
    return not re.match(r"(wl|tailscale|docker|veth|virbr|tun|tap|br-|lo\Z|wg)", name)

"""NCCL's topology XML (NCCL_TOPO_FILE, NCCL_TOPO_DUMP_FILE) to a `Reading`.

Static files that clouds ship often hold PCIe devices only: what has neither a class nor a <gpu>
or <nic> below it stays of unknown kind, and absent <nvlink> elements mean that NVLink is not
described, not that there is none.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.topology.reading import (
    MAX_GPUS,
    Nic,
    Pair,
    Reading,
    all_pairs,
    by_kind,
    gpu_names,
    nvlink_warnings,
)
from claw_plan.profiles.topology.source import Source, whole_number
from claw_plan.profiles.topology.xml_tree import Element, parse

FORMAT = "NCCL topology XML"

_BUS_ID = re.compile(r"[0-9a-f]{1,8}:[0-9a-f]{1,4}:[0-9a-f]{1,2}(?:\.[0-9a-f])?\Z", re.IGNORECASE)
_SWITCH_CLASS = "0x0680"
_MAX_LINKS = 64
_MAX_MBIT_S = 10_000_000
_DEFAULT_MBIT_S = 10_000
"""What NCCL writes for a network whose speed it cannot learn (net_socket.cc)."""

PCI_DEVICES = {
    "0x1db1": "v100-sxm-16gb", "0x1db5": "v100-sxm-32gb",
    "0x20b0": "a100-sxm-40gb", "0x20b2": "a100-sxm-80gb",
    "0x20f1": "a100-pcie-40gb", "0x20b5": "a100-pcie-80gb",
    "0x2330": "h100-sxm-80gb", "0x2331": "h100-pcie-80gb", "0x2335": "h200-sxm-141gb",
    "0x2901": "b200-sxm-180gb", "0x2941": "gb200-186gb",
    "0x1eb8": "t4", "0x2237": "a10g", "0x27b8": "l4", "0x2684": "rtx-4090",
    "0x74a1": "mi300x",
}  # fmt: skip
"""PCI device id to the catalogue's name (the PCI ID repository, https://pci-ids.ucw.cz)."""


def recognise(source: Source) -> bool:
    """Whether the text is XML with a <system> of CPUs, GPUs or PCIe devices."""
    return bool(re.search(r"<system[\s>]", source.text)) or bool(
        re.match(r"\s*<[A-Za-z?!]", source.text)
    )


def read(source: Source) -> list[Reading]:
    """One Reading. Raises InputError for other XML, with the line of what is wrong."""
    root = parse(source)
    system = root if root.tag == "system" else next(root.all("system"), None)
    if system is None:
        raise InputError(
            f"{source.where(root.line)}: <{root.tag}> is no NCCL topology, whose first element is "
            "<system>; let NCCL write one with NCCL_TOPO_DUMP_FILE=topo.xml"
        )
    for gpu in system.all("gpu"):
        above = [element.tag for element in gpu.ancestors()]
        if "cpu" not in above or "pci" not in above:
            raise InputError(
                f"{source.where(gpu.line)}: no <cpu> and <pci busid=...> above "
                f"<gpu dev={gpu.get('dev')[:20]!r}>, as NCCL writes them; let NCCL write the file "
                "with NCCL_TOPO_DUMP_FILE=topo.xml"
            )
    if not any(True for _ in system.all("pci")) and not any(True for _ in system.all("net")):
        raise InputError(
            f"{source.where(system.line)}: <system> holds no PCIe device; is the file whole?"
        )
    return [_SystemReader(source, system).reading()]


class _SystemReader:
    def __init__(self, source: Source, system: Element) -> None:
        self._source = source
        self._system = system
        self._warnings: list[str] = []
        self._unknown: list[str] = []
        self._gpus = self._ordered([pci for pci in system.all("pci") if _is_gpu(pci)])
        self._check_bus_ids()

    def reading(self) -> Reading:
        count = len(self._gpus)
        links, described = self._nvlinks()
        kinds: dict[Pair, str] = {
            (a, b): _path(self._gpus[a], self._gpus[b]) for a, b in all_pairs(count)
        }
        kinds |= {pair: f"NV{number}" for pair, number in links.items()}
        nics = self._nics()
        types = tuple(PCI_DEVICES.get(gpu.get("device").lower(), "") for gpu in self._gpus)
        self._note_unknown(types, described, nics)
        self._warnings += nvlink_warnings(count, kinds)
        return Reading(
            source=self._source.name,
            format=FORMAT,
            gpu_count=count,
            gpu_types=types if all(types) else (),
            pairs=by_kind(kinds),
            nics=nics,
            nvlink="present" if links else "unknown",
            facts=tuple(self._facts(links)),
            unknown=tuple(self._unknown),
            warnings=tuple(self._warnings),
        )

    def _ordered(self, gpus: list[Element]) -> list[Element]:
        """GPUs by their `dev`, where every one has its own; else in the file's order."""
        if len(gpus) > MAX_GPUS:
            raise InputError(f"{self._source.name}: {len(gpus)} GPUs are not one machine")
        numbers = []
        for pci in gpus:
            gpu = next((child for child in pci.children if child.tag == "gpu"), None)
            numbers.append(whole_number(gpu.get("dev"), MAX_GPUS) if gpu is not None else None)
        if sorted(number for number in numbers if number is not None) == list(range(len(gpus))):
            return [gpus[numbers.index(place)] for place in range(len(gpus))]
        return gpus

    def _check_bus_ids(self) -> None:
        seen: dict[str, int] = {}
        for gpu in self._gpus:
            bus = gpu.get("busid").lower()
            if not _BUS_ID.match(bus):
                raise InputError(
                    f"{self._source.where(gpu.line)}: the GPU's busid {bus[:40]!r} is no PCI bus "
                    "id such as 0000:1a:00.0"
                )
            if bus in seen:
                raise InputError(
                    f"{self._source.where(gpu.line)}: the busid {bus} stands also in line "
                    f"{seen[bus]}; each GPU has its own"
                )
            seen[bus] = gpu.line

    def _strangers(self) -> list[Element]:
        """Leaves that nothing says the kind of."""
        return [
            pci
            for pci in self._system.all("pci")
            if not pci.children and not pci.get("class") and not _is_nic(pci)
        ]

    def _nvlinks(self) -> tuple[dict[Pair, int], bool]:
        """Links between pairs of GPUs, and whether the file describes any.

        Each link stands at both of its ends; the smaller count of the two is taken.
        """
        place = {gpu.get("busid").lower(): index for index, gpu in enumerate(self._gpus)}
        ends: dict[tuple[int, int], int] = {}
        to_switch: dict[int, int] = {}
        described = False
        for index, gpu in enumerate(self._gpus):
            for link in gpu.all("nvlink"):
                described = True
                count = whole_number(link.get("count"), _MAX_LINKS)
                where = self._source.where(link.line)
                target = link.get("target").lower()
                if count is None or count == 0:
                    self._warnings.append(f"{where}: an <nvlink> of GPU{index} without a count")
                elif link.get("tclass").lower().startswith(_SWITCH_CLASS):
                    to_switch[index] = to_switch.get(index, 0) + count
                elif place.get(target) == index:
                    self._warnings.append(f"{where}: GPU{index} has an NVLink to itself")
                elif target not in place:
                    self._warnings.append(
                        f"{where}: an NVLink of GPU{index} leads to {target[:40]!r}, which is no "
                        "GPU here: that GPU differs from its peers"
                    )
                else:
                    key = (index, place[target])
                    ends[key] = ends.get(key, 0) + count
        links: dict[Pair, int] = {}
        for (index, other), count in ends.items():
            back = ends.get((other, index), count)
            if back != count and index < other:
                self._warnings.append(
                    f"GPU{index}-GPU{other} has {count} NVLinks at one end and {back} at the "
                    "other; the smaller is taken"
                )
            links[min(index, other), max(index, other)] = min(count, back)
        for first, second in all_pairs(len(self._gpus)):
            if first in to_switch and second in to_switch:
                links[first, second] = min(to_switch[first], to_switch[second])
        return links, described

    def _nics(self) -> dict[str, Nic]:
        nics: dict[str, Nic] = {}
        for element in self._system.all("net"):
            name = element.get("name")[:64] or f"net{len(nics)}"
            speed = whole_number(element.get("speed"), _MAX_MBIT_S)
            self._doubt_net(element, name, speed)
            nics[_free(name, nics)] = self._nic(element, speed)
        for pci in self._system.all("pci"):
            if _is_nic(pci) and not any(True for _ in pci.all("net")):
                nics[_free(pci.get("busid"), nics)] = self._nic(pci, None)
        return nics

    def _nic(self, element: Element, mbit_s: int | None) -> Nic:
        return Nic(
            to_gpus=tuple(_path(element, gpu) for gpu in self._gpus),
            bytes_per_s=mbit_s * 125_000.0 if mbit_s else None,
        )

    def _doubt_net(self, net: Element, name: str, mbit_s: int | None) -> None:
        where = self._source.where(net.line)
        pci = next((above for above in net.ancestors() if above.tag == "pci"), None)
        if mbit_s == _DEFAULT_MBIT_S:
            self._warnings.append(
                f"{where}: {name} has speed 10000, which NCCL also writes when it does not know"
            )
        if re.match(r"(wl|tailscale|docker|veth|virbr|tun|tap|br-|lo\Z|wg)", name):
            self._warnings.append(
                f"{where}: {name} is a wireless or virtual network: not for NCCL"
            )
        elif pci is None and net.get("gdr") == "0":
            self._unknown.append(f"where {name} is attached: it has no PCIe device")
        if pci is not None and pci.get("link_width") in ("1", "2"):
            self._warnings.append(
                f"{where}: {name} sits on x{pci.get('link_width')} of PCIe: slower than its name"
            )

    def _note_unknown(self, types: Sequence[str], described: bool, nics: dict[str, Nic]) -> None:
        strangers = self._strangers()
        if strangers:
            self._warnings.append(
                f"{self._source.where(strangers[0].line)}: {len(strangers)} PCI devices without "
                "class, <gpu> or <nic>: GPUs or NICs cannot be told apart"
            )
            self._unknown.append(f"what {len(strangers)} PCI devices are")
        if not self._gpus:
            self._unknown.append("GPUs: the file describes none (clouds' files often do not)")
            return
        if not described and len(self._gpus) > 1:
            self._unknown.append(
                "NVLink: not described in this file, which is not the same as none"
            )
        without = [
            index
            for index, gpu in enumerate(self._gpus)
            if described and not any(True for _ in gpu.all("nvlink"))
        ]
        if without:
            self._warnings.append(
                f"{gpu_names(without)} differs from its peers: no <nvlink>; a ring through it "
                "runs at PCIe or network speed"
            )
        if not all(types):
            self._unknown.append("the type of the GPUs: no PCI device id that the catalogue knows")
        if not nics:
            self._unknown.append("NICs: the file describes none")
        elif any(nic.bytes_per_s is None for nic in nics.values()):
            self._unknown.append("the rate of the NICs that have no <net speed>")

    def _facts(self, links: dict[Pair, int]) -> list[str]:
        facts = []
        for index, gpu in enumerate(self._gpus):
            speed, width = gpu.get("link_speed")[:40], gpu.get("link_width")[:4]
            c2c = next(gpu.all("c2c"), None)
            if c2c is not None:
                facts.append(
                    f"GPU{index} is joined to its CPU by C2C ({c2c.get('count')[:8]} x "
                    f"{c2c.get('bw')[:12]} MB/s): its PCIe link is not the path"
                )
            elif speed and index == 0:
                facts.append(f"GPU0's PCIe link: {speed} x{width}")
        if not links and len({gpu.get("link_speed") for gpu in self._gpus}) > 1:
            facts.append("the GPUs' PCIe links have unequal speeds")
        return facts


def _free(name: str, taken: dict[str, Nic]) -> str:
    """The name, or with a number if a NIC has it already."""
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}.{number}"
    return free


def _is_gpu(pci: Element) -> bool:
    if any(child.tag == "gpu" for child in pci.children):
        return True
    return pci.get("class").lower().startswith(("0x03", "0x1200")) and not pci.children


def _is_nic(pci: Element) -> bool:
    if any(child.tag in ("nic", "net") for child in pci.children):
        return True
    return pci.get("class").lower().startswith("0x02")


def _path(first: Element, second: Element) -> str:
    """The kind of path as nvidia-smi names it, from the nearest element both lie below."""
    ours = [element for element in first.ancestors() if element.tag in ("pci", "cpu")]
    theirs = [element for element in second.ancestors() if element.tag in ("pci", "cpu")]
    if first.tag == "net" and ours and ours[0].tag == "pci":
        ours = ours[1:]  # the NIC's own PCIe device
    for depth, element in enumerate(ours):
        if any(element is other for other in theirs):
            if element.tag == "cpu":
                return "PHB"
            other_depth = next(i for i, other in enumerate(theirs) if other is element)
            return "PIX" if depth == other_depth == 0 else "PXB"
    return "SYS"

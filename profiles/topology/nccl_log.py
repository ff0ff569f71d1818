"""NCCL_DEBUG=INFO logs to a `Reading`: hosts, GPUs, NICs, transports, and path tables if printed.

Path tables appear with NCCL_DEBUG_SUBSYS=GRAPH. Without them the log only says how GPUs that are
neighbours in a ring reach each other (P2P/IPC, SHM, NET), which is a transport and not a path;
then the kinds of the pairs stay unknown.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from claw_plan.profiles.topology.reading import (
    MAX_GPUS,
    Host,
    Nic,
    Pair,
    Reading,
    by_kind,
    nvlink_warnings,
)
from claw_plan.profiles.topology.source import Source, whole_number

FORMAT = "NCCL log"

_LINE = re.compile(
    r"(?<![\w.-])([\w.-]{1,128}):(\d{1,9}):(\d{1,9}) \[(\d{1,4})\] (?:[\w/.]{1,80}:\d{1,6} )?"
    r"NCCL (INFO|WARN)[:\s](.*)"
)
_VERSION = re.compile(r"NCCL version (\S{1,40})")
_COMM = re.compile(r"\brank (\d{1,7}) nranks (\d{1,7}) cudaDev (\d{1,4})\b")
_BUS = re.compile(r"\bbusId ([0-9a-fA-F]{1,16})\b")
_NETWORK = re.compile(r"Using network (\S{1,40})|Using (Socket|IB) transport")
_NET_USING = re.compile(r"NET/(IB|Socket|OFI|\w{1,20}) : Using (.{1,2000})")
_NET_CARD = re.compile(r"\[(\d{1,3})\]([\w.-]{1,40}):")
_PATHS = re.compile(r"\s*GPU/([0-9A-Fa-f-]{1,20}) :(.*)")
_PATH = re.compile(r"(GPU|NET)/([0-9A-Fa-f-]{1,20}) \((\d{1,3})/[\d.]{1,20}/([A-Z0-9]{2,4})\)")
_TRANSPORT = re.compile(r"-> .{1,60}? via (P2P|SHM|NET|COLLNET)\b")
_NO_GDR = re.compile(r"GPU Direct RDMA Disabled|GDR 0\b")
_MAX_WARNINGS = 4


def recognise(source: Source) -> bool:
    """Whether lines of NCCL's own log stand here."""
    return any("NCCL INFO" in line or "NCCL WARN" in line for line in source.lines)


@dataclass
class _Log:
    devices: dict[str, set[int]] = field(default_factory=dict)
    buses: dict[tuple[str, str], int] = field(default_factory=dict)
    version: str = ""
    ranks: int = 0
    networks: set[str] = field(default_factory=set)
    cards: dict[str, str] = field(default_factory=dict)
    transports: dict[str, int] = field(default_factory=dict)
    tables: dict[str, dict[str, dict[str, str]]] = field(default_factory=dict)
    no_gdr: bool = False
    warned: list[str] = field(default_factory=list)


def read(source: Source) -> list[Reading]:
    """One Reading of all hosts in the log."""
    log = _Log()
    for number, line in enumerate(source.lines, start=1):
        if "NCCL" not in line:
            continue
        if version := _VERSION.search(line):
            log.version = version[1]
        if match := _LINE.search(line):
            host, device, level, text = match[1], int(match[4]), match[5], match[6]
            log.devices.setdefault(host, set()).add(device)
            if level == "WARN" and len(log.warned) < _MAX_WARNINGS:
                log.warned.append(f"{source.where(number)}: NCCL warns: {text.strip()[:160]}")
            _take(log, host, text)
    return [_reading(source, log)]


def _take(log: _Log, host: str, text: str) -> None:
    if match := _COMM.search(text):
        log.ranks = max(log.ranks, int(match[2]))
        log.devices[host].add(int(match[3]))
        if bus := _BUS.search(text):
            log.buses[host, _bus(bus[1])] = int(match[3])
    elif match := _NETWORK.search(text):
        log.networks.add(match[1] or match[2])
    elif match := _NET_USING.search(text):
        for index, name in _NET_CARD.findall(match[2]):
            log.cards.setdefault(index, name)
    elif match := _PATHS.match(text):
        row = log.tables.setdefault(host, {}).setdefault(_bus(match[1]), {})
        for what, name, _, kind in _PATH.findall(match[2]):
            row[_bus(name) if what == "GPU" else f"NET/{name}"] = kind
    elif match := _TRANSPORT.search(text):
        log.transports[match[1]] = log.transports.get(match[1], 0) + 1
    if _NO_GDR.search(text):
        log.no_gdr = True


def _bus(text: str) -> str:
    """A GPU's bus id as log lines have it ('0-1A000', '1a000', '0000001a000')."""
    return text.rsplit("-", 1)[-1].lower().lstrip("0") or "0"


def _reading(source: Source, log: _Log) -> Reading:
    counts = {host: max(devices) + 1 for host, devices in log.devices.items()}
    host = max(log.tables, key=lambda name: len(log.tables[name]), default="")
    kinds, nics, count = _from_table(log, host) if host else ({}, {}, 0)
    if not nics:
        nics = {name: Nic() for name in log.cards.values()}
    same = set(counts.values())
    if not count:
        count = same.pop() if len(same) == 1 else 0
    facts = [f"NCCL {log.version}"] if log.version else []
    facts += [f"network: {', '.join(sorted(log.networks))}"] if log.networks else []
    facts += [f"{log.ranks} ranks"] if log.ranks else []
    facts += [f"{number} connections by {name}" for name, number in sorted(log.transports.items())]
    unknown = ["the type of the GPUs"]
    if not kinds and count != 1:
        unknown.append(
            "the paths between GPUs: run with NCCL_DEBUG_SUBSYS=INIT,GRAPH to print them"
        )
    unknown += ["the rate of the NICs"] if nics else ["NICs"]
    nvlink = "unknown"
    if kinds:
        nvlink = "present" if {"NVL", "NVB"} & set(kinds.values()) else "absent"
    return Reading(
        source=source.name,
        format=FORMAT,
        gpu_count=count if 0 < count <= MAX_GPUS else None,
        pairs=by_kind(kinds),
        nics=nics,
        nvlink=nvlink,
        hosts=tuple(Host(name=name, gpus=number) for name, number in counts.items()),
        node_count=len(counts) or None,
        facts=tuple(facts),
        unknown=tuple(unknown),
        warnings=(*_suspicions(log, counts), *nvlink_warnings(count, kinds)),
    )


def _from_table(log: _Log, host: str) -> tuple[dict[Pair, str], dict[str, Nic], int]:
    """Kinds of pairs, NICs and the number of GPUs, of the host with the largest table."""
    rows = log.tables[host]
    order = list(rows)
    known = [log.buses.get((host, bus)) for bus in order]
    if sorted(number for number in known if number is not None) == list(range(len(order))):
        order = [order[known.index(place)] for place in range(len(order))]
    order = order[:MAX_GPUS]
    kinds: dict[Pair, str] = {}
    for first, bus in enumerate(order):
        for second, other in enumerate(order):
            if first < second and other in rows[bus]:
                kinds[first, second] = rows[bus][other]
    nets = sorted({name for row in rows.values() for name in row if name.startswith("NET/")})
    nics = {}
    for net in nets:
        index = whole_number(net[4:].rsplit("-", 1)[-1], 1000)
        card = log.cards.get(str(index))
        nics[net] = Nic(to_gpus=tuple(rows[bus].get(net) for bus in order), device=card)
    return kinds, nics, len(order)


def _suspicions(log: _Log, counts: dict[str, int]) -> list[str]:
    warnings = list(log.warned)
    if len(set(counts.values())) > 1:
        text = ", ".join(f"{host} {number}" for host, number in list(counts.items())[:6])
        warnings.append(f"the hosts show unequal numbers of GPUs: {text}")
    if "Socket" in log.networks and log.ranks > max(counts.values(), default=0):
        warnings.append("between hosts NCCL uses TCP sockets: no InfiniBand or RoCE was found")
    if log.transports.get("SHM") and not log.transports.get("P2P"):
        warnings.append(
            "GPUs of a host reach each other through host memory (SHM): peer-to-peer is off"
        )
    if log.no_gdr and log.networks & {"IB"}:
        warnings.append("GPUDirect RDMA is disabled: traffic to the NICs goes through host memory")
    return warnings

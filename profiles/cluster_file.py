"""A cluster.yaml, or a shorthand such as `2xdgx-h100`, to a `Cluster`.

`load_cluster` is how every command gets to know the hardware; `cluster_from_mapping` reads the
cluster that a plan carries inside. What a file leaves open is assumed, and said in
`Cluster.assumptions`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from claw_plan.profiles import catalogue
from claw_plan.profiles.cluster import Cluster, Device, Link, Network, Node
from claw_plan.profiles.cluster_schema import (
    MAX_HOST_BYTES,
    ClusterSpec,
    DevicesSpec,
    HostSpec,
    IntraSpec,
    LinkSpec,
    NicsSpec,
    NodeSpec,
)
from claw_plan.profiles.errors import InputError, near_matches
from claw_plan.profiles.files import Document, read_yaml, validate
from claw_plan.profiles.measured_rate import difference, differs
from claw_plan.profiles.units import GIB, MIB, format_bytes

MIN_CPU_DEVICES = 4
"""A CPU host offers at least so many devices: plans of four ranks can be tried anywhere."""

_SHORTHAND = re.compile(r"(?:(\d+)x)?([A-Za-z][\w.\-]*)\Z")
_Answer = TypeVar("_Answer")


def load_cluster(text: str) -> Cluster:
    """Reads a path or a shorthand. Raises InputError with file, line and key."""
    if not text.strip():
        raise InputError("--cluster is empty; name a cluster file or a node type, as 2xdgx-h100")
    path = Path(text)
    try:
        is_file = path.is_file()
    except (OSError, ValueError):
        is_file = False
    if is_file:
        return _from_document(read_yaml(path))
    match = _SHORTHAND.match(text)
    if path.suffix in (".yaml", ".yml", ".json") or os.sep in text or match is None:
        return _from_document(read_yaml(path))
    count, name = int(match[1] or 1), match[2]
    types = [*catalogue.catalogue().nodes, "cpu"]
    if name not in types:
        raise InputError(
            f"--cluster {text!r} is neither a file nor a node type; {near_matches(name, types)}"
        )
    if not 0 < count <= 100_000:
        raise InputError(f"--cluster {text!r}: the number of nodes must be 1 to 100000")
    data = {"name": text, "nodes": [{"count": count, "type": name}]}
    return cluster_from_mapping(data, f"--cluster {text}")


def cluster_from_mapping(mapping: Mapping[str, Any], where: str) -> Cluster:
    """Reads a cluster that is already data; `where` opens every message."""
    return _from_document(Document(path=Path(where.replace(os.sep, "|")), data=mapping))


def _from_document(document: Document) -> Cluster:
    if "nodes" not in document.data:
        found = ", ".join(str(key) for key in list(document.data)[:4]) or "nothing"
        raise InputError(
            f"{document.where()}: not a cluster file of claw-plan: it has no key 'nodes' "
            f"(found: {found}); a cluster file starts with  nodes: [{{count: 2, type: dgx-h100}}]"
        )
    spec = validate(document, ClusterSpec)
    assumptions: list[str] = []
    nodes: list[Node] = []
    texts: list[Mapping[str, Any]] = []
    racks = 0
    for index, entry in enumerate(spec.nodes):
        reader = _NodeReader(document, index, entry, assumptions)
        node = replace(reader.node(), profile=entry.node_profile or "")
        _check_profile(document, index, node, nodes)
        nodes += [node] * entry.count
        texts.append(reader.text(document.data["nodes"][index]))
        racks = max(racks, reader.rack_nodes)
    _check_whole(document, nodes)
    nodes = _joined_by_rack(nodes, spec, racks, assumptions)
    if spec.network is None and len(nodes) > 1:
        assumptions.append("no network given: one non-blocking switch at the NICs' rate")
    name = spec.name or document.path.stem
    network = spec.network
    return Cluster(
        name=name,
        nodes=tuple(nodes),
        network=Network()
        if network is None
        else Network(
            type=network.type,
            oversubscription=network.oversubscription,
            latency_ns=network.latency or 0,
        ),
        text={**document.data, "name": name, "nodes": texts},
        node_mtbf_ns=spec.failures.node_mtbf if spec.failures else None,
        price_per_node_hour_usd=spec.price.per_node_hour if spec.price else None,
        training={} if spec.training is None else spec.training.model_dump(exclude_none=True),
        assumptions=tuple(dict.fromkeys(assumptions)),
    )


def _check_whole(document: Document, nodes: list[Node]) -> None:
    kinds = {node.device.kind for node in nodes}
    if len(kinds) > 1:
        raise InputError(
            f"{document.where(['nodes'])}: the nodes mix {' and '.join(sorted(kinds))} devices, "
            "which no collective library joins; make a cluster file for each"
        )


def _check_profile(document: Document, index: int, node: Node, before: list[Node]) -> None:
    """Nodes that the user groups have as many devices each: ranks lie on them in rows."""
    others = (other for other in before if node.profile and other.profile == node.profile)
    unlike = next((other for other in others if other.device_count != node.device_count), None)
    if unlike is not None:
        raise InputError(
            f"{document.where(['nodes', index, 'node_profile'])}: nodes of one node_profile have "
            f"as many devices each, but {node.profile!r} has nodes of {unlike.device_count} and "
            f"of {node.device_count}; give this entry a profile of its own"
        )


def _joined_by_rack(
    nodes: list[Node], spec: ClusterSpec, rack_nodes: int, assumptions: list[str]
) -> list[Node]:
    """Puts the rack's own link between nodes that share one rack."""
    rack_types = {entry.type for entry in spec.nodes}
    if not 1 < len(nodes) <= rack_nodes or len(rack_types) != 1:
        return nodes
    rack = catalogue.node_type(str(spec.nodes[0].type)).rack
    assert rack is not None
    link = catalogue.link(rack.link)
    assumptions.append(f"all {len(nodes)} nodes stand in one rack, joined by {link.name}")
    return [_replaced_nic(node, link) for node in nodes]


def _replaced_nic(node: Node, link: Link) -> Node:
    values = {name: getattr(node, name) for name in Node.__slots__}
    return Node(**(values | {"nic": link, "nic_count": node.device_count}))


class _NodeReader:
    """Makes a `Node` of one entry of `nodes:`."""

    def __init__(
        self, document: Document, index: int, spec: NodeSpec, assumptions: list[str]
    ) -> None:
        self.rack_nodes = 0
        self._document = document
        self._keys: list[str | int] = ["nodes", index]
        self._assumptions = assumptions
        self._pinned: dict[str, Any] = {}
        self._spec = self._filled(spec)

    def _at(self, ask: Callable[[], _Answer], *keys: str) -> _Answer:
        """Puts the place in the file before what `ask` complains about."""
        try:
            return ask()
        except InputError as error:
            where = self._document.where([*self._keys, *keys])
            raise InputError(f"{where}: {error}") from None

    def _filled(self, spec: NodeSpec) -> NodeSpec:
        """The entry with all that its catalogue type says and the file does not."""
        if spec.type is None:
            return spec
        if spec.type == "cpu":
            cores, memory = this_machine()
            return spec.model_copy(
                update={
                    "devices": DevicesSpec(type="cpu", cores=cores),
                    "host": spec.host or HostSpec(memory=f"{memory // MIB} MiB", cores=cores),
                }
            )
        known = self._at(lambda: catalogue.node_type(str(spec.type)), "type")
        self.rack_nodes = known.rack.nodes if known.rack and spec.nics is None else 0
        own = {name: getattr(spec, name) for name in ("intra", "nics", "host")}
        changes = {name: value for name, value in own.items() if value is not None}
        return known.model_copy(update=changes)

    def node(self) -> Node:
        """The node; raises InputError with file, line and key."""
        spec = self._spec
        devices = spec.devices
        assert devices is not None
        device = self._at(lambda: catalogue.device(devices.type, devices), "devices", "type")
        if devices.name:
            device = _renamed(device, devices.name)
        if device.kind == "cpu":
            return self._cpu_node(device, devices)
        if devices.cores is not None:
            where = self._document.where([*self._keys, "devices", "cores"])
            raise InputError(f"{where}: only CPU devices have cores; {device.name} is none")
        count = devices.count or 1
        intra = self._intra(spec.intra, device, count)
        nic, nic_count = self._nics(spec.nics)
        return Node(
            type=self._type_name(devices),
            device=device,
            device_count=count,
            intra=intra,
            nic=nic,
            nic_count=nic_count,
            host_memory_bytes=self._host(spec.host, device, count).memory,
            host_cores=self._host(spec.host, device, count).cores,
            pairs=self._pairs(spec.intra, count),
        )

    def _cpu_node(self, device: Device, devices: DevicesSpec) -> Node:
        """A host whose devices share its cores and its memory."""
        cores = devices.cores or this_machine()[0]
        count = devices.count or max(MIN_CPU_DEVICES, cores)
        host = self._spec.host
        memory = host.memory if host else (devices.memory or this_machine()[1])
        memory_text = f"{memory // MIB} MiB"
        if devices.cores is None or host is None or self._document_type() == "cpu":
            self._assumptions.append(
                f"the CPU node is this machine's: {cores} cores, {format_bytes(memory)}"
            )
        self._pinned = {"devices": {"type": "cpu", "cores": cores, "count": count}}
        self._pinned["host"] = {"memory": memory_text, "cores": host.cores if host else cores}
        if host and host.machine:
            self._pinned["host"]["machine"] = host.machine
        nic, nic_count = self._nics(self._spec.nics or NicsSpec(type="ethernet-10"))
        values = {name: getattr(device, name) for name in Device.__slots__}
        return Node(
            type="cpu",
            device=Device(**(values | {"memory_bytes": memory})),
            device_count=count,
            intra=self._intra(self._spec.intra or IntraSpec(type="loopback"), device, count),
            nic=nic,
            nic_count=nic_count,
            host_memory_bytes=memory,
            host_cores=host.cores if host else cores,
            cores=cores,
            shared_memory_bytes=memory,
            machine=(host and host.machine) or "",
        )

    def text(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """The entry as a plan carries it: a CPU host's cores and memory written out."""
        if not self._pinned:
            return given
        kept = {key: value for key, value in given.items() if key != "type"}
        devices = {**self._pinned["devices"], **kept.get("devices", {})}
        return {"count": 1, **kept, "devices": devices, "host": self._pinned["host"]}

    def _document_type(self) -> Any:
        return self._document.data["nodes"][self._keys[1]].get("type")

    def _type_name(self, devices: DevicesSpec) -> str:
        return str(self._document_type() or f"{devices.count or 1}x{devices.type}")

    def _host(self, host: HostSpec | None, device: Device, count: int) -> HostSpec:
        if host is not None:
            return host
        memory = min(max(64 * GIB, 2 * device.memory_bytes * count), MAX_HOST_BYTES)
        self._assumptions.append(
            f"no host given for {device.name}: {format_bytes(memory)} of memory, "
            f"{8 * count} cores a node"
        )
        return HostSpec(memory=f"{memory} B", cores=8 * count)

    def _intra(self, spec: IntraSpec | None, device: Device, count: int) -> Link:
        if spec is None:
            if count > 1:
                self._assumptions.append(f"no link given among {device.name}s: pcie4-x16")
            spec = IntraSpec(type="pcie4-x16")
        base: LinkSpec = spec
        keys = ("intra", "type")
        if spec.default is not None:
            base, keys = spec.default, ("intra", "default")
        elif spec.pairs and spec.type is None and spec.bandwidth is None:
            where = self._document.where([*self._keys, "intra"])
            raise InputError(f"{where}: `pairs` need a `default` link for the other devices")
        link = self._at(lambda: catalogue.link(base.type, base), *keys)
        self._tell_measured(base, link, "intra")
        if spec.pairs:
            self._assumptions.append(
                f"collectives inside a node are reckoned on {link.name}, not on single pairs"
            )
        return link if device.peer_to_peer else self._through_host(link, device)

    def _through_host(self, link: Link, device: Device) -> Link:
        """A GeForce driver refuses peer-to-peer: each byte crosses PCIe twice."""
        if link.name.startswith(("nvlink", "nvswitch")):
            where = self._document.where([*self._keys, "intra"])
            raise InputError(f"{where}: {device.name} has no NVLink; use pcie4-x16")
        self._assumptions.append(
            f"{device.name} has no peer-to-peer: traffic goes through the host at half of "
            f"{link.name}'s rate"
        )
        return Link(
            name=f"{link.name}-through-host",
            bytes_per_s=link.bytes_per_s / 2,
            latency_ns=2 * link.latency_ns,
            source=f"{link.source}; halved: to the host's memory and back",
            achieved_bytes_per_s={op: r / 2 for op, r in link.achieved_bytes_per_s.items()},
        )

    def _pairs(self, spec: IntraSpec | None, count: int) -> Mapping[tuple[int, int], Link]:
        pairs: dict[tuple[int, int], Link] = {}
        for index, (first, second, name) in enumerate(spec.pairs if spec else ()):
            where = self._document.where([*self._keys, "intra", "pairs", index])
            if first == second or not (0 <= first < count and 0 <= second < count):
                raise InputError(f"{where}: a pair names two of the devices 0 to {count - 1}")
            key = (min(first, second), max(first, second))
            if key in pairs:
                raise InputError(f"{where}: the pair {first}, {second} stands twice")
            pairs[key] = self._at(partial(catalogue.link, name), "intra", "pairs")
        return pairs

    def _nics(self, spec: NicsSpec | None) -> tuple[Link, int]:
        if spec is None:
            several = len(self._document.data["nodes"]) > 1 or self._spec.count > 1
            if several or self._document.data["nodes"][self._keys[1]].get("count", 1) > 1:
                where = self._document.where(self._keys)
                raise InputError(
                    f"{where}: several nodes need `nics`, as in {{type: ib-ndr, count: 8}}"
                )
            spec = NicsSpec(type="ethernet-10")
        link = self._at(lambda: catalogue.link(spec.type, spec), "nics", "type")
        self._tell_measured(spec, link, "nics")
        return link, spec.count

    def _tell_measured(self, spec: LinkSpec, link: Link, key: str) -> None:
        """Says which of the file's measured rates are far from the link's nominal one."""
        assert self._spec.devices is not None
        if self._spec.devices.type == "cpu":
            return  # gloo's rates are far below what its links carry
        where = self._document.where([*self._keys, key])
        for op, rate in (spec.achieved or {}).items():
            if differs(rate, link.bytes_per_s):
                origin = spec.achieved_source or "given in the file"
                text = difference(f"{link.name}, {op}", rate, link.bytes_per_s, origin)
                self._assumptions.append(f"{where}: {text}")


def _renamed(device: Device, name: str) -> Device:
    values = {field: getattr(device, field) for field in Device.__slots__}
    return Device(**(values | {"name": name}))


def this_machine() -> tuple[int, int]:
    """The cores this process may use, and the memory, a container's limit included."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        memory = min(memory, int(limit))
    except (OSError, ValueError):
        pass  # no limit, or no cgroup
    return cores or 1, memory

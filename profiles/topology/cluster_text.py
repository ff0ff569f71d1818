"""Readings to the text of a cluster.yaml that `load_cluster` accepts.

Last step of `claw-plan topology -o`. What no file says is assumed, because a cluster file needs
it, and every assumption stands in the text (ASSUMED) and is told; measured bandwidths override
nominal ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from claw_plan.profiles import catalogue
from claw_plan.profiles.cluster_file import cluster_from_mapping
from claw_plan.profiles.device_names import catalogue_name
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.topology import measured
from claw_plan.profiles.topology.node_links import intra_of, nics_of
from claw_plan.profiles.topology.reading import Host, Rate, Reading, is_nvlink

_ASSUMED_BY_LINKS = {
    "NV18": "h100-sxm-80gb",
    "NV12": "a100-sxm-80gb",
    "NV6": "v100-sxm-32gb",
    "NV2": "v100-sxm-32gb",
    "NV1": "v100-sxm-32gb",
    "XGMI": "mi300x",
}
"""The commonest device whose pairs have so many NVLinks; the first that occurs is taken."""

_ASSUMED_NVLINK = "a100-sxm-40gb"
_ASSUMED_WITHOUT = "l4"
"""The smallest device of the catalogue that computes in bf16: a plan for it fits others too."""


@dataclass
class ClusterText:
    """Content of a cluster file, what was assumed for it, and what is suspicious.

    `doubts` are the readings' own warnings, which the file repeats.
    """

    content: dict[str, Any]
    assumed: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    read: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)

    def text(self) -> str:
        """The file, with its assumptions as comments above."""
        lines = [f"# Read by claw-plan topology: {_one_line(text)}" for text in self.read]
        lines += [f"# ASSUMED: {_one_line(text)}" for text in self.assumed]
        lines += [f"# SUSPICIOUS: {_one_line(text)}" for text in (*self.doubts, *self.warnings)]
        body = yaml.safe_dump(
            self.content, sort_keys=False, allow_unicode=True, width=100, default_flow_style=None
        )
        return "\n".join(lines) + "\n" + body


def _one_line(text: str) -> str:
    return " ".join(text.split())


def make_cluster(
    readings: Sequence[Reading],
    *,
    gpu: str | None = None,
    gpus_per_node: int | None = None,
    nic: str | None = None,
) -> ClusterText:
    """The cluster that the files describe together.

    `gpu`, `gpus_per_node` and `nic` (names of the catalogue) answer what no file says. Raises
    InputError when the number of GPUs is nowhere, or when an answer is no known name.
    """
    if gpu is not None and catalogue_name(gpu) is None:
        catalogue.device(gpu)  # raises InputError with near matches
    if nic is not None:
        catalogue.link(nic)
    machines = [r for r in readings if r.pairs or r.draft or _has_paths(r)]
    if not machines:
        machines = [r for r in readings if r.gpu_count] or list(readings)
        machines = machines[:1]
    hosts = next((r.hosts for r in readings if r.hosts and r not in machines), ())
    hosts = hosts or next((r.hosts for r in readings if r.hosts), ())
    rates = [rate for reading in readings for rate in reading.rates]
    names = dict.fromkeys(reading.source for reading in readings)
    result = ClusterText({"name": next(iter(names)), "nodes": []}, read=list(names))
    several = len(machines) > 1
    for machine in machines:
        maker = _NodeMaker(result, machine, gpu, nic, rates)
        count = 1 if several else _node_count(readings, hosts)
        for number, gpus in _groups(machine, hosts, several, gpus_per_node, count, result):
            result.content["nodes"] += maker.entries(
                number, gpus, several or number > 1 or len(hosts) > 1
            )
    result.warnings += _contradictions(machines, readings)
    result.doubts = [text for reading in readings for text in reading.warnings]
    result.assumed = list(dict.fromkeys(result.assumed))
    result.warnings = list(dict.fromkeys(result.warnings))
    cluster_from_mapping(result.content, "the cluster of " + ", ".join(names))
    return result


def _contradictions(machines: Sequence[Reading], readings: Sequence[Reading]) -> list[str]:
    """Files that give another number of GPUs than the one machine that is described."""
    if len(machines) != 1 or machines[0].gpu_count is None:
        return []
    machine = machines[0]
    return [
        f"{machine.source} shows {machine.gpu_count} GPUs, {other.source} {other.gpu_count}: are "
        "they the same machine?"
        for other in readings
        if other is not machine and not other.hosts and other.gpu_count is not None
        if other.gpu_count != machine.gpu_count
    ]


def _has_paths(reading: Reading) -> bool:
    return any(nic.to_gpus for nic in reading.nics.values())


def _node_count(readings: Sequence[Reading], hosts: Sequence[Host]) -> int:
    return len(hosts) or max((r.node_count or 1 for r in readings), default=1)


def _groups(
    machine: Reading,
    hosts: Sequence[Host],
    several: bool,
    gpus_per_node: int | None,
    count: int,
    result: ClusterText,
) -> list[tuple[int, int]]:
    """Number of nodes and GPUs of each; hosts that have unequal slots become several groups."""
    slots = [host.gpus for host in hosts] if not several else []
    own = machine.gpu_count
    if own and not machine.hosts and any(slot not in (None, own) for slot in slots):
        text = ", ".join(str(slot) for slot in slots[:6])
        result.warnings.append(
            f"{machine.source} shows {own} GPUs, the hosts have {text} slots: the slots are taken"
        )
    known = [slot or gpus_per_node or own for slot in slots] or [own or gpus_per_node] * count
    groups: list[tuple[int, int]] = []
    for number in known:
        if number is None:
            raise InputError(
                f"{machine.source}: the GPUs of a node are in no file; give --gpus-per-node N, or "
                "the output of `nvidia-smi topo -m` as another file"
            )
        if groups and groups[-1][1] == number:
            groups[-1] = (groups[-1][0] + 1, number)
        else:
            groups.append((1, number))
    return groups


class _NodeMaker:
    """Makes entries of `nodes:` of one machine."""

    def __init__(
        self,
        result: ClusterText,
        machine: Reading,
        gpu: str | None,
        nic: str | None,
        rates: Sequence[Rate],
    ) -> None:
        self._result = result
        self._machine = machine
        self._gpu = gpu
        self._nic = nic
        self._rates = rates

    def entries(self, count: int, gpus: int, networked: bool) -> list[dict[str, Any]]:
        """One entry, or one for each kind of GPU that the machine mixes."""
        types = self._machine.gpu_types if self._gpu is None else ()
        kinds = list(dict.fromkeys(types))
        if len(kinds) > 1 and len(types) == gpus:
            self._result.assumed.append(
                f"{self._machine.source} mixes {', '.join(kinds)}: one entry a kind, joined as if "
                "by a network card of the host's PCIe"
            )
            nics = {"type": "pcie4-x16", "count": 1}
            parts = [self._entry(count, types.count(kind), kind, True) for kind in kinds]
            return [part | {"nics": nics} for part in parts]
        return [self._entry(count, gpus, kinds[0] if kinds else "", networked)]

    def _entry(self, count: int, gpus: int, kind: str, networked: bool) -> dict[str, Any]:
        draft: Mapping[str, Any] = self._machine.draft or {}
        devices = dict(draft.get("devices", {}))
        if not devices or self._gpu is not None:
            devices = {"type": self._device(kind), "count": gpus}
        devices["count"] = gpus
        device = str(devices["type"])
        whole = gpus == self._machine.gpu_count
        if not whole and self._machine.pairs:
            self._result.assumed.append(
                f"which {gpus} of the GPUs of {self._machine.source} these are is in no file, so "
                "its links between GPUs are not used"
            )
        intra = dict(draft.get("intra", {})) or intra_of(
            self._machine if whole else None, device, gpus, self._result.assumed
        )
        entry: dict[str, Any] = {"count": count, "devices": devices, "intra": intra}
        nics = dict(draft.get("nics", {})) or nics_of(
            self._machine, self._nic, networked, gpus, self._result.assumed
        )
        if nics:
            entry["nics"] = nics
        self._result.warnings += measured.apply(entry, self._rates)
        return entry

    def _device(self, kind: str) -> str:
        if self._gpu is not None:
            return catalogue_name(self._gpu) or self._gpu
        if kind and (name := catalogue_name(kind)):
            return name
        guess = _guess(self._machine.pairs)
        why = f"the catalogue has no {kind!r}" if kind else "no file names the GPUs"
        self._result.assumed.append(f"the GPUs are {guess}: {why}; say which with --gpu TYPE")
        return guess


def _guess(kinds: Iterable[str]) -> str:
    """The device to assume for these path kinds."""
    found = [device for kind, device in _ASSUMED_BY_LINKS.items() if kind in kinds]
    if found:
        return found[0]
    return _ASSUMED_NVLINK if any(is_nvlink(kind) for kind in kinds) else _ASSUMED_WITHOUT

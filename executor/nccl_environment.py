"""The environment variables that NCCL, gloo and torch read, chosen from the cluster.

Only the names of `ALLOWED` are ever set, each with its reason. What the user has set stays as it
is, and is said. All of it is written into the run's folder.

Sources: NCCL's 'Environment Variables' page; torch's ProcessGroupNCCL.hpp and FlightRecorder.hpp;
libfabric's fi_efa(7); torch.distributed's page, 'Common environment variables', for gloo.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from claw_plan.profiles.cluster import Cluster
from claw_plan.profiles.files import write_atomic

try:
    import fcntl
except ImportError:  # not a Unix: interfaces stay unknown
    fcntl = None  # type: ignore[assignment]

ENVIRONMENT_FILE = "environment.json"

ALLOWED = (
    "OMP_NUM_THREADS",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_P2P_DISABLE",
    "FI_PROVIDER",
    "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_FR_DUMP_TEMP_FILE",
)

MISTAKEN = {
    "NCCL_ASYNC_ERROR_HANDLING": "is torch's, TORCH_NCCL_ASYNC_ERROR_HANDLING, and on by default",
    "NCCL_BLOCKING_WAIT": "is torch's, TORCH_NCCL_BLOCKING_WAIT",
    "NCCL_DESYNC_DEBUG": "is torch's, TORCH_NCCL_DESYNC_DEBUG",
    "NCCL_RING_ALGO": "does not exist; NCCL_ALGO=Ring does",
    "NCCL_TREE_ALGO": "does not exist; NCCL_ALGO=Tree does",
    "NCCL_MIN_NRINGS": "is the old name of NCCL_MIN_NCHANNELS",
    "NCCL_MAX_NRINGS": "is the old name of NCCL_MAX_NCHANNELS",
}
"""Names that articles give and NCCL does not read, or reads under another."""

NUMBERS = ("NCCL_BUFFSIZE", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_NTHREADS")
"""Plain numbers: NCCL takes '2MB' for 2."""

SHARED_PREFIXES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "UCX_", "FI_")
"""What must be equal on all ranks, or they talk past each other."""

OF_A_HOST = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "NCCL_TOPO_FILE")
"""But for these, which name a host's own parts."""

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of <linux/sockios.h>


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One variable. `set_by` is 'claw-plan' or 'the user'."""

    name: str
    value: str
    reason: str
    set_by: str = "claw-plan"

    def __str__(self) -> str:
        return f"{self.name}={self.value} ({self.set_by}): {self.reason}"


def choose(
    cluster: Cluster,
    *,
    hosts: int,
    interface: str | None,
    folder: Path,
    environment: Mapping[str, str] = os.environ,
) -> list[Setting]:
    """The settings for ranks on so many hosts of the cluster, the user's own among them.

    `interface` is the one that leads to the other ranks, None where it is not known.
    """
    chosen = _of_any(hosts, interface)
    if cluster.backend == "nccl":
        chosen += _of_nccl(cluster, hosts, interface, folder)
    return [_unless_set(setting, environment) for setting in chosen]


def local_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What processes of this machine need to talk to each other on its CPUs."""
    settings = _of_any(1, loopback())
    return {s.name: s.value for s in (_unless_set(one, environment) for one in settings)}


def _of_any(hosts: int, interface: str | None) -> list[Setting]:
    found = [_setting("OMP_NUM_THREADS", "1", "ranks of one host share its cores")]
    if interface is not None:
        here = "all ranks are on this machine"
        why = here if hosts == 1 else "this interface leads to rank 0's host"
        found.append(_setting("GLOO_SOCKET_IFNAME", interface, why))
    return found


def _of_nccl(cluster: Cluster, hosts: int, interface: str | None, folder: Path) -> list[Setting]:
    found = []
    if hosts > 1 and interface is not None:
        why = "NCCL's own choice may be a slower card; RDMA is not concerned"
        found.append(_setting("NCCL_SOCKET_IFNAME", interface, why))
    if not all(node.device.peer_to_peer for node in cluster.nodes):
        why = f"{cluster.nodes[0].device.name}s have no peer-to-peer; shared memory is used"
        found.append(_setting("NCCL_P2P_DISABLE", "1", why))
    if hosts > 1 and cluster.nodes[0].nic.name.startswith("efa"):
        why = "without it libfabric may fall back to TCP on AWS"
        found.append(_setting("FI_PROVIDER", "efa", why))
    why = "when ranks wait too long for each other, the collective of each is written down"
    return [
        *found,
        _setting("TORCH_NCCL_DUMP_ON_TIMEOUT", "1", why),
        _setting("TORCH_FR_DUMP_TEMP_FILE", str(folder / "collectives_"), "where that goes"),
    ]


def _setting(name: str, value: str, reason: str) -> Setting:
    assert name in ALLOWED
    return Setting(name=name, value=value, reason=reason)


def _unless_set(setting: Setting, environment: Mapping[str, str]) -> Setting:
    theirs = environment.get(setting.name)
    if theirs is None or theirs == setting.value:
        return setting
    reason = f"set already, so it stays; the plan would have {setting.value}: {setting.reason}"
    return Setting(name=setting.name, value=theirs, reason=reason, set_by="the user")


def mistakes(environment: Mapping[str, str] = os.environ) -> list[str]:
    """What the user's own variables say that NCCL will not understand."""
    found = [f"{name} {why}" for name, why in MISTAKEN.items() if name in environment]
    for name in NUMBERS:
        value = environment.get(name, "0")
        if not value.isdecimal():
            found.append(f"{name} must be a plain number; got {value[:40]!r}")
    return found


def shared_settings(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variables that must be equal on all ranks."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if name.startswith(SHARED_PREFIXES) and name not in OF_A_HOST
    }


def apply(settings: Sequence[Setting]) -> None:
    """Makes them this process's own."""
    os.environ.update({setting.name: setting.value for setting in settings})


def write_environment(folder: Path, settings: Sequence[Setting]) -> None:
    """Leaves them in the run's folder."""
    values = [dataclasses.asdict(setting) for setting in settings]
    write_atomic(folder / ENVIRONMENT_FILE, json.dumps(values, indent=1))


def read_environment(folder: Path) -> list[Setting]:
    """What `write_environment` left."""
    values = json.loads((folder / ENVIRONMENT_FILE).read_text())
    return [Setting(**value) for value in values]


def loopback() -> str | None:
    """The interface over which processes of one machine talk."""
    return "lo" if any(name == "lo" for _, name in socket.if_nameindex()) else None


def own_address_towards(host: str) -> str | None:
    """This machine's address in the network that leads to `host`; None where none does."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # of a datagram socket: nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        return None


def interface_towards(host: str) -> str | None:
    """The interface that leads to `host`; None where that cannot be found out."""
    address = own_address_towards(host)
    if address is None or fcntl is None:
        return None
    for _, name in socket.if_nameindex():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)
            except OSError:  # it has no address
                continue
        if socket.inet_ntoa(answer[20:24]) == address:
            return name
    return None

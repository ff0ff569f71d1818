"""Hosts with links of any rate and delay, on one Linux machine: network namespaces and a switch.

    with Hosts([Port(bits_per_s=200_000_000, delay_ns=1_000_000)] * 2) as hosts:
        hosts.run(["claw-plan", "run", "plan.yaml"], ranks_per_host=2)

Needs root, `ip` and /dev/net/tun. A keeper (this file as a program) makes the namespaces, is the
switch, and takes everything down when the pipe from its maker closes: at the end of the `with`
block, and also when the maker was killed outright.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from types import TracebackType

from switch import Port, Switch, compile_forward, forward, open_tun

SUBNET = "10.79.0"
DEVICE = "eth0"
MTU, SEGMENT = 9000, 65_000
"""Bytes of a packet: jumbo frames, and what a host with segmentation offload hands to its NIC.
The switch takes 50 us of a processor for either, some of it from whoever computes there."""

PORT = 29577
PATIENCE_S = 5.0
"""How long the processes of a host have after SIGTERM."""


@dataclass(slots=True)
class Hosts:
    """As many hosts as ports, while the `with` block runs; packets have at most `mtu` bytes."""

    ports: Sequence[Port]
    mtu: int = MTU
    names: list[str] = field(init=False)
    _keeper: subprocess.Popen[str] = field(init=False)

    def __enter__(self) -> Hosts:
        self.names = [f"claw{os.getpid()}h{host}" for host in range(len(self.ports))]
        ports = [asdict(port) for port in self.ports]
        about = json.dumps({"names": self.names, "mtu": self.mtu, "ports": ports})
        self._keeper = subprocess.Popen(
            [sys.executable, __file__, about],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the maker
        )
        assert self._keeper.stdout is not None
        if not self._keeper.stdout.readline():
            self.__exit__(None, None, None)
            raise OSError("no hosts: namespaces and TUN devices need root, ip and /dev/net/tun")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._keeper.communicate()  # closes its stdin

    def run(self, command: Sequence[str], ranks_per_host: int, hosts: int | None = None) -> None:
        """The command as every rank of the first `hosts`; None: of all.

        Raises SystemExit when one fails, which ends the others.
        """
        world = ranks_per_host * (hosts or len(self.names))
        ranks = [
            subprocess.Popen(
                [*_inside(self.names, rank // ranks_per_host), *command],
                env=os.environ | _environment(rank, world, ranks_per_host),
                stdout=subprocess.DEVNULL if rank else None,
            )
            for rank in range(world)
        ]
        try:
            while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
                time.sleep(0.1)
        finally:
            for rank in ranks:
                rank.kill()
            codes = [rank.wait() for rank in ranks]
        if any(codes):
            raise SystemExit(f"the ranks ended with {codes}")

    def change(self, host: int, port: Port) -> None:
        """Gives a host another link, from the next packet on."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.write(json.dumps({"host": host} | asdict(port)) + "\n")
        self._keeper.stdin.flush()

    def sent(self, host: int) -> tuple[int, int]:
        """Bytes (with IP and TCP headers) and packets that left the host so far."""
        folder = f"/sys/class/net/{DEVICE}/statistics"
        out = subprocess.run(
            ["ip", "netns", "exec", self.names[host], "cat"]
            + [f"{folder}/{name}" for name in ("tx_bytes", "tx_packets")],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()
        return int(out[0]), int(out[1])


def _inside(names: Sequence[str], host: int) -> list[str]:
    """In the host's network, on its core, and under its name, by which programs tell hosts apart.

    A host keeps to one core: otherwise its ranks would take those of hosts that wait.
    """
    core = host % (os.cpu_count() or 1)
    named = ("unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', names[host])
    return ["ip", "netns", "exec", names[host], "taskset", "-c", str(core), *named]


def _environment(rank: int, world: int, ranks_per_host: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank % ranks_per_host),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "GROUP_RANK": str(rank // ranks_per_host),
        "MASTER_ADDR": f"{SUBNET}.1",
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": DEVICE,
        "OMP_NUM_THREADS": "1",
    }


def _keep(names: Sequence[str], mtu: int, ports: Sequence[Port]) -> None:
    """The keeper: hosts that last as long as its stdin is open."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        tuns = [_make(name, host, mtu) for host, name in enumerate(names)]
        compile_forward()
        print("ready", flush=True)
        switch, told = Switch(ports), os.fdopen(sys.stdin.fileno(), "rb", buffering=0)
        while True:
            forward(switch, tuns, told.fileno())
            if not (line := told.readline()):
                break
            change = json.loads(line)
            switch.change(change.pop("host"), Port(**change))
        if switch.lost:
            print(f"the switch lost {switch.lost} packets", file=sys.stderr)
    finally:
        for name in names:
            _end_processes(name)
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _make(name: str, host: int, mtu: int) -> int:
    _call("ip", "netns", "add", name)
    inside = ("ip", "netns", "exec", name)
    _call(*inside, "sh", "-c", "echo 1 > /proc/sys/net/ipv6/conf/default/disable_ipv6")
    tun = open_tun(name, DEVICE)
    _call(*inside, "ip", "link", "set", "lo", "up")
    _call(*inside, "ip", "addr", "add", f"{SUBNET}.{host + 1}/24", "dev", DEVICE)
    _call(*inside, "ip", "link", "set", DEVICE, "mtu", str(mtu), "txqueuelen", "5000", "up")
    return tun


def _call(*command: str) -> None:
    subprocess.run(command, check=True)


def _end_processes(name: str) -> None:
    """Whatever runs inside a namespace made here was started here."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + PATIENCE_S
        told: set[int] = set()
        while (inside := _processes(name)) and time.monotonic() < deadline:
            for process in inside - told:
                try:
                    os.kill(process, number)
                except ProcessLookupError:  # it has ended meanwhile
                    pass
            told |= inside
            time.sleep(0.05)


def _processes(name: str) -> set[int]:
    done = subprocess.run(
        ["ip", "netns", "pids", name], check=False, capture_output=True, text=True
    )
    return {int(process) for process in done.stdout.split()}


if __name__ == "__main__":
    described = json.loads(sys.argv[1])
    ports = [Port(**port) for port in described["ports"]]
    _keep(described["names"], described["mtu"], ports)

"""The shaped hosts of bench/shaped: the switch's times, and that nothing of a host stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "shaped"
sys.path.insert(0, str(FOLDER))
from hosts import SUBNET, Hosts  # noqa: E402
from switch import Port, Switch  # noqa: E402

MS = 1_000_000
PORT = Port(bits_per_s=200_000_000, delay_ns=1 * MS)


def arrivals(switch: Switch) -> list[tuple[int, int]]:
    """(host, time) of all packets under way."""
    found = []
    while (now_ns := switch.next_ns) is not None:
        found += [(host, now_ns) for host in switch.arrived(now_ns)]
    return found


def test_packets_arrive_after_their_time_on_the_wire_and_both_delays() -> None:
    switch = Switch([PORT, PORT])
    for _ in range(2):
        switch.offer(0, 0, 1, 9000)
    wire_ns = 9000 * 8 * 5  # 200 Mbit/s are 5 ns a bit
    assert arrivals(switch) == [(1, wire_ns + 2 * MS), (1, 2 * wire_ns + 2 * MS)]


def test_two_senders_share_the_receivers_link() -> None:
    switch = Switch([PORT, PORT, PORT])
    for source in (0, 2):
        switch.offer(0, source, 1, 9000)
    assert [when for _, when in arrivals(switch)] == [360_000 + 2 * MS, 720_000 + 2 * MS]


def test_the_slower_link_rules() -> None:
    slow = Port(bits_per_s=50_000_000, delay_ns=3 * MS)
    for ports in ([PORT, slow], [slow, PORT]):
        switch = Switch(ports)
        switch.offer(0, 0, 1, 9000)
        assert arrivals(switch) == [(1, 9000 * 8 * 20 + 4 * MS)]


def test_another_link_counts_from_the_next_packet_on() -> None:
    switch = Switch([PORT, PORT])
    switch.offer(0, 0, 1, 9000)
    switch.change(0, Port(bits_per_s=100_000_000, delay_ns=1 * MS))
    switch.offer(0, 0, 1, 9000)
    wire_ns = 9000 * 8 * 5
    assert arrivals(switch) == [(1, wire_ns + 2 * MS), (1, 3 * wire_ns + 2 * MS)]


def test_a_full_queue_loses_packets() -> None:
    switch = Switch([PORT, PORT])
    for _ in range(467):  # 466 packets of 9000 bytes fit into 4 MiB
        switch.offer(0, 0, 1, 9000)
    assert switch.lost == 1


needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0
    or not Path("/dev/net/tun").exists()
    or subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True).returncode
    != 0,
    reason="network namespaces and TUN devices are not allowed here",
)

SEND = f"""
import os, socket, time
if os.environ["RANK"] == "1":
    server = socket.create_server(("{SUBNET}.2", 5000))
    peer, _ = server.accept()
    while peer.recv(65536): pass
else:
    for _ in range(100):
        try:
            peer = socket.create_connection(("{SUBNET}.2", 5000))
            break
        except ConnectionError:
            time.sleep(0.05)
    peer.sendall(bytes(1_000_000))
"""
HOLD = """
import sys
from hosts import Hosts
from switch import Port
with Hosts([Port(bits_per_s=10**8, delay_ns=0)] * 2) as hosts:
    print(*hosts.names, flush=True)
    hosts.run(["sleep", "100"], 2)
"""


def namespaces() -> str:
    return subprocess.run(
        ["ip", "netns", "list"], check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.slow
@needs_namespaces
def test_the_interface_counts_the_payload_and_52_bytes_of_headers_a_packet() -> None:
    with Hosts([PORT, PORT]) as hosts:
        hosts.run([sys.executable, "-c", SEND], 1)
        sent_bytes, packets = hosts.sent(0)
        names = hosts.names
    # IPv4 20, TCP 20, timestamps 12 bytes; a SYN carries 8 more.
    assert 0 <= sent_bytes - 1_000_000 - 52 * packets <= 8 * 100
    assert not any(name in namespaces() for name in names)


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_stays_however_the_maker_ends(number: signal.Signals) -> None:
    maker = subprocess.Popen(
        [sys.executable, "-c", HOLD], cwd=FOLDER, stdout=subprocess.PIPE, text=True
    )
    assert maker.stdout is not None
    names = maker.stdout.readline().split()
    assert len(names) == 2
    maker.send_signal(number)
    maker.wait()
    deadline = time.monotonic() + 60
    while any(name in namespaces() for name in names) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(name in namespaces() for name in names)


@pytest.mark.slow
@needs_namespaces
def test_ranks_see_the_name_of_their_host_and_only_those_of_chosen_hosts_run(
    tmp_path: Path,
) -> None:
    with Hosts([PORT, PORT, PORT]) as hosts:
        hosts.run(["sh", "-c", f"hostname > {tmp_path}/$RANK-of-$WORLD_SIZE"], 2, hosts=2)
        names = hosts.names
    found = {path.name: path.read_text().strip() for path in tmp_path.iterdir()}
    assert found == {f"{rank}-of-4": names[rank // 2] for rank in range(4)}


@pytest.mark.slow
@needs_namespaces
def test_a_rank_that_fails_ends_the_others() -> None:
    with Hosts([PORT, PORT]) as hosts, pytest.raises(SystemExit, match="ended with"):
        hosts.run(["sh", "-c", "test $RANK = 1 && exit 7; sleep 100"], 2)

"""Packets of TUN devices become packets that took time: each link's rate, queue and delay.

Every host has one link to the switch. A packet leaves at its host's rate, travels the sum of both
hosts' delays, and arrives at the receiver's rate; what a full queue cannot hold is lost, as on a
wire. `Switch` is the arithmetic alone, `forward` the loop that moves real packets by it.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
PR_SET_TIMERSLACK = 29
"""Of linux/sched.h, linux/if_tun.h and linux/prctl.h."""

NS_PER_S = 1_000_000_000
QUEUE_BYTES = 4 << 20
"""Of each link and direction: more than gloo's sockets have under way."""

PRIORITY = 50
"""Of the threads in which Linux handles interrupts (kernel/irq/manage.c)."""

READS = 64
"""Packets taken from one device before the clock is looked at again."""

_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A host's link: the same rate both ways, and its delay to the switch one way."""

    bits_per_s: int
    delay_ns: int

    def wire_ns(self, size: int) -> int:
        """How long the link is taken by so many bytes."""
        return size * 8 * NS_PER_S // self.bits_per_s


@dataclass(slots=True)
class _Queue:
    free_ns: int = 0
    waiting_bytes: int = 0


@dataclass(slots=True)
class Switch:
    """When packets arrive. `lost` counts those that found a queue full."""

    ports: Sequence[Port]
    lost: int = 0
    _up: list[_Queue] = field(init=False)
    _down: list[_Queue] = field(init=False)
    _events: list[tuple[int, int, bool, int, int, bytes]] = field(default_factory=list)
    _count: int = 0

    def __post_init__(self) -> None:
        self._up = [_Queue() for _ in self.ports]
        self._down = [_Queue() for _ in self.ports]

    @property
    def next_ns(self) -> int | None:
        """When something happens next."""
        return self._events[0][0] if self._events else None

    def offer(self, now_ns: int, source: int, target: int, packet: bytes) -> None:
        """Host `source` sends a packet."""
        queue, port = self._up[source], self.ports[source]
        if not self._takes(queue, packet):
            return
        queue.free_ns = max(queue.free_ns, now_ns) + port.wire_ns(len(packet))
        self._push(queue.free_ns + port.delay_ns, False, source, target, packet)

    def arrived(self, now_ns: int) -> Iterator[tuple[int, bytes]]:
        """(host, packet) of all that has come by now."""
        while self._events and self._events[0][0] <= now_ns:
            when_ns, _, is_down, source, target, packet = heapq.heappop(self._events)
            if is_down:
                self._down[target].waiting_bytes -= len(packet)
                yield target, packet
                continue
            self._up[source].waiting_bytes -= len(packet)
            self._pass_on(when_ns, source, target, packet)

    def _pass_on(self, when_ns: int, source: int, target: int, packet: bytes) -> None:
        """The switch cuts through: two equal links in a row take a packet's time once."""
        queue, port = self._down[target], self.ports[target]
        if not self._takes(queue, packet):
            return
        first_ns = when_ns - self.ports[source].wire_ns(len(packet))
        last_ns = max(queue.free_ns, first_ns) + port.wire_ns(len(packet))
        queue.free_ns = max(last_ns, when_ns)
        self._push(queue.free_ns + port.delay_ns, True, source, target, packet)

    def _takes(self, queue: _Queue, packet: bytes) -> bool:
        if queue.waiting_bytes + len(packet) > QUEUE_BYTES:
            self.lost += 1
            return False
        queue.waiting_bytes += len(packet)
        return True

    def _push(self, when_ns: int, is_down: bool, source: int, target: int, packet: bytes) -> None:
        self._count += 1  # packets of one moment keep their order
        heapq.heappush(self._events, (when_ns, self._count, is_down, source, target, packet))


def open_tun(namespace: str, name: str) -> int:
    """A TUN device inside the namespace; its descriptor serves from anywhere."""
    here = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        _enter(there)
        try:
            tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            request = struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI)
            fcntl.ioctl(tun, TUNSETIFF, request)
        finally:
            _enter(here)
    finally:
        os.close(here)
        os.close(there)
    return tun


def _enter(namespace: int) -> None:
    if _LIBC.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def forward(tuns: Sequence[int], ports: Sequence[Port], until: int) -> Switch:
    """Moves packets until descriptor `until` can be read or its other end is closed."""
    # The default slack of 50 us would come on top of every delay.
    _LIBC.prctl(PR_SET_TIMERSLACK, 1)
    _go_first()
    switch = Switch(ports)
    host_of = {tun: host for host, tun in enumerate(tuns)}
    while True:
        due_ns = switch.next_ns
        wait_s = None if due_ns is None else max(0, due_ns - time.monotonic_ns()) / NS_PER_S
        # select and not epoll, which waits whole milliseconds
        ready = select.select([*tuns, until], (), (), wait_s)[0]
        if until in ready:
            return switch
        for tun in ready:
            for packet in _packets(tun):
                target = _target(packet)
                if 0 <= target < len(tuns):
                    switch.offer(time.monotonic_ns(), host_of[tun], target, packet)
        for host, packet in switch.arrived(time.monotonic_ns()):
            try:
                os.write(tuns[host], packet)
            except OSError:  # the device is full or down: the packet is lost
                switch.lost += 1


def _go_first() -> None:
    """No wire waits for a processor: the switch runs before all that shares the machine.

    Also before hosts that themselves run in real time, at its lowest priorities.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    except PermissionError:  # links are then slower than they should be on a busy machine
        pass


def _packets(tun: int) -> Iterator[bytes]:
    for _ in range(READS):
        try:
            yield os.read(tun, 65536)
        except BlockingIOError:
            return


def _target(packet: bytes) -> int:
    """The host of an IPv4 packet: its address ends with the host's number from 1; -1 if other."""
    return packet[19] - 1 if packet[0] >> 4 == 4 else -1

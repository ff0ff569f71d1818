"""Packets of TUN devices become packets that took time: each link's rate, queue and delay.

Every host has one link to the switch. A packet leaves at its host's rate, travels the sum of both
hosts' delays, and arrives at the receiver's rate; what a full queue cannot hold is lost, as on a
wire. `Switch` is the arithmetic alone, `forward` the loop that moves real packets by it.

Both are compiled: a wire takes no processor, and this one, which runs on the cores that compute,
takes little (in Python it took 50 us a packet, a quarter of the steps of a model that sends much).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numba
import numpy as np
from numba import types

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
PR_SET_TIMERSLACK = 29
CLOCK_MONOTONIC, POLLIN = 1, 1
"""Of linux/sched.h, linux/if_tun.h, linux/prctl.h, linux/time.h and poll.h."""

NS_PER_S = 1_000_000_000
QUEUE_BYTES = 4 << 20
"""Of each link and direction: more than gloo's sockets have under way."""

PRIORITY = 50
"""Of the threads in which Linux handles interrupts (kernel/irq/manage.c)."""

READS = 64
"""Packets taken from one device before the clock is looked at again."""

SLOTS = 8192
"""Packets under way at once, over all links; more are lost."""

SLOT_BYTES = 65_536
"""Of the largest packet of IPv4. What no packet has filled takes no memory."""

MODERATION_NS = 50_000
"""What arrives within so long wakes a host once, as NICs do (Linux' driver of Intel's E800 series
waits as long by default); each waking costs the processor as much as moving two packets."""

NEVER_NS = np.iinfo(np.int64).max

_LIBC = ctypes.CDLL(None, use_errno=True)
_read = types.ExternalFunction("read", types.intp(types.int32, types.uintp, types.uintp))
_write = types.ExternalFunction("write", types.intp(types.int32, types.uintp, types.uintp))
_clock = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.uintp))
_poll = types.ExternalFunction(
    "ppoll", types.int32(types.uintp, types.uintp, types.uintp, types.uintp)
)
_compiled: Any = numba.njit(cache=True, nogil=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A host's link: the same rate both ways, and its delay to the switch one way."""

    bits_per_s: int
    delay_ns: int


class State(NamedTuple):
    """Links first the hosts' to the switch, then the switch's to the hosts.

    `due_ns` and `slots` [links, SLOTS] are each link's packets under way: a ring from its `heads`
    that holds `counts`. Of a slot, `sizes`, `sources` and `targets` are its packet's; `free` are
    the first `totals[0]` slots that hold none; `totals[1]` counts the packets lost.
    """

    bits_per_s: Any
    delays_ns: Any
    free_ns: Any
    waiting_bytes: Any
    due_ns: Any
    slots: Any
    heads: Any
    counts: Any
    sizes: Any
    sources: Any
    targets: Any
    free: Any
    totals: Any


def _state(ports: Sequence[Port]) -> State:
    links = 2 * len(ports)

    def zeros(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.int64)

    return State(
        bits_per_s=np.array([port.bits_per_s for port in ports], np.int64),
        delays_ns=np.array([port.delay_ns for port in ports], np.int64),
        free_ns=zeros(links),
        waiting_bytes=zeros(links),
        due_ns=zeros(links, SLOTS),
        slots=zeros(links, SLOTS),
        heads=zeros(links),
        counts=zeros(links),
        sizes=zeros(SLOTS),
        sources=zeros(SLOTS),
        targets=zeros(SLOTS),
        free=np.arange(SLOTS - 1, -1, -1, dtype=np.int64),
        totals=np.array([SLOTS, 0], np.int64),
    )


@_compiled
def _put(state: State, link: int, due_ns: int, slot: int) -> None:
    place = (state.heads[link] + state.counts[link]) % SLOTS
    state.due_ns[link, place], state.slots[link, place] = due_ns, slot
    state.counts[link] += 1
    state.waiting_bytes[link] += state.sizes[slot]


@_compiled
def _take(state: State, link: int) -> int:
    slot = state.slots[link, state.heads[link]]
    state.heads[link] = (state.heads[link] + 1) % SLOTS
    state.counts[link] -= 1
    state.waiting_bytes[link] -= state.sizes[slot]
    return slot


@_compiled
def _lose(state: State, slot: int) -> None:
    state.totals[1] += 1
    _give_back(state, slot)


@_compiled
def _give_back(state: State, slot: int) -> None:
    state.free[state.totals[0]] = slot
    state.totals[0] += 1


@_compiled
def _wire_ns(state: State, host: int, size: int) -> int:
    return size * 8 * NS_PER_S // state.bits_per_s[host]


@_compiled
def _offer(state: State, now_ns: int, slot: int) -> None:
    """The packet of a slot leaves its host, or is lost."""
    source, size = state.sources[slot], state.sizes[slot]
    if state.waiting_bytes[source] + size > QUEUE_BYTES:
        _lose(state, slot)
        return
    state.free_ns[source] = max(state.free_ns[source], now_ns) + _wire_ns(state, source, size)
    _put(state, source, state.free_ns[source] + state.delays_ns[source], slot)


@_compiled
def _pass_on(state: State, when_ns: int, slot: int) -> None:
    """The switch cuts through: two equal links in a row take a packet's time once."""
    source, target, size = state.sources[slot], state.targets[slot], state.sizes[slot]
    link = len(state.bits_per_s) + target
    if state.waiting_bytes[link] + size > QUEUE_BYTES:
        _lose(state, slot)
        return
    first_ns = when_ns - _wire_ns(state, source, size)
    last_ns = max(state.free_ns[link], first_ns) + _wire_ns(state, target, size)
    state.free_ns[link] = max(last_ns, when_ns)
    _put(state, link, state.free_ns[link] + state.delays_ns[target], slot)


@_compiled
def _next(state: State) -> tuple[int, int]:
    """When something happens next, and on which link."""
    first_ns, link = NEVER_NS, 0
    for one in range(len(state.heads)):
        if state.counts[one] and state.due_ns[one, state.heads[one]] < first_ns:
            first_ns, link = state.due_ns[one, state.heads[one]], one
    return first_ns, link


@_compiled
def _arrived(state: State, now_ns: int) -> int:
    """The slot of a packet that has come to its host by now, -1 for none."""
    while True:
        when_ns, link = _next(state)
        if when_ns > now_ns:
            return -1
        slot = _take(state, link)
        if link >= len(state.bits_per_s):
            return slot
        _pass_on(state, when_ns, slot)


class Switch:
    """When packets arrive."""

    def __init__(self, ports: Sequence[Port]) -> None:
        self.state = _state(ports)
        self.packets = np.empty((SLOTS, SLOT_BYTES), np.uint8)

    @property
    def lost(self) -> int:
        """Packets that found a queue full."""
        return int(self.state.totals[1])

    @property
    def next_ns(self) -> int | None:
        """When something happens next."""
        when_ns, _ = _next(self.state)
        return None if when_ns == NEVER_NS else int(when_ns)

    def change(self, host: int, port: Port) -> None:
        """Packets that host sends or gets from now on take the time of another link."""
        self.state.bits_per_s[host] = port.bits_per_s
        self.state.delays_ns[host] = port.delay_ns

    def offer(self, now_ns: int, source: int, target: int, size: int) -> None:
        """Host `source` sends a packet of so many bytes."""
        self.state.totals[0] -= 1
        slot = self.state.free[self.state.totals[0]]
        self.state.sizes[slot] = size
        self.state.sources[slot], self.state.targets[slot] = source, target
        _offer(self.state, now_ns, slot)

    def arrived(self, now_ns: int) -> list[int]:
        """The hosts of all packets that have come by now."""
        hosts = []
        while (slot := _arrived(self.state, now_ns)) >= 0:
            hosts.append(int(self.state.targets[slot]))
            _give_back(self.state, slot)
        return hosts


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


def forward(switch: Switch, tuns: Sequence[int], until: int) -> None:
    """Moves packets between TUN devices, by host, until descriptor `until` can be read.

    Or until its other end is closed. It may be called again, and then goes on from there.
    """
    # The default slack of 50 us would come on top of every delay.
    _LIBC.prctl(PR_SET_TIMERSLACK, 1)
    _go_first()
    _run(switch, tuns, until)


def compile_forward() -> None:
    """Before the first packet, which would wait for it otherwise."""
    ready, other_end = os.pipe()
    os.close(other_end)
    _run(Switch(()), (), ready)
    os.close(ready)


def _run(switch: Switch, tuns: Sequence[int], until: int) -> None:
    polled = np.array([[number, POLLIN] for number in (*tuns, until)], np.int32)
    _forward(switch.state, polled, switch.packets, np.zeros(2, np.int64))


@_compiled
def _now_ns(spec: Any) -> int:
    """`spec` is a timespec, two int64."""
    _clock(CLOCK_MONOTONIC, spec.ctypes.data)
    return spec[0] * NS_PER_S + spec[1]


@_compiled
def _forward(state: State, polled: Any, packets: Any, spec: Any) -> None:
    """`polled` are struct pollfd: a descriptor, and what is asked (16 bits) and answered."""
    hosts = len(polled) - 1
    tuns = polled[:hosts, 0].copy()
    while True:
        _deliver(state, tuns, packets, _now_ns(spec))
        for host in range(hosts):  # answers to what was delivered are there already
            _receive(state, host, tuns[host], packets, spec)
        now_ns = _now_ns(spec)
        wake_ns = _wake_ns(state)
        for host in range(hosts):
            # What comes while the link is taken leaves as early if it is seen when that ends.
            is_taken = state.free_ns[host] > now_ns
            polled[host, 0] = -1 if is_taken else tuns[host]
            if is_taken:
                wake_ns = min(wake_ns, state.free_ns[host])
        timeout = 0
        if wake_ns != NEVER_NS:
            wait_ns = max(0, wake_ns - now_ns)
            spec[0], spec[1] = wait_ns // NS_PER_S, wait_ns % NS_PER_S
            timeout = spec.ctypes.data
        _poll(polled.ctypes.data, hosts + 1, timeout, 0)
        if polled[hosts, 1] >> 16:
            return


@_compiled
def _wake_ns(state: State) -> int:
    """When the next packet may have come to its host; what is to be passed on can wait until then.

    A packet on its way to the switch needs its receiver's delay at least from there.
    """
    hosts, wake_ns = len(state.bits_per_s), NEVER_NS
    for link in range(2 * hosts):
        if state.counts[link]:
            due_ns, slot = (
                state.due_ns[link, state.heads[link]],
                state.slots[link, state.heads[link]],
            )
            beyond_ns = state.delays_ns[state.targets[slot]] if link < hosts else 0
            wake_ns = min(wake_ns, due_ns + beyond_ns + MODERATION_NS)
    return wake_ns


@_compiled
def _deliver(state: State, tuns: Any, packets: Any, now_ns: int) -> None:
    while True:
        slot = _arrived(state, now_ns)
        if slot < 0:
            return
        size = state.sizes[slot]
        # A device that is full or down loses the packet.
        state.totals[1] += (
            _write(tuns[state.targets[slot]], packets[slot].ctypes.data, size) != size
        )
        _give_back(state, slot)


@_compiled
def _receive(state: State, host: int, tun: int, packets: Any, spec: Any) -> None:
    """Takes what a device has; its IPv4 addresses end with the number of the host from 1."""
    for _ in range(READS):
        if not state.totals[0]:
            return
        slot = state.free[state.totals[0] - 1]
        size = _read(tun, packets[slot].ctypes.data, SLOT_BYTES)
        if size <= 0:
            return
        target = packets[slot, 19] - 1
        if packets[slot, 0] >> 4 == 4 and 0 <= target < len(state.bits_per_s):
            state.totals[0] -= 1
            state.sizes[slot] = size
            state.sources[slot], state.targets[slot] = host, target
            _offer(state, _now_ns(spec), slot)


def _go_first() -> None:
    """No wire waits for a processor: the switch runs before all that shares the machine.

    Also before hosts that themselves run in real time, at its lowest priorities.
    """
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(PRIORITY))
    except PermissionError:  # links are then slower than they should be on a busy machine
        pass

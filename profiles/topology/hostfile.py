"""Hostfiles (DeepSpeed, Open MPI, MPICH, Horovod) to a `Reading` of hosts.

A host without slots has an unknown number of GPUs: it is asked for, never assumed to be one.
Every mistake is an error with its line, because a host that is silently left out makes a run on
fewer machines than its owner pays for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from claw_plan.profiles.errors import InputError, near_matches
from claw_plan.profiles.topology.reading import MAX_GPUS, Host, Reading
from claw_plan.profiles.topology.source import Source, whole_number

FORMAT = "hostfile"
MAX_HOSTS = 100_000

HOST = re.compile(
    r"(?:(?P<user>[A-Za-z_][\w.-]{0,63})@)?"
    r"(?P<name>\[[0-9A-Fa-f:]{2,45}\]|[A-Za-z0-9_](?:[\w.-]{0,252}[A-Za-z0-9_])?)"
    r"(?::(?P<slots>\S{1,40}))?\Z"
)
_KEYS = ("slots", "max_slots", "max-slots", "gpus")
_MANY_SLOTS = 16
"""No server has more GPUs but a DGX-2; more slots are the cores of an MPI hostfile."""


def recognise(source: Source) -> bool:
    """Whether most lines are host names, alone or with key=value behind them."""
    lines = [words for _, words in _entries(source)]
    if not lines or len(lines) > MAX_HOSTS:
        return False
    like = [
        words
        for words in lines
        if HOST.match(words[0]) and (len(words) == 1 or all("=" in word for word in words[1:]))
    ]
    with_slots = any("slots=" in word for words in lines for word in words[1:])
    return bool(like) and (with_slots or 2 * len(like) > len(lines))


def _entries(source: Source) -> list[tuple[int, list[str]]]:
    """Line number and words of every line that is neither blank nor a comment."""
    found = []
    for number, line in enumerate(source.lines, start=1):
        text = "=".join(part.strip() for part in line.split("#", 1)[0].split("="))
        names = text.split(",")
        if len(names) > 1 and not any(" " in name or "=" in name or not name for name in names):
            found += [(number, [name]) for name in names]  # Horovod's  -H node1:8,node2:8
        elif text:
            found.append((number, text.split()))
    return found


def read(source: Source) -> list[Reading]:
    """One Reading. Raises InputError with the line of the first mistake."""
    hosts: list[Host] = []
    lines: dict[str, int] = {}
    for number, words in _entries(source):
        host = _host(source.where(number), words)
        if host.name in lines:
            raise InputError(
                f"{source.where(number)}: the host {host.name} stands already in line "
                f"{lines[host.name]}; name each host once, with all its slots"
            )
        if len(hosts) >= MAX_HOSTS:
            raise InputError(f"{source.where(number)}: more than {MAX_HOSTS} hosts")
        lines[host.name] = number
        hosts.append(host)
    if not hosts:
        raise InputError(f"{source.name} names no host; a line is  node1 slots=8")
    return [hosts_reading(source.name, FORMAT, hosts)]


def hosts_reading(name: str, kind: str, hosts: Sequence[Host]) -> Reading:
    """The Reading of a list of hosts."""
    counts = {host.gpus for host in hosts}
    silent = [host.name for host in hosts if host.gpus is None]
    unknown, warnings = ["the type of the GPUs"], []
    if silent:
        unknown.insert(
            0,
            f"GPUs of {', '.join(silent[:4])}{' and others' if len(silent) > 4 else ''}: no slots "
            "given; give --gpus-per-node N, or write  slots=N",
        )
    elif len(counts) > 1:
        text = ", ".join(f"{host.name} {host.gpus}" for host in hosts[:6])
        warnings.append(f"the hosts have unequal numbers of slots: {text}")
    if any((count or 0) > _MANY_SLOTS for count in counts):
        warnings.append(
            f"more than {_MANY_SLOTS} slots on a host: in MPI hostfiles slots may be CPU cores"
        )
    known = [host.gpus for host in hosts if host.gpus is not None]
    facts = [f"{len(hosts)} hosts"]
    if len(known) == len(hosts):
        facts.append(f"{sum(known)} slots in total")
    same = len(counts) == 1 and None not in counts
    return Reading(
        source=name,
        format=kind,
        gpu_count=known[0] if same else None,
        hosts=tuple(hosts),
        node_count=len(hosts),
        facts=tuple(facts),
        unknown=tuple(unknown),
        warnings=tuple(warnings),
    )


def _host(where: str, words: Sequence[str]) -> Host:
    match = HOST.match(words[0])
    if match is None:
        raise InputError(f"{where}: {words[0][:60]!r} is no host name; a line is  node1 slots=8")
    gpus: int | None = None
    if match["slots"] is not None:
        gpus = _slots(where, match["slots"].split(":")[0])
    for word in words[1:]:
        key, separator, value = word.partition("=")
        if not separator or key not in _KEYS:
            raise InputError(
                f"{where}: {word[:60]!r} is not understood; {near_matches(key[:60], _KEYS)} "
                "(a line is  node1 slots=8)"
            )
        if key in ("slots", "gpus"):
            gpus = _slots(where, value)
    return Host(name=match["name"], gpus=gpus, user=match["user"])


def _slots(where: str, text: str) -> int:
    number = whole_number(text, MAX_GPUS)
    if not number:
        raise InputError(
            f"{where}: slots must be a number from 1 to {MAX_GPUS}; got {text[:40]!r}"
        )
    return number


def select(hosts: Sequence[Host], include: str) -> list[Host]:
    """The hosts and slots that DeepSpeed's --include names: 'node1@node2:0,2'.

    Raises InputError for hosts that are not there, and for slots that a host has not.
    """
    by_name = {host.name: host for host in hosts}
    chosen = []
    for part in include.split("@"):
        name, _, slots = part.strip().partition(":")
        if name not in by_name:
            raise InputError(
                f"--include {include!r}: no host {name!r}; {near_matches(name, by_name)}"
            )
        host = by_name[name]
        if slots:
            numbers = [whole_number(text.strip(), MAX_GPUS) for text in slots.split(",")]
            last = (host.gpus or MAX_GPUS) - 1
            if any(number is None or number > last for number in numbers):
                have = ",".join(str(slot) for slot in range(min(last + 1, 16)))
                raise InputError(f"--include {include!r}: {name} has slots {have}")
            host = Host(name=name, gpus=len(set(numbers)), user=host.user)
        chosen.append(host)
    return chosen

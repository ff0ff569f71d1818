"""Slurm's node lists, job environments and `scontrol show` output to a `Reading` of hosts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.topology.hostfile import MAX_HOSTS, hosts_reading
from claw_plan.profiles.topology.reading import MAX_GPUS, Host, Reading
from claw_plan.profiles.topology.source import Source, whole_number

FORMAT = "Slurm node list"

_VARIABLE = re.compile(r"\b(SLURM_\w{1,60})\s*=\s*['\"]?([^'\"\s;]{0,20000})")
_FIELD = re.compile(r"(?:^|\s)(NodeList|NodeName|Gres|TresPerNode)=(\S{1,20000})")
_GRES = re.compile(r"gpu(?:[:=]([A-Za-z][\w.-]{0,40}))?[:=](\d{1,4})")
_LIST_LINE = re.compile(r"[A-Za-z0-9_][\w.,\[\]-]{0,20000}\Z")
_PART = re.compile(r"[^,\[\]]*(?:\[[^\[\]]*\][^,\[\]]*)*")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?\Z")
_TITLES = {"NODELIST", "HOSTNAMES", "NODES", "PARTITION", "NodeList"}
"""First words of the headings of sinfo and squeue."""

_GPU_VARIABLES = ("SLURM_GPUS_ON_NODE", "SLURM_GPUS_PER_NODE", "SLURM_JOB_GPUS", "SLURM_STEP_GPUS")


def recognise(source: Source) -> bool:
    """Whether node lists with brackets, SLURM_ variables or scontrol's fields stand here."""
    for line in source.lines[:100_000]:
        if _VARIABLE.search(line) or re.search(r"(?:^|\s)(?:NodeList|NodeName)=\S", line):
            return True
        first = line.split("#", 1)[0].split(None, 1)
        if first and "[" in first[0] and _LIST_LINE.match(first[0]):
            return True
    return False


def expand(text: str) -> tuple[str, ...]:
    """'n[1-2],m[08-10]-ib' to host names, leading zeros kept. Raises InputError."""
    if text.count("[") != text.count("]"):
        raise InputError(f"the node list {text[:60]!r} has a bracket that is not closed")
    hosts: list[str] = []
    position = 0
    while position < len(text):
        match = _PART.match(text, position)
        part = match[0] if match else ""
        end = position + len(part)
        if not part or (end < len(text) and text[end] != ","):
            raise InputError(
                f"the node list {text[:60]!r} is not understood at {text[end:][:20]!r}"
            )
        hosts += _expand_part(part, text)
        if len(hosts) > MAX_HOSTS:
            raise InputError(f"the node list {text[:60]!r} names more than {MAX_HOSTS} nodes")
        position = end + 1
    if text.endswith(",") or not hosts:
        raise InputError(f"the node list {text[:60]!r} has an empty name")
    if len(set(hosts)) != len(hosts):
        twice = Counter(hosts).most_common(1)[0][0]
        raise InputError(f"the node list {text[:60]!r} names {twice} twice")
    return tuple(hosts)


def _expand_part(part: str, whole: str) -> list[str]:
    names = [""]
    for index, piece in enumerate(re.split(r"[\[\]]", part)):
        choices = [piece] if index % 2 == 0 else _numbers(piece, whole)
        if len(names) * len(choices) > MAX_HOSTS:
            raise InputError(f"the node list {whole[:60]!r} names more than {MAX_HOSTS} nodes")
        names = [name + choice for name in names for choice in choices]
    return names


def _numbers(text: str, whole: str) -> list[str]:
    found: list[str] = []
    for item in text.split(","):
        match = _RANGE.match(item)
        first = int(match[1]) if match else 1
        last = int(match[2] or match[1]) if match else 0
        if match is None or last < first:
            raise InputError(
                f"the node list {whole[:60]!r}: {item[:20]!r} is no number or range such as 1-4"
            )
        if last - first + len(found) >= MAX_HOSTS:
            raise InputError(f"the node list {whole[:60]!r} names more than {MAX_HOSTS} nodes")
        width = len(match[1])
        found += [f"{number:0{width}d}" for number in range(first, last + 1)]
    return found


def read(source: Source) -> list[Reading]:
    """One Reading; several lists in one file are kept apart in `node_lists`."""
    lists: dict[str, tuple[str, ...]] = {}
    gpus: dict[str, int] = {}
    types: set[str] = set()
    variables: dict[str, str] = {}
    for number, line in enumerate(source.lines, start=1):
        variables |= dict(_VARIABLE.findall(line))
        fields = dict(_FIELD.findall(line))
        named = [fields[key] for key in ("NodeList", "NodeName") if key in fields]
        named += [
            value
            for name, value in _VARIABLE.findall(line)
            if name in ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
        ]
        words = line.split("#", 1)[0].split(None, 1)
        plain = not fields and "=" not in line and bool(words) and words[0] not in _TITLES
        if plain and _LIST_LINE.match(words[0]):
            named.append(words[0])
        for text in named:
            if text not in ("(null)", "None"):
                try:
                    lists[text] = expand(text)
                except InputError as error:
                    raise InputError(f"{source.where(number)}: {error}") from None
        if match := _GRES.search(str(fields.get("Gres", fields.get("TresPerNode", "")))):
            types |= {match[1]} if match[1] else set()
            for host in list(lists.values())[-1] if lists else ():
                gpus[host] = int(match[2])
    return [_reading(source, lists, gpus, types, variables)]


def _reading(
    source: Source,
    lists: Mapping[str, tuple[str, ...]],
    gpus: Mapping[str, int],
    types: set[str],
    variables: Mapping[str, str],
) -> Reading:
    names = list(dict.fromkeys(host for hosts in lists.values() for host in hosts))
    if not names:
        raise InputError(
            f"{source.name}: no node list with a node; print one with  echo $SLURM_JOB_NODELIST"
        )
    common, kind = gpus_per_node(variables)
    hosts = [Host(name=name, gpus=gpus.get(name, common)) for name in names]
    reading = hosts_reading(source.name, FORMAT, hosts)
    warnings, facts = list(reading.warnings), list(reading.facts)
    if len(lists) > 1 and not gpus:
        warnings.append(f"{len(lists)} node lists: of several allocations?")
    told = whole_number(variables.get("SLURM_NNODES", ""), MAX_HOSTS)
    if told is not None and told != len(names):
        warnings.append(f"SLURM_NNODES is {told}, but the node list has {len(names)} nodes")
    types |= {kind} if kind else set()
    if types:
        facts.append(f"Slurm calls the GPUs {', '.join(sorted(types))}")
    return Reading(
        source=source.name,
        format=FORMAT,
        gpu_count=reading.gpu_count,
        gpu_types=(next(iter(types)),) * (reading.gpu_count or 0) if len(types) == 1 else (),
        hosts=tuple(hosts),
        node_count=len(hosts),
        node_lists=dict(lists),
        facts=tuple(facts),
        unknown=reading.unknown,
        warnings=tuple(warnings),
    )


def gpus_per_node(variables: Mapping[str, str]) -> tuple[int | None, str]:
    """GPUs of a node and their type ('' unknown), as a job's environment has them."""
    for name in _GPU_VARIABLES:
        text = variables.get(name, "")
        if "JOB" in name or "STEP" in name:
            items: Sequence[str] = text.split(",") if text else ()
            if items and all(item.isdigit() for item in items):
                return len(items), ""
            continue
        kind, _, number = text.rpartition(":")
        count = whole_number(number, MAX_GPUS)
        if count:
            return count, kind
    return None, ""


def allocation(environment: Mapping[str, str]) -> list[Host]:
    """The hosts of the Slurm job that this process is in; empty outside a job."""
    text = environment.get("SLURM_JOB_NODELIST", environment.get("SLURM_NODELIST", ""))
    if not text:
        return []
    count, _ = gpus_per_node(environment)
    return [Host(name=name, gpus=count) for name in expand(text)]

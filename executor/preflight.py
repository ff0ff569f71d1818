"""Before step 1 all ranks look at themselves, and rank 0 compares: what differs is named by host.

What would make the run wrong or end it later is an error; what makes it slower than predicted is
said and the run goes on. All of it is written to preflight.json in the run's folder.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from claw_plan.executor.detect_cluster import HOST_VARIABLE
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.job import Progress
from claw_plan.executor.link_check import LinkRate, measure_links, slow_links
from claw_plan.executor.nccl_environment import shared_settings
from claw_plan.executor.placement import displaced, nodes_of
from claw_plan.executor.ranks import Rank
from claw_plan.executor.rendezvous import ranks_text
from claw_plan.planner.plan import Plan
from claw_plan.profiles.cluster_file import cluster_from_mapping
from claw_plan.profiles.device_names import catalogue_name
from claw_plan.profiles.files import write_atomic
from claw_plan.profiles.units import format_bytes

PREFLIGHT_FILE = "preflight.json"

_BYTES_PER_PARAMETER = 4
"""Every rank builds the whole model in fp32 on its host before it keeps its part."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One rank about itself. `device_free_bytes` is 0 on a CPU, and `host_free_bytes` where the
    system does not tell.
    """

    rank: int
    host: str
    versions: Mapping[str, str]
    device: str
    device_free_bytes: int
    host_free_bytes: int
    environment: Mapping[str, str]


def facts_of(rank: Rank, model: Path) -> Facts:
    """What this rank finds."""
    is_gpu = rank.device.type == "cuda"
    return Facts(
        rank=rank.rank,
        host=os.environ.get(HOST_VARIABLE) or platform.node(),
        versions={
            "torch": torch.__version__,
            "Python": platform.python_version(),
            "claw-plan": version("claw-plan"),
            "the model file": _short_hash(model),
        },
        device=torch.cuda.get_device_name(rank.device) if is_gpu else "CPU",
        device_free_bytes=torch.cuda.mem_get_info(rank.device)[0] if is_gpu else 0,
        host_free_bytes=host_free_bytes(),
        environment=shared_settings(),
    )


def _short_hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12] if file.is_file() else "missing"


def host_free_bytes(file: Path = Path("/proc/meminfo")) -> int:
    """Memory that programs can get without swapping; 0 where the system does not tell."""
    if not file.exists():
        return 0
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return 0


def preflight(
    plan: Plan,
    rank: Rank,
    progress: Progress,
    folder: Path,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Looks, compares, and writes down. Raises ExecutionError on all ranks for what is wrong."""
    progress.phase = "looking at the machines"
    told: list[Any] = [None] * rank.world_size
    dist.all_gather_object(told, dataclasses.asdict(facts_of(rank, folder / plan.model.file)))
    facts = [Facts(**one) for one in told]
    errors = wrong(plan, facts)
    if errors:
        raise ExecutionError(errors[0] + (f" (and {len(errors) - 1} more)" if errors[1:] else ""))
    links = []
    if len({fact.host for fact in facts}) > 1:
        progress.phase = "measuring the network"
        links = _links(plan, facts, rank.device)
    progress.phase = "building the model"
    notes = [*remarks(plan, facts), *slow_links(links)]
    if rank.rank == 0:
        values = {
            "notes": notes,
            "links": [dataclasses.asdict(link) for link in links],
            "ranks": told,
        }
        write_atomic(folder / PREFLIGHT_FILE, json.dumps(values, indent=1))
        for note in notes:
            say(note)


def _links(plan: Plan, facts: Sequence[Facts], device: torch.device) -> list[LinkRate]:
    leaders = {fact.host: fact.rank for fact in reversed(facts)}
    ranks = sorted(leaders.values())
    nodes = nodes_of(plan)
    return measure_links(
        ranks,
        [facts[rank].host for rank in ranks],
        cluster_from_mapping(plan.cluster, "cluster"),
        [nodes[rank] for rank in ranks],
        device,
    )


def wrong(plan: Plan, facts: Sequence[Facts]) -> list[str]:
    """What must not be, each in a sentence that names the hosts."""
    found = [
        f"{what} differs between the hosts: {text}; make it the same on all"
        for what in facts[0].versions
        if (text := _different(facts, lambda fact, what=what: fact.versions[what]))  # type: ignore[misc]
    ]
    names = sorted({name for fact in facts for name in fact.environment})
    found += [
        f"{name} differs between the ranks: {text}; NCCL and gloo need it equal on all"
        for name in names
        if (text := _different(facts, lambda fact, name=name: fact.environment.get(name, "unset")))  # type: ignore[misc]
    ]
    return [*found, *_too_little_memory(plan, facts)]


def _different(facts: Sequence[Facts], value: Callable[[Facts], str]) -> str:
    """'2.13.0 on n1 and n2, 2.12.1 on n3'; empty when all ranks have the same."""
    hosts: dict[str, list[str]] = {}
    for fact in facts:
        named = hosts.setdefault(value(fact), [])
        if fact.host not in named:
            named.append(fact.host)
    if len(hosts) == 1:
        return ""
    return ", ".join(f"{what} on {' and '.join(names[:4])}" for what, names in hosts.items())


def _too_little_memory(plan: Plan, facts: Sequence[Facts]) -> list[str]:
    found = []
    stages = plan.prediction.memory_gib if plan.prediction else []
    for fact in facts:
        needed = int(stages[fact.rank * len(stages) // len(facts)] * (1 << 30)) if stages else 0
        if fact.device_free_bytes and fact.device_free_bytes < needed:
            found.append(
                f"rank {fact.rank} on {fact.host} has {format_bytes(fact.device_free_bytes)} free "
                f"on its {fact.device}, but the plan needs {format_bytes(needed)}; does another "
                "program use it?"
            )
    for host in dict.fromkeys(fact.host for fact in facts):
        here = [fact for fact in facts if fact.host == host]
        needed = len(here) * plan.model.parameters * _BYTES_PER_PARAMETER
        free = min(fact.host_free_bytes for fact in here)
        if free and free < needed:
            found.append(
                f"{host} has {format_bytes(free)} of memory free, but its {len(here)} ranks need "
                f"{format_bytes(needed)} to build the model, each the whole of it; start fewer "
                "ranks on a host, or use hosts with more memory"
            )
    return found


def remarks(plan: Plan, facts: Sequence[Facts]) -> list[str]:
    """What the predictions did not count on."""
    found = [displaced(plan, [fact.host for fact in facts])]
    planned = {node.device.name for node in cluster_from_mapping(plan.cluster, "cluster").nodes}
    for device in dict.fromkeys(fact.device for fact in facts):
        name = catalogue_name(device)
        if name is not None and name not in planned:
            found.append(
                f"the plan is for {', '.join(sorted(planned))}, but the ranks have {name}: its "
                "predictions do not hold"
            )
    kinds: dict[str, list[int]] = {}
    for fact in facts:
        kinds.setdefault(fact.device, []).append(fact.rank)
    if len(kinds) > 1:
        text = ", ".join(f"{kind} ({ranks_text(ranks)})" for kind, ranks in kinds.items())
        found.append(f"the ranks have different devices: {text}; the slowest sets the pace")
    return [text for text in found if text]

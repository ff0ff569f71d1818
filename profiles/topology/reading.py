"""`Reading`: what one file says of one machine or of several, and what it leaves open.

Made by the readers of this package, printed by `claw-plan topology`, and turned into the content
of a cluster.yaml by `cluster_text`. A field that is empty or None was not in the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Pair = tuple[int, int]

MAX_GPUS = 1024
"""Of one node: the largest with one PCIe tree or NVLink domain has 576 (GB200 NVL576)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """A network card or port: the kind of path to each GPU, None where it is not readable.

    `device` is the driver's name where the file numbers its NICs (NIC0 is mlx5_0).
    """

    to_gpus: tuple[str | None, ...] = ()
    device: str | None = None
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host of a list and its GPUs; None where the list does not say how many.

    `user` is whom to log in as, where the list says so.
    """

    name: str
    gpus: int | None = None
    user: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A measured bandwidth of `op` among `ranks` on `nodes` hosts (None: not said).

    `kind` is 'bus' or 'algorithm', as nccl-tests counts them. `where` is file and line.
    """

    op: str
    ranks: int | None
    nodes: int | None
    bytes_per_s: float
    kind: str
    where: str
    size_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What was read. `pairs` maps a kind of path to pairs of GPUs (lower index first).

    `nvlink` is 'present', 'absent' or 'unknown'. `gpu_count` and `gpu_types` are those of one
    machine; of a list of hosts they are in `hosts`. `facts` are sentences for people about what
    was understood, `unknown` about what is not in the file, `warnings` about what is suspicious.
    `node_count` is the number of such machines, where the file says it. `draft` is content of an
    entry of `nodes:` in a cluster.yaml, for files that give figures.
    """

    source: str
    format: str
    gpu_count: int | None = None
    gpu_types: tuple[str, ...] = ()
    pairs: Mapping[str, tuple[Pair, ...]] = field(default_factory=dict)
    pairs_unknown: tuple[Pair, ...] = ()
    nics: Mapping[str, Nic] = field(default_factory=dict)
    nvlink: str = "unknown"
    hosts: tuple[Host, ...] = ()
    node_count: int | None = None
    node_lists: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rates: tuple[Rate, ...] = ()
    facts: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    draft: Mapping[str, Any] | None = None


def gpu_names(indices: Iterable[int]) -> str:
    """'GPU0, GPU2': at most eight, then how many more."""
    names = [f"GPU{index}" for index in indices]
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def all_pairs(count: int) -> list[Pair]:
    """Every pair of `count` GPUs."""
    return [(first, second) for first in range(count) for second in range(first + 1, count)]


def by_kind(kinds: Mapping[Pair, str]) -> dict[str, tuple[Pair, ...]]:
    """Pair to kind, turned round; the kinds in the order of their names."""
    return {
        kind: tuple(sorted(pair for pair, of in kinds.items() if of == kind))
        for kind in sorted(set(kinds.values()))
    }


def is_nvlink(kind: str) -> bool:
    """Whether a path kind is NVLink: NV12 of nvidia-smi, NVL of NCCL."""
    return kind.startswith("NV") and kind != "NVB"


def islands(count: int, kinds: Mapping[Pair, str]) -> list[list[int]]:
    """GPUs that NVLink joins, directly or through others; every GPU is in one island."""
    near: dict[int, set[int]] = {gpu: {gpu} for gpu in range(count)}
    for (first, second), kind in kinds.items():
        if is_nvlink(kind):
            near[first].add(second)
            near[second].add(first)
    found: list[list[int]] = []
    left = set(range(count))
    while left:
        island: set[int] = set()
        front = {min(left)}
        while front:
            island |= front
            front = set().union(*(near[gpu] for gpu in front)) - island
        found.append(sorted(island))
        left -= island
    return found


def nvlink_warnings(
    count: int, kinds: Mapping[Pair, str], unknown: Sequence[Pair] = ()
) -> list[str]:
    """What is uneven about the NVLinks: a GPU off the fabric, islands, pairs without."""
    linked = {pair for pair, kind in kinds.items() if is_nvlink(kind)}
    if not linked or len(linked) + len(unknown) == count * (count - 1) // 2:
        return []
    open_ends = {gpu for pair in unknown for gpu in pair}
    groups = islands(count, kinds)
    alone = [group[0] for group in groups if len(group) == 1 and group[0] not in open_ends]
    joined = [group for group in groups if len(group) > 1]
    warnings = []
    if alone:
        verb = "has" if len(alone) == 1 else "have"
        warnings.append(
            f"{gpu_names(alone)} {verb} no NVLink while {gpu_names(joined[0])} have: a group with "
            "it runs at PCIe speed; leave it out, or check the bridge or the fabric manager"
        )
    if len(joined) > 1:
        text = " and ".join("{" + gpu_names(group) + "}" for group in joined[:4])
        warnings.append(f"NVLink joins only {text}; between them it is PCIe")
    explained = linked.union(unknown)
    without = [
        (first, second)
        for group in joined
        for first in group
        for second in group
        if first < second and (first, second) not in explained
    ]
    if without:
        warnings.append(
            f"NVLink is not all-to-all: {len(without)} pairs that it joins through others have no "
            f"link of their own, as GPU{without[0][0]}-GPU{without[0][1]}"
        )
    counts = sorted({kind for kind in kinds.values() if is_nvlink(kind)})
    if len(counts) > 1:
        warnings.append(f"the pairs have unequal NVLinks: {', '.join(counts)}")
    return warnings

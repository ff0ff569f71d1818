"""What the readers of published files give: rows that can be predicted, and why others cannot.

`published.read_published` gives a `Published` of `TrainingRow`s, `KernelRow`s or `CollectiveRow`s;
`cli.validate_command` predicts and reports them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from claw_plan.profiles.cluster import Cluster
from claw_plan.profiles.training_row import TrainingRow
from claw_plan.profiles.work import CollectiveWork, OpWork

TRAINING, ITERATIONS, KERNELS, COLLECTIVES = "training", "iterations", "kernels", "collectives"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotExpressed:
    """A row that cannot be predicted, or holds no figure to compare with."""

    id: str
    family: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """A published time of one kernel. `group` names runs that belong together (one shape)."""

    id: str
    family: str
    group: str
    cluster: Cluster
    device_name: str
    work: OpWork
    measured_ns: float
    flags: tuple[str, ...] = ()
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow:
    """A published time of one collective; all groups of the cluster's devices do the same.

    `nvls` tells whether the switches reduced (None: not said). `time_share` is the part of the
    collective's time that the row gives: predicted is the collective's time times it.
    """

    id: str
    family: str
    group: str
    cluster: Cluster
    device_name: str
    work: CollectiveWork
    measured_ns: float
    nvls: bool | None = None
    time_share: float = 1.0
    assumed: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One file as read; `kind` is one of the names above."""

    path: Path
    kind: str
    training: tuple[TrainingRow, ...] = ()
    kernels: tuple[KernelRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    not_expressed: tuple[NotExpressed, ...] = ()

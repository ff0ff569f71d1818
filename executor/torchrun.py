"""The torchrun command lines that start a plan's ranks, for those who start them themselves.

Source of the options: torch.distributed.run's page, https://docs.pytorch.org/docs/stable/elastic/run.html.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from claw_plan.executor.rendezvous import DEFAULT_PORT


def torchrun_lines(
    ranks_per_node: Sequence[int], command: Sequence[str], hosts: Sequence[str] = ()
) -> list[tuple[str, str]]:
    """(host, what to type there) for each host; names that are not known stay to be filled in.

    `command` is what every rank runs.
    """
    if len(ranks_per_node) == 1:
        start = ["torchrun", "--standalone", f"--nproc-per-node={ranks_per_node[0]}"]
        return [(hosts[0] if hosts else "this machine", _joined(start, command))]
    names = [*hosts, *(f"HOST{place}" for place in range(len(hosts), len(ranks_per_node)))]
    found = []
    for place, count in enumerate(ranks_per_node):
        start = [
            "torchrun",
            f"--nnodes={len(ranks_per_node)}",
            f"--node-rank={place}",
            f"--nproc-per-node={count}",
            f"--master-addr={names[0]}",
            f"--master-port={DEFAULT_PORT}",
        ]
        found.append((names[place], _joined(start, command)))
    return found


def _joined(start: Sequence[str], command: Sequence[str]) -> str:
    return shlex.join([*start, "--no-python", *command])

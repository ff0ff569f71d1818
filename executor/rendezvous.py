"""Where ranks find each other: one key-value store that all of them reach.

The store is held by our launcher, by torchrun's agent, or by rank 0 itself. Every rank writes
down that it is here and waits until all have; one that does not come is named then, not by a
collective that hangs later. Beats, reasons to end and torch's own process groups use the same
store, each under a prefix.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch.distributed import (  # type: ignore[attr-defined]
    DistError,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
)

from claw_plan.executor.errors import ExecutionError
from claw_plan.profiles.topology.slurm import expand

DEFAULT_PORT = 29500
"""torchrun's own default."""

TIMEOUT_S = 600.0
"""How long ranks wait for each other, as torch's NCCL groups do by default."""

MOST_NAMED = 8

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"


def master_address(
    environment: Mapping[str, str], world_size: int, local_world_size: int
) -> tuple[str, int]:
    """Host and port of the store. Raises ExecutionError where a starter does not tell the host."""
    port = environment.get("MASTER_PORT", "")
    if port and not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ExecutionError(f"MASTER_PORT must be a port from 1 to 65535; got {port[:40]!r}")
    if "MASTER_ADDR" in environment:
        return environment["MASTER_ADDR"], int(port or DEFAULT_PORT)
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    if nodes and "SLURM_PROCID" in environment:
        # Jobs that share a node must not meet each other.
        job = environment.get("SLURM_JOB_ID", "")
        own = DEFAULT_PORT + (int(job) % 1000 if job.isdecimal() else 0)
        return expand(nodes)[0], int(port or own)
    if local_world_size < world_size:
        raise ExecutionError(
            "the ranks are on several hosts, and their starter does not say where rank 0 is; set "
            "MASTER_ADDR to its host on all of them, as in mpirun -x MASTER_ADDR=node1"
        )
    return "127.0.0.1", int(port or DEFAULT_PORT)


def meet(
    rank: int,
    world_size: int,
    local_world_size: int,
    timeout_s: float = TIMEOUT_S,
    environment: Mapping[str, str] = os.environ,
) -> Store:
    """The store, once all ranks have come. Raises ExecutionError that names who has not."""
    if world_size == 1:
        return HashStore()
    host, port = master_address(environment, world_size, local_world_size)
    is_master = rank == 0 and environment.get(_AGENT_STORE) != "True"
    store: Store = _open(host, port, is_master, rank, timeout_s)
    # A torchrun that restarts its ranks keeps the store.
    store = own_keys(store, environment.get("TORCHELASTIC_RESTART_COUNT", "0"))
    store.set(f"here/{rank}", socket.gethostname())
    try:
        store.wait([f"here/{other}" for other in range(world_size)], timedelta(seconds=timeout_s))
    except DistError:
        present = [other for other in range(world_size) if store.check([f"here/{other}"])]
        raise ExecutionError(missing_text(present, world_size, timeout_s)) from None
    return store


def reach_store(environment: Mapping[str, str], timeout_s: float) -> Store:
    """The store that somebody else holds, for a process that is no rank."""
    host, port = master_address(environment, 1, 1)
    return _open(host, port, False, None, timeout_s)


def own_keys(store: Store, attempt: str = "0") -> Store:
    """The part of a store in which the ranks of one attempt write."""
    return PrefixStore(f"claw-plan/{attempt}", store)


def missing_text(present: Sequence[int], world_size: int, timeout_s: float) -> str:
    """Who did not come, in a sentence."""
    missing = sorted(set(range(world_size)) - set(present))
    return (
        f"{ranks_text(missing)} of {world_size} did not come within {timeout_s:g} s; look whether "
        "it was started and what it printed, or give --timeout more seconds"
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """'rank 3' or 'ranks 3, 4, 5 and 12 more'."""
    names = ", ".join(str(rank) for rank in ranks[:MOST_NAMED])
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"rank{'s' if len(ranks) != 1 else ''} {names}{more}"


def _open(host: str, port: int, is_master: bool, rank: int | None, timeout_s: float) -> TCPStore:
    try:
        return TCPStore(
            host,
            port,
            is_master=is_master,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except DistError as error:
        if is_master:
            raise ExecutionError(
                f"rank 0 cannot listen on port {port}: {_first_line(error)}; set MASTER_PORT to a "
                "free one on all ranks"
            ) from None
        raise ExecutionError(
            f"{'this host' if rank is None else f'rank {rank}'} cannot reach {host}:{port} within "
            f"{timeout_s:g} s: {'the launcher is gone' if rank is None else 'rank 0 did not come'}"
            ", or the port is closed between the hosts; check MASTER_ADDR and MASTER_PORT"
        ) from None


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0][:120] if str(error) else type(error).__name__


def free_store(host: str = "127.0.0.1") -> TCPStore:
    """A store for others to come to, on a port of this machine that was free."""
    return TCPStore(host, 0, is_master=True, wait_for_workers=False)

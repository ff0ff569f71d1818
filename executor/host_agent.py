"""On one host of several: starts the host's ranks and reports how they end.

Started by `launch_hosts` through ssh or srun as `python -m claw_plan.executor.host_agent JOB.json
FIRST COUNT WORLD PEER`. It lives as long as its standard input: a line there asks the ranks to
end after their step; its end, also by a broken connection, ends them at once.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path

from torch.distributed import DistError

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.job import FAILED, Job
from claw_plan.executor.local_ranks import WORKER, LocalRanks
from claw_plan.executor.nccl_environment import (
    choose,
    interface_towards,
    loopback,
    write_environment,
)
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.rendezvous import own_keys, reach_store
from claw_plan.profiles.cluster_file import cluster_from_mapping
from claw_plan.profiles.errors import ClawPlanError

STOP_LINE = "stop\n"

POLL_S = 0.05


def exit_key(rank: int) -> str:
    """The store's key of a rank's exit code."""
    return f"exit/{rank}"


def main(argv: list[str]) -> int:
    """Runs the host's ranks; 0 when all ended well."""
    path, first, count, world_size, peer = argv
    if not Path(path).is_file():
        raise ExecutionError(
            f"{path} is not here; plan, model and run folder must be on a file system that all "
            "hosts share"
        )
    job = Job.load(Path(path))
    store = own_keys(reach_store(os.environ, job.timeout_s))
    ranks = LocalRanks(
        [*WORKER, path],
        job.folder,
        int(world_size),
        first_rank=int(first),
        count=int(count),
        environment=_environment(job, peer, int(first) == 0, 1 if count == world_size else 2),
    )
    reported: set[int] = set()
    try:
        ranks.start()
        while len(reported) < len(ranks.ranks) and _listen(ranks):
            for rank, code in ranks.codes().items():
                if code is not None and rank not in reported:
                    store.set(exit_key(rank), str(code))
                    reported.add(rank)
    except DistError:  # the launcher and its store are gone
        return FAILED
    finally:
        ranks.end()
    return FAILED if any(ranks.codes().values()) else 0


def _environment(job: Job, peer: str, writes: bool, hosts: int) -> dict[str, str]:
    plan, _ = open_plan(job.plans[0])
    settings = choose(
        cluster_from_mapping(plan.cluster, "cluster"),
        hosts=hosts,
        interface=loopback() if hosts == 1 else interface_towards(peer),
        folder=job.folder,
    )
    if writes:
        write_environment(job.folder, settings)
    return {setting.name: setting.value for setting in settings}


def _listen(ranks: LocalRanks) -> bool:
    """Waits a little for the launcher's word; False when it has hung up."""
    ready, _, _ = select.select([sys.stdin], [], [], POLL_S)
    if not ready:
        return True
    word = os.read(sys.stdin.fileno(), 4096)
    if word:
        ranks.signal(signal.SIGTERM)
    return bool(word)


def run(argv: list[str]) -> int:
    """`main`, with errors for the user in one line."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        return main(argv)
    except ClawPlanError as error:
        print(error, file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))

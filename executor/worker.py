"""One rank's process: reads its job, joins the others, does it, and leaves a note if it fails.

Started by `launch` as `python -m claw_plan.executor.worker JOB.json` with RANK, LOCAL_RANK and
WORLD_SIZE set.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.job import VERIFY, Job, end_together, leave_done
from claw_plan.executor.preflight import preflight
from claw_plan.executor.rank_work import among_others, meet_others
from claw_plan.executor.ranks import Rank, die_with_parent
from claw_plan.executor.run_files import write_run
from claw_plan.executor.train import train
from claw_plan.executor.verify_rank import verify_on_rank
from claw_plan.planner.plan import load_plan


def main(argv: list[str]) -> int:
    """Runs the job of the given file on this rank; 0 when done."""
    job = Job.load(Path(argv[0]))
    rank = Rank.from_environment(device_type=job.device_type)
    if rank is None:
        raise ExecutionError("a worker is started by `claw-plan run`, not by hand")
    die_with_parent()
    with end_together(job.folder, rank.rank) as progress:
        store = meet_others(rank, progress, job.timeout_s)
        with among_others(store, rank, progress, job.timeout_s):
            if job.kind == VERIFY:
                verify_on_rank(job, rank, progress)
            else:
                if job.preflight:
                    preflight(load_plan(job.plans[0]), rank, progress, job.folder)
                records = train(job, rank, progress)
                if rank.rank == 0:
                    write_run(job.folder, records, rank)
        leave_done(job.folder, rank.rank)
        dist.destroy_process_group()
    return 0


def run(argv: list[str]) -> NoReturn:
    """`main`, then the end of this process."""
    code = main(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads of gloo may still run, and then an ordinary exit aborts ("terminate called").
    os._exit(code)


if __name__ == "__main__":
    run(sys.argv[1:])

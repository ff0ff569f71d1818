"""One rank's process: reads its job, joins the others, does it, and leaves a note if it fails.

Started by `launch` as `python -m claw_plan.executor.worker JOB.json` with RANK, LOCAL_RANK and
WORLD_SIZE set. The note is how the launcher learns which rank failed first, at which step and why.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import torch.distributed as dist

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.job import VERIFY, Job, Note
from claw_plan.executor.ranks import Rank, die_with_parent, join, take_core
from claw_plan.executor.train import Progress, train
from claw_plan.executor.verify_rank import verify_on_rank


def main(argv: list[str]) -> int:
    """Runs the job of the given file on this rank; 0 when done."""
    job = Job.load(Path(argv[0]))
    rank = Rank.from_environment()
    if rank is None:
        raise ExecutionError("a worker is started by `claw-plan run`, torchrun or srun")
    die_with_parent()
    perform(job, rank)
    return 0


def perform(job: Job, rank: Rank) -> None:
    """Does the job on this rank; on any failure leaves a note and ends the process."""
    progress = Progress()
    try:
        take_core(rank)
        join(rank)
        (verify_on_rank if job.kind == VERIFY else train)(job, rank, progress)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        Note.of(error, rank.rank, progress.step).write(job.folder)
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # at once: ordinary exits wait for collectives that will never end


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

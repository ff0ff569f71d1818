"""How the scripts that these tests start on each rank begin and end."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


def run(main: Callable[[int, int, Path], None]) -> None:
    """`main` of rank, ranks and folder from the command line, in a gloo group of all ranks."""
    try:
        rank, world_size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / "store"), world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        main(rank, world_size, folder)
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may still run

"""How long a message between neighbouring pipeline stages takes, measured after training.

In a step a send is hidden in the wait for the other side's computation; here both sides meet
first, and one message of the same size goes over, a few times.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from claw_plan.executor.parallel_model import ParallelModel
from claw_plan.executor.ranks import Rank
from claw_plan.profiles.work import CollectiveWork

REPEATS = 10


def time_sends(compiled: ParallelModel, rank: Rank) -> dict[CollectiveWork, list[int]]:
    """The receiver's times of each message size that a pipeline boundary has."""
    if compiled.pipeline_stage is None:
        return {}
    mesh, group = compiled.mesh, compiled.mesh.group("pp")
    me, count = mesh.index("pp"), mesh.sizes["pp"]
    samples: dict[CollectiveWork, list[int]] = {}
    for sender in range(count - 1):
        sizes: list[object] = [compiled.pipeline_stage.sent_bytes if me == sender else 0]
        source = dist.get_global_rank(group, sender)
        dist.broadcast_object_list(sizes, src=source, group=group)
        buffer = torch.empty(int(str(sizes[0])), dtype=torch.uint8, device=rank.device)
        work = CollectiveWork(
            op="send",
            bytes=buffer.nbytes,
            group_size=2,
            nodes=1,
            backend="nccl" if rank.device.type == "cuda" else "gloo",
        )
        for _ in range(REPEATS):
            dist.barrier(group)
            start = time.perf_counter_ns()
            if me == sender:
                dist.send(buffer, dist.get_global_rank(group, sender + 1), group=group)
            elif me == sender + 1:
                dist.recv(buffer, source, group=group)
                if rank.device.type == "cuda":
                    torch.cuda.synchronize()
                samples.setdefault(work, []).append(time.perf_counter_ns() - start)
    return samples

"""A worker for test_checkpoint.py: each plan of the job reads what the one before it wrote.

All values are made up from their names, so that what a rank must hold can be cut out of the whole
by other means than the checkpoint's: `local_slice` for tensor parallelism, chunks of rows for
fully_shard.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from claw_plan.executor import worker
from claw_plan.executor.checkpoint import Checkpointer
from claw_plan.executor.checkpoint_folder import checkpoints_in
from claw_plan.executor.checkpoint_layout import divided_as
from claw_plan.executor.checkpoint_state import own_buffers
from claw_plan.executor.gradients import local
from claw_plan.executor.job import Job, Progress
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import ParallelModel, compile_plan
from claw_plan.executor.ranks import Rank

MOMENTS = ("exp_avg", "exp_avg_sq")


def made_up(name: str, key: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {key}".encode()))
    return torch.rand(shape, generator=generator)


def expected(compiled: ParallelModel, name: str, key: str) -> torch.Tensor:
    """What of the made-up tensor this rank must hold."""
    own = made_up(name, key, compiled.whole.shapes[name])
    divided = divided_as(compiled, name)
    if divided is not None:
        assert compiled.tensor_parallel is not None
        own = compiled.tensor_parallel.local_slice(divided, own)
    parts, index = compiled.knobs.dp_shard, compiled.mesh.index("dp_shard")
    if compiled.experts is not None and name in compiled.experts.parameters:
        ep = compiled.knobs.ep
        parts, index = max(1, parts // ep), index // ep
        if own.ndim == 3:  # in common tensors; of a list a rank holds some modules and no others
            own = own.chunk(ep)[compiled.mesh.data_index % ep]
    if isinstance(compiled.parameters[name], DTensor):
        rows = own.chunk(parts)
        own = rows[index] if index < len(rows) else own[:0]
    return own


def fill(compiled: ParallelModel) -> None:
    for name, parameter in compiled.parameters.items():
        local(parameter.detach()).copy_(expected(compiled, name, "value"))
        state = compiled.optimizer.state[parameter]
        state["step"] = torch.tensor(float(len(name)))
        for key in MOMENTS:
            state[key] = torch.zeros_like(parameter)
            local(state[key]).copy_(expected(compiled, name, key))


def compare(compiled: ParallelModel) -> None:
    for name, parameter in compiled.parameters.items():
        assert torch.equal(local(parameter.detach()), expected(compiled, name, "value")), name
        state = compiled.optimizer.state[parameter]
        assert state["step"].item() == len(name)
        assert sorted(state) == ["exp_avg", "exp_avg_sq", "step"]
        for key in MOMENTS:
            assert torch.equal(local(state[key]), expected(compiled, name, key)), (name, key)


def compare_buffers(compiled: ParallelModel, built: torch.nn.Module) -> None:
    """On every rank as the model's constructor makes them, the non-persistent ones too."""
    expected = dict(built.named_buffers())
    for name, buffer in own_buffers(compiled):
        assert torch.equal(buffer, expected[name]), name


def chain(job: Job, rank: Rank, progress: Progress) -> None:
    before = Path(job.resume) if job.resume else None
    for index, path in enumerate(job.plans):
        progress.step = index + 1
        opened = open_plan(path)
        compiled = compile_plan(opened[0], opened[1], rank.device)
        folder = job.folder / path.stem
        checkpointer = Checkpointer(compiled, folder)
        if before is None:
            fill(compiled)
        else:
            assert checkpointer.load(before).step == 7
            compare(compiled)
        compare_buffers(compiled, opened[1].build())
        assert checkpointer.save(7) == ""
        fill_with_nothing(compiled)  # what is written was copied before
        failed = checkpointer.finish()
        assert not failed, failed
        [before] = checkpoints_in(folder) if rank.rank == 0 else [folder / "step-00000007"]
        torch.distributed.barrier()


def fill_with_nothing(compiled: ParallelModel) -> None:
    for parameter in compiled.parameters.values():
        local(parameter.detach()).fill_(float("nan"))


if __name__ == "__main__":
    worker.verify_on_rank = chain
    worker.run(sys.argv[1:])

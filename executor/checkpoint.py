"""`Checkpointer`: the state of all ranks to a folder while training goes on, and back.

Saving copies this rank's share to the host, which is all that training waits for; a thread then
writes it together with the other ranks' threads, over a process group of their own. Loading fills
the live tensors of any plan of the same model from whatever plan wrote them.
"""

from __future__ import annotations

import errno
import itertools
import pickle
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from claw_plan.executor.checkpoint_folder import (
    REMEDY,
    Header,
    check_files,
    commit,
    partial_path,
    prepare_folder,
    read_header,
)
from claw_plan.executor.checkpoint_io import Box, read_boxes, tensors_in, write_boxes
from claw_plan.executor.checkpoint_state import (
    ERRORS,
    MODEL,
    RANDOM,
    ChangedBuffers,
    Stored,
    agree_on_writers,
    boxes_to_read,
    boxes_to_write,
    optimizer_name,
    whole_box,
)
from claw_plan.executor.dropout import seed_forwards
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.parallel_model import ParallelModel
from claw_plan.executor.random_state import set_random_state
from claw_plan.planner.plan import candidate_mapping
from claw_plan.profiles.errors import ClawPlanError, InputError

DECIDES_DATA = ("global_batch", "seq_len", "seed")
"""What of the plan's training section must stay for the data to go on where it was."""


class Checkpointer:
    """Saves and loads one rank's part. All ranks construct it and call the same methods in turn.

    With `folder` None it only loads. `keep` is how many of the newest checkpoints stay, None: all.
    `note` is what there is to say of what was loaded.
    """

    def __init__(
        self, compiled: ParallelModel, folder: Path | None, *, keep: int | None = None
    ) -> None:
        self._compiled, self._folder, self._keep = compiled, folder, keep
        self._rank = dist.get_rank()
        # Not the group that trains: its collectives must not meet those of the writing thread.
        self._group = dist.new_group(backend="gloo")
        if folder is not None and self._rank == 0:
            prepare_folder(folder)
        attempt = [time.time_ns()]
        dist.broadcast_object_list(attempt, src=0, group=self._group)
        self._attempts = itertools.count(attempt[0])
        self.holding = agree_on_writers(compiled, self._group)
        self._changed = ChangedBuffers(compiled)
        self._built_groups = group_numbers(compiled.optimizer)
        self.note = ""
        self._copies: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._running: tuple[Header, Path, Future[None]] | None = None

    def save(self, step: int) -> str:
        """Begins to write the state after `step` steps; returns once it is copied.

        Waits for the one before, and answers why that was not written; empty when it was.
        """
        assert self._folder is not None
        failed = self.finish()
        share = boxes_to_write(self._compiled, self.holding, self._changed, self._rank)
        copies = [self._copied(box) for box in share]
        header = self._header(step)
        partial = partial_path(self._folder, step, next(self._attempts))
        running = self._thread.submit(self._write, partial, copies, header)
        self._running = header, partial, running
        return failed

    def look(self) -> str:
        """As `finish`, without waiting: empty while it is being written."""
        is_done = self._running is not None and self._running[-1].done()
        return self.finish() if is_done else ""

    def finish(self) -> str:
        """Waits until what was begun is written; answers why it was not, empty when it was."""
        if self._running is None:
            return ""
        header, partial, running = self._running
        self._running = None
        error = running.exception()
        if error is None:
            return ""
        if self._rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        return (
            f"the checkpoint of step {header.step} is not written to {partial.parent}: "
            f"{why(error)}"
        )

    def load(self, path: Path) -> Header:
        """Puts a checkpoint into the live model, optimizer and generators.

        Raises InputError or ExecutionError in one line, before anything is changed where the
        checkpoint is not whole or not of this training.
        """
        header = read_header(path)
        check_files(path, header)
        stored = stored_in(path)
        check_model(self._compiled, stored, path)
        self._check_training(header, path)
        boxes, finish = boxes_to_read(self._compiled, self.holding.held, stored)
        random = self._own_boxes(RANDOM, header, stored)
        errors = self._own_boxes(ERRORS, header, stored)
        read(([*boxes, *random.values(), *errors.values()]), path, self._group)
        for step in finish:
            step()
        if self._compiled.overlap is not None:
            self._compiled.overlap.resume(header.step)
        self._take_numbers(header)
        self._take_errors(errors, header, stored)
        if random:
            set_random_state({purpose: box.tensor for purpose, box in random.items()})
        else:
            # Not the numbers that training began with once more.
            seed = self._compiled.plan.training.seed * 1_000_003 + header.step
            seed_forwards(self._compiled.mesh, seed % 2**40)
        return header

    def _copied(self, box: Box) -> Box:
        key = (box.key, box.offsets)
        copy = self._copies.get(key)
        if copy is None or copy.shape != box.tensor.shape or copy.dtype != box.tensor.dtype:
            copy = torch.empty(box.tensor.shape, dtype=box.tensor.dtype, device="cpu")
            self._copies[key] = copy
        copy.copy_(box.tensor)
        return Box(path=box.path, shape=box.shape, offsets=box.offsets, tensor=copy)

    def _write(self, partial: Path, boxes: Sequence[Box], header: Header) -> None:
        needed = torch.tensor(sum(box.tensor.nbytes for box in boxes))
        dist.all_reduce(needed, group=self._group)
        try:
            write_boxes(boxes, partial, self._group)
        except CheckpointException as error:
            if any(is_full(cause) for cause, _ in error.failures.values()):
                raise ExecutionError(
                    f"no space left on {partial.parent}, {needed.item()} bytes needed; free some, "
                    "keep fewer checkpoints, or name another --checkpoint-dir"
                ) from None
            raise
        if self._rank == 0:
            commit(partial, header, self._keep)

    def _header(self, step: int) -> Header:
        compiled, plan = self._compiled, self._compiled.plan
        scale = compiled.loss_scale
        return Header(
            step=step,
            samples=step * plan.training.global_batch,
            saved_at_ns=0,
            model=plan.model.model_dump(),
            training=plan.training.model_dump(),
            candidate=candidate_mapping(compiled.knobs),
            optimizer=optimizer_name(compiled.optimizer),
            groups=changed_numbers(compiled.optimizer, self._built_groups),
            loss_scale=scale and {"factor": scale.factor, "good_steps": scale.good_steps},
            names=dict(compiled.whole.names),
            versions={"torch": torch.__version__, "claw-plan": version("claw-plan")},
        )

    def _check_training(self, header: Header, path: Path) -> None:
        own = self._compiled.plan.training.model_dump()
        for key in DECIDES_DATA:
            if header.training.get(key) != own[key]:
                raise InputError(
                    f"{path} was trained with {key} {header.training.get(key)}, but the plan says "
                    f"{own[key]}; use the same, or take its weights alone: --init-from {path}"
                )
        optimizer = optimizer_name(self._compiled.optimizer)
        if header.optimizer != optimizer:
            raise InputError(
                f"{path} holds the state of the optimizer {header.optimizer}, but the plan trains "
                f"with {optimizer}; use the same, or take its weights alone: --init-from {path}"
            )

    def _own_boxes(self, room: str, header: Header, stored: Stored) -> dict[str, Box]:
        """Room for what this rank alone had, by name; none where another plan wrote it."""
        if header.candidate != candidate_mapping(self._compiled.knobs):
            return {}
        prefix = f"{room}.rank{self._rank}."
        return {
            name: whole_box((room, f"rank{self._rank}", name), torch.zeros(shape, dtype=dtype))
            for key, (shape, dtype) in stored.items()
            if (name := key.removeprefix(prefix)) != key
        }

    def _take_errors(self, errors: Mapping[str, Box], header: Header, stored: Stored) -> None:
        """What codecs had not sent; of other ranks' it is of no use, and begins at zero."""
        exchange = self._compiled.exchange
        if exchange is not None:
            device = self._compiled.device
            own = {name: box.tensor.to(device) for name, box in errors.items()}
            exchange.resume(own, header.step)
        if not errors and any(key.startswith(f"{ERRORS}.") for key in stored):
            self.note = (
                f"what codec={header.candidate.get('codec')} had not sent when {header.step} "
                "steps were done is left out: it belongs to the ranks of another plan"
            )

    def _take_numbers(self, header: Header) -> None:
        groups = self._compiled.optimizer.param_groups
        for group, numbers in zip(groups, header.groups, strict=False):
            group.update(numbers)
        scale, stored = self._compiled.loss_scale, header.loss_scale
        if scale is not None and stored is not None:
            scale.factor, scale.good_steps = stored["factor"], int(stored["good_steps"])


Numbers = Mapping[str, int | float]


def group_numbers(optimizer: torch.optim.Optimizer) -> list[Numbers]:
    """The plain numbers among each parameter group's options."""
    return [
        {key: value for key, value in group.items() if type(value) in (int, float)}
        for group in optimizer.param_groups
    ]


def changed_numbers(
    optimizer: torch.optim.Optimizer, built: Sequence[Numbers]
) -> list[dict[str, int | float]]:
    """Those that are no longer as they were built: a schedule's, an optimizer's own counters."""
    return [
        {key: value for key, value in now.items() if before.get(key) != value}
        for now, before in zip(group_numbers(optimizer), built, strict=True)
    ]


def stored_in(path: Path) -> Stored:
    """Shape and dtype of every tensor of a checkpoint."""
    try:
        found = tensors_in(path)
    except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError) as error:
        raise InputError(f"{path}/.metadata cannot be read ({error}); {REMEDY}") from None
    return {key: (tuple(value.size), value.properties.dtype) for key, value in found.items()}


def check_model(compiled: ParallelModel, stored: Stored, path: Path) -> None:
    """Raises InputError when the checkpoint is of another model."""
    whole = compiled.whole
    wanted = {name: whole.shapes[name] for name in whole.names.values()}
    wanted = {name: shape for name, shape in wanted.items() if 0 not in shape}
    prefix = f"{MODEL}."
    held = {
        k.removeprefix(prefix): shape for k, (shape, _) in stored.items() if k.startswith(prefix)
    }
    for name in sorted(wanted.keys() | held.keys()):
        if wanted.get(name) != held.get(name):
            raise InputError(
                f"{path} is of another model: {name} is {_shape(held.get(name))} there and "
                f"{_shape(wanted.get(name))} in the plan's {compiled.plan.model.file}; use the "
                "plan and the model that it was trained with"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))


def read(boxes: Sequence[Box], path: Path, group: dist.ProcessGroup | None) -> None:
    """`read_boxes`, whose failures become one line."""
    try:
        read_boxes(boxes, path, group)
    except (CheckpointException, OSError, RuntimeError) as error:
        raise ExecutionError(f"cannot read {path}: {why(error)}; {REMEDY}") from None


def is_full(error: BaseException) -> bool:
    """Whether a disk, or one's part of it, has no room left."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def why(error: BaseException) -> str:
    """The first cause that some rank had, in one line."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = min(error.failures.items())
        return f"{why(cause)} (rank {rank})"
    if isinstance(error, OSError):
        return f"{error.strerror or error}"
    lines = [line for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else ""
    return first if isinstance(error, ClawPlanError) else f"{type(error).__name__}: {first}"

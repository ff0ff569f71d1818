"""`Subject`: a model made ready to be recorded at any batch size, on fake tensors or real ones.

Fake tensors have shapes and no data, so a model of 70 billion parameters is built and run in
seconds. Models whose values decide how they go on are recorded on small real tensors instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.modules.module as module_hooks

from claw_plan.planner.attention_op import fused_operators
from claw_plan.planner.chain import Fold, chain_of, containers
from claw_plan.planner.errors import TraceError
from claw_plan.planner.fake_build import build_fake
from claw_plan.planner.foreign_code import ForeignCode
from claw_plan.planner.model_source import SEED, LoadedModel
from claw_plan.planner.recorder import Recorder, Recording
from claw_plan.planner.side_by_side import side_by_side
from claw_plan.planner.torch_private import (
    FakeTensorMode,
    one_sequence_per_row,
    without_onednn,
)

Exchanged = Callable[..., None]
"""Told of a collective: its name, the bytes of its full buffer, the module it serves, and the mesh
axis if that is not 'tp'."""

Around = Callable[[nn.Module, Exchanged], AbstractContextManager[object]]
"""What divides a model around a recorded step: it may change the module inside."""


@dataclass
class Subject:
    """A built model. `fake` is None on real tensors; `folds` hold the chain of blocks.

    `around` is put around every step that is recorded.
    """

    model: LoadedModel
    module: nn.Module
    fake: FakeTensorMode | None
    seq_len: int | None
    dtype: torch.dtype
    names: dict[int, str] = field(default_factory=dict)
    folds: list[Fold] = field(default_factory=list)
    around: Around | None = None

    @classmethod
    def prepare(
        cls,
        model: LoadedModel,
        *,
        seq_len: int | None,
        dtype: torch.dtype,
        fold: int | None = None,
        real: bool = False,
    ) -> Subject:
        """Builds the model, finds its chain and takes out the blocks that others stand for.

        `fold` is one of `chain.FOLDS`.
        """
        fake = None if real else FakeTensorMode(allow_non_fake_inputs=True)
        with _same_random_numbers():
            module = model.build() if fake is None else build_fake(model, fake)
        subject = cls(model, module, fake, seq_len, dtype)
        subject.names = {id(part): name for name, part in module.named_modules()}
        subject.folds = subject._find_chain(fold)
        return subject

    def _find_chain(self, fold: int | None) -> list[Fold]:
        candidates = {id(found.module): found for found in containers(self.module)}
        folds = {key: Fold.of(found, fold) for key, found in candidates.items()}
        for each in folds.values():
            each.apply()
        cast_parameters(self.module, self.dtype)
        try:
            calls = self._calls()
        except TraceError:
            if not any(each.alike for each in folds.values()):
                raise
            calls = None  # the forward counts on all blocks being there
        chain = [] if calls is None else chain_of(list(candidates.values()), calls)
        chosen = {id(found.module) for found in chain}
        if any(each.alike for key, each in folds.items() if key not in chosen):
            for each in folds.values():
                each.undo()
            return self._find_chain(None)
        return [folds[id(found.module)] for found in chain]

    def _calls(self) -> list[int]:
        """The ids of all modules in the order in which a forward enters them."""
        calls: list[int] = []

        def entered(module: nn.Module, args: Any) -> None:
            calls.append(id(module))

        hook = module_hooks.register_module_forward_pre_hook(entered)
        try:
            with self.world(), torch.no_grad():
                self.forward(self.batch(2))
        finally:
            hook.remove()
        return calls

    @property
    def block_names(self) -> list[str]:
        """All blocks of the chain, those that are not traced included."""
        return [name for fold in self.folds for name in fold.container.block_names]

    @property
    def kept(self) -> list[int]:
        """The places in `block_names` of the blocks that are traced."""
        return [start + index for start, fold in self._starts() for index in fold.kept]

    @property
    def stands_for(self) -> list[int]:
        """For each block of the chain the place of the traced block that is like it."""
        return [start + index for start, fold in self._starts() for index in fold.stands_for]

    @property
    def alike(self) -> list[tuple[int, int]]:
        """Pairs of places of traced blocks that must cost the same for the others to be right."""
        return [
            (start + one, start + other)
            for start, fold in self._starts()
            for one, other in fold.alike
        ]

    def _starts(self) -> Iterator[tuple[int, Fold]]:
        start = 0
        for fold in self.folds:
            yield start, fold
            start += len(fold.container.children)

    @property
    def blocks(self) -> list[nn.Module]:
        """The modules of the traced blocks, in order."""
        return [fold.container.children[index][1] for fold in self.folds for index in fold.kept]

    def dtype_of(self, parameter: torch.Tensor) -> torch.dtype:
        """In which a parameter is used; those of blocks that are not traced are left as built."""
        return self.dtype if parameter.is_floating_point() else parameter.dtype

    def batch(self, size: int) -> dict[str, torch.Tensor]:
        """A batch of the model's inputs in its dtype, fake where the model is."""
        batch = self.model.example_batch(size, self.seq_len)
        cast = {
            name: tensor.to(self.dtype) if tensor.is_floating_point() else tensor
            for name, tensor in batch.items()
        }
        if self.fake is None:
            return cast
        with self.fake:
            return {
                name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
                for name, tensor in cast.items()
            }

    @contextmanager
    def world(self) -> Iterator[None]:
        """Where the model runs: on fake tensors, with fused operators as one each."""
        with ExitStack() as stack:
            stack.enter_context(without_onednn())
            stack.enter_context(_same_random_numbers())
            if self.fake is not None:
                stack.enter_context(self.fake)
            stack.enter_context(fused_operators())
            stack.enter_context(one_sequence_per_row())
            yield

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """The loss of a batch; a TraceError gives what the model raised."""
        inputs = self.model.inputs_of(self.module, batch)
        with ForeignCode(self.model.path, "running its forward"):
            output = self.module(**inputs)
        return self.model.loss(output, batch)

    def record(self, batch_size: int, around: Around | None = None) -> Recording:
        """One forward and backward at a batch size.

        `around(module, exchanged)` is entered for the time of the step; it tells `exchanged` of
        the collectives that run.
        """
        batch = self.batch(batch_size)
        recorder: Recorder

        def exchanged(op: str, num_bytes: int, module: str, axis: str = "tp") -> None:
            recorder.exchange(op, num_bytes, module, axis)

        around = around or self.around

        with self.world(), around(self.module, exchanged) if around else nullcontext():
            tensors = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
            recorder = Recorder(self.names, self.blocks, tensors, batch)
            with recorder:
                loss = self.forward(batch)
                self._check_trainable(loss)
                with ForeignCode(self.model.path, "running its backward"):
                    recorder.backward(loss)
        self.module.zero_grad(set_to_none=True)
        return recorder.recording

    def record_all(self, batch_sizes: Sequence[int]) -> list[Recording]:
        """`record` at each size, on two cores where there are and nothing is computed."""
        works = [partial(self.record, size) for size in batch_sizes]
        return [work() for work in works] if self.fake is None else side_by_side(works)

    def _check_trainable(self, loss: torch.Tensor) -> None:
        trained = any(parameter.requires_grad for parameter in self.module.parameters())
        if loss.requires_grad and trained:
            return
        if not trained:
            reason = "none of its parameters requires a gradient"
        else:
            reason = "its loss has no gradient: forward runs under no_grad or inference_mode, or "
            reason += "detaches what it computes"
        raise TraceError(f"{self.model.path}: not trainable as it stands; {reason}")


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """A model on real tensors is the same at every trace, and the caller's state is kept."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        yield


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Floating-point parameters to `dtype`, ties kept; buffers stay, as under FSDP's policy."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)

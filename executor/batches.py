"""The training data, in one global order whatever the plan; each rank takes its own slice.

Three sources: the bytes of any text file, the model file's own `train_data`, or random example
batches. Every source answers `global_batch(step)` the same on every rank, so plans that split
the batch differently train on the same samples in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch
import torch.nn as nn

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.random_state import RandomStream
from claw_plan.planner.model_source import Batch, LoadedModel
from claw_plan.planner.plan import Plan
from claw_plan.profiles.errors import InputError

BYTE_VALUES = 256


class Source(Protocol):
    """Global batches by step; `says` is what to tell the user."""

    says: str

    def global_batch(self, step: int) -> Batch:
        """All samples of one optimizer step."""


def own_slice(batch: Batch, index: int, count: int) -> Batch:
    """The index-th of `count` equal runs of samples."""
    return {name: value.chunk(count)[index].contiguous() for name, value in batch.items()}


def make_source(plan: Plan, loaded: LoadedModel, data: Path | None) -> Source:
    """The text file if one is given, else the model's own data, else example batches."""
    if data is not None:
        return TextSource(plan, loaded, data)
    if loaded.train_data is not None:
        return ModelSource(plan, loaded)
    return ExampleSource(plan, loaded)


class ExampleSource:
    """Random batches of the model's own shapes, new ones every step."""

    says = "random example batches (no data given): the loss means nothing"

    def __init__(self, plan: Plan, loaded: LoadedModel) -> None:
        self._training = plan.training
        self._loaded = loaded

    def global_batch(self, step: int) -> Batch:
        """The batch of a step, whatever was asked for before."""
        training = self._training
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(training.seed * 1_000_003 + step)
            return dict(self._loaded.make_batch(training.global_batch, training.seq_len))


class ModelSource:
    """The model file's `train_data(rank, world_size)`, asked for all of it and cut anew.

    It yields batches of any size; samples are taken in order, again from the start when it ends.
    A step that is asked for later than the next one is reached by reading what lies between, as a
    resumed run does. What `train_data` draws at random depends on the plan's seed alone.
    """

    says = "the model file's own train_data"

    def __init__(self, plan: Plan, loaded: LoadedModel) -> None:
        assert loaded.train_data is not None
        self._open = loaded.train_data
        self._path = loaded.path
        self._size = plan.training.global_batch
        self._random = RandomStream(plan.training.seed)
        self._stream: Iterator[Batch] = iter(())
        self._held: list[Batch] = []
        self._next_step = 0

    def global_batch(self, step: int) -> Batch:
        """Steps must be asked for in order."""
        if step < self._next_step:
            raise ValueError(f"steps come in order, but got {step=} after {self._next_step - 1}")
        with self._random.drawing():
            while self._next_step < step:
                self._following()
            return self._following()

    def _following(self) -> Batch:
        self._next_step += 1
        while self._rows() < self._size:
            self._held.append(self._more())
        joined = {name: torch.cat([batch[name] for batch in self._held]) for name in self._held[0]}
        self._held = [{name: value[self._size :] for name, value in joined.items()}]
        return {name: value[: self._size] for name, value in joined.items()}

    def _rows(self) -> int:
        return sum(next(iter(batch.values())).shape[0] for batch in self._held)

    def _more(self) -> Batch:
        for _ in range(2):
            for batch in self._stream:
                return dict(batch)
            self._stream = iter(self._open(0, 1))
        raise InputError(f"{self._path}: train_data gives no batch; yield dicts of tensors")


class TextSource:
    """Bytes of a text file as tokens; one step's samples lie one behind the other.

    The model's integer [batch, sequence] inputs are filled: the first with the tokens; another
    with the same tokens when the model's example has it so (Hugging Face labels), else with each
    token's follower.
    """

    def __init__(self, plan: Plan, loaded: LoadedModel, path: Path) -> None:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InputError(f"--data {path}: {error.strerror}; give any text file") from None
        self.says = f"the bytes of {path}"
        self._size = plan.training.global_batch
        self._same = _label_inputs(loaded, plan.training.seq_len)
        self._length = plan.training.seq_len or loaded.seq_len() or 0
        if not self._length:
            raise InputError(f"--data: {loaded.path} has no sequence to put text into")
        if len(data) <= self._length:
            raise InputError(
                f"--data {path} has {len(data)} bytes, but one sample needs {self._length + 1}"
            )
        self._data = torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def global_batch(self, step: int) -> Batch:
        """The batch of a step, whatever was asked for before."""
        rows = self._data.numel() // self._length
        first = step * self._size
        samples = torch.stack([self._sample((first + i) % rows) for i in range(self._size)])
        return {
            name: samples[:, :-1].contiguous() if same else samples[:, 1:].contiguous()
            for name, same in self._same.items()
        }

    def _sample(self, row: int) -> torch.Tensor:
        start = min(row * self._length, self._data.numel() - self._length - 1)
        return self._data[start : start + self._length + 1].long()


def _label_inputs(loaded: LoadedModel, seq_len: int | None) -> dict[str, bool]:
    """The inputs to fill: True with the tokens themselves, False with each one's follower."""
    example = loaded.example_batch(2, seq_len)
    unfit = [n for n, v in example.items() if v.dim() != 2 or v.is_floating_point()]
    if unfit:
        raise InputError(
            f"--data: text goes into integer inputs [batch, sequence], but {', '.join(unfit)} of "
            f"{loaded.path} is not one; give the file a train_data(rank, world_size) instead"
        )
    names = list(example)
    tokens = example[names[0]]
    same = {names[0]: True}
    for name in names[1:]:
        same[name] = name == "labels" or torch.equal(example[name], tokens)
    return same


def check_vocabulary(model: nn.Module) -> None:
    """Raises ExecutionError when the model has no place for all byte values."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            if module.num_embeddings < BYTE_VALUES:
                raise ExecutionError(
                    f"--data gives bytes, {BYTE_VALUES} values, but {name} holds "
                    f"{module.num_embeddings}; use a model with a larger vocabulary"
                )
            return


def steps(source: Source, count: int) -> Iterator[tuple[int, Batch]]:
    """The first `count` global batches."""
    for step in range(count):
        yield step, source.global_batch(step)

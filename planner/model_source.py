"""From the name of a model to something that can be built, fed and given a loss.

A model is a Python file (functions `build_model` and `example_batch`; or `--build` and `--inputs`;
or its only module class) or a Hugging Face config. `trace` reads a `LoadedModel`, and so does
every worker process, which makes it again from the same three texts: path, build, inputs.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from claw_plan.planner.errors import TraceError
from claw_plan.planner.foreign_code import ForeignCode, import_file
from claw_plan.planner.input_text import InputSpec, parse_inputs, random_batch
from claw_plan.profiles.errors import InputError

DEFAULT_SEQ_LEN_LIMIT = 8192
"""The longest sequence planned for unless the user asks for more (DESIGN: 'at most 8192')."""

SEED = 0
"""Example batches are the same in every process."""

LONGEST_PATH = 200
"""Characters of a path that are shown; the system refuses names above 255."""

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model that can be built.

    `path`, `build_text` and `inputs_text` are enough to load it again elsewhere. `train_data` and
    `optimizer` are the file's own functions, None when it has none. `make` and `make_batch` are
    how this kind of source does it; callers use `build` and `example_batch`.
    """

    path: Path
    name: str
    sha256: str
    make: Callable[[], Any] = field(repr=False)
    make_batch: Callable[[int, int | None], Any] = field(repr=False)
    build_text: str | None = None
    inputs_text: str | None = None
    loss_function: Callable[[Any, Batch], torch.Tensor] | None = None
    train_data: Callable[[int, int], Iterable[Batch]] | None = None
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer] | None = None
    context: int | None = None

    def build(self) -> nn.Module:
        """A fresh module in training mode; a TraceError gives what the model itself raised."""
        with ForeignCode(self.path, "building the model"):
            module = self.make()
        if not isinstance(module, nn.Module):
            is_class = isinstance(module, type)
            given = f"the class {module.__name__}" if is_class else type(module).__name__
            raise TraceError(
                f"{self.path}: building the model gave {given}, not a "
                "torch.nn.Module; return the module itself"
            )
        return module.train()

    def example_batch(self, batch_size: int, seq_len: int | None = None) -> Batch:
        """Random tensors of real values, the same at every call, `batch_size` rows each."""
        with torch.random.fork_rng(devices=[]), ForeignCode(self.path, "making an example batch"):
            torch.manual_seed(SEED)
            batch = self.make_batch(batch_size, seq_len)
        if not isinstance(batch, Mapping) or not batch:
            raise InputError(
                f"{self.path}: example_batch returns a dict of tensors named as forward's "
                f"arguments, but gave {type(batch).__name__}"
            )
        batch = dict(batch)
        self._check_rows(batch, batch_size)
        return batch

    def _check_rows(self, batch: Batch, batch_size: int) -> None:
        for name, value in batch.items():
            if not isinstance(value, torch.Tensor):
                raise InputError(
                    f"{self.path}: input {name!r} is {type(value).__name__}, not a tensor; give "
                    "constants a default in forward and leave them out of the batch"
                )
            if value.dim() == 0 or value.shape[0] != batch_size:
                raise TraceError(
                    f"{self.path}: the first dimension of input {name!r} must be the batch, but "
                    f"a batch of {batch_size} gave shape {tuple(value.shape)}; put the batch "
                    "first in every tensor, so that it can be split"
                )

    def inputs_of(self, module: nn.Module, batch: Batch) -> Batch:
        """The part of the batch that `forward` takes; what only `loss` reads is left out.

        What goes into `**kwargs` is taken to be for `forward` where there is no `loss` to read it.
        """
        parameters = [
            parameter
            for parameter in inspect.signature(module.forward).parameters.values()
            if parameter.kind is not parameter.VAR_POSITIONAL
        ]
        taken = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
        takes_any = len(taken) < len(parameters)
        if takes_any and (self.loss_function is None or not taken & batch.keys()):
            return dict(batch)
        unknown = [name for name in batch if name not in taken]
        missing = [
            p.name
            for p in parameters
            if p.default is p.empty and p.name in taken and p.name not in batch
        ]
        if missing or (unknown and self.loss_function is None):
            raise InputError(
                f"{self.path}: forward takes ({', '.join(sorted(taken))}) and the batch has "
                f"({', '.join(batch)}); name the inputs as forward's arguments"
                + (", or give a function loss(output, batch)" if unknown else "")
            )
        return {name: value for name, value in batch.items() if name in taken}

    def loss(self, output: Any, batch: Batch) -> torch.Tensor:
        """The scalar to minimise: of the file's `loss`, or found in what the model returned."""
        if self.loss_function is None:
            found = _scalar_of(output)
        else:
            with ForeignCode(self.path, "computing the loss"):
                found = self.loss_function(output, batch)
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            raise TraceError(
                f"{self.path}: no scalar loss in what the model returns ({_describe(output)}); "
                "add a function loss(output, batch) to the file"
            )
        return found if found.ndim == 0 else found.reshape(())

    @cached_property
    def native_seq_len(self) -> int | None:
        """The sequence length the model's own inputs have; None without a sequence."""
        if self.context is not None:
            return self.context
        batch = self.example_batch(2)
        return next((length for length in map(_sequence_of, batch.values()) if length), None)

    def seq_len(self, limit: int = DEFAULT_SEQ_LEN_LIMIT) -> int | None:
        """The model's context, at most `limit`; None for models without a sequence."""
        return None if self.native_seq_len is None else min(self.native_seq_len, limit)


def load_model(path: Path, *, build: str | None = None, inputs: str | None = None) -> LoadedModel:
    """The model of a Python file, a Hugging Face config.json or a folder holding one.

    `build` is an expression in the file's own namespace; `inputs` describes a batch as in
    `idx=int64[B,1024]<50304`. Raises InputError or TraceError with one sentence for the user.
    """
    path = _model_file(Path(path))
    specs = None if inputs is None else parse_inputs(inputs)
    if path.suffix == ".json":
        return _load_config(path, build, inputs, specs)
    if path.suffix != ".py":
        raise InputError(f"{path}: a model is a .py file or a config.json, not {path.suffix!r}")
    namespace = vars(import_file(path))
    return LoadedModel(
        path=path,
        name=path.stem,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        make=_maker(path, namespace, build),
        make_batch=_batch_maker(path, namespace, specs),
        build_text=build,
        inputs_text=inputs,
        loss_function=namespace.get("loss"),
        train_data=namespace.get("train_data"),
        optimizer=namespace.get("optimizer"),
    )


def _model_file(path: Path) -> Path:
    """The file itself, or the config.json of a folder."""
    try:
        if path.is_dir() and (path / "config.json").is_file():
            return path / "config.json"
        if path.is_file():
            return path
        what = "is a folder without a config.json" if path.is_dir() else "does not exist"
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
    raise InputError(
        f"{str(path)[:LONGEST_PATH]} {what}; give a Python file or a Hugging Face config.json"
    )


def _load_config(
    path: Path, build: str | None, inputs: str | None, specs: tuple[InputSpec, ...] | None
) -> LoadedModel:
    from claw_plan.planner.hf_model import HuggingFaceConfig

    if build is not None:
        raise InputError(f"{path}: --build names an expression of a Python file, not of a config")
    source = HuggingFaceConfig.read(path, is_fed=specs is not None)
    chosen = source.inputs() if specs is None else specs
    return LoadedModel(
        path=path,
        name=path.parent.name if path.name == "config.json" else path.stem,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        make=source.build,
        make_batch=lambda size, seq_len: random_batch(chosen, size, seq_len),
        inputs_text=inputs,
        context=source.context if specs is None else None,
    )


def _maker(path: Path, namespace: dict[str, Any], build: str | None) -> Callable[[], Any]:
    if build is not None:
        with ForeignCode(path, f"reading --build {build!r}"):
            code = compile(build, "--build", "eval")
        return lambda: eval(code, namespace)
    if callable(given := namespace.get("build_model")):
        return given  # type: ignore[no-any-return]
    own = [
        value
        for value in namespace.values()
        if inspect.isclass(value)
        and issubclass(value, nn.Module)
        and value.__module__ == namespace["__name__"]
    ]
    found = [cls for cls in own if _has_default_constructor(cls)]
    if len(found) == 1:
        return found[0]
    advice = 'add build_model() to it or pass --build "GPT(GPTConfig())"'
    if found:
        names = ", ".join(cls.__name__ for cls in found)
        raise InputError(f"{path}: several modules could be the model ({names}); {advice}")
    if own:
        names = ", ".join(cls.__name__ for cls in own)
        raise InputError(f"{path}: every module ({names}) needs arguments; {advice}")
    raise InputError(f"{path}: no torch.nn.Module is defined in this file; {advice}")


def _has_default_constructor(cls: type[nn.Module]) -> bool:
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return all(p.default is not p.empty or p.kind in variadic for p in parameters)


def _batch_maker(
    path: Path, namespace: dict[str, Any], specs: tuple[InputSpec, ...] | None
) -> Callable[[int, int | None], Any]:
    if specs is not None:
        return lambda size, seq_len: random_batch(specs, size, seq_len)
    given = namespace.get("example_batch")
    if not callable(given):
        raise InputError(
            f"{path}: nothing says what the model's inputs are; add example_batch(batch_size) to "
            'the file or pass --inputs "idx=int64[B,1024]<50304"'
        )
    if len(inspect.signature(given).parameters) > 1:
        return lambda size, seq_len: given(size) if seq_len is None else given(size, seq_len)
    return lambda size, seq_len: _cut_sequence(path, given(size), seq_len)


def _sequence_of(tensor: torch.Tensor) -> int | None:
    """Length of the sequence in one input: [batch, seq] of integers, [batch, seq, features]."""
    if tensor.dim() == 2 and not tensor.is_floating_point() and not tensor.is_complex():
        return tensor.shape[1]
    return tensor.shape[1] if tensor.dim() == 3 and tensor.is_floating_point() else None


def _cut_sequence(path: Path, batch: Any, seq_len: int | None) -> Any:
    if seq_len is None or not isinstance(batch, Mapping):
        return batch
    tensors = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    native = next((length for length in map(_sequence_of, tensors) if length), None)
    if native is None or native == seq_len:
        return batch
    if seq_len > native:
        raise InputError(
            f"{path}: example_batch(batch_size) gives sequences of {native}, shorter than "
            f"--seq-len {seq_len}; let it take a second argument: example_batch(batch_size, seq)"
        )

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        # Integer inputs and masks hold the sequence in every dimension of that size ([B, S, S]);
        # of floating-point ones only the second can be it, the features may have the same size.
        last = 2 if tensor.is_floating_point() else tensor.dim()
        for dim in range(1, min(last, tensor.dim())):
            if tensor.shape[dim] == native:
                tensor = tensor.narrow(dim, 0, seq_len)
        return tensor.contiguous()

    return {k: cut(v) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}


def _scalar_of(output: Any) -> torch.Tensor | None:
    if isinstance(output, torch.Tensor):
        return output if output.numel() == 1 else None
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(named, torch.Tensor):
        return named
    if isinstance(output, tuple | list):
        scalars = [
            leaf
            for leaf in output
            if isinstance(leaf, torch.Tensor) and leaf.dim() == 0 and leaf.is_floating_point()
        ]
        return scalars[0] if len(scalars) == 1 else None
    return None


def _describe(output: Any) -> str:
    if isinstance(output, torch.Tensor):
        return f"{str(output.dtype).removeprefix('torch.')}{list(output.shape)}"
    if isinstance(output, tuple | list):
        return "(" + ", ".join(_describe(part) for part in output) + ")"
    return type(output).__name__

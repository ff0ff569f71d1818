"""First weights from a file: `--init-from` a checkpoint of ours, safetensors, or torch.save.

Whatever the plan divides, a rank reads only its own boxes of the file: safetensors are read by
slices, files of torch.save are mapped.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from claw_plan.executor.checkpoint import check_model, read, stored_in
from claw_plan.executor.checkpoint_folder import HEADER, check_files, read_header
from claw_plan.executor.checkpoint_layout import Part, parts_of, whole_part
from claw_plan.executor.checkpoint_state import model_boxes, own_buffers
from claw_plan.executor.gradients import local
from claw_plan.executor.parallel_model import ParallelModel
from claw_plan.profiles.errors import InputError

SAFETENSORS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""What Hugging Face calls a model's weights, in one file and in several."""


class Weights(Protocol):
    """Tensors by the keys of the model's state_dict."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of all tensors there are."""

    def part(self, key: str, part: Part) -> torch.Tensor:
        """One box."""


def load_weights(compiled: ParallelModel, path: Path) -> None:
    """Fills this rank's parameters and persistent buffers; optimizer and data begin anew.

    Raises InputError when the file is none of the kinds, or of another model.
    """
    if (path / HEADER).is_file():
        check_files(path, read_header(path))
        stored = stored_in(path)
        check_model(compiled, stored, path)
        held = {name: parts_of(compiled, name) for name in compiled.parameters}
        read(model_boxes(compiled, held, stored), path, None)
        return
    with ExitStack() as files:
        weights = open_weights(path, files)
        keys = keys_of(compiled, weights.shapes(), path)
        for name, part, target in _targets(compiled):
            if name in keys:
                target.copy_(weights.part(keys[name], part))


def _targets(compiled: ParallelModel) -> Iterator[tuple[str, Part, torch.Tensor]]:
    for name, parameter in compiled.parameters.items():
        for part in parts_of(compiled, name):
            yield name, part, part.of_local(local(parameter.detach()))
    for name, buffer in own_buffers(compiled):
        yield name, whole_part(tuple(buffer.shape)), buffer.detach()


def keys_of(
    compiled: ParallelModel, given: Mapping[str, tuple[int, ...]], path: Path
) -> dict[str, str]:
    """Where each parameter and persistent buffer stands in the file, tied ones under any name."""
    whole = compiled.whole
    for key in given:
        if key not in whole.names:
            raise InputError(
                f"--init-from {path}: {key} is not in the state_dict of the plan's "
                f"{compiled.plan.model.file}; give the weights of the same model"
            )
    keys: dict[str, str] = {}
    for key, name in whole.names.items():
        if key in given:
            keys.setdefault(name, key)
    for name in whole.names.values():
        found = given.get(keys.get(name, ""))
        if found != whole.shapes[name]:
            there = "absent" if found is None else str(list(found))
            raise InputError(
                f"--init-from {path}: {name} is {list(whole.shapes[name])} in the plan's "
                f"{compiled.plan.model.file}, but {there} in the file; give the weights of the "
                "same model"
            )
    return keys


def open_weights(path: Path, files: ExitStack) -> Weights:
    """The weights at `path`, open until `files` is closed."""
    if path.is_dir():
        name = SAFETENSORS if (path / SAFETENSORS).is_file() else INDEX
        path = path / name
    if not path.is_file():
        raise InputError(
            f"--init-from {path} is not there; give a checkpoint (step-<N>), a .safetensors file, "
            "a folder with model.safetensors, or a file of torch.save(model.state_dict())"
        )
    if path.name == INDEX:
        named = set(json.loads(path.read_text())["weight_map"].values())
        return _Safetensors([path.with_name(name) for name in sorted(named)], files)
    if path.suffix == ".safetensors":
        return _Safetensors([path], files)
    return _TorchSave(path)


class _Safetensors:
    def __init__(self, paths: list[Path], files: ExitStack) -> None:
        self._holder = {}
        for path in paths:
            try:
                file = files.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise InputError(f"{path} cannot be read as safetensors: {error}") from None
            self._holder.update(dict.fromkeys(file.keys(), file))

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {k: tuple(file.get_slice(k).get_shape()) for k, file in self._holder.items()}

    def part(self, key: str, part: Part) -> torch.Tensor:
        if not part.sizes:
            number: torch.Tensor = self._holder[key].get_tensor(key)
            return number
        ends = (start + size for start, size in zip(part.offsets, part.sizes, strict=True))
        box: torch.Tensor = self._holder[key].get_slice(key)[tuple(map(slice, part.offsets, ends))]
        return box


class _TorchSave:
    def __init__(self, path: Path) -> None:
        try:
            held = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            first = str(error).partition("\n")[0]
            raise InputError(f"{path} cannot be read by torch.load: {first}") from None
        if not isinstance(held, Mapping) or not all(
            isinstance(value, torch.Tensor) for value in held.values()
        ):
            raise InputError(f"{path} holds no state_dict; write torch.save(model.state_dict())")
        self._held = held

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {key: tuple(value.shape) for key, value in self._held.items()}

    def part(self, key: str, part: Part) -> torch.Tensor:
        return part.of_whole(self._held[key])

"""What an exported script must say about the user's model, found by calling it once.

How the file builds it, what its forward takes of a batch, and where in its answer the loss is:
`describe` finds all of it on fake tensors and writes it as Python expressions, which `export` puts
into the script.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.torch_private import fake_mode
from claw_plan.planner.fake_build import build_fake
from claw_plan.planner.foreign_code import import_file
from claw_plan.planner.input_text import InputSpec, parse_inputs
from claw_plan.planner.model_source import Batch, LoadedModel
from claw_plan.planner.plan import Plan

MODULE = "MODEL"
"""What the script calls the imported model file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelText:
    """Python expressions and statements; each stands in the script as it is.

    `load` imports the file, `build` makes a model, `batch` is the body of make_batch(rows),
    `loss` reads the loss from `output` and `batch`, `call` is the arguments of the model.
    `trains_on_file` says that the file gives training data itself.
    """

    load: str
    build: str
    batch: str
    call: str
    loss: str
    optimizer: str | None
    trains_on_file: bool


def describe(plan: Plan, loaded: LoadedModel, folder: Path) -> ModelText:
    """The model in words of Python, for a script in `folder`."""
    module, batch, output = observe(plan, loaded)
    is_config = loaded.path.suffix == ".json"
    taken = loaded.inputs_of(module, batch)
    call = "**batch"
    if set(taken) != set(batch):
        call = ", ".join(f'{name}=batch["{name}"]' for name in taken)
    return ModelText(
        load=_load_config(loaded, folder) if is_config else _load_file(loaded, folder),
        build=_build(loaded, module),
        batch=_batch(plan, loaded, batch),
        call=call,
        loss=f"{MODULE}.loss(output, batch)" if loaded.loss_function else _loss(loaded, output),
        optimizer=f"{MODULE}.optimizer(iter(parameters))" if loaded.optimizer else None,
        trains_on_file=loaded.train_data is not None,
    )


def observe(plan: Plan, loaded: LoadedModel) -> tuple[nn.Module, Batch, Any]:
    """A model without memory, one microbatch, and what the model answers."""
    batch = loaded.example_batch(plan.knobs().microbatch_size, plan.training.seq_len)
    mode = fake_mode()
    with torch.random.fork_rng(devices=[]):
        module = build_fake(loaded, mode)
        try:
            with mode:
                return module, batch, module(**loaded.inputs_of(module, batch))
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError):
            # Models that look at values need some; see `recording.record`.
            module = loaded.build()
            return module, batch, module(**loaded.inputs_of(module, batch))


def _relative(loaded: LoadedModel, folder: Path) -> str:
    """The model's file from the script's folder."""
    path = Path(os.path.relpath(loaded.path.resolve(), folder.resolve())).as_posix()
    place = f'Path(__file__).resolve().parent / "{path}"'
    return place if len(place) < 85 else f"(\n    {place}\n)"


def _load_file(loaded: LoadedModel, folder: Path) -> str:
    return f'''MODEL_FILE = {_relative(loaded, folder)}


def load_model_file() -> ModuleType:
    """The model's file as a module."""
    sys.path.insert(0, str(MODEL_FILE.parent))  # it may import its neighbours
    spec = importlib.util.spec_from_file_location("model_file", MODEL_FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["model_file"] = module  # dataclasses look their module up by name
    spec.loader.exec_module(module)
    return module


{MODULE} = load_model_file()
{_build_constant(loaded)}'''


def _build_constant(loaded: LoadedModel) -> str:
    if loaded.build_text is None:
        return ""
    text = json.dumps(loaded.build_text)
    return f"# What --build said: an expression in the namespace of the file.\nBUILD = {text}\n"


def _load_config(loaded: LoadedModel, folder: Path) -> str:
    return f"""MODEL_FILE = {_relative(loaded, folder)}
CONFIG = transformers.AutoConfig.from_pretrained(MODEL_FILE)
CONFIG.use_cache = False  # keys and values are kept for generating text only
"""


def _build(loaded: LoadedModel, module: nn.Module) -> str:
    name = type(module).__name__
    if loaded.path.suffix == ".json":
        return f"transformers.{name}(CONFIG)"
    if loaded.build_text is not None:
        return f"eval(BUILD, vars({MODULE}))"
    if callable(getattr(import_file(loaded.path), "build_model", None)):
        return f"{MODULE}.build_model()"
    return f"{MODULE}.{name}()"


def _batch(plan: Plan, loaded: LoadedModel, batch: Batch) -> str:
    """The body of make_batch(rows)."""
    if loaded.inputs_text is not None or loaded.path.suffix == ".json":
        specs = _specs(loaded)
        lines = [f'        "{s.name}": {_random(s, batch[s.name])},' for s in specs]
        return "\n".join(["    return {", *lines, "    }"])
    function = import_file(loaded.path).example_batch
    seq_len = plan.training.seq_len
    if seq_len is not None and len(inspect.signature(function).parameters) > 1:
        return f"    return {MODULE}.example_batch(rows, {seq_len})"
    given = function(plan.knobs().microbatch_size)
    if all(given[name].shape == value.shape for name, value in batch.items()):
        return f"    return {MODULE}.example_batch(rows)"
    if any(value.dim() != 2 for value in batch.values()):
        raise ExecutionError(
            f"export: {loaded.path.name} gives longer sequences than the plan's "
            f"{seq_len}; let example_batch take a second argument: example_batch(rows, seq_len)"
        )
    return (
        f"    batch = {MODULE}.example_batch(rows)\n"
        f"    return {{name: value[:, :{seq_len}].contiguous() for name, value in batch.items()}}"
    )


def _specs(loaded: LoadedModel) -> tuple[InputSpec, ...]:
    if loaded.inputs_text is not None:
        return parse_inputs(loaded.inputs_text)
    from claw_plan.planner.hf_model import HuggingFaceConfig

    return HuggingFaceConfig.read(loaded.path).inputs()


def _random(spec: InputSpec, example: torch.Tensor) -> str:
    """The expression that draws what `input_text.random_batch` draws."""
    sizes = ", ".join(["rows", *map(str, example.shape[1:])])
    cast = f".to(torch.{spec.dtype})"
    shape = f"({sizes},)" if example.dim() == 1 else f"({sizes})"
    if example.is_floating_point() or example.is_complex():
        if spec.bound is None:
            return f"torch.randn({sizes}){cast}"
        return f"(torch.rand({sizes}) * {spec.bound}){cast}"
    return f"torch.randint(0, {int(spec.bound or 2)}, {shape}){cast}"


def _loss(loaded: LoadedModel, output: Any) -> str:
    """Where in the answer of the model the loss is, by the rules of `LoadedModel.loss`."""
    found = loaded.loss(output, {})
    if output is found or isinstance(output, torch.Tensor):
        return "output"
    if getattr(output, "loss", None) is not None:
        return "output.loss"
    if isinstance(output, Mapping):
        return 'output["loss"]'
    places = [
        index
        for index, part in enumerate(output)
        if isinstance(part, torch.Tensor) and part.dim() == 0 and part.is_floating_point()
    ]
    return f"output[{places[0]}]"

"""`export_plan`: a plan as a plain torch script that trains without claw-plan.

The script holds only the lines its plan needs, each part with the reason it is there. It reads the
user's own model file, and trains on the same batches and weights as `claw-plan run`. What plain
torch cannot be told in a few readable lines is refused by name, never approximated.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Sequence
from pathlib import Path

import torch.nn as nn

from claw_plan.executor.double_mode import DoubleMode
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.export_model import ModelText, describe, observe
from claw_plan.executor.export_pipeline import has_tied, pipeline_text
from claw_plan.executor.export_steps import (
    checkpoint_text,
    loop_text,
    model_text,
    optimizer_text,
    step_text,
)
from claw_plan.executor.export_tensor_parallel import plain_styles
from claw_plan.executor.export_wrapping import is_sharded, wrapping_text
from claw_plan.executor.opened_plan import device_type_of, open_plan
from claw_plan.executor.sharding import stays_whole
from claw_plan.executor.whole_model import cast_floats
from claw_plan.planner.candidate import MESH_ORDER, Candidate
from claw_plan.planner.expert_tensor_parallel import EXPERTS
from claw_plan.planner.model_source import LoadedModel
from claw_plan.planner.plan import Plan
from claw_plan.planner.schedules import ASYNCHRONOUS

WIDTH = 99
"""Characters of a line."""

IMPORTS = {
    "argparse": "import argparse",
    "contextlib": "import contextlib",
    "copy": "import copy",
    "importlib": "import importlib.util",
    "itertools": "import itertools",
    "os": "import os",
    "sys": "import sys",
    "partial": "from functools import partial",
    "Path": "from pathlib import Path",
    "ModuleType": "from types import ModuleType",
    "": "",
    "torch": "import torch",
    "dist": "import torch.distributed as dist",
    "dcp": "import torch.distributed.checkpoint as dcp",
    "nn": "import torch.nn as nn",
    "transformers": "import transformers",
    "StateDictOptions": (
        "from torch.distributed.checkpoint.state_dict import (\n"
        "    StateDictOptions,\n    get_state_dict,\n    set_state_dict,\n)"
    ),
    "init_device_mesh": "from torch.distributed.device_mesh import init_device_mesh",
    "MixedPrecisionPolicy": (
        "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard"
    ),
    "fully_shard": "from torch.distributed.fsdp import fully_shard",
    "PipelineStage": "from torch.distributed.pipelining import PipelineStage, $SCHEDULE",
    "DTensor": "from torch.distributed.tensor import DTensor",
    "ColwiseParallel": (
        "from torch.distributed.tensor.parallel import (\n"
        "    ColwiseParallel,\n    RowwiseParallel,\n    parallelize_module,\n)"
    ),
    "DistributedDataParallel": "from torch.nn.parallel import DistributedDataParallel",
    "checkpoint": "from torch.utils.checkpoint import checkpoint",
}
"""Name in the script -> the line that imports it."""


def export_plan(plan_path: Path, script: Path) -> str:
    """The text of a script that trains the plan; `script` is where it will lie.

    Raises ExecutionError naming what plain torch cannot be told.
    """
    plan, loaded = open_plan(plan_path)
    knobs = plan.knobs()
    refuse(plan, plan_path)
    text = describe(plan, loaded, script.absolute().parent)
    styles = _styles(plan, loaded) if knobs.tp > 1 else {}
    module, batch, _ = observe(plan, loaded)
    _refuse_numbers(plan, module)
    stages = pipeline_text(plan, loaded, module, batch) if knobs.pp > 1 else ""
    body = "\n\n".join(
        part.strip("\n") + "\n"
        for part in (
            _constants(plan, text),
            model_text(plan, text),
            stages,
            wrapping_text(plan, styles),
            optimizer_text(plan, text),
            step_text(plan, ties=has_tied(stages)),
            checkpoint_text(plan),
            loop_text(plan, ties=has_tied(stages)),
        )
        if part
    )
    whole = _heading(plan, plan_path, script) + _imports(body, plan) + body
    ast.parse(whole)  # what is wrong here must not be found out on a cluster
    return whole


def _refuse_numbers(plan: Plan, module: nn.Module) -> None:
    """Raises ExecutionError for parameters that fully_shard does not take."""
    name = next((name for name, p in module.named_parameters() if stays_whole(p)), None)
    if name is not None and is_sharded(plan):
        raise ExecutionError(
            f"export: {name} has no dimension for fully_shard to cut, and what it needs is "
            "not written out; plan again with --fix dp_shard=1 --precision fp32, or use `from "
            "claw_plan.executor import parallelize`"
        )


def refuse(plan: Plan, path: Path) -> None:
    """Raises ExecutionError for what no plain script is written for."""
    knobs = plan.knobs()
    neutral = Candidate()
    if plan.training.optimizer == "lamb":
        raise ExecutionError(
            "export: torch has no LAMB; plan again with --optimizer adamw, or use `from "
            "claw_plan.executor import parallelize`"
        )
    for name in ("cp", "ep", "collective", "codec", "offload"):
        if getattr(knobs, name) != getattr(neutral, name):
            raise ExecutionError(
                f"export: {name}={getattr(knobs, name)} has no plain form in torch; plan again "
                f"with --fix {name}={getattr(neutral, name)}"
            )
    if any(rule.style == EXPERTS for rule in plan.tensor_parallel):
        raise ExecutionError(
            "export: experts divided by tensor parallelism have no plain form in torch; plan "
            "again with --fix tp=1"
        )
    if knobs.schedule in ASYNCHRONOUS:
        raise ExecutionError(
            f"export: schedule={knobs.schedule} has no plain form in torch, whose pipelines flush "
            "every step; plan again with --fix schedule=1F1B, or use `claw-plan run`"
        )
    if plan.training.precision == "float16":
        raise ExecutionError(
            "export: float16 needs a loss scale that all ranks agree on; plan again with "
            "--precision bfloat16, or use `from claw_plan.executor import parallelize`"
        )
    if plan.training.clip_norm is not None and knobs.pp > 1:
        raise ExecutionError(
            "export: the norm of gradients over pipeline stages is not written out; plan again "
            "with --fix pp=1 or without --clip-norm"
        )
    if knobs.recompute not in ("none", "full"):
        raise ExecutionError(
            f"export: recompute={knobs.recompute} is not written out; plan again with "
            "--fix recompute=full"
        )
    if knobs.reshard_ranks and (knobs.pp > 1 or knobs.tp > 1):
        raise ExecutionError(
            f"export: reshard_ranks={knobs.reshard_ranks} is for pp=tp=1: fully_shard makes its "
            "smaller groups of the ranks of one stage alone, and takes no divided parameters; "
            "plan again with --fix reshard_ranks=0"
        )
    if path.with_suffix(".schedule.csv").exists():
        raise ExecutionError(
            f"export: {path.with_suffix('.schedule.csv').name} holds a schedule of your own, "
            "which torch's public schedules do not take; remove it, or use `claw-plan run`"
        )


def _styles(plan: Plan, loaded: LoadedModel) -> dict[str, str]:
    model = loaded.build().double()
    batch = loaded.example_batch(plan.knobs().microbatch_size, plan.training.seq_len)
    taken = cast_floats(loaded.inputs_of(model, batch), next(model.parameters()).dtype)
    with DoubleMode():
        return plain_styles(plan, model, lambda module: module(**taken))


def _heading(plan: Plan, path: Path, script: Path) -> str:
    ranks = plan.knobs().num_devices
    what = f"Trains {Path(plan.model.file).name} as {path.name} says: {plan.knobs().short()}."
    return f'''"""{textwrap.fill(what, WIDTH - 3)}

Written by `claw-plan export`; it needs torch and the model's file, not claw-plan. Start it with

    torchrun --nproc-per-node {ranks} {script.name} --steps 100

or, over several hosts, with as many processes in all ({ranks}) and torchrun's --nnodes and
--rdzv-endpoint.
"""

'''


def _imports(body: str, plan: Plan) -> str:
    words = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    if "MixedPrecisionPolicy" in words:
        words.discard("fully_shard")
    lines = [line for word, line in IMPORTS.items() if word in words or not word]
    return "\n".join(lines).replace("$SCHEDULE", f"Schedule{plan.schedule.name}") + "\n\n"


def _constants(plan: Plan, text: ModelText) -> str:
    knobs, training = plan.knobs(), plan.training
    axes = {a: getattr(knobs, a) for a in MESH_ORDER if a != "cp" and getattr(knobs, a) > 1}
    axes = axes or {"dp_shard": 1}
    named = ", ".join(f'"{axis}": {size}' for axis, size in axes.items())
    on_cpu = device_type_of(plan) == "cpu"
    device = '"cpu"' if on_cpu else '"cuda", int(os.environ["LOCAL_RANK"])'
    return f"""{text.load}
# Ranks on each axis of the mesh; those of the last axis are neighbours.
AXES = {{{named}}}
DATA_RANKS = {knobs.dp}  # shares of the global batch
GLOBAL_BATCH = {training.global_batch}  # samples of one optimizer step
MICROBATCH = {knobs.microbatch_size}  # samples of one forward and backward on a rank
LEARNING_RATE = {training.learning_rate}
SEED = {training.seed}
BLOCKS = {block_names(plan.blocks)}
DTYPE = torch.float32  # parameters and optimizer states are stored so
DEVICE = torch.device({device})
"""


def block_names(blocks: Sequence[str]) -> str:
    """'[f"h.{i}" for i in range(12)]' for numbered neighbours, else the names one by one."""
    prefixes = {name.rpartition(".")[0] for name in blocks}
    numbers = [name.rpartition(".")[2] for name in blocks]
    if len(prefixes) == 1 and numbers == [str(index) for index in range(len(blocks))]:
        return f'[f"{prefixes.pop()}.{{i}}" for i in range({len(blocks)})]'
    return "[\n" + "".join(f'    "{name}",\n' for name in blocks) + "]"

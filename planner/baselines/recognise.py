"""A file of any known format to its `Setting`: the content decides, not the name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from claw_plan.planner.baselines.accelerate import is_accelerate, read_accelerate
from claw_plan.planner.baselines.deepspeed import is_deepspeed, read_deepspeed
from claw_plan.planner.baselines.megatron import is_megatron, read_megatron
from claw_plan.planner.baselines.setting import Setting
from claw_plan.planner.baselines.torchtitan import is_torchtitan, read_torchtitan
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.files import read_text

FORMATS: tuple[tuple[Callable[[str], bool], Callable[[str, str], Setting]], ...] = (
    (is_deepspeed, read_deepspeed),
    (is_accelerate, read_accelerate),
    (is_megatron, read_megatron),
    (is_torchtitan, read_torchtitan),
)


def read_setting(path: Path) -> Setting:
    """Reads a training configuration. Raises InputError for what is none of a known format."""
    text = read_text(path)
    for is_format, read in FORMATS:
        if is_format(text):
            return read(text, path.name)
    raise InputError(
        f"{path.name} is no training configuration that is known: a Megatron-LM command line "
        "(--tensor-model-parallel-size …), a torchtitan TOML, a DeepSpeed JSON or an Accelerate "
        "YAML"
    )

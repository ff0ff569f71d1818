"""A file of published measurements to its rows, whatever kind of file it is.

`claw-plan validate` and the fits read files through here. The kind is told by the content, not by
the name: runs (a list with model, hardware, plan, measured), iteration times (CSV with their
columns), kernels (tables of rates or times) or collectives (tables with a collective).
"""

from __future__ import annotations

from pathlib import Path

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.files import read_text
from claw_plan.profiles.published_collectives import is_collectives, read_collectives
from claw_plan.profiles.published_fields import load_yaml
from claw_plan.profiles.published_iterations import is_iterations, read_iterations
from claw_plan.profiles.published_kernels import is_kernels, read_kernels
from claw_plan.profiles.published_rows import Published
from claw_plan.profiles.published_training import is_training, read_training


def read_published(path: Path) -> Published:
    """The rows of a file.

    Raises:
        InputError: The file cannot be read, is of no kind that is known, or has a broken row; the
            message names file, row and key.
    """
    text = read_text(path)
    if not text.strip():
        raise InputError(f"{path.name} is empty")
    if is_iterations(text):
        return read_iterations(path)
    data = load_yaml(path)
    if is_training(data):
        return read_training(path, data)
    if is_collectives(data):
        return read_collectives(path, data)
    if is_kernels(data):
        return read_kernels(path, data)
    found = type(data).__name__
    if isinstance(data, dict):
        found = "a mapping with the keys " + ", ".join(str(key) for key in list(data)[:4])
    elif isinstance(data, list):
        found = f"a list of {len(data)}"
    raise InputError(
        f"{path.name} holds no published measurements ({found}); known are a list of runs with "
        "model, hardware, plan and measured; a CSV with a column 'iteration time (ms)'; tables "
        "of kernels with m, n, k and tflops or time_ms; tables of collectives"
    )

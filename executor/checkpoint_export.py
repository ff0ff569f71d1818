"""A checkpoint's weights in one file for one process, under the model's own names.

`export_weights` writes what `model.load_state_dict` and Hugging Face's `from_pretrained` read:
every key of the state_dict, tied ones too, as torch.save or as safetensors. It needs host memory
for the model, and no ranks.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from claw_plan.executor.checkpoint import read, stored_in
from claw_plan.executor.checkpoint_folder import check_files, read_header
from claw_plan.executor.checkpoint_import import SAFETENSORS
from claw_plan.executor.checkpoint_state import MODEL, whole_box
from claw_plan.executor.errors import ExecutionError


def export_weights(checkpoint: Path, target: Path) -> Path:
    """Writes .safetensors (into a folder as Hugging Face names it), or else torch.save's format.

    Answers with the file. Raises InputError for a checkpoint that is not whole.
    """
    if target.is_dir():
        target = target / SAFETENSORS
    state = whole_weights(checkpoint)
    partial = target.with_name(f".{target.name}.partial")
    try:
        if target.suffix == ".safetensors":
            save_file(_without_sharing(state), partial, metadata={"format": "pt"})
        else:
            torch.save(state, partial)
        partial.replace(target)
    except OSError as error:
        raise ExecutionError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)
    return target


def whole_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The state_dict that one process would have; tied keys share a tensor."""
    header = read_header(checkpoint)
    check_files(checkpoint, header)
    stored = stored_in(checkpoint)
    tensors = {}
    for name in dict.fromkeys(header.names.values()):
        shape, dtype = stored[f"{MODEL}.{name}"]
        tensors[name] = torch.empty(shape, dtype=dtype)
    read([whole_box((MODEL, name), tensor) for name, tensor in tensors.items()], checkpoint, None)
    return {key: tensors[name] for key, name in header.names.items()}


def _without_sharing(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Safetensors keeps no ties: a tensor with several names is written for each."""
    seen: set[int] = set()
    own = {}
    for key, tensor in state.items():
        own[key] = tensor.clone() if id(tensor) in seen else tensor
        seen.add(id(tensor))
    return own

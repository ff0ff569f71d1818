"""`--init-from`: every kind of file fills a model, by slices where the plan divides it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from claw_plan.executor.checkpoint import Checkpointer
from claw_plan.executor.checkpoint_import import load_weights, open_weights
from claw_plan.executor.checkpoint_layout import Part
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import ParallelModel, compile_plan
from claw_plan.executor.ranks import Rank
from claw_plan.profiles.errors import InputError


@pytest.fixture
def compiled(tiny_plan: Callable[..., Path], alone: Rank) -> ParallelModel:
    opened = open_plan(tiny_plan("initialised"))
    return compile_plan(opened[0], opened[1], alone.device)


def shifted(compiled: ParallelModel) -> dict[str, torch.Tensor]:
    """A state_dict of other values, tied keys included."""
    values = {name: p.detach() + 1 for name, p in compiled.parameters.items()}
    return {key: values[first] for key, first in compiled.whole.names.items()}


def write(kind: str, compiled: ParallelModel, folder: Path) -> Path:
    state = shifted(compiled)
    if kind == "torch":
        torch.save(state, folder / "w.pt")
        return folder / "w.pt"
    if kind == "checkpoint":
        kept = {name: p.detach().clone() for name, p in compiled.parameters.items()}
        _add(compiled, 1)
        checkpointer = Checkpointer(compiled, folder / "c")
        checkpointer.save(1)
        assert checkpointer.finish() == ""
        for name, parameter in compiled.parameters.items():
            parameter.detach().copy_(kept[name])
        return folder / "c" / "step-00000001"
    own = {key: value.clone() for key, value in state.items()}
    if kind == "file":
        del own["lm_head.weight"]  # a tied key that is left out is found under its other name
        save_file(own, folder / "w.safetensors")
        return folder / "w.safetensors"
    names = sorted(own)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in shards.items():
        save_file({key: own[key] for key in keys}, folder / file)
    weight_map = {key: file for file, keys in shards.items() for key in keys}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    return folder


def _add(compiled: ParallelModel, number: float) -> None:
    for parameter in compiled.parameters.values():
        parameter.detach().add_(number)


@pytest.mark.parametrize("kind", ["torch", "checkpoint", "file", "folder"])
def test_every_kind_of_file_fills_the_model(
    kind: str, compiled: ParallelModel, tmp_path: Path
) -> None:
    expected = shifted(compiled)
    path = write(kind, compiled, tmp_path)
    load_weights(compiled, path)
    for name, parameter in compiled.parameters.items():
        assert torch.equal(parameter, expected[name]), name
    assert not compiled.optimizer.state


def test_a_part_is_a_slice_of_the_file(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(4, 6)
    save_file({"a": whole, "n": torch.tensor(5.0)}, tmp_path / "w.safetensors")
    torch.save({"a": whole, "n": torch.tensor(5.0)}, tmp_path / "w.pt")
    for name in ("w.safetensors", "w.pt"):
        with ExitStack() as files:
            weights = open_weights(tmp_path / name, files)
            part = Part((1, 2), (2, 3), (0, 0))
            assert torch.equal(weights.part("a", part), whole[1:3, 2:5])
            assert weights.part("n", Part((), (), ())) == 5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("transformer.wpe.weight"), "wpe.weight .*but absent in the file"),
        (lambda state: state.update(more=torch.zeros(1)), "more is not in the state_dict"),
        (
            lambda state: state.update({"transformer.wpe.weight": torch.zeros(2, 3)}),
            r"but \[2, 3\] in the file",
        ),
    ],
)
def test_weights_of_another_model_are_refused(
    change: Callable[[dict[str, torch.Tensor]], None],
    said: str,
    compiled: ParallelModel,
    tmp_path: Path,
) -> None:
    state = shifted(compiled)
    change(state)
    torch.save(state, tmp_path / "w.pt")
    with pytest.raises(InputError, match=said):
        load_weights(compiled, tmp_path / "w.pt")


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_what_is_no_such_file_is_one_line(
    name: str, compiled: ParallelModel, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="is not there; give a checkpoint"):
        load_weights(compiled, tmp_path / name)
    (tmp_path / name).write_bytes(b"no weights at all")
    with pytest.raises(InputError, match="cannot be read") as raised:
        load_weights(compiled, tmp_path / name)
    assert "\n" not in str(raised.value)
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(InputError, match="holds no state_dict"):
        load_weights(compiled, tmp_path / "list.pt")

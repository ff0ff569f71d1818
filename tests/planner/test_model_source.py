from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from claw_plan.planner.errors import TraceError
from claw_plan.planner.model_source import load_model
from claw_plan.profiles.errors import InputError

ROOT = Path(__file__).parents[2]

HEAD = "import torch\nimport torch.nn as nn\n"
NET = """
class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.linear = nn.Linear(width, width)
    def forward(self, x):
        return self.linear(x)
"""
BATCH = "\ndef example_batch(n): return {'x': torch.randn(n, 4)}\n"
LOSS = "\ndef loss(output, batch): return output.sum()\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "model.py"
    path.write_text(HEAD + text, encoding="utf-8")
    return path


def test_the_example_that_imports_its_sibling() -> None:
    model = load_model(ROOT / "examples" / "gpt_small.py")
    module, batch = model.build(), model.example_batch(3)
    assert module.training
    assert (model.name, model.seq_len(), model.seq_len(64)) == ("gpt_small", 128, 64)
    assert {name: tuple(t.shape) for name, t in batch.items()} == {
        "idx": (3, 128),
        "targets": (3, 128),
    }
    loss = model.loss(module(**model.inputs_of(module, batch)), batch)
    assert loss.shape == () and abs(loss.detach().item() - torch.tensor(256.0).log()) < 0.2


def test_it_can_be_loaded_again_from_its_texts(tmp_path: Path) -> None:
    path = write(tmp_path, NET)
    model = load_model(path, build="Net(width=4)", inputs="x=float32[B,4]")
    again = load_model(model.path, build=model.build_text, inputs=model.inputs_text)
    assert again.sha256 == model.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert torch.equal(again.example_batch(2)["x"], model.example_batch(2)["x"])


def test_making_a_batch_leaves_the_random_state(tmp_path: Path) -> None:
    model = load_model(write(tmp_path, NET + BATCH))
    before = torch.random.get_rng_state()
    model.example_batch(2)
    assert torch.equal(before, torch.random.get_rng_state())


def test_the_only_module_with_a_default_constructor(tmp_path: Path) -> None:
    other = "\nclass Part(nn.Module):\n    def __init__(self, width): super().__init__()\n"
    assert type(load_model(write(tmp_path, NET + other + BATCH)).build()).__name__ == "Net"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BATCH, "no torch.nn.Module is defined"),
        (NET + "class Other(Net): pass" + BATCH, r"several modules .*\(Net, Other\)"),
        (NET.replace("=4", "") + BATCH, r"every module \(Net\) needs arguments"),
        (NET, "nothing says what the model's inputs are"),
    ],
)
def test_files_that_name_no_model_or_no_inputs(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_model(write(tmp_path, text))


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nowhere.py does not exist"):
        load_model(tmp_path / "nowhere.py")
    with pytest.raises(InputError, match=r"is a folder without a config.json"):
        load_model(tmp_path)
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"a \.py file or a config\.json, not '\.bin'"):
        load_model(tmp_path / "weights.bin")


def test_a_model_that_raises_while_building(tmp_path: Path) -> None:
    model = load_model(write(tmp_path, "def build_model():\n    return 1 // 0\n" + BATCH))
    with pytest.raises(TraceError, match=r"building the model failed: ZeroDivisionError.*line 4"):
        model.build()


def test_building_something_else(tmp_path: Path) -> None:
    model = load_model(write(tmp_path, "def build_model(): return 7\n" + BATCH))
    with pytest.raises(TraceError, match=r"gave int, not a torch\.nn\.Module"):
        model.build()
    model = load_model(write(tmp_path, "def build_model(): return nn.Linear\n" + BATCH))
    with pytest.raises(TraceError, match=r"gave the class Linear, not a torch\.nn\.Module"):
        model.build()


@pytest.mark.parametrize(
    ("batch", "kind", "message"),
    [
        ("{'x': torch.randn(4)}", TraceError, r"of input 'x' must be the batch.*\(4,\)"),
        ("{'x': torch.randn(n, 4), 'y': torch.randn(4, n)}", TraceError, "'y' must be the batch"),
        ("{'x': torch.randn(n, 4), 'k': 3}", InputError, "'k' is int, not a tensor"),
        ("(torch.randn(n, 4),)", InputError, "returns a dict of tensors .* gave tuple"),
    ],
)  # fmt: skip
def test_batches_that_cannot_be_split(
    tmp_path: Path, batch: str, kind: type[Exception], message: str
) -> None:
    model = load_model(write(tmp_path, NET + f"\ndef example_batch(n): return {batch}\n"))
    with pytest.raises(kind, match=message):
        model.example_batch(3)


def test_inputs_that_forward_does_not_take(tmp_path: Path) -> None:
    more = BATCH.replace("4)", "4), 'y': torch.randn(n)")
    model = load_model(write(tmp_path, NET + more))
    with pytest.raises(InputError, match=r"forward takes \(x\) and the batch has \(x, y\)"):
        model.inputs_of(model.build(), model.example_batch(2))
    model = load_model(write(tmp_path, NET + more + LOSS))
    assert list(model.inputs_of(model.build(), model.example_batch(2))) == ["x"]


def test_losses_are_found_in_outputs(tmp_path: Path) -> None:
    model = load_model(write(tmp_path, NET + BATCH))
    one = torch.tensor(2.0)
    vector = torch.zeros(3)

    class Output:
        loss = one

    for output in (one, torch.tensor([2.0]), (vector, one), {"loss": one, "x": vector}, Output()):
        assert model.loss(output, {}) == 2.0
    for output in (vector, (vector, vector), (one, one), None):
        with pytest.raises(TraceError, match="no scalar loss in what the model returns"):
            model.loss(output, {})


def test_shorter_sequences_are_cut_and_longer_ones_refused(tmp_path: Path) -> None:
    batch = "\ndef example_batch(n): return {'x': torch.zeros(n, 8, dtype=torch.int64)}\n"
    model = load_model(write(tmp_path, NET + batch))
    assert model.example_batch(2, 4)["x"].shape == (2, 4)
    with pytest.raises(InputError, match="gives sequences of 8, shorter than --seq-len 16"):
        model.example_batch(2, 16)
    longer = batch.replace("(n)", "(n, length=8)").replace("n, 8", "n, length")
    assert load_model(write(tmp_path, NET + longer)).example_batch(2, 16)["x"].shape == (2, 16)


def test_images_have_no_sequence(tmp_path: Path) -> None:
    assert load_model(write(tmp_path, NET), inputs="x=float32[B,3,8,8]").seq_len() is None


@pytest.mark.parametrize(
    ("forward", "loss", "taken"),
    [
        ("x, **options", True, ["x"]),
        ("x, **options", False, ["x", "y"]),
        ("*args, **options", True, ["x", "y"]),
    ],
)
def test_what_only_the_loss_reads_is_not_put_into_kwargs(
    tmp_path: Path, forward: str, loss: bool, taken: list[str]
) -> None:
    """x-transformers' wrapper hands its **kwargs on to layers that know no labels."""
    text = f"""
import torch

class Net(torch.nn.Module):
    def forward(self, {forward}):
        return None

def example_batch(size):
    return {{"x": torch.ones(size), "y": torch.ones(size)}}
"""
    text += "def loss(output, batch):\n    return batch['y'].mean()\n" * loss
    (tmp_path / "net.py").write_text(text)
    model = load_model(tmp_path / "net.py")
    assert list(model.inputs_of(model.build(), model.example_batch(2))) == taken

"""A user's own script under torchrun, against the same loop in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn

from claw_plan.executor import parallelize
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.ranks import Rank
from claw_plan.planner.errors import PlanError
from claw_plan.planner.plan import load_plan

STEPS = 3

SCRIPT = """
import sys
from pathlib import Path
import torch
from claw_plan.executor import parallelize
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.checkpoint_layout import parts_of
from claw_plan.executor.gradients import local

sys.path.insert(0, sys.argv[1])
from own import STEPS, global_batch, own_model

def train(path, way):
    model, optimizer, step = parallelize(path, own_model(path))
    losses = []
    for index in range(STEPS):
        batch = model.share_of(global_batch(index))
        if way == "step":
            losses.append(step(batch))
            continue
        halves = [{name: value.chunk(2)[half] for name, value in batch.items()} for half in (0, 1)]
        total = 0.0
        for half in halves:
            loss = model(**half) / 2
            loss.backward()
            total += loss.detach()
        optimizer.step()
        optimizer.zero_grad()
        torch.distributed.all_reduce(total, op=torch.distributed.ReduceOp.AVG)
        losses.append(total.item())
    compiled = model.compiled
    return losses, [
        (name, part.offsets, part.of_local(local(parameter.detach())).clone())
        for name, parameter in compiled.parameters.items()
        for part in parts_of(compiled, name)
    ]

results = {}
for text in sys.argv[2:]:
    path, _, way = text.partition(":")
    results[text] = train(Path(path), way)
rank = torch.distributed.get_rank()
try:
    model = own_model(Path(path))
    with torch.no_grad():
        next(model.parameters()).add_(rank)
    parallelize(path, model)
except ExecutionError as error:
    results["error"] = str(error)
torch.save(results, Path(sys.argv[1], f"{rank}.pt"))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""

OWN = f"""
import torch
from claw_plan.executor.opened_plan import open_plan
STEPS = {STEPS}

def own_model(path):
    torch.manual_seed(11)
    return open_plan(path)[1].build().double()

def global_batch(step):
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 61, (8, 17), generator=generator)
    return {{"idx": tokens[:, :-1].contiguous(), "targets": tokens[:, 1:].contiguous()}}
"""

WAYS = {
    "ddp": ({"dp_replicate": 4}, ("step", "loop")),
    "fsdp": ({"dp_shard": 4, "microbatch_size": 2, "recompute": "full"}, ("step", "loop")),
    "tp": ({"dp_replicate": 2, "tp": 2}, ("step", "loop")),
    "sp": ({"dp_shard": 2, "tp": 2, "sequence_parallel": True}, ("step", "loop")),
    "pp": ({"pp": 2, "dp_replicate": 2}, ("step",)),
}


@pytest.mark.slow
def test_a_script_of_ones_own_trains_like_one_process(
    tiny_plan: Callable[..., Path], tmp_path: Path
) -> None:
    plans = {name: tiny_plan(f"own-{name}", **knobs) for name, (knobs, _) in WAYS.items()}
    texts = [f"{plans[name]}:{way}" for name, (_, ways) in WAYS.items() for way in ways]
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    subprocess.run(
        [*command, str(tmp_path / "script.py"), str(tmp_path), *texts],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300,
        check=True,
    )
    losses, parameters = _alone(plans["ddp"])
    for rank in range(4):
        results = torch.load(tmp_path / f"{rank}.pt")
        for text in texts:
            found, values = results[text]
            assert found == pytest.approx(losses, abs=1e-10), text
            for name, offsets, value in values:
                whole = parameters[name]
                for dim, (start, size) in enumerate(zip(offsets, value.shape, strict=True)):
                    whole = whole.narrow(dim, start, size)
                torch.testing.assert_close(value, whole, rtol=0, atol=1e-10)
        assert "transformer.wte.weight has other values on other ranks" in results["error"]


def _alone(plan: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same training in this process, written without claw-plan."""
    names: dict[str, object] = {}
    exec(OWN, names)
    model = names["own_model"](plan)  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        _, loss = model(**names["global_batch"](step))  # type: ignore[operator]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def _model(path: Path) -> nn.Module:
    return open_plan(path)[1].build()


def test_one_rank_needs_no_process_group(tiny_plan: Callable[..., Path]) -> None:
    path = tiny_plan("own-one")
    try:
        model, _, step = parallelize(load_plan(path).model_copy(), _model(path))
        loaded = open_plan(path)[1]
        first = step(loaded.example_batch(8))
        assert step(loaded.example_batch(8)) < first
        assert (model.data_rank, model.data_ranks) == (0, 1)
        with pytest.raises(ExecutionError, match=r"takes this rank's 8 rows .* but got 4"):
            step(loaded.example_batch(4))
    finally:
        dist.destroy_process_group()


def test_what_differs_from_the_plan_is_said(
    tiny_plan: Callable[..., Path], alone: Rank, tmp_path: Path
) -> None:
    two, one = tiny_plan("own-two", dp_shard=2), tiny_plan("own-other")
    with pytest.raises(ExecutionError, match="trains on 2 ranks, but 1 were started"):
        parallelize(two, _model(two))
    other = _model(one)
    del other.transformer.h[3]  # type: ignore[operator, union-attr]
    with pytest.raises(
        ExecutionError, match=r"planned with transformer\.h\.3.* but .* not at all"
    ):
        parallelize(one, other)
    with pytest.raises(ExecutionError, match=r"is on meta, but .* with its weights"):
        parallelize(one, _model(one).to("meta"))
    text = one.read_text()
    sha = load_plan(one).model.sha256
    changed = tmp_path / "changed.yaml"
    changed.write_text(text.replace(sha, "a" * 64))
    with pytest.raises(PlanError, match="is not the file that was planned"):
        parallelize(changed, _model(one))


def test_a_script_started_alone_is_told_how_to_start(tiny_plan: Callable[..., Path]) -> None:
    path = tiny_plan("own-alone", dp_replicate=2)
    with pytest.raises(ExecutionError, match="torchrun --nproc-per-node 2 SCRIPT"):
        parallelize(path, _model(path))


def test_a_loop_of_ones_own_is_refused_where_it_would_be_wrong(
    tiny_plan: Callable[..., Path], alone: Rank
) -> None:
    path = tiny_plan("own-half", precision="float16")
    model, _, _ = parallelize(path, _model(path))
    with pytest.raises(ExecutionError, match="scales the loss: call step"):
        model(**open_plan(path)[1].example_batch(2))

"""Reported cases about data parallelism and numerics; each test names its case.

The cases are threads of public projects (source and number stand with each in the corpus); what
is checked is the outcome that is right, not the one that was reported. Models are made for it,
small enough to train in a blink, and trained by real processes against one.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.job import VERIFY, Job
from claw_plan.executor.launch import start_ranks
from claw_plan.executor.mesh import make_mesh
from claw_plan.executor.opened_plan import open_plan
from claw_plan.executor.parallel_model import compile_plan
from claw_plan.executor.verify import VerifyResult, verify_plans
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.graph import Parameter
from claw_plan.planner.model_source import load_model
from claw_plan.planner.pinned import batch_refusal
from claw_plan.planner.plan import Plan, candidate_mapping, save_plan
from claw_plan.planner.planning import PlanningRequest, make_plan
from claw_plan.planner.shards import GroupSize, Place, shard_numel
from claw_plan.planner.trace import trace

CPU = torch.device("cpu")
GLOBAL_BATCH = 8

MODELS = '''
import torch
import torch.nn as nn


class Chain(nn.Module):
    """Blocks of one kind between an embedding of x and a mean squared error."""

    def __init__(self, make, width=8):
        super().__init__()
        self.start = nn.Linear(4, width)
        self.blocks = nn.ModuleList(make(width) for _ in range(2))
        self.end = nn.Linear(width, 10)  # ten rows: 3, 3, 3 and 1 on four ranks

    def forward(self, x, y):
        hidden = self.start(x)
        for block in self.blocks:
            hidden = block(hidden)
        return (self.end(hidden).mean(-1) - y).square().mean()


class Plain(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x):
        return x + torch.relu(self.linear(self.norm(x)))


class RootParameters(Chain):
    def __init__(self):
        super().__init__(Plain)
        self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(4))

    def forward(self, x, y):
        return super().forward(x * self.scale + self.shift, y)


class UnusedHead(Chain):
    def __init__(self):
        super().__init__(Plain)
        self.other_head = nn.Linear(8, 3)


class Branches(nn.Module):
    """One of two networks runs, by the first sample's sign."""

    def __init__(self, width):
        super().__init__()
        self.one, self.other = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        chosen = self.one if x.flatten()[0] > 0 else self.other
        return x + torch.tanh(chosen(x))


class Experts(nn.Module):
    """Each sample goes to one of three; an expert without samples does not run."""

    def __init__(self, width):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        chosen = x.argmax(-1) % 3
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        return x + out


class TwoForwards(nn.Module):
    """A batch norm that runs twice before one backward."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.norm(torch.relu(self.linear(self.norm(x))))


class Huge(Chain):
    """Its gradients overflow in fp16 whatever the scale."""

    def __init__(self):
        super().__init__(Plain)

    def forward(self, x, y):
        return super().forward(x, y) * 1e38


def example_batch(batch_size, seq_len=None):
    made = torch.Generator().manual_seed(0)
    x = torch.randn(batch_size, 4, generator=made)
    return {"x": x, "y": x.sum(-1)}
'''

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def plan_of(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Writes a plan for one of MODELS by an expression that makes it."""
    folder = tmp_path_factory.mktemp("numerics")
    model = folder / "models.py"
    model.write_text(MODELS)

    def write(build: str, precision: str = "float32", **knobs: Any) -> Path:
        candidate = Candidate(**knobs)
        blocks = ["blocks.0", "blocks.1"]
        plan = {
            "version": 1,
            "model": {
                "file": str(model),
                "sha256": hashlib.sha256(model.read_bytes()).hexdigest(),
                "build": build,
                "parameters": 1,
            },
            "training": {
                "global_batch": GLOBAL_BATCH,
                "precision": precision,
                "optimizer": "adamw",
                "learning_rate": 1e-2,
            },
            "cluster": {"name": "here", "nodes": [{"devices": {"type": "cpu", "count": 8}}]},
            "candidate": candidate_mapping(candidate),
            "mesh": {
                "axes": {axis: getattr(candidate, axis) for axis in candidate.mesh_order},
                "devices": [f"0:{i}" for i in range(candidate.num_devices)],
            },
            "schedule": {
                "name": "1F1B",
                "stages_per_rank": 1,
                "num_microbatches": candidate.num_microbatches(GLOBAL_BATCH),
            },
            "blocks": blocks,
            "stages": [{"rank_group": 0, "modules": blocks}],
        }
        text = hashlib.sha256(repr(plan).encode()).hexdigest()[:12]
        path = folder / f"{text}.yaml"
        save_plan(Plan.model_validate(plan), path)
        return path

    return write


DDP, FSDP, PAIRS = {"dp_replicate": 2}, {"dp_shard": 2}, {"microbatch_size": 2}

ON_TWO: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "root-parameters": [("RootParameters()", DDP), ("RootParameters()", FSDP)],
    "ddp-unused": [("UnusedHead()", DDP), ("UnusedHead()", FSDP)],
    "ddp-branch-by-flag": [("Chain(Branches)", DDP), ("Chain(Branches)", FSDP)],
    "moe-zero-tokens": [("Chain(Experts)", FSDP | PAIRS), ("Chain(Experts)", DDP)],
    "bn-two-forwards": [("Chain(TwoForwards)", DDP | PAIRS), ("Chain(TwoForwards)", FSDP | PAIRS)],
}  # fmt: skip
"""Case -> models and plans of two processes that must train like one."""


@pytest.fixture(scope="module")
def on_two(plan_of: Write) -> dict[str, list[VerifyResult]]:
    plans = [
        (case, plan_of(build, **knobs)) for case, ways in ON_TWO.items() for build, knobs in ways
    ]
    results = verify_plans([path for _, path in plans], steps=3)
    found: dict[str, list[VerifyResult]] = {}
    for (case, _), result in zip(plans, results, strict=True):
        found.setdefault(case, []).append(result)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", ON_TWO)
def test_trains_like_one_process(case: str, on_two: dict[str, list[VerifyResult]]) -> None:
    assert [result.first_difference for result in on_two[case]] == [None] * len(ON_TWO[case])


@pytest.mark.slow
def test_dtensor_10_on_4(plan_of: Write) -> None:
    """Ten rows over four ranks are 3, 3, 3 and 1; all ten train."""
    [result] = verify_plans([plan_of("Chain(Plain)", dp_shard=4)], steps=3)
    assert result.ok


def test_root_parameters_are_counted(plan_of: Write) -> None:
    """root-parameters: accelerate 1548."""
    loaded = load_model(open_plan(plan_of("RootParameters()"))[1].path, build="RootParameters()")
    graph = trace(loaded, seq_len=None, dtype="float32")
    own = {name for parameter in graph.parameters for name in parameter.names}
    assert {"scale", "shift"} <= own
    assert graph.num_parameters == sum(p.numel() for p in loaded.build().parameters())


def parameter(*shape: int) -> Parameter:
    return Parameter(names=("w",), shape=shape, dtype="float32", trainable=True, units=(0,))


@pytest.mark.parametrize(("rows", "ranks"), [(16, 6), (10, 4), (7, 4), (3, 4)])
def test_linear_16_on_6(rows: int, ranks: int) -> None:
    """linear-16-on-6: every rank's shard is torch.chunk's, of some ranks nothing."""
    chunks = [len(chunk) for chunk in torch.arange(rows).chunk(ranks)]
    chunks += [0] * (ranks - len(chunks))
    weight = parameter(rows, 2)
    shards = [shard_numel(weight, 1, ranks, Place(dp_shard=rank)) for rank in range(ranks)]
    assert shards == [2 * rows for rows in chunks]
    size = GroupSize().plus(weight, 1, ranks)
    assert (size.whole, size.shard) == (2 * rows, 2 * max(chunks))


def test_batch_dp_ga() -> None:
    """batch-dp-ga: a global batch of 256 over dp=7 in microbatches of 2."""
    said = batch_refusal({"dp_replicate": 7, "microbatch_size": 2}, 256)
    assert "dp=7 x microbatch_size=2 = 14; nearest: 252 or 266" in said


def test_batch_silent_truncate(plan_of: Write) -> None:
    """batch-silent-truncate: nothing rounds a batch down, neither planning nor a plan."""
    with pytest.raises(PlanError, match="10 does not divide into dp=4"):
        Candidate(dp_shard=4).num_microbatches(10)


def test_uneven_inputs(plan_of: Write, alone: None) -> None:
    """uneven-inputs: the rest of a data set is refused by name before any collective."""
    plan, loaded = open_plan(plan_of("Chain(Plain)"))
    compiled = compile_plan(plan, loaded, CPU)
    with pytest.raises(ExecutionError, match=r"trains on 8 samples a step .* but got 5; .* drop"):
        compiled.train_step(loaded.example_batch(5))


def test_world_not_divisible(plan_of: Write, alone: None, tmp_path: Path) -> None:
    """world-not-divisible: pp=3 on eight devices is planned on six or three; else it is said."""
    model = open_plan(plan_of("Chain(Plain)"))[1].path
    request = PlanningRequest(
        model=model,
        cluster=str(_cluster(tmp_path, 8)),
        build="Chain(Plain)",
        global_batch=6,
        fix={"pp": 2, "dp_shard": 3, "dp_replicate": 1, "tp": 1},
        output_folder=tmp_path,
    )
    assert make_plan(request).plan.knobs().num_devices == 6
    with pytest.raises(ExecutionError, match=r"needs 6 ranks \(pp=3 .* but 1 were started"):
        make_mesh(Candidate(pp=3, dp_shard=2), "cpu")


def _cluster(folder: Path, count: int) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(f"name: here\nnodes: [{{devices: {{type: cpu, count: {count}}}}}]\n")
    return path


def test_fp16_scale_floor(plan_of: Write, alone: None) -> None:
    """fp16-scale-floor: training that takes no step ends, with advice."""
    plan, loaded = open_plan(plan_of("Huge()", precision="float16"))
    compiled = compile_plan(plan, loaded, CPU)
    before = [parameter.detach().clone() for parameter in compiled.trainable()]
    with pytest.raises(ExecutionError, match="no step can be taken; plan with --precision bf16"):
        for _ in range(17):  # 65536 halves to 1 in 16 steps
            compiled.train_step(loaded.example_batch(GLOBAL_BATCH))
    for parameter, value in zip(compiled.trainable(), before, strict=True):
        assert torch.equal(parameter.detach(), value)


@pytest.mark.parametrize(
    ("precision", "said"),
    [
        ("bf16", r"--precision bfloat16: v100-sxm-32gb computes in float16, float32, float64"),
        ("fp16", "not activations of weights that were trained in bfloat16"),
    ],
)
def test_fp16_bf16_weights(plan_of: Write, tmp_path: Path, precision: str, said: str) -> None:
    """fp16-bf16-weights: V100 has no bf16, which is said before anything starts."""
    request = PlanningRequest(
        model=open_plan(plan_of("Chain(Plain)"))[1].path,
        cluster="dgx1-v100",
        build="Chain(Plain)",
        global_batch=8,
        precision=precision,
        fix={"pp": 1, "tp": 1, "dp_replicate": 1, "dp_shard": 1},
        output_folder=tmp_path,
    )
    if precision == "bf16":
        with pytest.raises(PlanError, match=said):
            make_plan(request)
    else:
        assert any(said in line for line in make_plan(request).assumptions)


@pytest.mark.slow
def test_eval_on_rank0_only(plan_of: Write, tmp_path: Path) -> None:
    """eval-on-rank0-only: a rank that goes its own way ends all, and not with success."""
    script = tmp_path / "leaves.py"
    script.write_text(
        "import os, sys\n"
        "from claw_plan.executor import parallel_model, worker\n"
        "step = parallel_model.ParallelModel.train_step\n"
        "def leave(self, batch):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        os._exit(0)\n"
        "    return step(self, batch)\n"
        "parallel_model.ParallelModel.train_step = leave\n"
        "worker.run(sys.argv[1:])\n"
    )
    job = Job(kind=VERIFY, folder=tmp_path, plans=(plan_of("Chain(Plain)", dp_shard=2),), steps=1)
    with pytest.raises(ExecutionError, match=r"rank [01]"):
        start_ranks(job, 2, worker=(sys.executable, str(script)))


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()

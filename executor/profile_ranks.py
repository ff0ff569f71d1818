"""A model's pieces measured on several ranks of this machine, each with a part of the model.

`claw-plan profile --gpus N` calls `profile_ranks` after `profile_model`. For every way of dividing
the model that is proven (parameters sharded, weights divided) a plan is written and run for a few
steps; what its ranks record are the kernels at their divided shapes and the collectives between
them. So a model is measured that no single device holds.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from claw_plan.executor.benchmark_gpu import detect_gpu_node
from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.run import RANKS_PER_CORE, run_plan
from claw_plan.executor.run_files import MEASUREMENTS
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.graph import ModelGraph
from claw_plan.planner.model_source import LoadedModel
from claw_plan.planner.plan import save_plan
from claw_plan.planner.plan_writer import write_plan
from claw_plan.planner.problem import Problem, Training
from claw_plan.planner.score import Scorer
from claw_plan.planner.trace import trace
from claw_plan.profiles.cluster import Cluster
from claw_plan.profiles.cluster_file import cluster_from_mapping
from claw_plan.profiles.cost_model import ClusterCostModel
from claw_plan.profiles.measurement import Measurement
from claw_plan.profiles.profile import load_profile
from claw_plan.profiles.work import PRECISIONS

STEPS = 6
"""The shortest run that times its work: two of these steps do."""

Progress = Callable[[str, float], None]


def profile_ranks(
    loaded: LoadedModel,
    batch_sizes: Sequence[int],
    ranks: int,
    *,
    precision: str = "fp32",
    seq_len: int | None = None,
    progress: Progress = lambda *_: None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[list[Measurement]]:
    """Measurements of each division at each batch a rank computes at once, as they are made.

    `say` hears of a way that the model cannot go. Raises ExecutionError when the machine has too
    few devices or a run fails, TraceError for a model that cannot be traced.
    """
    cluster = local_cluster(ranks)
    _give_back_memory()
    progress("tracing", 0.0)
    dtype = PRECISIONS[precision]
    graph = trace(loaded, seq_len=seq_len, dtype=dtype)
    axes = ["dp_shard", "tp"]
    if why := tensor_parallel_refusal(graph, ranks):
        axes.remove("tp")
        say(f"not measured with tp={ranks}: {why}")
    todo = [(axis, size) for size in batch_sizes for axis in axes]
    training = Training(
        global_batch=1,
        seq_len=graph.seq_len,
        precision=dtype,
        optimizer="adamw",
        memory_headroom=0.0,
    )
    cost = ClusterCostModel(cluster, None)
    for place, (axis, size) in enumerate(todo):
        progress(f"{axis}={ranks}, batch of {size}", place / len(todo))
        degrees: dict[str, Any] = {axis: ranks}
        candidate = Candidate(microbatch_size=size, **degrees)
        problem = Problem(
            graph=graph,
            cluster=cluster,
            training=replace(training, global_batch=size * candidate.dp),
            cost=cost,
        )
        yield _run(problem, candidate, loaded)


def tensor_parallel_refusal(graph: ModelGraph, ranks: int) -> str:
    """Why the model's weights cannot be divided over so many ranks; empty when they can."""
    if graph.no_tensor_parallel:
        return graph.no_tensor_parallel
    if not graph.takes_tp(ranks):
        return f"the model's heads divide by {graph.tp_divides} at most"
    return ""


def local_cluster(ranks: int) -> Cluster:
    """This machine with so many devices: its GPUs, else a process for each.

    Raises ExecutionError when it has fewer GPUs, or too few cores for the processes.
    """
    if not torch.cuda.is_available():
        most = RANKS_PER_CORE * (os.cpu_count() or 1)
        if ranks > most:
            raise ExecutionError(
                f"--gpus is {ranks}, but this machine has no GPU and {os.cpu_count()} cores; give "
                f"at most {most}, which are processes then"
            )
        devices: Mapping[str, Any] = {"type": "cpu", "count": ranks}
        return _cluster({"devices": devices})
    present = torch.cuda.device_count()
    if ranks > present:
        raise ExecutionError(
            f"--gpus is {ranks}, but this machine has {present}; give at most {present}"
        )
    found = detect_gpu_node()
    if found is None:
        raise ExecutionError(
            "NVML does not tell what this machine's GPUs are (is nvidia-ml-py installed?), so "
            "their measurements would have no name; leave out --gpus"
        )
    return _cluster(found)


def _give_back_memory() -> None:
    """What this process measured before, for the ranks need the same device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _cluster(node: Mapping[str, Any]) -> Cluster:
    return cluster_from_mapping({"name": "this-machine", "nodes": [dict(node)]}, "this machine")


def _run(problem: Problem, candidate: Candidate, loaded: LoadedModel) -> list[Measurement]:
    """The candidate's run in a folder that is gone afterwards."""
    whole = ((0, len(problem.graph.units)),)
    scored = Scorer(problem).score(candidate, whole)
    with tempfile.TemporaryDirectory(prefix="claw-plan-") as name:
        folder = Path(name)
        plan = write_plan(problem, scored, loaded, folder=folder, profile="", search={})
        save_plan(plan, folder / "profile.yaml")
        try:
            result = run_plan(folder / "profile.yaml", STEPS, runs=folder / "runs")
        except ExecutionError as error:
            raise ExecutionError(
                f"{candidate.short()}: {_without_folder(error, folder)}"
            ) from error
        if result is None:  # another rank of a torchrun writes
            return []
        measured = load_profile(Path(result.run) / MEASUREMENTS).measurements
    return [
        replace(one, provenance={**one.provenance, "command": "claw-plan profile"})
        for one in measured
    ]


def _without_folder(error: ExecutionError, folder: Path) -> str:
    """The error without its last half when that points to a log that is about to go."""
    text = str(error)
    return text.partition(";")[0] if str(folder.resolve()) in text else text

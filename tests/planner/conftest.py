"""What several tests share: a toy model and cost model, and the ranks of tensor parallelism.

The toys are small enough to follow by hand, for the tests of the search.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from claw_plan.planner.graph import (
    PLAIN,
    SEQUENCE,
    TENSOR,
    Amount,
    Exchange,
    ModelGraph,
    Op,
    Parameter,
    TensorParallelRule,
    Unit,
    UnitCost,
)
from claw_plan.planner.lower_data import ACCUMULATE
from claw_plan.planner.problem import Problem, Training
from claw_plan.profiles.cluster import Cluster, Device, Link, Network, Node
from claw_plan.profiles.cost import CollectiveCost, OpCost
from claw_plan.profiles.work import CollectiveWork, OpWork


def _op(flops: int, split: bool, writes: Amount = Amount()) -> Op:  # noqa: B008
    """One that writes nothing that grows with the batch makes gradients of weights alone."""
    amount = Amount(0, 0, 0, flops) if split else Amount(0, flops)
    return Op(
        kind="gemm",
        target="mm",
        module="",
        dims=(),
        dtype="float32",
        flops=amount,
        read_bytes=Amount(),
        written_bytes=writes,
    )


def _unit_cost(flops: int, hidden: int, *, tensor: bool, block: bool) -> UnitCost:
    exchange = Exchange(op="all_reduce", bytes=Amount(0, hidden), module="")
    split = tensor and block
    return UnitCost(
        forward=(_op(flops, split), *([exchange] if split else [])),
        backward=(
            _op(flops, split, Amount(0, 1)),
            _op(flops, split),
            *([exchange] if split else []),
        ),
        saved_bytes=Amount(0, 4 * hidden),
        input_bytes=Amount(0, hidden),
        output_bytes=Amount(0, hidden),
        forward_peak_bytes=Amount(0, hidden),
        backward_peak_bytes=Amount(0, 2 * hidden),
    )


def _parameters(layers: int, width: int, tied: bool) -> tuple[Parameter, list[Parameter]]:
    last = layers + 1
    table = Parameter(
        names=("embedding", "head") if tied else ("embedding",),
        shape=(64, width),
        dtype="float32",
        trainable=True,
        units=(0, last) if tied else (0,),
    )
    blocks = [
        Parameter(
            names=(f"blocks.{index}.weight",),
            shape=(width, width),
            dtype="float32",
            trainable=True,
            units=(index + 1,),
            tp_dim=0,
        )
        for index in range(layers)
    ]
    return table, blocks


def make_graph(
    layers: int = 4,
    *,
    flops: int = 1000,
    hidden: int = 100,
    width: int = 8,
    heads: int = 4,
    tied: bool = True,
    ends: bool = True,
) -> ModelGraph:
    """A chain of equal blocks between a prologue and an epilogue twice as dear as a block.

    Without `ends` those two cost nothing, so that all pipeline stages can be equal.
    """
    table, blocks = _parameters(layers, width, tied)
    costs = {
        variant: (
            _unit_cost(ends * flops // 10, hidden, tensor=False, block=False),
            _unit_cost(flops, hidden, tensor=variant != PLAIN, block=True),
            _unit_cost(ends * 2 * flops, hidden, tensor=False, block=False),
        )
        for variant in (PLAIN, TENSOR, SEQUENCE)
    }
    return ModelGraph(
        name="toy",
        fingerprint="toy",
        parameters=(table, *blocks),
        buffer_bytes=0,
        units=(
            Unit(name="prologue", modules=("embedding",), structure=0),
            *(
                Unit(name=f"blocks.{i}", modules=(f"blocks.{i}",), structure=1)
                for i in range(layers)
            ),
            Unit(name="epilogue", modules=("head",), structure=2),
        ),
        costs=costs,
        tensor_parallel=(
            TensorParallelRule(module="up", style="colwise", heads=heads),
            TensorParallelRule(module="down", style="rowwise", heads=heads),
        ),
        tp_divides=heads,
        seq_len=8,
    )


@dataclass(frozen=True)
class ToyCost:
    """1 flop takes 1 us; a collective its latency and its bytes over the link's rate.

    Adding up gradients is free: the closed forms of schedules leave it out.
    """

    cluster: Cluster
    latency_ns: int = 5000
    assumptions: tuple[str, ...] = ()

    def op(self, work: OpWork) -> OpCost:
        moved_bytes = 0 if work.target == ACCUMULATE else work.bytes
        return OpCost(ns=1000 * work.flops + moved_bytes // 10, source="analytic")

    def collective(self, work: CollectiveWork) -> CollectiveCost:
        node = self.cluster.nodes[0]
        inside = work.nodes == 1
        rate = node.intra.bytes_per_s if inside else node.nic_bytes_per_s_per_device
        return CollectiveCost(
            latency_ns=self.latency_ns * (work.group_size > 1),
            bytes=work.bytes if work.group_size > 1 else 0,
            rate_cap_bytes_per_s=rate,
            link="intra" if inside else "inter",
            source="analytic",
        )

    def among(self, nodes: Sequence[Node]) -> ToyCost:
        return self

    def quickest(self) -> ToyCost:
        return self

    def step_overhead_ns(self) -> int:
        return 0


def make_cluster(
    nodes: int = 1,
    devices: int = 4,
    memory_bytes: int = 1 << 40,
    kind: str = "cuda",
    intra_bytes_per_s: float = 1e6,
    inter_bytes_per_s: float = 1e5,
) -> Cluster:
    """Equal nodes whose links are slow enough to matter beside the toy model's flops."""
    device = Device(
        name="toy",
        kind=kind,
        memory_bytes=memory_bytes,
        memory_bytes_per_s=1e9,
        peak_flops_per_s={"float32": 1e6},
        achieved_flops_per_s={"float32": 1e6},
        kernel_launch_ns=0,
        source="made up",
    )
    node = Node(
        type="toy",
        device=device,
        device_count=devices,
        intra=Link(name="in", bytes_per_s=intra_bytes_per_s, latency_ns=0, source="made up"),
        nic=Link(name="out", bytes_per_s=inter_bytes_per_s, latency_ns=0, source="made up"),
        nic_count=devices,
        host_memory_bytes=1 << 40,
        host_cores=8,
    )
    return Cluster(name="toy", nodes=(node,) * nodes, network=Network(), text={"nodes": []})


def make_problem(
    graph: ModelGraph | None = None,
    cluster: Cluster | None = None,
    *,
    global_batch: int = 8,
    precision: str = "float32",
    headroom: float = 0.0,
    latency_ns: int = 5000,
) -> Problem:
    """A problem of the toy model on the toy cluster."""
    graph = graph or make_graph()
    cluster = cluster or make_cluster()
    return Problem(
        graph=graph,
        cluster=cluster,
        cost=ToyCost(cluster, latency_ns),
        training=Training(
            global_batch=global_batch,
            seq_len=8,
            precision=precision,
            optimizer="adamw",
            memory_headroom=headroom,
        ),
    )


@dataclass(frozen=True)
class Toys:
    """The makers, for tests that want other sizes."""

    graph = staticmethod(make_graph)
    cluster = staticmethod(make_cluster)
    problem = staticmethod(make_problem)
    cost = ToyCost


@pytest.fixture(scope="session")
def toys() -> Toys:
    return Toys()


class ThreadRank:
    """A communicator over the threads of one process; `calls` counts its collectives."""

    def __init__(self, board: RankThreads, rank: int) -> None:
        self.board, self.rank, self.degree = board, rank, board.degree
        self.calls: Counter[str] = Counter()

    def all_reduce(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        self.calls["all_reduce"] += 1
        return torch.stack(self.board.exchange(self.rank, tensor)).sum(0)

    def all_reduce_max(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        self.calls["all_reduce"] += 1
        return torch.stack(self.board.exchange(self.rank, tensor)).amax(0)

    def all_gather(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        self.calls["all_gather"] += 1
        return torch.cat(self.board.exchange(self.rank, tensor), 1)

    def reduce_scatter(self, tensor: torch.Tensor, where: str) -> torch.Tensor:
        self.calls["reduce_scatter"] += 1
        whole = torch.stack(self.board.exchange(self.rank, tensor)).sum(0)
        return whole.chunk(self.degree, 1)[self.rank]


class RankThreads:
    """The ranks of one process: each in its thread, they meet at a barrier."""

    rank_type = ThreadRank

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self.slots: list[Any] = [None] * degree
        self.barrier = threading.Barrier(degree, timeout=60)

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.slots[rank] = tensor.clone()
        self.barrier.wait()
        all_ranks = list(self.slots)
        self.barrier.wait()
        return all_ranks

    def run(self, work: Callable[[ThreadRank], Any]) -> list[Any]:
        """What `work` answers on every rank; raises the first error of any."""
        results, errors = [None] * self.degree, []

        def one(rank: int) -> None:
            try:
                results[rank] = work(self.rank_type(self, rank))
            except Exception as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(self.degree)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


@pytest.fixture(scope="session")
def rank_threads() -> type[RankThreads]:
    return RankThreads


@pytest.fixture(scope="session")
def mixed_toys() -> Any:
    """The toys of mixed_toys.py: clusters of several kinds."""
    name = Path(__file__).with_name("mixed_toys.py")
    spec = importlib.util.spec_from_file_location(name.stem, name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name.stem] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module

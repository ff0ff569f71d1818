from __future__ import annotations

from claw_plan.executor.replay import Replay, replay
from claw_plan.executor.replay_measurements import measurements_of
from claw_plan.executor.trace_readers.rank_trace import (
    Collective,
    RankTrace,
    Step,
    TimedWork,
    activities,
)
from claw_plan.profiles.cluster_file import load_cluster
from claw_plan.profiles.work import CollectiveWork, OpWork

MM = OpWork(
    kind="gemm", dims=(1, 8, 8, 8), dtype="bfloat16", flops=1024, bytes=384, target="aten.mm"
)


def found(*arrivals: int, world: int = 2, host_names: tuple[str, ...] = ("", "")) -> Replay:
    traces = [
        RankTrace(
            source="all.tar.gz: rank.json",
            rank=rank,
            world_size=world,
            device="NVIDIA A100-SXM4-80GB",
            is_gpu=True,
            has_timing=True,
            activities=activities([(0, 5, "gemm", "forward", 0)], ("k",)),
            collectives=(
                Collective(
                    op="all_reduce", bytes=4096, group_size=world, ranks=(), group="",
                    start_ns=arrival, end_ns=100, issue_ns=arrival, stream="n",
                ),
            ),
            steps=(Step(number=0, start_ns=0, end_ns=200),),
            works=(TimedWork(work=MM, samples_ns=(7 + rank,)),),
            host_name=host_names[rank],
        )
        for rank, arrival in enumerate(arrivals)
    ]  # fmt: skip
    return replay(traces)


def test_kernels_of_all_ranks_and_transfers_without_waiting() -> None:
    op, reduce = measurements_of(found(10, 70), load_cluster("dgx-a100-80gb"))
    assert (op.device, op.work, op.samples_ns) == ("a100-sxm-80gb", MM, (7, 8))
    assert reduce.device == "a100-sxm-80gb/nvswitch3"
    assert reduce.work == CollectiveWork(op="all_reduce", bytes=4096, group_size=2, nodes=1)
    assert reduce.samples_ns == (30,)
    assert op.provenance["trace"] == "all.tar.gz" and op.ranks_per_host == 2


def test_hosts_are_counted_by_their_names() -> None:
    cluster = load_cluster("2xdgx-a100-80gb")
    _, reduce = measurements_of(found(10, 70, host_names=("a", "b")), cluster)
    assert isinstance(reduce.work, CollectiveWork) and reduce.work.nodes == 2
    assert reduce.device == f"a100-sxm-80gb/{cluster.nodes[0].nic.name}"
    assert reduce.ranks_per_host == 1


def test_a_group_with_missing_ranks_tells_no_transfer() -> None:
    found_ops = measurements_of(found(10, 70, world=3), load_cluster("dgx-a100-80gb"))
    assert [m.work for m in found_ops] == [MM]

"""Reported failures of launchers, hosts and networks, each with the outcome that is right.

The ids are those of the collection of reported cases. comm-init-hang and dead-rank with real
processes are in tests/executor/test_launch.py and tests/executor/test_launch_hosts.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.heartbeat import Beat, guilty
from claw_plan.executor.link_check import LinkRate, slow_links
from claw_plan.executor.rendezvous import free_store, meet
from claw_plan.executor.replay_collectives import match
from claw_plan.executor.replay_stragglers import stragglers
from claw_plan.executor.trace_readers.rank_trace import Collective, RankTrace, Step, activities
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.graph import TensorParallelRule
from claw_plan.planner.tensor_parallel import check_degree
from claw_plan.profiles.cluster import Cluster
from claw_plan.profiles.cluster_file import cluster_from_mapping
from claw_plan.profiles.cost_model import ClusterCostModel
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.topology.recognise import read_topology
from claw_plan.profiles.work import CollectiveWork

MS = 1_000_000


def test_comm_init_hang_is_noticed_where_ranks_meet() -> None:
    """pytorch#88103: one rank never starts; before any collective it is known which."""
    kept = free_store()
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(kept.port)}
    place["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    with pytest.raises(ExecutionError, match=r"ranks 0, 1 of 3 did not come within 0\.3 s"):
        meet(2, 3, 3, 0.3, place)


def test_dead_rank_is_told_with_its_step() -> None:
    """pytorch#46874: of ranks whose connections broke, the one without beats is named."""
    beats = {
        rank: Beat(rank=rank, step=12, phase="building the model", where="") for rank in (0, 1, 2)
    }
    assert guilty(beats, [2], False) == ([2], "is gone or stopped")
    assert beats[2].when == "at step 12"


def test_elastic_mp_batch_counts_replicas_not_gpus() -> None:
    """DeepSpeed#8395: 16 GPUs, tp=4, batch 64, micro 8: 16 for each of dp=4, in two steps."""
    candidate = Candidate(tp=4, dp_shard=4, microbatch_size=8)
    assert candidate.num_devices == 16 and candidate.dp == 4
    assert candidate.num_microbatches(64) == 2


def test_straggler_dataloader_names_rank_2_and_its_input() -> None:
    """traceml#252: rank 2's loader stalls 150 ms in each of two batches."""

    def trace(rank: int, stall_ms: int) -> RankTrace:
        rows = []
        for start in (0, 201):
            if stall_ms:
                rows.append((start * MS, (start + stall_ms) * MS, "input", "other", 0))
            rows.append(
                ((start + stall_ms) * MS, (start + stall_ms + 49) * MS, "gemm", "forward", 0)
            )
        collectives = tuple(
            Collective(
                op="all_reduce",
                bytes=8,
                group_size=4,
                ranks=(0, 1, 2, 3),
                group="",
                start_ns=(start + stall_ms + 49) * MS,
                end_ns=end * MS,
                issue_ns=(start + stall_ms + 49) * MS,
                stream="n",
            )
            for start, end in ((0, 201), (201, 402))
        )
        return RankTrace(
            source="t",
            rank=rank,
            world_size=4,
            device="",
            is_gpu=True,
            has_timing=True,
            activities=activities(rows, ("k",)),
            collectives=collectives,
            steps=(Step(number=0, start_ns=0, end_ns=420 * MS),),
        )

    traces = [trace(rank, 150 if rank == 2 else 0) for rank in range(4)]
    (late,) = stragglers(traces, match(traces), 420 * MS, 1)
    assert (late.rank, late.cause, late.late_ns) == (2, "input", 300 * MS)


def test_net_asymmetric_nic_is_named_before_step_1() -> None:
    """nccl#1581: 10 GbE there, back by the 1 GbE card at 0.125 GB/s."""
    there = LinkRate(source="a", target="b", bytes_per_s=1.2e9, expected_bytes_per_s=1.25e9)
    back = LinkRate(source="b", target="a", bytes_per_s=0.12e9, expected_bytes_per_s=1.25e9)
    [text] = slow_links([there, back])
    assert "one way only" in text and "from b to a 0.12 GB/s" in text and "1.25 GB/s" in text


def two_nodes(nics: int) -> Cluster:
    node = {"count": 2, "type": "dgx-a100-80gb", "nics": {"type": "ib-edr", "count": nics}}
    return cluster_from_mapping({"name": "two", "nodes": [node]}, "cluster.yaml")


def test_net_shared_nic_is_divided_among_its_ranks() -> None:
    """nccl#1536: 8 ranks of a node share one card: eight groups at once take eight times."""
    assert two_nodes(1).nodes[0].nic_bytes_per_s_per_device == pytest.approx(12.5e9 / 8)
    work = CollectiveWork(op="all_gather", bytes=1 << 30, group_size=2, nodes=2, backend="nccl")
    shared, own = (
        ClusterCostModel(two_nodes(nics)).collective(work).rate_cap_bytes_per_s for nics in (1, 8)
    )
    assert own / shared == pytest.approx(8, rel=0.01)


def test_net_p2p_slower_than_shm_takes_the_measured_rate() -> None:
    """nccl#1817: PCIe says little; 6 GB/s of bus bandwidth were measured and are used."""
    node = {
        "count": 1,
        "devices": {"type": "a100-pcie-80gb", "count": 8},
        "intra": {"type": "pcie4-x16", "achieved": {"all_reduce": "6 GB/s"}},
    }
    cluster = cluster_from_mapping({"name": "p2p", "nodes": [node]}, "cluster.yaml")
    assert cluster.nodes[0].intra.rate("all_reduce") == 6e9


def hostfile(folder: Path, text: str) -> Path:
    path = folder / "hostfile"
    path.write_text(text)
    return path


def test_hostfile_bad_key_names_line_and_text(tmp_path: Path) -> None:
    """DeepSpeed#3669, whose message said "{line}"."""
    file = hostfile(tmp_path, "10.0.0.1 slots=8\n10.0.0.2 lots=8\n")
    with pytest.raises(InputError, match=r"hostfile:2: 'lots=8' is not understood; .*slots"):
        read_topology(file)


def test_hostfile_missing_never_runs_on_this_machine_alone(tmp_path: Path) -> None:
    """DeepSpeed#5221."""
    with pytest.raises(InputError, match=r"there is no file .*nowhere"):
        read_topology(tmp_path / "nowhere")


def test_hostfile_duplicate_is_an_error(tmp_path: Path) -> None:
    """ompi#11136: the same host twice, once with slots."""
    with pytest.raises(InputError, match=r"hostfile:2: the host n1 stands already in line 1"):
        read_topology(hostfile(tmp_path, "n1 slots=8\nn1\n"))


def test_error_actionable_names_heads_degrees_and_another_way() -> None:
    """vllm#52535: 64 heads, tp=3."""
    rule = TensorParallelRule(module="attn.q", style="colwise", heads=64)
    with pytest.raises(PlanError) as refused:
        check_degree([rule], 3)
    text = str(refused.value)
    assert "64 heads" in text and "got 3" in text and "1, 2, 4, 8, 16, 32, 64" in text
    assert "pp" in text

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from claw_plan.executor.errors import ExecutionError
from claw_plan.executor.mesh import AXES, NEAR, make_mesh
from claw_plan.executor.ranks import Rank
from claw_plan.planner.candidate import Candidate


def test_one_rank_stands_at_the_start_of_every_axis(alone: Rank) -> None:
    mesh = make_mesh(Candidate(), "cpu")
    assert mesh.sizes == dict.fromkeys(AXES, 1)
    assert [mesh.index(axis) for axis in AXES] == [0, 0, 0, 0]
    assert mesh.data_index == 0
    assert mesh.data_mesh.mesh_dim_names == ("dp_shard",)


def test_axes_lie_in_the_candidates_order(alone: Rank) -> None:
    order = ("tp", "cp", "dp_shard", "dp_replicate", "pp")
    mesh = make_mesh(Candidate(mesh_order=order), "cpu")
    assert mesh.device_mesh.mesh_dim_names == ("tp", "dp_shard", "dp_replicate", "pp")


def test_plans_of_one_shape_share_their_groups(alone: Rank) -> None:
    first, second = (make_mesh(Candidate(microbatch_size=size), "cpu") for size in (1, 2))
    assert first.device_mesh is second.device_mesh
    other = make_mesh(Candidate(mesh_order=("tp", "cp", "dp_shard", "dp_replicate", "pp")), "cpu")
    assert other.device_mesh is not first.device_mesh


def test_too_few_ranks_are_refused(alone: Rank) -> None:
    with pytest.raises(ExecutionError, match=r"needs 6 ranks \(pp=3 .* tp=2\), but 1 were"):
        make_mesh(Candidate(pp=3, tp=2), "cpu")


@pytest.mark.parametrize(("rank", "near"), [(0, [0, 2]), (5, [5, 7]), (14, [12, 14])])
def test_neighbours_on_the_shards_axis(rank: int, near: list[int]) -> None:
    """Ranks are pp x dp_shard x tp = 2 x 4 x 2, so neighbours are two apart."""
    dist.init_process_group("fake", rank=rank, world_size=16, store=FakeStore())
    mesh = make_mesh(Candidate(pp=2, dp_shard=4, tp=2), "cpu")
    assert dist.get_process_group_ranks(mesh.groups(2)[NEAR]) == near
    assert mesh.neighbours(2) == mesh.neighbours(2)
    assert [*mesh.groups(0)] == [*AXES]
    dist.destroy_process_group()


def test_only_plans_that_share_sequences_have_an_axis_for_it(alone: Rank) -> None:
    assert "cp" not in make_mesh(Candidate(), "cpu").sizes
    with pytest.raises(ExecutionError, match="cp=2"):
        make_mesh(Candidate(cp=2), "cpu")

"""The plan's degrees as a torch DeviceMesh, and this rank's place in it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from claw_plan.executor.errors import ExecutionError
from claw_plan.planner.candidate import Candidate
from claw_plan.planner.placement import EXPERT_REPLICATE, EXPERT_SHARD

AXES = ("pp", "dp_replicate", "dp_shard", "tp")
"""The axes of every mesh; the order over the devices is the candidate's. Where sequences are
shared there is cp too: an axis that nobody uses would cost a thread of gloo's for each group."""

SHARDED, REPLICATED = "dp_shard_cp", "dp_replicate beside dp_shard_cp"
"""The axis of all ranks that share states where cp is used, as torchtitan calls it, and that of
their replicas in the same mesh."""

NEAR = "near"
"""The axis of neighbours on dp_shard that keep parameters together between passes."""


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """A DeviceMesh of `AXES`, cp where it is used, and the indices of this rank on each.

    `meets_apart` where replicas of shards meet outside of FSDP.
    """

    device_mesh: DeviceMesh
    sizes: dict[str, int]
    meets_apart: bool = False

    def index(self, axis: str) -> int:
        """This rank's place on the axis."""
        return self.device_mesh.get_local_rank(axis)

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one on the axis only."""
        return self.device_mesh.get_group(axis)

    def neighbours(self, ranks: int) -> DeviceMesh:
        """(apart, near): runs of so many neighbours on dp_shard along the second axis."""
        names = self.device_mesh.mesh_dim_names or ()
        inside = math.prod(self.sizes[name] for name in names[names.index("dp_shard") + 1 :])
        apart = math.prod(self.sizes.values()) // (ranks * inside)
        sizes = {"apart": apart, NEAR: ranks, "inside": inside}
        return _device_mesh(self.device_mesh.device_type, sizes)["apart", NEAR]

    def experts(self, ep: int) -> DeviceMesh:
        """(expert_replicate, expert_shard, ep): which ranks of data parallelism share experts.

        Runs of so many neighbours in the order of the batch's slices; of the others, those on
        dp_shard may shard what they hold alike.
        """
        names = self.device_mesh.mesh_dim_names or ()
        others = [name for name in names if not name.startswith("dp_")]
        order = [names.index(name) for name in (*others, "dp_replicate", "dp_shard")]
        shards = max(1, self.sizes["dp_shard"] // ep)
        sizes = {name: self.sizes[name] for name in others}
        sizes |= {EXPERT_REPLICATE: -1, EXPERT_SHARD: shards, "ep": ep}
        ranks = self.device_mesh.mesh.permute(order).reshape(tuple(sizes.values()))
        return _mesh_of(self.device_mesh.device_type, ranks, tuple(sizes))

    def groups(self, near: int) -> dict[str, dist.ProcessGroup]:
        """This rank's group of each axis, and NEAR where so many neighbours keep parameters."""
        found = {axis: self.group(axis) for axis in self.sizes}
        if "cp" in self.sizes:
            found[SHARDED] = self._joined().get_group(SHARDED)
            found[REPLICATED] = self._joined().get_group("dp_replicate")
        if near:
            found[NEAR] = self.neighbours(near).get_group(NEAR)
        return found

    @property
    def data_index(self) -> int:
        """Which slice of the global batch is this rank's."""
        return self.index("dp_replicate") * self.sizes["dp_shard"] + self.index("dp_shard")

    @property
    def data_mesh(self) -> DeviceMesh:
        """What FSDP works on: one axis, or (replicate, shard) for hybrid sharding."""
        mesh, shard = self.device_mesh, "dp_shard"
        if "cp" in self.sizes:
            mesh, shard = self._joined(), SHARDED
        is_alone = self.sizes["dp_replicate"] == 1 or self.meets_apart
        return mesh[shard] if is_alone else mesh["dp_replicate", shard]

    def _joined(self) -> DeviceMesh:
        """dp_shard and cp as one axis; cp lies just inside dp_shard."""
        ranks = self.sizes["dp_shard"] * self.sizes["cp"]
        sizes = {
            SHARDED if name == "cp" else name: ranks if name == "cp" else size
            for name, size in self.sizes.items()
            if name != "dp_shard"
        }
        return _device_mesh(self.device_mesh.device_type, sizes)

    @property
    def state_axes(self) -> tuple[str, ...]:
        """The axes over which gradients are averaged, the innermost first."""
        return (*(("cp",) if "cp" in self.sizes else ()), "dp_shard", "dp_replicate")


def make_mesh(candidate: Candidate, device_type: str) -> Mesh:
    """Lays the ranks out as the candidate says. The process group must be initialised.

    Raises ExecutionError unless there is one rank for every device of the plan.
    """
    names = [name for name in candidate.mesh_order if name in AXES or candidate.cp > 1]
    sizes = {name: getattr(candidate, name) for name in names}
    world = dist.get_world_size()
    if math.prod(sizes.values()) != world:
        product = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ExecutionError(
            f"the plan needs {math.prod(sizes.values())} ranks ({product}), but {world} were "
            f"started; start as many, or plan again for {world} devices"
        )
    device_mesh = _device_mesh(device_type, sizes)
    return Mesh(device_mesh=device_mesh, sizes=sizes, meets_apart=candidate.codec != "none")


_made: WeakKeyDictionary[dist.ProcessGroup, dict[str, DeviceMesh]] = WeakKeyDictionary()


def _device_mesh(device_type: str, sizes: dict[str, int]) -> DeviceMesh:
    """Plans of one shape share a mesh: every group of gloo's has a thread, and all wake often."""
    world = dist.group.WORLD
    assert world is not None
    known = _made.setdefault(world, {})
    key = f"{device_type} {sizes}"
    if key not in known:
        known[key] = init_device_mesh(
            device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)
        )
    return known[key]


def _mesh_of(device_type: str, ranks: torch.Tensor, names: tuple[str, ...]) -> DeviceMesh:
    """The same for ranks in another order than the devices'."""
    world = dist.group.WORLD
    assert world is not None
    known = _made.setdefault(world, {})
    key = f"{device_type} {names} {ranks.tolist()}"
    if key not in known:
        known[key] = DeviceMesh(device_type, ranks, mesh_dim_names=names)
    return known[key]

"""Changed clusters, and searches on them."""

from __future__ import annotations

import pytest

from claw_plan.planner.plan import save_plan
from claw_plan.planner.planned import open_planned
from claw_plan.planner.planning import PlanningRequest, make_plan
from claw_plan.planner.what_if import AS_IT_IS, MORE_MEMORY_BYTES, _changed_clusters, what_ifs
from claw_plan.profiles.cluster_file import load_cluster


def changed(text):
    return dict(_changed_clusters(load_cluster(text)))


def test_what_is_changed_is_one_thing_by_its_size():
    base, found = load_cluster("2xdgx-h100"), changed("2xdgx-h100")
    node = base.nodes[0]
    assert len(found["one more node"].nodes) == 3
    network = found["network links twice as fast"].nodes[0]
    assert network.nic.bytes_per_s == 2 * node.nic.bytes_per_s
    assert network.intra == node.intra and network.device == node.device
    inside = found[f"{node.intra.name} twice as fast"].nodes[0]
    assert inside.intra.bytes_per_s == 2 * node.intra.bytes_per_s and inside.nic == node.nic
    roomier = found["10 GB more memory a device"].nodes[1].device
    assert roomier.memory_bytes == node.device.memory_bytes + MORE_MEMORY_BYTES
    assert found[AS_IT_IS] == base


def test_one_node_gets_one_more_device():
    found = changed("dgx-h100")
    assert found["one more device"].num_devices == 9
    assert "network links twice as fast" not in found


@pytest.mark.slow
def test_better_hardware_is_never_worse_than_the_cluster_as_it_is(tmp_path):
    model = tmp_path.joinpath("m.py")
    model.write_text(
        "import torch\nfrom torch import nn\n\n\ndef build_model():\n"
        "    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(4)])\n\n\n"
        "def example_batch(n):\n    return {'input': torch.zeros(n, 64)}\n\n\n"
        "def loss(output, batch):\n    return output.square().mean()\n"
    )
    path = tmp_path / "plan.yaml"
    request = PlanningRequest(
        model=model, cluster="2xdgx-a100-80gb", global_batch=32, output_folder=tmp_path
    )
    save_plan(make_plan(request).plan, path)
    first, *others = what_ifs(open_planned(path), None)
    assert first.change == AS_IT_IS and len(others) == 4
    assert all(other.step_time_ns <= first.step_time_ns for other in others)
    assert all(other.gap == 0.0 for other in others)

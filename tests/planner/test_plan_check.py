"""Edits of one part of a plan that the others contradict."""

from __future__ import annotations

from pathlib import Path

import pytest

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import PlanError
from claw_plan.planner.plan import Plan
from claw_plan.planner.plan_check import check_against_model, check_plan, model_of_plan

AXES = {"pp": 2, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1}


def values():
    """Two stages of two shards each, on one node of four devices."""
    return {
        "version": 1,
        "model": {"file": "gpt.py", "sha256": "0" * 64, "parameters": 8},
        "training": {
            "global_batch": 8, "seq_len": 4, "precision": "float32", "optimizer": "adamw",
        },
        "cluster": {"nodes": [{"devices": {"type": "cpu", "cores": 2, "count": 4}}]},
        "candidate": {"pp": 2, "dp_shard": 2, "microbatch_size": 2},
        "mesh": {"axes": dict(AXES), "devices": ["0:0", "0:1", "0:2", "0:3"]},
        "schedule": {"name": "1F1B", "stages_per_rank": 1, "num_microbatches": 2},
        "blocks": ["h.0", "h.1", "h.2"],
        "stages": [
            {"rank_group": 0, "modules": ["wte", "h[0:2]"]},
            {"rank_group": 1, "modules": ["h.2", "head"]},
        ],
        "tied": [{"parameters": ["wte.weight", "head.weight"], "stages": [0, 1]}],
        "sharding": [{"modules": "h[*]", "zero": 3}],
        "communication": [{"axis": "pp", "op": "send"}],
    }  # fmt: skip


def edited(path, value):
    plan = values()
    part = plan
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return Plan.model_validate(plan)


def test_a_plan_whose_parts_agree_passes():
    candidate = check_plan(Plan.model_validate(values()), "p.yaml")
    assert (candidate.pp, candidate.dp_shard) == (2, 2)


@pytest.mark.parametrize(
    "path, value, said",
    [
        (["training", "seq_len"], -1, "training.seq_len is at least 1"),
        (["candidate", "buckets"], [3, 1], "candidate.buckets act where dp_replicate is over 1"),
        (["training", "optimizer"], "lamb", "norms of whole parameters; use dp_shard=1"),
        (["candidate", "codec"], "zero_one", "codec=zero_one: it acts where whole replicas meet"),
        (["candidate", "codec"], "top_k:0.1,0.9", "acts where whole replicas meet"),
        (["training", "global_batch"], 16, "microbatches of 2 makes 4"),
        (["training", "global_batch"], 7, "7 does not divide into dp=2"),
        (["cluster", "nodes", 0, "devices", "count"], 2, "uses 4 devices .* cluster has 2"),
        (["candidate", "pp"], 1, "uses|mesh.axes is"),
        (["candidate", "tp"], 2, "uses 8 devices"),
        (["candidate", "recompute"], "some", "use one of none, full"),
        (["candidate", "recompute_blocks"], 2, "recompute_blocks=2: nothing is run again"),
        (["candidate", "reshard_ranks"], 2, "reshard_ranks=2: dp_shard=2 must be a multiple"),
        (["candidate", "reshard_ranks"], True, "reshard_ranks is of type int, but got True"),
        (["candidate", "blocks_per_group"], 0, "blocks_per_group is at least 1, but got"),
        (["candidate", "bucket_bytes"], -5, "bucket_bytes is at least 1"),
        (["mesh", "axes"], {"pp": 7}, "but the candidate makes"),
        (["mesh", "devices"], ["0:0"], "names 1 different devices for 1 ranks"),
        (["mesh", "devices"], ["0:0"] * 4, "names 1 different devices for 4 ranks"),
        (["mesh", "devices"], ["0:0", "0:1", "0:2", "9:0"], "'9:0'; devices are node:device"),
        (["schedule", "name"], "GPipe", "schedule.name is GPipe, candidate.schedule 1F1B"),
        (["schedule", "stages_per_rank"], 2, "stages_per_rank is 2"),
        (["schedule", "num_microbatches"], 3, "num_microbatches is 3"),
        (["stages"], [], "stages is empty"),
        (
            ["stages", 0, "modules"],
            ["wte", "h.0"],
            r"stages\[1\] must hold the blocks that follow",
        ),
        (["stages", 0, "modules"], ["wte", "h[0:3]"], r"stages\[1\] must hold the blocks"),
        (["stages", 0, "modules"], ["h[0:99999999]"], "no run of blocks"),
        (["stages", 1, "rank_group"], 5, r"stages\[1\].rank_group is 1, but got 5"),
        (["tied", 0, "stages"], [0, 9], r"tied\[0\].stages are 0 to 1"),
        (["sharding", 0, "zero"], 2, r"sharding\[0\].zero is 2"),
        (["communication", 0, "axis"], "tp", "which the candidate does not use"),
        (["communication", 0, "codec"], "int8", "differs from candidate.collective"),
    ],
)
def test_a_part_that_contradicts_the_others_is_refused(path, value, said):
    with pytest.raises(PlanError, match=f"^p.yaml: .*({said})"):
        check_plan(edited(path, value), "p.yaml")


def test_buckets_hold_the_models_parameters_once_each(toys):
    graph = toys.graph(layers=3, tied=False)
    plan = edited(["model", "parameters"], graph.num_parameters)
    plan = plan.model_copy(update={"tied": []})
    check_against_model(graph, Candidate(dp_replicate=2, buckets=(3, 1)), plan)
    with pytest.raises(PlanError, match=r"the 4 trained parameters once each, but .* hold 5"):
        check_against_model(graph, Candidate(dp_replicate=2, buckets=(3, 2)), plan)


def test_tensor_parallelism_needs_its_rules():
    plan = values()
    plan["candidate"] = {"pp": 2, "tp": 2, "microbatch_size": 4}
    plan["mesh"]["axes"] = AXES | {"dp_shard": 1, "tp": 2}
    plan["sharding"] = []
    with pytest.raises(PlanError, match="tensor_parallel holds no rule"):
        check_plan(Plan.model_validate(plan), "p.yaml")


def test_another_model_file_is_refused(tmp_path: Path):
    (tmp_path / "gpt.py").write_text("import torch.nn as nn\nclass M(nn.Linear): pass\n")
    plan = edited(["model", "inputs"], "x=float32[B,4]")
    plan = plan.model_copy(update={"model": plan.model.model_copy(update={"build": "M(4, 4)"})})
    with pytest.raises(PlanError, match=r"gpt\.py is not the file that was planned"):
        model_of_plan(plan, tmp_path / "plan.yaml")

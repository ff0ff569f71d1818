"""The whole way: model files to plans, on the models and clusters people ask about first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from claw_plan.planner.errors import InfeasiblePlan, PlanError
from claw_plan.planner.plan import Plan, load_plan, save_plan
from claw_plan.planner.plan_stages import expand_names
from claw_plan.planner.planning import PlanningRequest, make_plan, pose, simulate_plan

ROOT = Path(__file__).parents[2]
GPT = ROOT / "examples" / "gpt.py"
SMALL = ROOT / "examples" / "gpt_small.py"
RESNET = Path(__file__).with_name("models") / "resnet.py"

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
}


def planned(model, cluster, **settings):
    return make_plan(PlanningRequest(model=model, cluster=cluster, **settings))


def assert_every_parameter_once(result):
    """Each parameter lies in the modules of one stage; a tied one in those its tie names."""
    plan = result.plan
    modules = [expand_names(stage.modules) for stage in plan.stages]
    tied = {name: tie.stages for tie in plan.tied for name in tie.parameters}
    for parameter in result.graph.parameters:
        holders = [
            stage
            for stage, names in enumerate(modules)
            if any(full.startswith(f"{name}.") for name in names for full in parameter.names)
        ]
        assert holders == tied.get(parameter.name, holders), parameter.name
        assert len(holders) == 1 or parameter.name in tied, parameter.name
    assert plan.model.parameters == result.graph.num_parameters


def gpt_flops(batch, seq=1024, layers=12, dim=768, vocab=50304):
    """Forward and backward by hand: 2 a weight and token, 4 B S^2 D of attention; backward twice
    for products, 2.5 times for attention."""
    weights = 2 * batch * seq * (12 * layers * dim * dim + vocab * dim)
    attention = 4 * batch * seq * seq * dim * layers
    return weights + attention, 2 * weights + 5 * attention // 2


def test_gpt_124m_on_one_node():
    result = planned(GPT, "dgx-a100-80gb")
    assert result.graph.num_parameters == 124_475_904
    assert result.graph.flops(2) == gpt_flops(2)
    assert result.search.optimal and result.best.fits
    assert set(result.baselines) == {"FSDP", "DDP"}
    assert all(scored.step_time_ns >= result.best.step_time_ns for scored in result.alternatives)
    assert sum(result.best.parts_ns.values()) == result.best.step_time_ns
    assert_every_parameter_once(result)


@pytest.mark.parametrize(
    "fix", [{"pp": 4}, {"tp": 4}, {"pp": 2, "tp": 2, "dp_shard": 2}, {"pp": 3, "dp_replicate": 2}]
)
def test_every_parameter_once_however_gpt_is_split(fix):
    result = planned(GPT, "dgx-a100-80gb", fix=fix, global_batch=24)
    assert all(getattr(result.best.candidate, knob) == value for knob, value in fix.items())
    assert_every_parameter_once(result)


def test_resnet():
    result = planned(RESNET, "dgx-a100-80gb")
    assert result.graph.num_parameters == 25_557_032
    assert result.plan.training.seq_len is None and result.best.tokens_per_s is None
    assert any("tensor parallelism: not possible" in reason for reason in result.reasons)
    assert any("BatchNorm" in assumption for assumption in result.assumptions)
    assert_every_parameter_once(result)


@pytest.mark.slow
def test_mixtral(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTRAL))
    result = planned(path, "dgx-h100", global_batch=32, fix={"pp": 2})
    experts = 6 * 4 * 3 * 256 * 512
    assert result.graph.num_parameters > experts
    assert_every_parameter_once(result)


def test_a_plan_stands_alone_and_scores_the_same(tmp_path):
    result = planned(SMALL, "cpu", global_batch=8, output_folder=tmp_path)
    path = tmp_path / "plan.yaml"
    save_plan(result.plan, path)
    assert load_plan(path) == result.plan
    assert simulate_plan(path).step_time_ns == result.best.step_time_ns


def test_nodes_that_a_plan_leaves_out_slow_nothing_down(tmp_path):
    devices = "devices: {{type: cpu, cores: 1, count: 2}}"
    node = (
        "  - {{count: {}, "
        + devices
        + ", nics: {{name: n{}, bandwidth: {} Mb/s, latency: 2 ms}}}}\n"
    )
    fast, slow = node.format(2, 1, 200), node.format(1, 2, 50)
    times = []
    for name, nodes in (("fast", fast), ("mixed", fast + slow)):
        cluster, path = tmp_path / f"{name}.yaml", tmp_path / f"{name}-plan.yaml"
        cluster.write_text(f"name: {name}\nnodes:\n{nodes}")
        # Buckets are planned while the slowest node still counts, so these are pinned.
        fix = {"dp_replicate": 4, "dp_shard": 1, "microbatch_size": 2, "bucket_bytes": 5_000_000}
        plan = planned(SMALL, str(cluster), global_batch=8, fix=fix, output_folder=tmp_path).plan
        save_plan(plan, path)
        times.append(simulate_plan(path).step_time_ns)
    assert times[0] == times[1]


def test_an_edited_plan_is_scored_as_it_stands(tmp_path):
    fix = {"pp": 2, "dp_shard": 4, "stages_per_rank": 1}
    result = planned(GPT, "dgx-a100-80gb", fix=fix, output_folder=tmp_path)
    even = result.plan.model_copy(deep=True)
    stages = even.stages
    stages[0].modules[:] = ["transformer.wte", "transformer.wpe", "transformer.h[0:2]"]
    stages[1].modules[:] = ["transformer.h[2:12]", "transformer.ln_f", "lm_head"]
    path = tmp_path / "edited.yaml"
    save_plan(even, path)
    assert simulate_plan(path).step_time_ns > result.best.step_time_ns


@pytest.mark.slow
@pytest.mark.parametrize(
    "part, change, said",
    [
        ("model", {"parameters": 5}, "model.parameters is 5, but the model has 10136256"),
        ("tied", [], "transformer.wte.weight = lm_head.weight"),
        ("stages", [{"rank_group": 0, "modules": ["x"]}], r"stages\[0\] holds x beside"),
    ],
)
def test_an_edit_that_contradicts_the_model_is_refused(tmp_path, part, change, said):
    plan = planned(SMALL, "cpu", global_batch=8, fix={"pp": 1}, output_folder=tmp_path).plan
    values = plan.model_dump()
    values[part] = values[part] | change if isinstance(change, dict) else change
    save_plan(Plan.model_validate(values), tmp_path / "plan.yaml")
    with pytest.raises(PlanError, match=said):
        simulate_plan(tmp_path / "plan.yaml")


@pytest.mark.slow
def test_an_edit_that_leaves_a_divided_head_whole_is_refused(tmp_path):
    fix = {"tp": 2, "pp": 1, "dp_replicate": 1, "dp_shard": 1}
    plan = planned(SMALL, "cpu", global_batch=8, fix=fix, output_folder=tmp_path).plan
    values = plan.model_dump()
    values["tensor_parallel"] = [r for r in values["tensor_parallel"] if r["style"] != "head"]
    save_plan(Plan.model_validate(values), tmp_path / "plan.yaml")
    named = r"transformer.wte \(\d+ rows\), lm_head \(\d+ rows\)"
    with pytest.raises(PlanError, match=f"must divide those tables and heads .*: {named}"):
        simulate_plan(tmp_path / "plan.yaml")


@pytest.mark.parametrize(
    "fix, said",
    [
        ({"tp": 5}, "heads divide by 1, 2, 3, 4, 6, 12"),
        ({"pp": 13}, "12 blocks make at most 12 stages"),
        ({"cp": 2, "tp": 2}, "cp x tp: no test proves"),
        ({"schedule": "1f1b"}, "use one of 1F1B, GPipe"),
    ],
)
def test_what_cannot_be_pinned(fix, said):
    with pytest.raises(PlanError, match="--fix") as caught:
        planned(GPT, "2xdgx-a100-80gb", fix=fix)
    assert said in str(caught.value)


def test_lamb_is_planned_where_ranks_hold_whole_parameters():
    result = planned(SMALL, "2xdgx-a100-80gb", optimizer="lamb", global_batch=64)
    knobs = result.plan.knobs()
    assert (knobs.tp, knobs.dp_shard, knobs.cp, knobs.offload) == (1, 1, 1, "none")
    assert result.plan.training.optimizer == "lamb"
    with pytest.raises(PlanError, match="--fix tp=2: LAMB takes norms of whole parameters"):
        planned(SMALL, "2xdgx-a100-80gb", optimizer="lamb", fix={"tp": 2})


def test_beside_lamb_plain_fsdp_is_said_to_be_impossible():
    result = planned(GPT, "2xdgx-a100-80gb", optimizer="lamb")
    assert "LAMB takes norms of whole parameters" in result.baselines["FSDP"]
    assert not isinstance(result.baselines["DDP"], str)


def test_a_batch_that_nothing_divides():
    with pytest.raises(PlanError, match="nearest: 248 or 256"):
        planned(GPT, "dgx-a100-80gb", global_batch=250, fix={"dp_shard": 8})


def test_more_devices_than_there_are():
    with pytest.raises(PlanError, match=r"asks for 16 devices.* has 8"):
        planned(GPT, "dgx-a100-80gb", fix={"dp_shard": 16})


@pytest.mark.slow
def test_too_large_says_how_much_is_missing_and_what_would_do():
    with pytest.raises(InfeasiblePlan) as caught:
        planned(ROOT / "examples" / "llama-3-70b" / "config.json", "dgx-a100-40gb")
    message = str(caught.value)
    assert "missing" in message and "stage" in message and "it would fit on" in message


@pytest.mark.slow
def test_the_same_seed_gives_the_same_plan():
    first, second = (planned(SMALL, "dgx-a100-80gb", global_batch=16) for _ in range(2))
    assert first.best.candidate == second.best.candidate
    assert [s.candidate for s in first.alternatives] == [s.candidate for s in second.alternatives]


@pytest.mark.slow
def test_the_cluster_file_may_set_what_is_trained(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "nodes: [{count: 1, type: dgx-a100-80gb}]\n"
        "training: {global_batch: 24, seq_len: 64, precision: bf16, optimizer: sgd}\n"
    )
    training = planned(SMALL, str(path)).plan.training
    assert (training.global_batch, training.seq_len) == (24, 64)
    assert (training.precision, training.optimizer) == ("bfloat16", "sgd")
    assert planned(SMALL, str(path), precision="fp32").plan.training.precision == "float32"


def test_the_users_own_setting_stands_beside_and_never_wins_unseen(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(
        "TP=2\npretrain_gpt.py --tensor-model-parallel-size $TP --micro-batch-size 4 \\\n"
        "  --global-batch-size 64 --seq-length 512 --use-distributed-optimizer --bf16\n"
    )
    result = planned(GPT, "dgx-a100-80gb", baseline=script)
    training, given = result.plan.training, result.given
    assert (training.global_batch, training.seq_len, training.clip_norm) == (64, 512, 1.0)
    assert any("global_batch 64 (train.sh:3" in text for text in result.assumptions)
    assert given.name == "Megatron-LM: train.sh" and given.scored.fits
    assert (given.scored.candidate.tp, given.scored.candidate.dp_shard) == (2, 4)
    assert result.best.step_time_ns <= given.scored.step_time_ns


def test_a_setting_that_does_not_fit_gets_its_verdict(tmp_path):
    config = tmp_path / "ds.json"
    config.write_text('{"train_micro_batch_size_per_gpu": 256, "zero_optimization": {"stage": 1}}')
    result = planned(GPT, "dgx-a100-40gb", baseline=config, global_batch=2048)
    assert result.given.verdict.startswith("out of memory: stage 0 needs")
    assert result.best.fits


UNLIKE_SIZES = """
name: unlike-sizes
nodes:
  - {count: 2, type: dgx-a100-80gb}
  - count: 1
    devices: {type: h100-sxm-80gb, count: 4}
    intra: {type: nvswitch4}
    nics: {type: ib-ndr, count: 4}
    host: {memory: 2 TiB, cores: 112}
"""


def test_nodes_of_unlike_sizes_are_planned(tmp_path):
    """Groups are laid over hosts of four devices, of which a node of eight is two."""
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(UNLIKE_SIZES)
    asked = PlanningRequest(model=SMALL, cluster=str(cluster), global_batch=240)
    problem = pose(asked).problem
    kinds = [node.device.name for node in problem.hosts]
    assert kinds == ["a100-sxm-80gb"] * 4 + ["h100-sxm-80gb"]
    for fix in ({"dp_shard": 20}, {"pp": 5, "dp_replicate": 4}):
        plan = planned(SMALL, str(cluster), global_batch=240, fix=fix).plan
        assert len(plan.mesh.devices) == 20

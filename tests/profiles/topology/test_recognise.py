from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.topology.reading import Rate, Reading
from claw_plan.profiles.topology.recognise import merge, read_text, read_topology
from claw_plan.profiles.topology.source import Source

CORPUS = Path(__file__).parents[4] / "shared" / "corpus"
FILES = (
    [
        path
        for folder in ("topology", "nccl_xml", "cluster")
        for path in sorted((CORPUS / folder).iterdir())
        if folder == "cluster" or path.suffix != ".yaml"
    ]
    if CORPUS.is_dir()
    else []
)
REFUSED = {
    "52.txt": "topo -p2p",
    "wrong-blog-gpu-on-system.xml": "above <gpu",
    "accelerate-fsdp_config.yaml": "a training configuration of accelerate",
    "alpa-coreweave-ray-cluster.yaml": "Kubernetes objects",
    "aws-parallelcluster-vanilla.yaml": "AWS ParallelCluster",
    "bad_hostfiles.txt": "begins no file that is known",
    "calculon-a100_80e.json": "mem1.GiB: 8e.10 is implausible",
    "galvatron-profile_hardware.yaml": "settings of Galvatron's profiler",
    "slurm_nodelists.expect.yaml": "no description of a machine",
}


@pytest.mark.skipif(not FILES, reason="the corpus is not beside the project")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_of_the_corpus_is_read_or_refused_in_one_line(path: Path) -> None:
    if path.name in REFUSED:
        with pytest.raises(InputError, match=REFUSED[path.name]) as caught:
            read_topology(path)
        assert str(caught.value).startswith(f"{path.name}:")
        assert "\n" not in str(caught.value)
    else:
        assert read_topology(path)


@pytest.mark.skipif(not FILES, reason="the corpus is not beside the project")
def test_a_log_with_nccl_lines_and_a_benchmark_is_one_reading() -> None:
    path = CORPUS / "cluster" / "bigscience-n1_16gb_all_reduce_bench.txt"
    (reading,) = read_topology(path)
    assert reading.gpu_count == 4
    (rate,) = reading.rates
    assert rate.bytes_per_s == pytest.approx(997.8e9 / 8, rel=1e-3)
    assert list(reading.nics) == ["hfi1_2", "hfi1_0", "hfi1_3", "hfi1_1"]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("\tGPU0\tGPU1\nGPU0\t X \tPHB\nGPU1\tPHB\t X \n", "nvidia-smi topo -m"),
        ("=== Link Type between two GPUs ===\n GPU0 GPU1\nGPU0 0 XGMI\nGPU1 XGMI 0\n", "rocm-smi"),
        ("n[1-2]\n", "Slurm node list"),
        ("node1 slots=8\n", "hostfile"),
        ("worker-0\nworker-1\n", "hostfile"),
        ('{"pp_size_2": 8.0}', "Galvatron"),
        ("Nodes 8\nTiers 1\nTier 0\nDownlink_speed_Gbps 200\n", "ASTRA-sim htsim"),
    ],
)
def test_the_content_tells_the_reader(text: str, kind: str) -> None:
    assert read_text(Source("file", text))[0].format.startswith(kind)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes:\n- type: dgx-h100\n", "a cluster file of claw-plan already"),
        ('{\n "traceEvents": []}', "t:2: a trace of the PyTorch profiler"),
        ("NVIDIA-SMI has failed because", "t:1: the tool's own error"),
        ("hello world, this is prose", "t:1: 'hello world, this is prose' begins no file"),
        ("\n\nkey: value\n", "t:3: a file with the keys key"),
    ],
)
def test_other_files_are_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_text(Source("t", text))


def test_merged_readings_answer_each_other() -> None:
    rate = Rate(op="send", ranks=2, nodes=1, bytes_per_s=1e9, kind="bus", where="b:1")
    first = Reading(source="t", format="a", gpu_count=4, unknown=("the type of the GPUs", "NICs"))
    second = Reading(
        source="t", format="b", gpu_types=("x",) * 4, rates=(rate,), unknown=("NICs", "speed")
    )
    whole = merge([first, second])
    assert (whole.gpu_count, whole.gpu_types, whole.rates) == (4, ("x",) * 4, (rate,))
    assert whole.unknown == ("NICs", "speed")


@given(st.text(alphabet='GPU0123XNVSYPIO \t\n<>/{}[]":=#-_abcdefs,.', max_size=300))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        assert read_text(Source("t", text))
    except InputError as error:
        assert "\n" not in str(error)


def test_a_word_in_a_data_file_is_no_host() -> None:
    with pytest.raises(InputError, match="begins no file that is known"):
        read_text(Source("empty.json", "null\n"))

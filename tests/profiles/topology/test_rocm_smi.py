from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.topology.rocm_smi import read, recognise
from claw_plan.profiles.topology.source import Source, read_source

CORPUS = Path(__file__).parents[4] / "shared" / "corpus" / "topology"

TABLE = """
==================== ROCm System Management Interface ====================
================ Hops between two GPUs ================
       GPU0  GPU1  GPU2
GPU0   0     1     2
GPU1   1     0     2
GPU2   2     2     0
============== Link Type between two GPUs =============
       GPU0  GPU1  GPU2
GPU0   0     XGMI  PCIE
GPU1   XGMI  0     PCIE
GPU2   PCIE  PCIE  0
================ Numa Nodes ================
GPU[0]\t\t: (Topology) Numa Node: 0
"""
KINDS = {"PCIE": ((0, 2), (1, 2)), "XGMI": ((0, 1),)}


@pytest.mark.skipif(not CORPUS.is_dir(), reason="the corpus is not beside the project")
@pytest.mark.parametrize("number", ["65", "67", "68"])
def test_corpus(number: str) -> None:
    expected = yaml.safe_load((CORPUS / f"{number}.yaml").read_text())["right_reading"]
    source = read_source(CORPUS / f"{number}.txt")
    assert recognise(source)
    (reading,) = read(source)
    assert reading.gpu_count == expected["gpu_count"]
    assert {k: [list(pair) for pair in v] for k, v in reading.pairs.items()} == expected["pairs"]


@pytest.mark.parametrize(
    "text",
    [
        TABLE,
        TABLE.replace("\n", "\r\n"),
        "\n".join("  # " + line for line in TABLE.split("\n")),
        " ".join(TABLE.split(" ")).replace("  ", " "),
        json.dumps(
            {
                "system": {
                    "(Topology) Link type between DRM devices 0 and 1": "XGMI",
                    "(Topology) Link type between DRM devices 0 and 2": "PCIE",
                    "(Topology) Link type between DRM devices 1 and 2": "PCIE",
                }
            }
        ),
    ],
)
def test_every_form_gives_the_same_kinds(text: str) -> None:
    (reading,) = read(Source("t", text))
    assert (reading.gpu_count, dict(reading.pairs)) == (3, KINDS)
    assert reading.warnings == ("XGMI joins only {GPU0, GPU1}; other pairs use PCIe",)


def test_amd_smi_labels_by_pci_address() -> None:
    text = (
        "LINK TYPE TABLE:\n             0000:0c:00.0 0000:22:00.0\n"
        "0000:0c:00.0 SELF         XGMI\n0000:22:00.0 XGMI         SELF\n"
    )
    assert recognise(Source("t", text))
    (reading,) = read(Source("t", text))
    assert (reading.gpu_count, dict(reading.pairs)) == (2, {"XGMI": ((0, 1),)})


def test_a_table_cut_off_names_the_pairs_that_are_missing() -> None:
    (reading,) = read(Source("t", TABLE.split("GPU1   XGMI")[0]))
    assert reading.pairs_unknown == ((1, 2),)
    assert any("1 GPU pairs are not in the table: GPU1-GPU2" in w for w in reading.warnings)


def test_hops_alone_are_no_reading() -> None:
    with pytest.raises(InputError, match="Link Type between two GPUs"):
        read(Source("t", TABLE.split("============== Link Type")[0]))


def test_types_come_from_the_product_names() -> None:
    names = "".join(f"GPU[{i}]\t\t: Card Series: \t\tAMD Instinct MI210\n" for i in range(3))
    (reading,) = read(Source("t", TABLE + names))
    assert reading.gpu_types == ("AMD Instinct MI210",) * 3


@given(st.text(alphabet="GPU012 XMIPCE=\n[]:", max_size=300))
@settings(max_examples=200, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        read(Source("t", "Link Type between two GPUs" + text))
    except InputError as error:
        assert str(error).startswith("t:")

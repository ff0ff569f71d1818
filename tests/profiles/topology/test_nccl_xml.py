from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.topology.nccl_xml import read, recognise
from claw_plan.profiles.topology.reading import Reading
from claw_plan.profiles.topology.source import Source, read_source

CORPUS = Path(__file__).parents[4] / "shared" / "corpus" / "nccl_xml"
FILES = sorted(CORPUS.glob("*.yaml")) if CORPUS.is_dir() else []


def gpu(index: int, targets: str) -> str:
    return (
        f'<pci busid="0000:{index}0:00.0" class="0x030200" device="0x20b2"><gpu dev="{index}" '
        f'sm="80" rank="{index}">{targets}</gpu></pci>'
    )


def to_switch(count: int) -> str:
    return f'<nvlink target="fffffff:ffff:ff" count="{count}" tclass="0x068000"/>'


def only(*parts: str) -> Reading:
    text = '<system version="1">\n<cpu numaid="0">\n' + "\n".join(parts) + "\n</cpu></system>"
    (reading,) = read(Source("t.xml", text))
    return reading


@pytest.mark.skipif(not FILES, reason="the corpus of NCCL files is not beside the project")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_of_the_corpus_gives_its_right_reading(path: Path) -> None:
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    expected, source = document["right_reading"], read_source(path.with_suffix(".xml"))
    assert recognise(source)
    if document["expect_error"]:
        with pytest.raises(InputError, match=r"xml:3: no <cpu> and <pci busid=...> above <gpu"):
            read(source)
        return
    (reading,) = read(source)
    assert reading.gpu_count == expected["gpus"]
    assert len(reading.nics) == expected["nics"]
    nvlinks = sorted(
        [first, second, int(kind[2:])]
        for kind, pairs in reading.pairs.items()
        if kind.startswith("NV")
        for first, second in pairs
    )
    if expected["nvlink_pairs"] == "not described":
        assert not nvlinks
        assert reading.nvlink == "unknown"
    else:
        assert nvlinks == expected["nvlink_pairs"]
    if strangers := expected["devices_of_unknown_kind"]:
        assert any(f"{strangers} PCI devices without class" in w for w in reading.warnings)
    for nic, read_nic in zip(expected["nic_list"], reading.nics.items(), strict=True):
        assert nic.get("name", read_nic[0]) == read_nic[0]
        if "mbit_s" in nic:
            assert read_nic[1].bytes_per_s == nic["mbit_s"] * 125_000


def test_links_to_a_switch_join_every_pair() -> None:
    reading = only(*(gpu(index, to_switch(12)) for index in range(4)))
    assert len(reading.pairs["NV12"]) == 6
    assert reading.gpu_types == ("a100-sxm-80gb",) * 4
    assert reading.warnings == ()


@pytest.mark.parametrize(
    "broken", ["", '<nvlink target="-1" count="1" tclass="0x030200"/>'], ids=["none", "minus-one"]
)
def test_a_gpu_without_its_nvlinks_is_named(broken: str) -> None:
    reading = only(*(gpu(index, to_switch(12) if index != 2 else broken) for index in range(4)))
    assert reading.pairs["PHB"] == ((0, 2), (1, 2), (2, 3))
    assert any(w.startswith("GPU2 has no NVLink while") for w in reading.warnings)
    assert any("differs from its peers" in w for w in reading.warnings)


def test_links_to_itself_are_not_counted() -> None:
    link = '<nvlink target="0000:00:00.0" count="4" tclass="0x030200"/>'
    reading = only(gpu(0, link), gpu(1, ""))
    assert reading.pairs == {"PHB": ((0, 1),)}
    assert any("GPU0 has an NVLink to itself" in warning for warning in reading.warnings)


def test_paths_follow_the_tree() -> None:
    reading = only(
        f'<pci busid="s1" class="0x060400">{gpu(0, "")}{gpu(1, "")}</pci>',
        f'<pci busid="s2" class="0x060400">{gpu(2, "")}'
        '<pci busid="0000:99:00.0" class="0x020000"><nic><net name="mlx5_0" speed="200000"/></nic>'
        "</pci></pci>",
    )
    assert reading.pairs == {"PHB": ((0, 2), (1, 2)), "PIX": ((0, 1),)}
    assert reading.nics["mlx5_0"].to_gpus == ("PHB", "PHB", "PIX")
    assert reading.nics["mlx5_0"].bytes_per_s == 25e9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<nvidia_smi_log/>", "t:1: <nvidia_smi_log> is no NCCL topology"),
        ('<system version="1"/>', "t:1: <system> holds no PCIe device"),
        (f"<system><cpu>{gpu(0, '').replace('0000:', ':')}</cpu></system>", "no PCI bus id"),
        ("<system><cpu>" + gpu(1, "") * 2 + "</cpu></system>", "stands also in line 1"),
    ],
)  # fmt: skip
def test_other_files_are_refused_with_their_line(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(Source("t", text))

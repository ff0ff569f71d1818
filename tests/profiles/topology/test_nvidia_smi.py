from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.profiles.errors import InputError
from claw_plan.profiles.topology.nvidia_smi import read, recognise
from claw_plan.profiles.topology.reading import Reading
from claw_plan.profiles.topology.source import Source, decode, read_source

CORPUS = Path(__file__).parents[4] / "shared" / "corpus" / "topology"
FILES = sorted(path for path in CORPUS.glob("*.yaml")) if CORPUS.is_dir() else []

MATRIX = (
    "\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\n"
    "GPU0\t X \tNV4\tNV4\tNV4\tPIX\tSYS\t0-15\t0\t\tN/A\n"
    "GPU1\tNV4\t X \tNV4\tNV4\tPXB\tSYS\t0-15\t0\t\tN/A\n"
    "GPU2\tNV4\tNV4\t X \tNV4\tSYS\tPHB\t16-31\t1\t\tN/A\n"
    "GPU3\tNV4\tNV4\tNV4\t X \tSYS\tPIX\t16-31\t1\t\tN/A\n"
    "NIC0\tPIX\tPXB\tSYS\tSYS\t X \tSYS\n"
    "NIC1\tSYS\tSYS\tPHB\tPIX\tSYS\t X \n"
    "\nLegend:\n\n  X    = Self\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
    "\nNIC Legend:\n\n  NIC0: mlx5_0\n  NIC1: mlx5_1\n"
)
PAIRS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))


def fold(text: str, width: int) -> str:
    """As a terminal of that width shows it, and a mouse copies it."""
    lines = [line.expandtabs(8) for line in text.split("\n")]
    return "\n".join(
        line[start : start + width]
        for line in lines
        for start in range(0, max(1, len(line)), width)
    )


def only(text: str) -> Reading:
    (reading,) = read(Source("topo.txt", text))
    return reading


def check(reading: Reading) -> None:
    assert reading.gpu_count == 4
    assert reading.pairs == {"NV4": PAIRS}
    assert {name: nic.to_gpus for name, nic in reading.nics.items()} == {
        "NIC0": ("PIX", "PXB", "SYS", "SYS"),
        "NIC1": ("SYS", "SYS", "PHB", "PIX"),
    }


@pytest.mark.skipif(not FILES, reason="the corpus of topology files is not beside the project")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_file_of_the_corpus_gives_its_right_reading(path: Path) -> None:
    expected = yaml.safe_load(path.read_text(encoding="utf-8"))["right_reading"]
    if expected.get("vendor") == "amd":
        pytest.skip("read by rocm_smi")
    source = read_source(path.with_suffix(".txt"))
    assert recognise(source)
    if "expect_error" in expected:
        with pytest.raises(InputError, match=r"52\.txt:2: not a `topo -m` matrix.*topo -p2p"):
            read(source)
        return
    (reading,) = read(source)
    assert reading.gpu_count == expected["gpu_count"]
    assert {k: [list(pair) for pair in v] for k, v in reading.pairs.items()} == expected["pairs"]
    assert {
        name: {"to_gpus": list(nic.to_gpus)} | ({"device": nic.device} if nic.device else {})
        for name, nic in reading.nics.items()
    } == expected["nics"]
    assert [list(pair) for pair in reading.pairs_unknown] == expected.get("pairs_unknown", [])
    if "nvlink" in expected:
        assert reading.nvlink == "unknown"
    for row in expected.get("unreadable", []):
        assert any(row in warning for warning in reading.warnings), row


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace("\t", "   "),
        lambda text: "\n".join("    " + line for line in text.split("\n")),
        lambda text: "\n".join("# " + line for line in text.split("\n")),
        lambda text: "\n".join("> " + line for line in text.split("\n")),
        lambda text: "\n".join("node7: " + line for line in text.split("\n")),
        lambda text: "\n".join("[1,0]<stdout>:" + line for line in text.split("\n")),
        lambda text: "\n".join("2024-01-02T03:04:05Z " + line for line in text.split("\n")),
        lambda text: "\t\x1b[4m" + text[1:].replace("ID\n", "ID\x1b[0m\n"),
        lambda text: "\tESC[4m" + text[1:].replace("ID\n", "IDESC[0m\n"),
        lambda text: "\t[4m" + text[1:].replace("ID\n", "ID[0m\n"),
        lambda text: text[1:],
        lambda text: "GPU0GPU1GPU2GPU3NIC0NIC1CPU Affinity\n" + text.split("\n", 1)[1],
        lambda text: "$ nvidia-smi topo -m\n" + text + "$ exit\n",
        lambda text: "The GPU0 of ours is slow, see:\n\n```\n" + text + "```\nAny idea?\n",
        lambda text: "\n".join("| " + " | ".join(x.split("\t")) + " |" for x in text.split("\n")),
        lambda text: text + "\n" + text,
        lambda text: fold(text, 40),
        lambda text: text.replace("\t", ","),
        lambda text: text.lower(),
        lambda text: repr(text),
        lambda text: "\n".join("\u2502 " + x.replace("\t", " \u2502 ") for x in text.split("\n")),
        lambda text: "\n".join([*text.split("\n")[:1], *text.split("\n")[6:0:-1]]),
        lambda text: text + "\n" + text.replace("NV4", "SYS").replace("NV#  = ", "SYS  = "),
        lambda text: text.replace(" ", "\u00a0"),
        lambda text: text.replace("\tPXB\tSYS\t0-15", "\tPXB\n\tSYS\t0-15"),
        lambda text: text.split("\n", 1)[1],
        lambda text: decode(text.encode("utf-16"), "t"),
        lambda text: decode(text.encode("utf-16-le"), "t"),
    ],
)  # fmt: skip
def test_what_copying_and_pasting_does_to_a_matrix_changes_nothing(change) -> None:  # type: ignore[no-untyped-def]
    check(only(change(MATRIX)))


def test_a_whole_matrix_leaves_only_types_and_rates_open() -> None:
    reading = only(MATRIX)
    assert reading.warnings == ()
    assert reading.nvlink == "present"
    assert [nic.device for nic in reading.nics.values()] == ["mlx5_0", "mlx5_1"]
    assert len(reading.unknown) == 2


def test_types_are_taken_from_a_list_pasted_along() -> None:
    lines = [f"GPU {i}: NVIDIA A100-SXM4-40GB (UUID: GPU-{i}a)" for i in range(4)]
    assert only("\n".join(lines) + "\n" + MATRIX).gpu_types == ("NVIDIA A100-SXM4-40GB",) * 4


def test_different_matrices_are_different_machines() -> None:
    pcie = "\tGPU0\tGPU1\nGPU0\t X \tPHB\nGPU1\tPHB\t X \n"
    first, second = read(Source("t", MATRIX + pcie))
    assert (first.gpu_count, second.gpu_count) == (4, 2)


def test_rows_that_contradict_each_other_leave_the_pair_unknown() -> None:
    reading = only(MATRIX.replace("GPU1\tNV4\t X ", "GPU1\tSYS\t X "))
    assert reading.pairs_unknown == ((0, 1),)
    assert any("GPU0-GPU1 is NV4 in one row and SYS in the other" in w for w in reading.warnings)


def test_a_cell_lost_before_the_diagonal_does_not_shift_the_others() -> None:
    reading = only(MATRIX.replace("GPU3\tNV4\tNV4\tNV4\t X ", "GPU3\tPIX\tNV4\t X "))
    assert reading.pairs == {"NV4": PAIRS}
    assert any("row GPU3 has 5 readable cells of 6" in warning for warning in reading.warnings)


def test_a_gpu_off_the_fabric_is_named() -> None:
    text = MATRIX.replace("NV4\tPXB", "SYS\tPXB").replace(
        "GPU1\tNV4\t X \tNV4", "GPU1\tSYS\t X \tSYS"
    )
    text = text.replace("GPU0\t X \tNV4", "GPU0\t X \tSYS").replace(
        "GPU2\tNV4\tNV4", "GPU2\tNV4\tSYS"
    )
    text = text.replace("GPU3\tNV4\tNV4", "GPU3\tNV4\tSYS")
    reading = only(text)
    assert reading.pairs["SYS"] == ((0, 1), (1, 2), (1, 3))
    assert any(warning.startswith("GPU1 has no NVLink") for warning in reading.warnings)


def test_labels_that_are_not_nvidias_are_refused_with_their_line() -> None:
    text = "     GP0   GP1   CPUAffinity\nGP0   X    SYS   0-3 .\nGP1  SYS    X    0-3 .\n"
    with pytest.raises(InputError, match=r"t:2: the row is labelled 'GP0'.*malformed table"):
        read(Source("t", text))


def test_tabs_that_were_lost_leave_nothing_to_read() -> None:
    with pytest.raises(InputError, match="no row of the matrix can be read; were its tabs lost"):
        read(Source("t", MATRIX.replace("\t", "")))


def test_endless_matrices_are_refused() -> None:
    with pytest.raises(InputError, match="more than 256 matrices"):
        read(Source("t", MATRIX * 300))


def test_without_header_and_nvlinks_nics_cannot_be_told_apart() -> None:
    text = "GPU0\t X \tPHB\tSYS\nGPU1\tPHB\t X \tSYS\n"
    with pytest.raises(InputError, match="t:1: no header line, and 3 cells"):
        read(Source("t", text))


@given(st.text(alphabet="GPU01X NVSY\t\n#|PIO=-mp,", max_size=400))
@settings(max_examples=200, deadline=None)
def test_any_text_is_read_or_refused(text: str) -> None:
    source = Source("t", text)
    if recognise(source):
        try:
            read(source)
        except InputError as error:
            assert str(error).startswith("t:")

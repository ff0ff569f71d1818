from __future__ import annotations

from claw_plan.profiles.topology.reading import (
    all_pairs,
    by_kind,
    gpu_names,
    is_nvlink,
    islands,
    nvlink_warnings,
)


def test_pairs_by_kind() -> None:
    kinds = {(0, 1): "NV4", (1, 2): "SYS", (0, 2): "NV4"}
    assert by_kind(kinds) == {"NV4": ((0, 1), (0, 2)), "SYS": ((1, 2),)}
    assert len(all_pairs(8)) == 28


def test_names_are_cut_after_eight() -> None:
    assert gpu_names([0, 2]) == "GPU0, GPU2"
    assert gpu_names(range(10)).endswith("GPU7 and 2 more")


def test_nvlink_kinds() -> None:
    assert is_nvlink("NV12")
    assert is_nvlink("NVL")
    assert not is_nvlink("NVB")  # NCCL: NVLink through another GPU
    assert not is_nvlink("NODE")


def test_islands_are_joined_through_others() -> None:
    assert islands(5, {(0, 1): "NV1", (1, 2): "NV1", (3, 4): "PIX"}) == [[0, 1, 2], [3], [4]]


def test_uneven_nvlinks_are_said() -> None:
    def of(count: int, *linked: tuple[int, int]) -> list[str]:
        kinds = {pair: "NV4" if pair in linked else "SYS" for pair in all_pairs(count)}
        return nvlink_warnings(count, kinds)

    assert of(3) == []
    assert of(2, (0, 1)) == []
    assert of(3, (0, 1))[0].startswith("GPU2 has no NVLink while GPU0, GPU1 have")
    assert of(4, (0, 1), (2, 3)) == [
        "NVLink joins only {GPU0, GPU1} and {GPU2, GPU3}; between them it is PCIe"
    ]
    assert of(3, (0, 1), (1, 2))[0].startswith("NVLink is not all-to-all: 1 pairs")


def test_unknown_pairs_are_not_taken_for_missing_links() -> None:
    kinds = {(0, 1): "NV4"}
    assert nvlink_warnings(3, kinds, [(0, 2), (1, 2)]) == []

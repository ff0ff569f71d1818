from __future__ import annotations

from pathlib import Path

from claw_plan.profiles.cluster_file import load_cluster
from claw_plan.profiles.measured_rate import difference, differs


def test_differs_at_a_quarter() -> None:
    assert not differs(75, 100)
    assert differs(74, 100)
    assert differs(126, 100)


def test_the_sentence() -> None:
    assert difference("intra x, send", 1e9, 2e9, "f:1") == (
        "intra x, send: measured 1 GB/s (f:1) overrides the nominal 2 GB/s, from which it differs "
        "by -50%"
    )


def told(tmp_path: Path, intra: str, nics: str = "ib-ndr") -> list[str]:
    path = tmp_path / "c.yaml"
    path.write_text(
        f"nodes:\n- count: 2\n  devices: {{type: h100, count: 8}}\n  intra: {intra}\n"
        f"  nics: {nics}\n  host: {{memory: 1 TB, cores: 64}}\n"
    )
    return [text for text in load_cluster(str(path)).assumptions if "overrides" in text]


def test_a_cluster_file_with_slow_measured_links_says_so(tmp_path: Path) -> None:
    slow = "{type: nvswitch4, achieved: {all_reduce: 6 GB/s}, achieved_source: nccl-tests}"
    assert told(tmp_path, slow) == [
        "c.yaml:4: nodes[0].intra: nvswitch4, all_reduce: measured 6 GB/s (nccl-tests) overrides "
        "the nominal 450 GB/s, from which it differs by -99%"
    ]
    assert told(tmp_path, "{type: nvswitch4, achieved: {all_reduce: 400 GB/s}}") == []
    assert told(tmp_path, "nvswitch4") == []  # the catalogue's own figures are not told
    assert len(told(tmp_path, "nvswitch4", "{type: ib-ndr, achieved: {send: 5 GB/s}}")) == 1

from __future__ import annotations

import pytest

from claw_plan.profiles import catalogue
from claw_plan.profiles.cluster_schema import DeviceFigures, LinkFigures, NodeSpec
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.fitted import fitted
from claw_plan.profiles.units import GIB

DEVICES = sorted(catalogue.catalogue().devices)
LINKS = sorted(catalogue.catalogue().links)
NODES = sorted(catalogue.catalogue().nodes)


def test_holds_the_devices_and_nodes_that_people_have() -> None:
    families = {name.partition("-")[0] for name in DEVICES}
    assert families >= {"v100", "a100", "h100", "h200", "b200", "gb200", "l4", "a10g", "t4"}
    assert families >= {"rtx", "mi300x", "cpu"}
    assert len(DEVICES) >= 15
    assert set(NODES) >= {
        "dgx-a100-40gb", "dgx-a100-80gb", "dgx-h100", "dgx-h200", "dgx-b200", "p4d.24xlarge",
        "p4de.24xlarge", "p5.48xlarge", "nd96asr-v4", "nd96amsr-v4", "nd96isr-h100-v5",
        "gb200-nvl72-tray", "dgx1-v100", "g5.48xlarge",
    }  # fmt: skip


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_figure_has_a_source(name: str) -> None:
    entry = catalogue.catalogue().devices[name]
    device = catalogue.device(name)
    assert "http" in device.source
    if entry.achieved:
        assert entry.achieved_source and len(entry.achieved_source) > 30
    if entry.peak or entry.bandwidth:
        # A figure of its own needs a source of its own or of the entry it is like.
        assert entry.source or entry.like


@pytest.mark.parametrize("name", LINKS)
def test_every_link_figure_has_a_source(name: str) -> None:
    entry = catalogue.catalogue().links[name]
    link = catalogue.link(name)
    assert len(link.source) > 30
    if entry.achieved and not entry.like:
        assert entry.achieved_source
    assert link.latency_ns > 0
    assert all(0 < rate <= link.bytes_per_s for rate in link.achieved_bytes_per_s.values())


@pytest.mark.parametrize("name", NODES)
def test_every_node_names_things_of_the_catalogue(name: str) -> None:
    node = catalogue.node_type(name)
    assert node.source and "http" in node.source
    assert node.devices and node.intra and node.nics and node.host
    assert catalogue.device(node.devices.type).peer_to_peer
    assert catalogue.link(node.intra.type).bytes_per_s > 0
    assert catalogue.link(node.nics.type).bytes_per_s > 0


@pytest.mark.parametrize("name", DEVICES)
def test_peaks_are_ordered_and_never_exceeded(name: str) -> None:
    device = catalogue.device(name)
    peak = device.peak_flops_per_s
    order = [peak[d] for d in ("float64", "float32", "bfloat16", "float8") if d in peak]
    assert order == sorted(order)
    for dtype, rate in device.achieved_flops_per_s.items():
        if dtype != "attention":
            assert 0.2 * peak[dtype] < rate <= peak[dtype] or device.kind == "cpu"
    assert 8 * GIB < device.memory_bytes < 1024 * GIB
    assert device.memory_bytes_per_s > 1e9


def test_figures_that_everybody_knows() -> None:
    """Data-sheet figures, written down here a second time from the data sheets."""
    a100 = catalogue.device("a100-80gb")
    assert a100.peak_flops_per_s["bfloat16"] == 312e12
    assert a100.memory_bytes == 80 * GIB
    assert a100.memory_bytes_per_s == 2.039e12
    assert a100.achieved_flops_per_s["float32"] == pytest.approx(18e12, rel=0.1)
    h100 = catalogue.device("h100")
    assert h100.peak_flops_per_s["bfloat16"] == 989.4e12
    assert h100.peak_flops_per_s["float8"] == pytest.approx(2 * 989.4e12, rel=1e-3)
    assert catalogue.device("h200-sxm-141gb").memory_bytes_per_s == 4.8e12
    assert catalogue.device("v100-sxm-32gb").memory_bytes > 31 * GIB
    assert catalogue.link("nvswitch3").bytes_per_s == 300e9
    assert catalogue.link("pcie3-x16").rate("all_gather") == 8e9
    assert catalogue.link("nvswitch4").bytes_per_s == 450e9
    assert catalogue.link("ib-ndr").bytes_per_s == 50e9


def test_links_side_by_side_add_up() -> None:
    link = catalogue.link("nvlink3 x4")
    assert (link.name, link.bytes_per_s, link.latency_ns) == ("nvlink3 x4", 100e9, 5250)


def test_what_nobody_measured_follows_from_peak_and_power() -> None:
    a10g = catalogue.device("a10g").achieved_flops_per_s
    assert a10g["bfloat16"] == pytest.approx(0.78 * 70e12)
    assert a10g["attention"] == pytest.approx(0.75 * 0.78 * 70e12)
    h100 = catalogue.device("h100", with_fitted=False).achieved_flops_per_s
    assert h100["bfloat16"] == 700e12  # 700 W


def test_a_part_inherits_what_was_fitted_to_the_one_it_is_like() -> None:
    def factor(name: str) -> float:
        plain = catalogue.device(name, with_fitted=False).achieved_flops_per_s["bfloat16"]
        return catalogue.device(name).achieved_flops_per_s["bfloat16"] / plain

    assert factor("a800-sxm-80gb") == pytest.approx(factor("a100-sxm-80gb"))
    assert factor("a100-sxm-80gb") == pytest.approx(
        fitted().rates["a100-sxm-80gb"]["half"] / 243.36e12
    )


def test_own_figures_win_and_are_said() -> None:
    own = DeviceFigures.model_validate({"peak": {"bfloat16": "800 TFLOPS"}})
    device = catalogue.device("h100", own)
    assert device.peak_flops_per_s == {"bfloat16": 800e12}
    assert device.achieved_flops_per_s["bfloat16"] == pytest.approx(0.78 * 800e12)
    assert device.memory_bytes_per_s == 3.35e12
    assert device.source.endswith("peak from the cluster file")
    slow = LinkFigures.model_validate({"bandwidth": "100 GB/s"})
    assert catalogue.link("pcie4-x16", slow).rate("all_reduce") == 100e9


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: catalogue.device("a100-80g"), "unknown device 'a100-80g'; did you mean 'a100-"),
        (lambda: catalogue.link("nvlnk3"), "unknown link 'nvlnk3'; did you mean 'nvlink3'"),
        (lambda: catalogue.link("nvlink3 x0"), "unknown link 'nvlink3 x0'"),
        (lambda: catalogue.node_type("dgx-h10"), "unknown node type 'dgx-h10'; did you mean"),
        (lambda: catalogue.device("custom"), "missing: memory, bandwidth, peak"),
        (lambda: catalogue.link(None), "missing: bandwidth, latency"),
    ],
)
def test_unknown_names(ask: object, message: str) -> None:
    assert callable(ask)
    with pytest.raises(InputError) as caught:
        ask()
    assert message in str(caught.value)


def test_a_node_has_a_type_or_devices() -> None:
    with pytest.raises(ValueError, match="either a `type` of the catalogue or its own `devices`"):
        NodeSpec.model_validate({"count": 1})

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.profiles import cluster_file
from claw_plan.profiles.catalogue import catalogue
from claw_plan.profiles.cluster import Cluster
from claw_plan.profiles.cluster_file import cluster_from_mapping, load_cluster
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.units import GIB

SHARED = Path(__file__).parents[3] / "shared"

CUSTOM = "{type: custom, count: 2, memory: 80 GiB, bandwidth: 1 TB/s, peak: {float32: 9 TFLOPS}}"


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_file, "this_machine", lambda: (2, 24 * GIB))


def load(folder: Path, text: str) -> Cluster:
    path = folder / "c.yaml"
    path.write_text(text)
    return load_cluster(str(path))


def test_the_example_file() -> None:
    path = SHARED / "examples" / "cluster.yaml"
    if not path.exists():
        pytest.skip("the shared examples are not beside this checkout")
    cluster = load_cluster(str(path))
    assert cluster.name == "two-kinds"
    assert cluster.num_devices == 20
    assert [node.device_count for node in cluster.nodes] == [8, 8, 4]
    assert [node.device.name for node in cluster.nodes] == [
        "a100-sxm-80gb", "a100-sxm-80gb", "h100-sxm-80gb",
    ]  # fmt: skip
    assert not cluster.is_uniform
    assert cluster.network.type == "fat-tree"
    assert cluster.network.latency_ns == 3000
    assert cluster.node_mtbf_ns == 30 * 86400 * 10**9
    assert cluster.price_per_node_hour_usd == 32.77
    assert cluster.training == {
        "global_batch": 512, "seq_len": 2048, "precision": "bf16", "optimizer": "adamw",
    }  # fmt: skip
    assert cluster.nodes[2].host_memory_bytes == 2 * 1024 * GIB
    assert cluster.nodes[2].nic_bytes_per_s_per_device == 50e9
    assert cluster.assumptions == ()


@pytest.mark.parametrize("name", sorted(catalogue().nodes))
def test_every_node_type_is_a_shorthand(name: str) -> None:
    cluster = load_cluster(f"2x{name}")
    assert len(cluster.nodes) == 2
    assert cluster.is_uniform
    assert cluster.nodes[0].type == name
    assert cluster == cluster_from_mapping(yaml.safe_load(yaml.safe_dump(cluster.text)), "plan")
    assert load_cluster(name).num_devices == cluster.num_devices // 2


def test_a_shorthand_says_what_it_assumes() -> None:
    cluster = load_cluster("2xdgx-h100")
    assert cluster.num_devices == 16
    assert cluster.assumptions == ("no network given: one non-blocking switch at the NICs' rate",)
    assert cluster.text == {"name": "2xdgx-h100", "nodes": [{"count": 2, "type": "dgx-h100"}]}
    assert load_cluster("dgx-h100").assumptions == ()


@pytest.mark.usefixtures("two_cores")
def test_cpu_devices_share_cores_and_memory() -> None:
    cluster = load_cluster("cpu")
    (node,) = cluster.nodes
    assert (node.device_count, node.cores, node.host_cores) == (4, 2, 2)
    assert node.shared_memory_bytes == node.device.memory_bytes == 24 * GIB
    assert cluster.backend == "gloo"
    assert "the CPU node is this machine's: 2 cores, 24.0 GiB" in cluster.assumptions


@pytest.mark.usefixtures("two_cores")
@pytest.mark.parametrize("text", ["cpu", "3xcpu"])
def test_a_cpu_cluster_stands_alone_in_a_plan(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = load_cluster(text)
    inlined = yaml.safe_load(yaml.safe_dump(dict(cluster.text)))
    assert inlined["nodes"][0]["devices"] == {"type": "cpu", "cores": 2, "count": 4}
    monkeypatch.setattr(cluster_file, "this_machine", lambda: (64, 512 * GIB))
    elsewhere = cluster_from_mapping(inlined, "plan.yaml: cluster")
    assert elsewhere.nodes == cluster.nodes
    assert elsewhere.text == cluster.text


@pytest.mark.usefixtures("two_cores")
def test_many_cores_make_as_many_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_file, "this_machine", lambda: (16, 64 * GIB))
    assert load_cluster("cpu").num_devices == 16


def test_measured_cpu_figures_are_kept(tmp_path: Path) -> None:
    cluster = load(
        tmp_path,
        "nodes:\n- devices: {type: cpu, cores: 2, peak: {float32: 90 GFLOPS}, source: by me,"
        " kernel_launch: 3 us}\n"
        "  intra: {type: loopback, bandwidth: 3 GB/s, achieved: {all_reduce: 1 GB/s},"
        " startup: {send: 70 us}}\n"
        "  host: {memory: 8 GiB, cores: 2}\n",
    )
    (node,) = cluster.nodes
    assert node.device.peak_flops_per_s == {"float32": 90e9}
    assert node.device.kernel_launch_ns == 3000
    assert node.device.source.startswith("by me")
    assert node.intra.rate("all_reduce") == 1e9
    assert node.intra.rate("all_gather") == 3e9
    assert node.intra.startup_ns == {"send": 70_000}
    assert node.shared_memory_bytes == 8 * GIB
    again = cluster_from_mapping(yaml.safe_load(yaml.safe_dump(dict(cluster.text))), "plan")
    assert again.nodes == cluster.nodes


def test_a_custom_device_and_link(tmp_path: Path) -> None:
    cluster = load(
        tmp_path,
        f"nodes:\n- count: 2\n  devices: {CUSTOM}\n"
        "  intra: {bandwidth: 100 GB/s, latency: 2 us}\n"
        "  nics: {bandwidth: 400 Gb/s, latency: 5 us, count: 1}\n"
        "  host: {memory: 64 GiB, cores: 16}\n",
    )
    node = cluster.nodes[0]
    assert node.device.memory_bytes == 80 * GIB
    assert node.device.achieved_flops_per_s["float32"] == 0.9 * 9e12
    assert (node.intra.bytes_per_s, node.intra.latency_ns) == (100e9, 2000)
    assert node.nic.bytes_per_s == 50e9
    assert node.nic_bytes_per_s_per_device == 25e9


def test_pairs_override_the_default_link(tmp_path: Path) -> None:
    cluster = load(
        tmp_path,
        "nodes:\n- devices: {type: a100-80gb, count: 4}\n"
        "  intra: {pairs: [[0, 3, nvlink3 x4], [2, 1, nvlink3 x4]], default: {type: pcie4-x16}}\n",
    )
    node = cluster.nodes[0]
    assert node.intra.name == "pcie4-x16"
    assert {pair: link.bytes_per_s for pair, link in node.pairs.items()} == {
        (0, 3): 100e9,
        (1, 2): 100e9,
    }
    assert any("not on single pairs" in text for text in cluster.assumptions)


def test_a_geforce_goes_through_the_host(tmp_path: Path) -> None:
    cluster = load(tmp_path, "nodes:\n- devices: {type: rtx-4090, count: 2}\n  intra: pcie4-x16\n")
    assert cluster.nodes[0].intra.bytes_per_s == 31.5e9 / 2
    assert any("no peer-to-peer" in text for text in cluster.assumptions)


def test_a_rack_of_trays_is_one_nvlink_domain() -> None:
    assert load_cluster("18xgb200-nvl72-tray").nodes[0].nic.name == "nvswitch5-nvl72"
    assert load_cluster("19xgb200-nvl72-tray").nodes[0].nic.name == "ib-ndr"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: []", "c.yaml:1: nodes: list should have at least 1 item"),
        ("nodes: 3", "c.yaml:1: nodes: input should be a valid list; got 3"),
        ("nodes: [{}]", "c.yaml:1: nodes[0]: a node has either a `type`"),
        (f"nodes: [{{type: dgx-h100, devices: {CUSTOM}}}]", "either a `type`"),
        (
            "nodes:\n- type: dgx-h10",
            "c.yaml:2: nodes[0].type: unknown node type 'dgx-h10'; did you mean 'dgx-h100'",
        ),
        (
            "nodes:\n- devices: {type: h10O, count: 2}",
            "c.yaml:2: nodes[0].devices.type: unknown device 'h10O'; did you mean 'h100'",
        ),
        (
            "nodes:\n- typ: dgx-h100",
            "c.yaml:2: nodes[0].typ: unknown key 'typ'; did you mean 'type'?",
        ),
        (
            "nodes:\n- type: dgx-h100\nnetwrk: {}",
            "c.yaml:3: netwrk: unknown key 'netwrk'; did you mean 'network'?",
        ),
        ("nodes:\n- {count: 0, type: dgx-h100}", "nodes[0].count: input should be greater than 0"),
        ("nodes:\n- {count: -1, type: dgx-h100}", "greater than 0; got -1"),
        ("nodes:\n- {count: .inf, type: dgx-h100}", "valid integer; got inf"),
        ("nodes:\n- {count: .nan, type: dgx-h100}", "valid integer; got nan"),
        ("nodes:\n- {count: 1.5, type: dgx-h100}", "valid integer; got 1.5"),
        ("nodes:\n- {count: true, type: dgx-h100}", "valid integer; got True"),
        ("nodes:\n- {count: 1e9, type: dgx-h100}", "valid integer; got '1e9'"),
        (
            "nodes:\n- {count: 999999999, type: dgx-h100}",
            "less than or equal to 100000; got 999999999",
        ),
        (
            "nodes:\n- devices:\n    type: custom\n    memory: 80 GB/s\n",
            "c.yaml:4: nodes[0].devices.memory: a size has the unit 'GB/s' in '80 GB/s'",
        ),
        (
            "nodes:\n- devices:\n    type: custom\n    memory: 80000000000 GiB\n",
            "80000000000 GiB is implausible: more than 1.0 TiB",
        ),
        (
            "nodes:\n- devices: {type: h100, bandwidth: 1e30 GB/s}",
            "1e30 GB/s is implausible: more than 1 PB/s; is the unit right?",
        ),
        (
            "nodes:\n- devices: {type: h100, peak: {bfloat16: 1e9 TFLOPS}}",
            "1e9 TFLOPS is implausible: more than 1000 PFLOPS",
        ),
        ("nodes:\n- devices: {type: h100, memory: 0 GiB}", "a size must be positive and finite"),
        ("nodes:\n- devices: {type: h100, memory: -80 GiB}", "positive and finite"),
        ("nodes:\n- devices: {type: h100, memory: inf GiB}", "a number with its unit"),
        ("nodes:\n- devices: {type: h100, memory: 80}", "a number with its unit, as in '80 GiB'"),
        ("nodes:\n- devices: {type: h100, memory: 80 Gb}", "a size has the unit 'Gb'"),
        (
            "nodes:\n- devices: {type: h100, bandwidth: 3 TB}",
            "a bandwidth has the unit 'TB' in '3 TB'; use bytes (GB/s) or bits (Gb/s)",
        ),
        ("nodes:\n- devices: {type: h100, peak: {bf16: 1 TFLOPS}}", "'bfloat16'"),
        ("nodes:\n- devices: {type: h100, peak: {}}", "peak"),
        ("nodes:\n- devices: {type: h100, cores: 8}", "only CPU devices have cores"),
        ("nodes:\n- devices: {type: custom, count: 2}", "missing: memory, bandwidth, peak"),
        (
            "nodes:\n- devices: {type: h100, count: 2}\n  intra: nvlik4",
            "c.yaml:3: nodes[0].intra.type: unknown link 'nvlik4'; did you mean 'nvlink4'",
        ),
        (
            "nodes:\n- devices: {type: h100, count: 2}\n  intra: {bandwidth: 1 GB/s}",
            "missing: latency",
        ),
        (
            "nodes:\n- devices: {type: h100, count: 2}\n  intra:\n    pairs: [[0, 1, nvlink4]]",
            "`pairs` need a `default` link",
        ),
        (
            "nodes:\n- devices: {type: h100, count: 2}\n"
            "  intra: {pairs: [[0, 2, nvlink4]], default: pcie5-x16}",
            "nodes[0].intra.pairs[0]: a pair names two of the devices 0 to 1",
        ),
        (
            "nodes:\n- devices: {type: h100, count: 2}\n"
            "  intra: {pairs: [[0, 1, nvlink4], [1, 0, nvlink4]], default: pcie5-x16}",
            "the pair 1, 0 stands twice",
        ),
        (
            "nodes:\n- count: 2\n  devices: {type: h100, count: 2}\n",
            "c.yaml:2: nodes[0]: several nodes need `nics`",
        ),
        (
            "nodes:\n- devices: {type: rtx-4090, count: 2}\n  intra: nvlink4 x4",
            "rtx-4090 has no NVLink",
        ),
        ("nodes:\n- type: dgx-h100\n- type: cpu", "the nodes mix cpu and cuda devices"),
        ("nodes:\n- type: dgx-h100\nnetwork: {type: fat-tre}", "'fat-tree' or 'rails'"),
        ("nodes:\n- type: dgx-h100\nnetwork: {oversubscription: .nan}", "finite number"),
        ("nodes:\n- type: dgx-h100\nnetwork: {oversubscription: 0.5}", "greater than or equal"),
        ("nodes:\n- type: dgx-h100\nnetwork: {latency: 3}", "a duration must be a number with"),
        ("nodes:\n- type: dgx-h100\nfailures: {node_mtbf: 0 d}", "positive and finite"),
        ("nodes:\n- type: dgx-h100\nprice: {per_node_hour: 3 EUR}", "'32.77 USD'"),
        ("nodes:\n- type: dgx-h100\ntraining: {optimizer: lion}", "'adamw' or 'sgd'"),
        ("nodes:\n- {type: dgx-h100, nics: {type: ib-ndr, count: 0}}", "greater than 0"),
        (
            "devices: {type: h100}",
            "c.yaml:1: not a cluster file of claw-plan: it has no key 'nodes'",
        ),
    ],
)
def test_bad_files_get_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gone.yaml", "there is no file 'gone.yaml'"),
        ("no/such/folder", "there is no file 'no/such/folder'"),
        ("dgx-h10", "neither a file nor a node type; did you mean 'dgx-h100'"),
        ("2xdgx-h10", "neither a file nor a node type"),
        ("0xdgx-h100", "the number of nodes must be 1 to 100000"),
        ("999999999xdgx-h100", "the number of nodes must be 1 to 100000"),
        ("", "--cluster is empty"),
        ("a\0b", "null byte"),
    ],
)
def test_bad_shorthands(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_cluster(text)
    assert message in str(caught.value)


def test_an_inlined_cluster_says_which_plan_it_is_in() -> None:
    with pytest.raises(InputError, match=r"^plan\.yaml: cluster: nodes\[0\]\.type: unknown node"):
        cluster_from_mapping({"nodes": [{"type": "dgx"}]}, "plan.yaml: cluster")


CORPUS = sorted((SHARED / "corpus" / "cluster").glob("*"))


@pytest.mark.skipif(not CORPUS, reason="the shared corpus is not beside this checkout")
def test_files_of_other_tools_are_refused_in_one_line() -> None:
    for path in CORPUS:
        with pytest.raises(InputError) as caught:
            load_cluster(str(path))
        assert path.name in str(caught.value)
        assert "\n" not in str(caught.value)


def _values() -> st.SearchStrategy[object]:
    leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
    keys = st.sampled_from(
        [
            "nodes",
            "count",
            "type",
            "devices",
            "intra",
            "nics",
            "host",
            "memory",
            "pairs",
            "default",
        ]
    )
    return st.recursive(
        leaves | st.sampled_from(["h100", "cpu", "dgx-h100", "pcie4-x16", "80 GiB", "1 GB/s"]),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
        max_leaves=12,
    )


@given(st.lists(_values(), max_size=3))
@settings(max_examples=200)
def test_nonsense_raises_nothing_but_input_errors(nodes: list[object]) -> None:
    try:
        cluster_from_mapping({"nodes": nodes}, "plan.yaml")
    except InputError as error:
        assert "plan.yaml" in str(error)


def test_a_node_of_a_thousand_devices_has_a_host(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("nodes:\n- devices: {type: mi300x, count: 1024}\n")
    assert load_cluster(str(path)).nodes[0].host_memory_bytes == 64 << 40


def test_hosts_on_one_machine_say_so_and_are_of_one_kind() -> None:
    """Also in the text that a plan carries, from which the cluster is read again."""
    host = {"devices": {"type": "cpu", "cores": 1, "count": 2}, "nics": {"type": "ethernet-10"}}
    names = ("left", "right", "left")
    nodes = [host | {"host": {"memory": "8 GiB", "cores": 1, "machine": name}} for name in names]
    cluster = cluster_from_mapping({"name": "virtual", "nodes": nodes}, "here")
    again = cluster_from_mapping(cluster.text, "plan")
    assert [node.machine for node in again.nodes] == list(names)
    assert cluster.is_uniform


def test_nodes_are_grouped_by_hand(tmp_path: Path) -> None:
    cluster = load(
        tmp_path,
        "nodes:\n- {type: dgx-a100-80gb, node_profile: big}\n"
        "- {type: dgx-h100, node_profile: big, count: 2}\n- {type: dgx-h100}\n",
    )
    assert [node.profile for node in cluster.nodes] == ["big", "big", "big", ""]
    assert cluster.nodes[1] == cluster.nodes[3]  # a profile changes nothing of a node
    again = cluster_from_mapping(cluster.text, "plan.yaml: cluster")
    assert [node.profile for node in again.nodes] == ["big", "big", "big", ""]


@pytest.mark.parametrize(
    "entry, message",
    [
        ("{type: p4d.24xlarge, node_profile: ''}", "node_profile"),
        ("{type: dgx-h100, node_profile: 7}", "node_profile"),
        ("{devices: {type: rtx-4090, count: 4}, nics: {type: ib-ndr}, node_profile: big}", "of 4"),
    ],
)
def test_groups_that_cannot_be_are_refused(tmp_path: Path, entry: str, message: str) -> None:
    text = f"nodes:\n- {{type: dgx-a100-80gb, node_profile: big}}\n- {entry}\n"
    with pytest.raises(InputError, match=message) as caught:
        load(tmp_path, text)
    assert "\n" not in str(caught.value)

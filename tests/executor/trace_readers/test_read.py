from __future__ import annotations

import gzip
import json
import sqlite3
import tarfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from claw_plan.executor.trace_readers.read import read_traces
from claw_plan.profiles.errors import InputError

CORPUS = Path(__file__).parents[4] / "shared" / "corpus" / "kineto"

OPERATOR = {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 1, "dur": 2}
REDUCE = OPERATOR | {"cat": "user_annotation", "name": "gloo:all_reduce"}


def write(path: Path, *events: Any, **head: Any) -> Path:
    path.write_text(json.dumps({**head, "traceEvents": list(events)}))
    return path


def rank(number: int, size: int = 2) -> dict[str, Any]:
    return {"distributedInfo": {"rank": number, "world_size": size}}


def test_ranks_are_in_order_whatever_the_files_are(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{n}.json", OPERATOR, **rank(n)) for n in (1, 0)]
    assert [trace.rank for trace in read_traces(paths)] == [0, 1]
    assert [trace.rank for trace in read_traces([tmp_path])] == [0, 1]
    with tarfile.open(tmp_path / "all.tar.gz", "w:gz") as tar:
        for path in paths:
            tar.add(path, path.name)
    assert [trace.rank for trace in read_traces([tmp_path / "all.tar.gz"])] == [0, 1]


def test_a_rank_is_asked_for_or_taken_from_the_name(tmp_path: Path) -> None:
    path = write(tmp_path / "host.json", REDUCE)
    with pytest.raises(InputError, match=r"host\.json does not say which rank .* --rank N"):
        read_traces([path])
    assert read_traces([path], [5])[0].rank == 5
    assert read_traces([write(tmp_path / "trace_rank12.pt.json", REDUCE)])[0].rank == 12
    with pytest.raises(InputError, match="--rank is given 2 times"):
        read_traces([path], [5, 6])


def test_one_process_without_collectives_needs_no_rank(tmp_path: Path) -> None:
    (trace,) = read_traces([write(tmp_path / "a.json", OPERATOR)])
    assert (trace.rank, trace.world_size) == (0, 1)
    assert "taken as the only process" in trace.warnings[-1]


def test_a_world_smaller_than_its_rank_is_not_believed(tmp_path: Path) -> None:
    distributed = {"distributedInfo": {"rank": 9, "world_size": 8}}
    (trace,) = read_traces([write(tmp_path / "a.json", OPERATOR, **distributed)])
    assert (trace.rank, trace.world_size) == (9, None)
    assert trace.warnings[-1].startswith("it calls itself rank 9 of 8")


def test_two_recordings_of_one_rank_are_refused(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, OPERATOR, **rank(1)) for name in ("a.json", "b.json")]
    with pytest.raises(InputError, match=r"b\.json and a\.json both are rank 1"):
        read_traces(paths)


def test_a_run_folder_lasts_as_long_as_its_clock_says(tmp_path: Path) -> None:
    span = {"rank": 0, "stream": "compute", "kind": "forward", "name": "f", "start_ns": 0,
            "end_ns": 1_000_000, "step": 3}  # fmt: skip
    (tmp_path / "timeline.json").write_text(json.dumps({"origin": "measured", "spans": [span]}))
    (tmp_path / "steps.jsonl").write_text('{"step": 3, "way": "timeline", "step_time_ms": 3.0}')
    (trace,) = read_traces([tmp_path])
    assert trace.steps[0].duration_ns == 3_000_000
    (alone,) = read_traces([tmp_path / "timeline.json"])
    assert alone.steps[0].duration_ns == 1_000_000


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b'{"a": 1}', "has neither traceEvents"),
        ("a.json", b"{}", "has neither traceEvents"),
        ("a.json", b'{"traceEvents": []}', "no operator, kernel or step in it"),
        ("a.json", b"[]", "no operator, kernel or step in it"),
        ("a.json", b'{"spans": []}', "a run records one when it has 3 steps or more"),
        ("a.json", b'{"schema": "1", "nodes": []}', "its nodes are none of an execution trace"),
        ("a.nsys-rep", b"\x00\x01", "export it with nsys export --type sqlite"),
        ("a.et", b"\x0a\x10", "Chakra trace in protobuf"),
        ("a.json", b"\x89PNG", "a.json.*not text in UTF-8"),
        ("a.json", b"", "no JSON trace: empty"),
    ],
)
def test_other_files_are_one_line(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=said):
        read_traces([tmp_path / name])


def test_a_database_is_told_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "report.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE x (y)")
        database.commit()
    with pytest.raises(InputError, match="no Nsight Systems export"):
        read_traces([path])
    packed = tmp_path / "report.db.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(InputError, match="unpack it first"):
        read_traces([packed])


@pytest.mark.skipif(not CORPUS.exists(), reason="the shared corpus is not beside this checkout")
class TestCorpus:
    """Traces of others; the right reading stands in the corpus' README, section 3."""

    def test_eight_ranks_without_process_groups(self) -> None:
        traces = read_traces([CORPUS / "dlrm_8ranks_v100_kineto.tar.gz"])
        assert [trace.rank for trace in traces] == list(range(8))
        for trace in traces:
            assert trace.device == "Tesla V100-SXM2-32GB" and trace.world_size == 8
            ops = [one.op for one in trace.collectives]
            assert (ops.count("all_reduce"), ops.count("all_to_all"), len(ops)) == (3, 5, 8)
            assert [step.number for step in trace.steps] == [10]
        lasted = {trace.rank: trace.steps[0].duration_ns / 1e6 for trace in traces}
        assert (min(lasted, key=lasted.__getitem__), max(lasted, key=lasted.__getitem__)) == (7, 1)
        assert (round(lasted[7], 1), round(lasted[1], 1)) == (12.5, 19.9)

    def test_one_rank_of_128(self) -> None:
        (trace,) = read_traces([CORPUS / "sampled_world128_rank0.json.gz"])
        assert (trace.rank, trace.world_size) == (0, 128)
        assert len(trace.collectives) == 10
        assert [step.number for step in trace.steps] == [551, 552]
        assert 419430400 in {one.bytes for one in trace.collectives}

    def test_gloo_rank_34_of_300(self) -> None:
        (trace,) = read_traces([CORPUS / "gloo_cpu_rank34_of_300.pt.trace.json.gz"])
        assert (trace.rank, trace.world_size, trace.is_gpu) == (34, 300, False)
        assert [one.op for one in trace.collectives] == ["all_reduce"] * 10
        assert {one.group_size for one in trace.collectives} == {300}
        assert "no GPU events" in " ".join(trace.warnings)

    def test_no_rank_is_asked_for(self) -> None:
        path = CORPUS / "no_distributedInfo.json.gz"
        with pytest.raises(InputError, match=r"no_distributedInfo\.json\.gz .* --rank"):
            read_traces([path])
        (trace,) = read_traces([path], [3])
        assert trace.rank == 3 and not trace.is_gpu

    def test_an_amd_process(self) -> None:
        (trace,) = read_traces([CORPUS / "mi250_rocm62.json.gz"])
        assert trace.is_gpu and not trace.collectives and trace.device == "AMD Radeon Graphics"
        assert len(trace.activities) == 16
        assert "sees 4 devices" in " ".join(trace.warnings)

    def test_an_execution_trace_is_told_apart(self) -> None:
        (trace,) = read_traces([CORPUS / "execution_trace_not_kineto.json.gz"])
        assert not trace.has_timing and "an execution trace" in trace.warnings[0]

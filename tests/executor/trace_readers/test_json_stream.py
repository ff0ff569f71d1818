from __future__ import annotations

import io
import json
import math
import tracemalloc
from typing import Any, BinaryIO, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from claw_plan.executor.trace_readers import json_stream
from claw_plan.executor.trace_readers.json_stream import EMPTY, stream_members
from claw_plan.profiles.errors import InputError

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def members(text: str | bytes, lists: tuple[str, ...] = ("traceEvents",)) -> list[tuple[str, Any]]:
    raw = text.encode() if isinstance(text, str) else text
    return list(stream_members(io.BytesIO(raw), "t.json", lists))


@given(st.dictionaries(st.text(), VALUES, max_size=5), st.lists(VALUES, max_size=6))
def test_members_are_those_of_json(head: dict[str, Any], events: list[Any]) -> None:
    value = {**head, "traceEvents": events}
    expected = [(key, one) for key, one in value.items() if key != "traceEvents"]
    expected += [("traceEvents", one) for one in events or [EMPTY]]
    for text in (json.dumps(value), json.dumps(value, indent=2, ensure_ascii=False)):
        assert sorted(members(text), key=repr) == sorted(expected, key=repr)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7])
def test_chunks_may_end_anywhere(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "CHUNK_BYTES", chunk)
    text = '{"n": 12.5e3, "é": "ü\\"}]", "traceEvents": [ {"a": [1, 23]}, -456 , true ] , "z": 9}'
    assert members(text) == [
        ("n", 12500.0),
        ("é", 'ü"}]'),
        ("traceEvents", {"a": [1, 23]}),
        ("traceEvents", -456),
        ("traceEvents", True),
        ("z", 9),
    ]


def test_a_bare_list_is_the_events_and_may_stay_open() -> None:
    assert members("[1, 2]") == [("traceEvents", 1), ("traceEvents", 2)]
    assert members("[1, 2\n") == [("traceEvents", 1), ("traceEvents", 2)]


def test_nan_and_infinity_come_as_floats() -> None:
    (_, (nan, infinite)) = members('{"a": [NaN, -Infinity]}')[0]
    assert math.isnan(nan) and infinite == -math.inf


@pytest.mark.parametrize("text", ['{"a": 1, "traceEvents": [{"b": "c"}, {"d": 12}], "e": [1, 2]}'])
def test_a_file_cut_anywhere_is_called_truncated(text: str) -> None:
    for cut in range(2, len(text)):
        with pytest.raises(InputError, match=rf"t\.json is truncated at byte {cut}:"):
            members(text[:cut])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "t.json is no JSON trace: empty"),
        ("hello", "begins with 'hello'"),
        ('{"traceEvents": [1 2]}' + " " * 20, "t.json, byte 19: not JSON"),
        ("{'a': 1}" + " " * 20, "byte 1: not JSON .a key in quotes"),
        ('{"a": 1' + "0" * 5000 + "}", "4300"),
        ('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}", "nested too deeply"),
        (b'{"a": "\xff"}', "not text in UTF-8"),
    ],
)
def test_what_is_no_trace_is_one_line(text: str | bytes, said: str) -> None:
    with pytest.raises(InputError, match=said):
        members(text)


def test_one_endless_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "MAX_VALUE_CHARS", 100_000)
    monkeypatch.setattr(json_stream, "CHUNK_BYTES", 1000)
    with pytest.raises(InputError, match="longer than"):
        members('{"a": "' + "x" * 1_000_000 + '"}')


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file() -> None:
    event = json.dumps({"name": "aten::add", "args": {"Input Dims": [[512, 512]]}}).encode() + b","

    class Endless(io.RawIOBase):
        """12 MB of events."""

        left = 12_000_000 // len(event)

        def read(self, size: int = -1) -> bytes:
            if not hasattr(self, "begun"):
                self.begun = True
                return b'{"traceEvents": ['
            count = min(self.left, max(1, size // len(event)))
            self.left -= count
            return event * count if count else b""

    tracemalloc.start()
    with pytest.raises(InputError, match="truncated"):
        for _ in stream_members(cast("BinaryIO", Endless()), "t.json", ("traceEvents",)):
            pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 << 20

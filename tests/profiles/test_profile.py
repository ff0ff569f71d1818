from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.profiles.gradient_times import GradientTimes
from claw_plan.profiles.measurement import Measurement
from claw_plan.profiles.profile import (
    Profile,
    ProfileError,
    append_profile,
    link_device,
    load_profile,
    save_profile,
)
from claw_plan.profiles.work import CollectiveWork, OpWork

OP = Measurement(
    device="cpu-core",
    work=OpWork(kind="gemm", dims=(1, 2, 3, 4), dtype="float32", flops=48, bytes=104),
    samples_ns=(5, 7, 6),
    ranks_per_host=2,
    provenance={"when": "2026-11-29", "torch": "2.13.0"},
)
COLLECTIVE = Measurement(
    device=link_device("cpu-core", "loopback"),
    work=CollectiveWork(op="send", bytes=10, group_size=2, nodes=1, backend="gloo"),
    samples_ns=(9,),
    provenance={},
)

TIMES = GradientTimes(device="cpu-core", microbatch_size=2, ready_ns={"head": 3, "table": 9})


def test_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    path = tmp_path / "p.profile"
    profile = Profile(
        name="p",
        measurements=(OP, COLLECTIVE),
        constants={"cpu-core": {"op_scale": 1.25, "step_overhead_ns": 3.0}},
        gradients=(TIMES,),
    )
    save_profile(profile, path)
    assert load_profile(path) == profile


def test_appending_makes_the_file_and_grows_it(tmp_path: Path) -> None:
    path = tmp_path / "p.profile"
    append_profile(path, [OP])
    append_profile(path, [COLLECTIVE], {"cpu-core": {"op_scale": 1.0}})
    append_profile(path, [], {"cpu-core": {"op_scale": 2.0}})
    append_profile(path, [], gradients=[TIMES])
    append_profile(path, [])
    profile = load_profile(path)
    assert profile.gradients == (TIMES,)
    assert profile.measurements == (OP, COLLECTIVE)
    assert profile.constant("cpu-core", "op_scale", 0.0) == 2.0
    assert profile.constant("other", "op_scale", 7.0) == 7.0
    assert profile.of_device("cpu-core") == (OP,)


@settings(deadline=None)
@given(st.data())
def test_a_kill_at_any_byte_loses_the_torn_record_only(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("torn") / "p.profile"
    append_profile(path, [OP])
    whole = path.stat().st_size
    append_profile(path, [COLLECTIVE])
    end = data.draw(st.integers(whole, path.stat().st_size - 1))
    with path.open("r+b") as file:
        file.truncate(end)
    assert load_profile(path).measurements == (OP,)
    # The new record is shorter than the torn one may be: nothing of it may show behind.
    append_profile(path, [], {"a": {"b": 1.0}})
    append_profile(path, [COLLECTIVE])
    profile = load_profile(path)
    assert profile.measurements == (OP, COLLECTIVE)
    assert profile.constants == {"a": {"b": 1.0}}


def test_a_kill_inside_the_header_leaves_a_file_that_can_grow(tmp_path: Path) -> None:
    path = tmp_path / "p.profile"
    path.write_text('{"format": "claw')
    append_profile(path, [OP])
    assert load_profile(path).measurements == (OP,)


def test_merging_keeps_each_measurement_once() -> None:
    one = Profile(measurements=(OP,), constants={"a": {"x": 1.0, "y": 2.0}})
    two = Profile(measurements=(COLLECTIVE, OP), constants={"a": {"y": 3.0}, "b": {"z": 4.0}})
    merged = one.merge(two)
    assert merged.measurements == (OP, COLLECTIVE)
    assert merged.constants == {"a": {"x": 1.0, "y": 3.0}, "b": {"z": 4.0}}
    assert merged.merge(two) == merged


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "its first line must say"),
        ("{}\n", "its first line must say"),
        ("[" * 9999 + "\n", "its first line must say"),
        ('{"format": "claw-plan profile", "version": 99}\n', "version 99"),
        ('{"format": "claw-plan profile", "version": 1}\nnonsense\n', "p.profile:2: not a record"),
        ('{"format": "claw-plan profile", "version": 1}\n{"record": "x"}\n', "p.profile:2:"),
        ('{"format": "claw-plan profile", "version": 1}\n[1]\n', "p.profile:2:"),
    ],
)
def test_files_that_are_no_profile(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "p.profile"
    path.write_text(content)
    with pytest.raises(ProfileError) as caught:
        load_profile(path)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"samples_ns": []},
        {"samples_ns": [-1]},
        {"work": {"kind": "magic"}},
        {"noun": "collective"},
        {"provenance": 3},
    ],
)
def test_a_record_that_breaks_the_rules_of_its_noun(
    tmp_path: Path, change: dict[str, object]
) -> None:
    path = tmp_path / "p.profile"
    append_profile(path, [OP])
    header, line = path.read_text().splitlines()
    path.write_text(header + "\n" + json.dumps(json.loads(line) | change) + "\n")
    with pytest.raises(ProfileError, match=r"p\.profile:2: not a record"):
        load_profile(path)


def test_missing_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="claw-plan learn"):
        load_profile(tmp_path / "gone.profile")
    with pytest.raises(ProfileError, match="cannot read"):
        load_profile(tmp_path)
    with pytest.raises(ProfileError, match="cannot write"):
        append_profile(tmp_path / "no" / "p.profile", [OP])
    foreign = tmp_path / "notes.txt"
    foreign.write_text("my notes\n")
    with pytest.raises(ProfileError, match="is not a profile"):
        append_profile(foreign, [OP])
    assert foreign.read_text() == "my notes\n"


def test_a_measurement_has_a_middle_and_a_spread() -> None:
    assert (OP.median_ns, OP.spread_ns) == (6, 2)
    assert replace(OP, samples_ns=(1, 2)).median_ns == 2
    with pytest.raises(ValueError, match="non-negative samples"):
        replace(OP, samples_ns=())


def test_lines_in_another_form_are_read_alike(tmp_path: Path) -> None:
    path = tmp_path / "a.profile"
    append_profile(path, [OP, OP])
    header, *lines = path.read_text().splitlines()
    spaced = [json.dumps(json.loads(line), indent=None, sort_keys=True) for line in lines]
    (tmp_path / "b.profile").write_text("\n".join([header, *lines, *spaced]) + "\n")
    read = load_profile(tmp_path / "b.profile").measurements
    assert read == (OP,) * 4


def test_a_repeated_beginning_with_broken_samples_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.profile"
    append_profile(path, [OP])
    header, line = path.read_text().splitlines()
    start = line.index('"samples_ns":[') + len('"samples_ns":[')
    broken = line[:start] + "," + line[start:]
    path.write_text("\n".join([header, line, broken]) + "\n")
    with pytest.raises(ProfileError, match=r"a\.profile:3: not a record"):
        load_profile(path)


def test_of_gradients_that_two_profiles_know_the_other_ones_are_the_newest() -> None:
    later = replace(TIMES, microbatch_size=4)
    merged = Profile(gradients=(TIMES, later)).merge(Profile(gradients=(TIMES,)))
    assert merged.gradients == (later, TIMES)

"""`Profile`: what has been measured on some hardware, kept in one file that only grows.

Runs append `Measurement`s, `fit` adds a few constants per device, the cost models look both up.
The file is JSON lines: a header, then one record a line. A line is written at once and synced, so
a kill can tear only the last one; such a tail is left out when reading and cut off by the next
append.
"""

from __future__ import annotations

import dataclasses
import fcntl
import gc
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from claw_plan.profiles.errors import ClawPlanError
from claw_plan.profiles.files import write_atomic
from claw_plan.profiles.gradient_times import GradientTimes
from claw_plan.profiles.measurement import Measurement
from claw_plan.profiles.work import CollectiveWork, OpWork

FORMAT = "claw-plan profile"
_SAMPLES = b',"samples_ns":['
_RANKS = b'],"ranks_per_host":'
VERSION = 1

Constants = Mapping[str, Mapping[str, float]]


class ProfileError(ClawPlanError):
    """A profile that cannot be read, written or merged."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measurements in the order they were made, and `constants` by device and name.

    The constants are those of `fit.NEUTRAL`, such as 'op_scale'. `gradients` tell of runs when
    the gradients of their models were ready, the newest last.
    """

    name: str = "profile"
    measurements: tuple[Measurement, ...] = ()
    constants: Constants = field(default_factory=dict)
    gradients: tuple[GradientTimes, ...] = ()

    def merge(self, other: Profile) -> Profile:
        """Both, each measurement once; of two constants the other's."""
        merged = {device: dict(values) for device, values in self.constants.items()}
        for device, values in other.constants.items():
            merged.setdefault(device, {}).update(values)
        known = {_line(measurement) for measurement in self.measurements}
        new = tuple(m for m in other.measurements if _line(m) not in known)
        return dataclasses.replace(
            self,
            measurements=self.measurements + new,
            constants=merged,
            gradients=(*(g for g in self.gradients if g not in other.gradients), *other.gradients),
        )

    def constant(self, device: str, name: str, default: float) -> float:
        """A fitted constant of the device, or the default."""
        return self.constants.get(device, {}).get(name, default)

    def of_device(self, device: str) -> tuple[Measurement, ...]:
        """The measurements made on this device ('a100-sxm-80gb') or link of it."""
        return tuple(m for m in self.measurements if m.device == device)


def link_device(device: str, link: str) -> str:
    """The `Measurement.device` of a collective: 'cpu-core/loopback'."""
    return f"{device}/{link}"


def load_profile(path: Path) -> Profile:
    """Reads a profile. Raises ProfileError for anything but a torn last line."""
    collecting = gc.isenabled()
    gc.disable()  # a million measurements hold no cycles, but would be searched for them
    try:
        with path.open("rb") as file:
            return _load(path, file)
    except FileNotFoundError:
        raise ProfileError(
            f"there is no profile {str(path)!r}; `claw-plan learn` makes one"
        ) from None
    except OSError as error:
        raise ProfileError(f"cannot read the profile {str(path)!r}: {error.strerror}") from None
    finally:
        if collecting:
            gc.enable()


def _load(path: Path, lines: Iterable[bytes]) -> Profile:
    measurements: list[Measurement] = []
    constants: dict[str, dict[str, float]] = {}
    gradients: list[GradientTimes] = []
    reader = _LineReader()
    number = 0
    for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):  # torn by a kill
            number -= 1
            break
        if number == 1:
            _check_header(path, line)
            continue
        try:
            measurement = reader.quick(line)
            if measurement is not None:
                measurements.append(measurement)
                continue
            record = json.loads(line)
            if record["record"] == "measurement":
                measurements.append(measurement_of(record))
            elif record["record"] == "gradients":
                gradients.append(gradients_of(record))
            else:
                values = {str(name): float(value) for name, value in record["values"].items()}
                constants.setdefault(str(record["device"]), {}).update(values)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ProfileError(
                f"{path.name}:{number}: not a record of a profile ({type(error).__name__}: "
                f"{error}); restore the file or delete this line"
            ) from None
    if number == 0:
        _check_header(path, b"")
    return Profile(
        name=path.stem,
        measurements=tuple(measurements),
        constants=constants,
        gradients=tuple(gradients),
    )


class _LineReader:
    """Reads measurements as `_line` writes them; what repeats is parsed once.

    A line is a beginning (device and work), the samples, and an end (ranks and provenance). Runs
    measure the same work with the same versions again and again, so beginnings and ends repeat.
    """

    def __init__(self) -> None:
        self._begins: dict[bytes, tuple[str, OpWork | CollectiveWork]] = {}
        self._ends: dict[bytes, tuple[int, Mapping[str, str]]] = {}

    def quick(self, line: bytes) -> Measurement | None:
        """The measurement; None for a line in another form."""
        begin, found, rest = line.partition(_SAMPLES)
        samples, also_found, end = rest.partition(_RANKS)
        if not found or not also_found or samples.translate(None, b"0123456789,"):
            return None
        head, tail = self._begins.get(begin), self._ends.get(end)
        if head is None or tail is None:
            one = measurement_of(json.loads(line))
            self._begins[begin] = (one.device, one.work)
            self._ends[end] = (one.ranks_per_host, one.provenance)
            return one
        return Measurement(
            device=head[0],
            work=head[1],
            samples_ns=tuple(map(int, samples.split(b","))),
            ranks_per_host=tail[0],
            provenance=tail[1],
        )


def save_profile(profile: Profile, path: Path) -> None:
    """Writes the whole profile anew, atomically."""
    lines = [_header(), *(_line(m) for m in profile.measurements)]
    lines += [_constants_line(device, values) for device, values in profile.constants.items()]
    lines += [_gradients_line(one) for one in profile.gradients]
    write_atomic(path, "\n".join(lines) + "\n")


def append_profile(
    path: Path,
    measurements: Iterable[Measurement],
    constants: Constants | None = None,
    gradients: Iterable[GradientTimes] = (),
) -> None:
    """Adds records to a profile, made if it is not there; processes may append at once."""
    lines = [_line(measurement) for measurement in measurements]
    lines += [_constants_line(device, values) for device, values in (constants or {}).items()]
    lines += [_gradients_line(one) for one in gradients]
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ProfileError(f"cannot write the profile {str(path)!r}: {error.strerror}") from None
    with open(descriptor, "r+b") as file:  # noqa: PTH123  # an open descriptor, not a path
        fcntl.flock(file, fcntl.LOCK_EX)
        content = file.read()
        end = content.rfind(b"\n") + 1
        if end:
            _check_header(path, content[: content.index(b"\n")])
        else:
            lines.insert(0, _header())
        file.truncate(end)
        file.seek(end)
        file.write(("\n".join(lines) + "\n").encode() if lines else b"")
        file.flush()
        os.fsync(file.fileno())


def _header() -> str:
    return json.dumps({"format": FORMAT, "version": VERSION})


def _check_header(path: Path, line: bytes) -> None:
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ProfileError(f"{path.name} is not a profile: its first line must say {FORMAT!r}")
    if header.get("version") != VERSION:
        raise ProfileError(
            f"{path.name} is a profile of version {header.get('version')!r}; "
            f"this claw-plan reads version {VERSION}"
        )


def record_of(measurement: Measurement) -> dict[str, Any]:
    """A measurement as plain data, as one line of a profile has it."""
    work = measurement.work
    return {
        "record": "measurement",
        "device": measurement.device,
        "noun": "op" if isinstance(work, OpWork) else "collective",
        "work": dataclasses.asdict(work),
        "samples_ns": list(measurement.samples_ns),
        "ranks_per_host": measurement.ranks_per_host,
        "provenance": dict(measurement.provenance),
    }


def _line(measurement: Measurement) -> str:
    return json.dumps(record_of(measurement), separators=(",", ":"))


def _constants_line(device: str, values: Mapping[str, float]) -> str:
    return json.dumps({"record": "constants", "device": device, "values": dict(values)})


def _gradients_line(times: GradientTimes) -> str:
    record = {"record": "gradients", **dataclasses.asdict(times)}
    return json.dumps(record, separators=(",", ":"))


def gradients_of(record: Mapping[str, Any]) -> GradientTimes:
    """The times of a line of a profile; raises KeyError, TypeError or ValueError for others."""
    return GradientTimes(
        device=str(record["device"]),
        microbatch_size=int(record["microbatch_size"]),
        ready_ns={str(name): int(time_ns) for name, time_ns in record["ready_ns"].items()},
    )


def measurement_of(record: Mapping[str, Any]) -> Measurement:
    """The measurement of `record_of`; raises KeyError, TypeError or ValueError for others."""
    values = dict(record["work"])
    work: OpWork | CollectiveWork
    if record["noun"] == "op":
        work = OpWork(**(values | {"dims": tuple(values["dims"])}))
    else:
        work = CollectiveWork(**values)
    return Measurement(
        device=record["device"],
        work=work,
        samples_ns=tuple(record["samples_ns"]),
        ranks_per_host=record["ranks_per_host"],
        provenance={str(key): str(value) for key, value in record["provenance"].items()},
    )

"""What an operator writes about switching collectives, to numbers, and how it is read.

    parse_options({"bandwidth_threshold": "50MBps", "fallback_topology": "tree",
                   "check_interval": "500ms"})

The usual reading, "below the threshold take the fallback", is wrong for a tree: it sends more
bytes than a ring, so that low bandwidth speaks against it. Here the threshold says when the links
are measured again, the fallback gets a trial then, and what is fastest is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from claw_plan.executor.benchmark_rates import gigabytes_per_s
from claw_plan.executor.communication.algorithms import NAMES
from claw_plan.executor.errors import ExecutionError
from claw_plan.profiles.errors import InputError, near_matches
from claw_plan.profiles.files import read_yaml
from claw_plan.profiles.units import NS_PER_MS, ms_from_ns, parse_bytes_per_s, parse_ns

_KEYS = ("bandwidth_threshold", "fallback_topology", "check_interval")
_BPS = re.compile(r"([KMGT]?i?B)ps\s*\Z")
"""'50MBps' is 50 MB/s; with a lower-case b ('50Mbps') it is bits, which units know."""

_SIGN = re.compile(r"\s*[=:]\s*")
"""Between a name and its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectorOptions:
    """When a selector looks again, and what it tries then."""

    bandwidth_threshold_bytes_per_s: float = 0.0
    """Below it links are measured again; 0: only when times have changed."""

    fallback_topology: str = ""
    """Tried when the threshold is passed or the links were measured again, whatever the model
    says of it; '': none."""

    check_interval_ns: int = 500 * NS_PER_MS
    """About so often, always at the end of a step."""

    def explained(self) -> str:
        """How the options are read, in a sentence each."""
        every = f"about every {ms_from_ns(self.check_interval_ns):g} ms, at the end of a step, "
        said = [
            every + "times are compared; an algorithm that is 5 % faster is changed to",
            "when a time has changed by half the links are measured again",
        ]
        if self.bandwidth_threshold_bytes_per_s:
            rate = gigabytes_per_s(self.bandwidth_threshold_bytes_per_s)
            said[-1] = f"{said[-1]}, and when a bandwidth falls below {rate}"
        if self.fallback_topology:
            said.append(
                f"{self.fallback_topology} is tried then and used only if it is the fastest: low "
                "bandwidth alone favours what sends the fewest bytes, as a ring does"
            )
        return "; ".join(said)


def read_options(text: str) -> dict[str, str]:
    """'check_interval=500ms,fallback_topology=tree', or a YAML file of such lines, to a mapping.

    A colon serves like the sign of equality, as in YAML. Raises InputError for a file that is
    none, ExecutionError for text that is neither.
    """
    path = Path(text)
    if path.is_file():
        return {str(key): str(value) for key, value in read_yaml(path).data.items()}
    options = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, *values = _SIGN.split(part, maxsplit=1)
        if not any(values):
            raise ExecutionError(
                f"--selector takes option=value pairs, as in check_interval=500ms, or a YAML file "
                f"of them; got {part!r}, and there is no such file"
            )
        if name in options:
            raise ExecutionError(f"--selector gives {name} twice; give it once")
        options[name] = values[0]
    return options


def parse_options(options: Mapping[str, str]) -> SelectorOptions:
    """Raises ExecutionError or InputError for what is unknown or has no unit."""
    for key in options:
        if key not in _KEYS:
            raise ExecutionError(
                f"there is no selector option {key!r}; {near_matches(key, _KEYS)}"
            )
    threshold, interval = options.get("bandwidth_threshold"), options.get("check_interval")
    fallback = options.get("fallback_topology", "")
    if fallback and fallback not in NAMES:
        raise ExecutionError(
            f"fallback_topology is a collective algorithm; there is no {fallback!r}; "
            f"{near_matches(fallback, NAMES)}"
        )
    default = SelectorOptions()
    return SelectorOptions(
        bandwidth_threshold_bytes_per_s=(
            _parsed("bandwidth_threshold", parse_bytes_per_s, _BPS.sub(r"\1/s", threshold))
            if threshold
            else 0.0
        ),
        fallback_topology=fallback,
        check_interval_ns=(
            int(_parsed("check_interval", parse_ns, interval))
            if interval
            else default.check_interval_ns
        ),
    )


def _parsed(option: str, parse: Callable[[object], float], text: str) -> float:
    try:
        return parse(text)
    except InputError as error:
        raise InputError(f"selector option {option}: {error}") from None

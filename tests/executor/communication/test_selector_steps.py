"""When a selector probes and what it tells, with times that nothing disturbs and no other rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from claw_plan.executor.communication import selector as module
from claw_plan.executor.communication.algorithms import NATIVE
from claw_plan.executor.communication.group import CollectiveGroup
from claw_plan.executor.communication.selector import Probe, Selector, Switch
from claw_plan.executor.communication.selector_options import parse_options
from claw_plan.profiles.collective_algorithms import Hop, Links

HOP = Hop(latency_ns=1e5, bytes_per_s=1e8)
TIMES_NS = {NATIVE: 1e6, "ring": 2e6}
OTHERS_NS = 3e6


@pytest.fixture
def selector(monkeypatch: pytest.MonkeyPatch) -> Selector:
    """Of two ranks and a threshold that no link reaches; calls take what TIMES_NS says."""
    group: Any = SimpleNamespace(size=lambda: 2)
    monkeypatch.setattr(CollectiveGroup, "device", torch.device("cpu"))
    monkeypatch.setattr(module, "probe_links", lambda group: Links(intra=HOP, inter=HOP))
    monkeypatch.setattr(module.dist, "all_reduce", lambda *args, **kwargs: None)

    def timed(call: Any, device: torch.device) -> tuple[str, Any]:
        name = call()
        return name, lambda: TIMES_NS.get(name, OTHERS_NS)

    monkeypatch.setattr(module, "_timed", timed)
    options = parse_options({"bandwidth_threshold": "1TBps", "check_interval": "1ns"})
    made = CollectiveGroup(process_group=group, nodes=((0, 1),), strategy=NATIVE)
    return Selector(made, options)


def steps(selector: Selector, count: int, *numels: int) -> None:
    for _ in range(count):
        for numel in numels:
            selector.timed(torch.empty(numel), lambda name: name)
        selector.step_ended()


def test_a_bandwidth_that_stays_low_is_probed_for_once(selector: Selector) -> None:
    steps(selector, 400, 1000, 50_000)
    probes = [event for event in selector.events if isinstance(event, Probe)]
    assert [probe.step == 0 for probe in probes] == [True, False]
    assert "below 1000 GB/s" in probes[1].reason
    assert selector.used() == {4000: NATIVE, 200_000: NATIVE}


def test_what_trials_end_with_is_told_even_if_it_was_tried_last(selector: Selector) -> None:
    steps(selector, 400, 1000)
    settled = [e for e in selector.events if isinstance(e, Switch) and not e.is_trial]
    # Once before the links were measured again, once after. The backend's own is tried last.
    assert [(switch.before, switch.after) for switch in settled] == [(NATIVE, NATIVE)] * 2
    assert settled[0].reason.startswith(f"fastest; {NATIVE} 1 ms (median of 3)")


def test_a_size_that_no_longer_comes_holds_nothing_up(selector: Selector) -> None:
    steps(selector, 1, 700)
    steps(selector, 400, 1000)
    assert not selector.is_settled(2800)
    assert len([event for event in selector.events if isinstance(event, Probe)]) == 2

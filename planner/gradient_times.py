"""When a run's gradients were ready becomes where inside its unit's backward each one is.

The trace knows the order of a unit's gradients, not when they come; a run records both
(`executor.bucket_times`), and a profile keeps it. With it buckets may end inside blocks:
`lower_whole` lets them leave there, `bucket_choice` plans by it.

    share of parameter p = (r_p - E_before) / (E_own - E_before)

    r_p       when the gradient of p was complete, ns
    E_own     when all gradients of its unit were
    E_before  when all of the units that run before it in backward were

What a unit still does after its last gradient counts for the next one. Of the first unit in
backward nothing says when it began: its gradients are taken to come at its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.graph import ModelGraph, Parameter
from claw_plan.profiles.profile import Profile


def with_recorded_gradients(graph: ModelGraph, profile: Profile | None) -> ModelGraph:
    """The graph with the shares that the newest run of this model in the profile tells."""
    names = {p.name for p in graph.parameters if p.trainable}
    recorded = profile.gradients[::-1] if profile is not None else ()
    newest = next((one.ready_ns for one in recorded if one.ready_ns.keys() == names), None)
    shares = ready_shares(graph, newest) if newest else {}
    return graph if shares == graph.ready_shares else replace(graph, ready_shares=shares)


def ready_shares(graph: ModelGraph, ready_ns: Mapping[str, int]) -> dict[str, float]:
    """The share of its unit's backward after which each trained parameter's gradient is there."""
    by_unit: dict[int, list[str]] = {}
    for parameter in graph.parameters:
        if parameter.trainable:
            by_unit.setdefault(completing_unit(parameter), []).append(parameter.name)
    shares: dict[str, float] = {}
    before_ns: int | None = None
    for unit in sorted(by_unit, reverse=True):
        end_ns = max(ready_ns[name] for name in by_unit[unit])
        for name in by_unit[unit]:
            lasted_ns = 0 if before_ns is None else end_ns - before_ns
            since_ns = 0 if before_ns is None else ready_ns[name] - before_ns
            shares[name] = min(1.0, max(0.0, since_ns / lasted_ns)) if lasted_ns > 0 else 1.0
        before_ns = end_ns if before_ns is None else max(before_ns, end_ns)
    return shares


def completing_unit(parameter: Parameter) -> int:
    """The unit with whose backward a parameter's gradient is complete: the first that uses it."""
    return min(parameter.units, default=0)


def launch_shares(
    held: Sequence[tuple[Parameter, int]], candidate: Candidate, shares: Mapping[str, float]
) -> tuple[float, ...]:
    """After which share of the backward with which it leaves each planned bucket does so.

    `held` are the trained parameters in the model's order; none where nothing is recorded, or
    where no bucket is planned.
    """
    if not shares or not candidate.buckets:
        return ()
    remaining = iter(reversed(held))
    complete = []
    for size in candidate.buckets:
        own = [parameter for parameter, _ in islice(remaining, size)]
        complete.append(max((-completing_unit(p), shares[p.name]) for p in own))
    found, latest = [], complete[0]
    for number in candidate.bucket_order or range(len(complete)):
        latest = max(latest, complete[number])
        found.append(latest[1])
    return tuple(found)

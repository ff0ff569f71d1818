"""A group opened with any cut: bounds that close in on the simulated step, counted by work."""

from __future__ import annotations

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.group_opener import SIMULATED, GroupOpener
from claw_plan.planner.score import Scorer
from claw_plan.planner.search import Evaluated
from claw_plan.planner.space import Space

UNEVEN = ((0, 2), (2, 7))


def leaves(branch):
    """Every evaluated candidate below, each with the bounds above it."""
    opened = branch.open()
    if isinstance(opened, Evaluated):
        yield [branch.bound_ns], opened
        return
    for below in opened:
        for bounds, found in leaves(below):
            yield [branch.bound_ns, *bounds], found


def opened(problem, *, recuts, **fix):
    scorer = Scorer(problem)
    fix |= {"pp": 2, "tp": 1, "recompute": "none", "offload": "none"}
    space = Space(problem, fix)
    opener = GroupOpener(scorer, space, recuts=recuts)
    group = next(group for group in space.groups() if group.base.schedule == "1F1B")
    (branch,) = opener.add_up(group, scorer.bounds.path_of(group.base, UNEVEN))
    return scorer, space, group, opener, list(leaves(branch))


def test_all_candidates_of_a_group_are_judged_with_the_cut(toys):
    problem = toys.problem(toys.graph(layers=5), toys.cluster(devices=4))
    scorer, space, group, opener, found = opened(problem, recuts=False)
    assert {each.item[0] for _, each in found} == set(space.members(group))
    for bounds, each in found:
        assert each.item[1] == UNEVEN
        assert each.time_ns == scorer.step_time_ns(*each.item) >= max(bounds)
    assert opener.looked_at.keys() == {each.item for _, each in found}
    passes = len(UNEVEN) * group.microbatches
    assert opener.spent >= SIMULATED * passes * len(found)


def test_what_does_not_fit_is_cut_otherwise_only_where_asked(toys):
    """A byte less than the fuller stage needs: four of five blocks are one too many on a stage."""
    graph = toys.graph(layers=5, tied=False)
    candidate = Candidate(pp=2, microbatch_size=8, schedule="1F1B")
    roomy = Scorer(toys.problem(graph, toys.cluster(devices=2, kind="cpu")))
    need = max(stage.peak_bytes for stage in roomy.memory.stages(candidate, UNEVEN))
    cluster = toys.cluster(devices=2, memory_bytes=need - 1, kind="cpu")
    problem = toys.problem(graph, cluster)
    _, _, _, opener, found = opened(problem, microbatch_size=8, recuts=False)
    assert all(each.time_ns is None for _, each in found) and opener.pruned
    scorer, _, _, _, again = opened(problem, microbatch_size=8, recuts=True)
    fitting = [each.item for _, each in again if each.time_ns]
    assert fitting and all(scorer.memory.fits(*choice) for choice in fitting)
    assert UNEVEN not in {cuts for _, cuts in fitting}

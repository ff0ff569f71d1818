"""The dynamic program against all assignments."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from claw_plan.planner.split import program as module
from claw_plan.planner.split.program import SplitProgram, Step, Way, cost_of, solve
from claw_plan.planner.split.states import PARTIAL, SHARED, WHOLE, State, cut

STATES = (WHOLE, SHARED, PARTIAL, cut(0), cut(1))


@st.composite
def programs(draw: st.DrawFn) -> SplitProgram:
    """Up to seven steps over tensors that several later ones take, with any prices."""
    count = draw(st.integers(2, 7))
    states = st.sampled_from(STATES)
    steps: list[Step] = []
    for number in range(count):
        earlier = st.integers(0, number - 1) if number else st.nothing()
        inputs = tuple(draw(st.lists(earlier, min_size=1, max_size=3))) if number else ()
        ways = [
            Way(
                label=str(index),
                needs=tuple(draw(states) for _ in inputs),
                gives=(draw(states),),
                time_ns=draw(st.integers(0, 12)),
                held_bytes=draw(st.integers(0, 3)),
            )
            for index in range(draw(st.integers(1, 3)))
        ]
        steps.append(Step(name=str(number), inputs=inputs, outputs=(number,), ways=tuple(ways)))
    prices = draw(
        st.dictionaries(
            st.tuples(st.integers(0, count), states, states),
            st.one_of(st.none(), st.integers(0, 9)),
        )
    )

    shortest = _shortest(count, prices)

    def price(tensor: int, origin: State, target: State) -> int | None:
        return shortest[tensor, origin, target]

    return SplitProgram(steps=tuple(steps), price=price)


def _shortest(
    count: int, prices: dict[tuple[int, State, State], int | None]
) -> dict[tuple[int, State, State], int | None]:
    """Prices, 4 where none is drawn, that no detour beats (Floyd and Warshall)."""
    found = {
        key: 0 if key[1] == key[2] else prices.get(key, 4)
        for key in product(range(count + 1), STATES, STATES)
    }
    for middle, tensor, origin, target in product(STATES, range(count + 1), STATES, STATES):
        first, second = found[tensor, origin, middle], found[tensor, middle, target]
        if first is not None and second is not None:
            direct = found[tensor, origin, target]
            detour = first + second
            found[tensor, origin, target] = detour if direct is None else min(detour, direct)
    return found


def best_of_all(program: SplitProgram, limit: int | None = None) -> tuple[int, int] | None:
    found = []
    for ways in product(*(step.ways for step in program.steps)):
        held = sum(way.held_bytes for way in ways)
        time_ns = cost_of(program, ways)
        if time_ns is not None and (limit is None or held <= limit):
            found.append((time_ns, held))
    return min(found, default=None)


@settings(max_examples=400, deadline=None)
@given(programs())
def test_no_assignment_is_faster_and_none_as_fast_is_smaller(program: SplitProgram) -> None:
    choice, best = solve(program), best_of_all(program)
    if best is None:
        assert choice is None
        return
    assert choice is not None and (choice.time_ns, choice.held_bytes) == best
    assert cost_of(program, choice.ways) == choice.time_ns


@settings(max_examples=300, deadline=None)
@given(programs(), st.integers(0, 12))
def test_within_a_limit_of_memory_too(program: SplitProgram, limit: int) -> None:
    choice, best = solve(program, limit_bytes=limit), best_of_all(program, limit)
    if best is None:
        assert choice is None
    else:
        assert choice is not None and (choice.time_ns, choice.held_bytes) == best


def test_a_tensor_is_brought_to_a_state_once_for_all_who_need_it() -> None:
    make = Step(name="make", inputs=(), outputs=(0,), ways=(_way((), (PARTIAL,)),))
    uses = [
        Step(name=f"use {n}", inputs=(0,), outputs=(n,), ways=(_way((WHOLE,), (WHOLE,)),))
        for n in (1, 2, 3)
    ]
    program = SplitProgram(steps=(make, *uses), price=lambda tensor, origin, target: 10)
    choice = solve(program)
    assert choice is not None and choice.time_ns == 10


def test_with_too_many_situations_the_answer_is_not_called_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_SITUATIONS", 1)
    ways = tuple(
        replace(_way((), (state,)), time_ns=time) for state, time in ((WHOLE, 1), (cut(0), 2))
    )
    ends = tuple(
        replace(_way((state,), ()), time_ns=time) for state, time in ((WHOLE, 9), (cut(0), 1))
    )
    steps = (
        Step(name="make", inputs=(), outputs=(0,), ways=ways),
        Step(name="end", inputs=(0,), outputs=(), ways=ends),
    )
    choice = solve(SplitProgram(steps=steps, price=lambda tensor, origin, target: 100))
    assert choice is not None and (choice.time_ns, choice.is_proven) == (3, False)


def _way(needs: tuple[State, ...], gives: tuple[State, ...]) -> Way:
    return Way(label="", needs=needs, gives=gives, time_ns=0)

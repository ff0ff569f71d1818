"""The root of every error that a person is meant to read.

Each room raises its own class and each class lives in the room that raises it:

    ClawPlanError                      profiles.errors
    ├── InputError                     profiles.errors     a file, flag or value that the user gave
    │   └── CodecError (ValueError)    profiles.codecs     a codec's text, or codes not of a codec
    ├── ProfileError                   profiles.profile    a profile that cannot be read or merged
    ├── TraceError                     planner.errors      a model that cannot be traced or trained
    │   └── ProgramChanges             planner.fit         its operations change with the batch
    ├── PlanError (ValueError)         planner.errors      a plan that contradicts itself
    │   ├── TensorParallelError        planner.errors      a module that cannot be divided so
    │   │   └── PiecesNeeded           planner.errors      divide its fused output in pieces
    │   └── InfeasiblePlan             planner.errors      no candidate, or this one, fits
    ├── SimulationError                simulator.errors    a task graph that cannot be simulated
    │   └── Deadlock                   simulator.errors    tasks that wait for each other
    └── ExecutionError                 executor.errors     a run that failed

A message says the rule, what came, the valid choices and the next step. The command line prints
it in one line and exits with 2 (1 for `InfeasiblePlan`); nobody sees a traceback for a mistake in
their own input.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ClawPlanError(Exception):
    """Base of all errors that are addressed to the user."""


class Interrupted(KeyboardInterrupt):
    """A signal that asks the program to end; `number` is the signal's."""

    def __init__(self, number: int, message: str = "interrupted") -> None:
        super().__init__(message)
        self.number = number


class InputError(ClawPlanError):
    """What the user gave (file, flag, value) breaks a rule; the message says which and where."""


def near_matches(word: str, choices: Iterable[str]) -> str:
    """A half sentence that names the choices most like `word`, or all of them if none is near."""
    choices = sorted(choices)
    near = difflib.get_close_matches(word, choices, n=3, cutoff=0.5)
    if near:
        return "did you mean " + " or ".join(repr(choice) for choice in near) + "?"
    return "known are " + ", ".join(choices)

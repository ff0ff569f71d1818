"""Measurements to constants: of whole steps (`steps`), and of data files to committed tables.

`python -m claw_plan.profiles.fit FILE…` recognises each file by its content and writes the
profile files made from it; the same data gives the same files (`registry`).
"""

from claw_plan.profiles.fit.steps import NEUTRAL, PRIOR_SPREAD, StepTime, fit_constants

__all__ = ["NEUTRAL", "PRIOR_SPREAD", "StepTime", "fit_constants"]

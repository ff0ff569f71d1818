"""runs/<id>/: what a run leaves behind, and how it is read again.

    plan.yaml           the plan that ran, its model's path made to fit from here
    steps.jsonl         loss and times of each step, written as they happen
    timeline.json       the measured step of all ranks
    measurements.jsonl  work and its times, for `learn`
    result.json         losses, step time, memory, predicted against measured
    rank<r>.log         what each rank printed
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from claw_plan.executor.train import RankRecord
from claw_plan.planner.plan import Plan, save_plan
from claw_plan.profiles.errors import InputError
from claw_plan.profiles.files import write_atomic
from claw_plan.profiles.measurement import Measurement
from claw_plan.profiles.work import CollectiveWork, OpWork
from claw_plan.simulator.timeline import MEASURED, Span, Timeline

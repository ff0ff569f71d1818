"""What "best" means: step time, cost, a deadline, goodput, or a weighted balance.

An objective turns a step time into a value, less of which is better. For a given number of
devices it never falls when the time grows; so a lower bound of the time is one of the value, and
the search proves the best value as it proves the best time. `balanced` also looks at the stages'
imbalance, which is at least 0, so that the bound without it holds.

Values are whole numbers, so that they compare exactly.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from claw_plan.planner.candidate import Candidate
from claw_plan.planner.errors import InfeasiblePlan, PlanError
from claw_plan.planner.goodput import Failures, slowdown
from claw_plan.planner.group_bounds import GroupBounds
from claw_plan.planner.problem import OPTIMIZER_STATES, STORED_BYTES
from claw_plan.planner.score import Scorer
from claw_plan.planner.space import Space
from claw_plan.planner.stage_path import Cuts
from claw_plan.profiles.cluster import Cluster
from claw_plan.profiles.codecs import describe_codec
from claw_plan.profiles.units import format_ns, parse_ns, s_from_ns

NAMES = ("step_time", "cost", "deadline=<time>", "goodput", "memory", "balanced")
MEMORY = "memory"
BALANCE_WEIGHT, COMPUTE_WEIGHT = 0.7, 0.3
"""Weights of imbalance and of time over its bound, of the articles this program grew from."""

SCALE = 10**12
"""Values that are ratios are kept as whole multiples of 10^-12."""


class Objective(Protocol):
    """How a candidate is valued."""

    @property
    def name(self) -> str:
        """What the report calls it."""

    def bound(self, time_ns: int, num_devices: int) -> int:
        """The least value of a candidate on so many devices whose step lasts so long or longer."""

    def value(self, candidate: Candidate, cuts: Cuts, time_ns: int) -> int:
        """The value of a candidate whose step lasts so long."""


@dataclass(frozen=True, slots=True)
class _ByDevices(ABC):
    """Those whose value follows from time and devices alone."""

    @abstractmethod
    def bound(self, time_ns: int, num_devices: int) -> int:
        """As `Objective` says."""

    def value(self, candidate: Candidate, cuts: Cuts, time_ns: int) -> int:
        """As the bound says for the simulated time."""
        return self.bound(time_ns, candidate.num_devices)


@dataclass(frozen=True, slots=True)
class StepTime(_ByDevices):
    """The shortest step."""

    name: str = "step_time"

    def bound(self, time_ns: int, num_devices: int) -> int:
        """The time."""
        return time_ns


@dataclass(frozen=True, slots=True)
class TimeToLoss(_ByDevices):
    """The shortest step times the steps that its codec needs for what one needs without."""

    name: str = "step_time"

    def bound(self, time_ns: int, num_devices: int) -> int:
        """No codec needs fewer."""
        return time_ns

    def value(self, candidate: Candidate, cuts: Cuts, time_ns: int) -> int:
        """As the codec's descriptor says."""
        return int(time_ns * max(1.0, describe_codec(candidate.codec).step_penalty))


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost(_ByDevices):
    """The cheapest step: whole nodes are paid while it lasts, idle devices in them too."""

    devices_per_node: int
    name: str = "cost"

    def nodes(self, num_devices: int) -> int:
        """Nodes that so many devices take."""
        return -(-num_devices // self.devices_per_node)

    def bound(self, time_ns: int, num_devices: int) -> int:
        """Node-nanoseconds; the price of a node is a factor that changes no order."""
        return time_ns * self.nodes(num_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline(_ByDevices):
    """The fewest devices whose step is short enough; then the shortest step on them."""

    limit_ns: int
    most_devices: int
    name: str = "deadline"

    def bound(self, time_ns: int, num_devices: int) -> int:
        """Ordered by devices where the deadline is met; above all those, by time."""
        if time_ns <= self.limit_ns:
            return num_devices * (self.limit_ns + 1) + time_ns
        return (self.most_devices + 1) * (self.limit_ns + 1) + time_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput(_ByDevices):
    """The shortest time per step that lasts, failures and checkpoints included."""

    failures: Failures
    devices_per_node: int
    name: str = "goodput"

    def bound(self, time_ns: int, num_devices: int) -> int:
        """The step's time stretched by what checkpoints, restarts and lost work take."""
        nodes = -(-num_devices // self.devices_per_node)
        return int(time_ns * slowdown(self.failures, nodes))


@dataclass(frozen=True, kw_only=True)
class Balanced:
    """balance_weight x (slowest stage / mean - 1) + compute_weight x time / least bound of all."""

    scorer: Scorer = field(repr=False)
    least_ns: int
    balance_weight: float = BALANCE_WEIGHT
    compute_weight: float = COMPUTE_WEIGHT
    name: str = "balanced"

    def bound(self, time_ns: int, num_devices: int) -> int:
        """No imbalance at all."""
        return int(SCALE * self.compute_weight * time_ns / self.least_ns)

    def value(self, candidate: Candidate, cuts: Cuts, time_ns: int) -> int:
        """The bound and the weighted imbalance of the ranks' computation."""
        skew = imbalance(self.stage_times(candidate, cuts))
        return self.bound(time_ns, 0) + int(SCALE * self.balance_weight * skew)

    def stage_times(self, candidate: Candidate, cuts: Cuts) -> list[int]:
        """Computation of a microbatch on each stage."""
        times = self.scorer.bounds.unit_times(candidate)
        each = [forward + backward for forward, backward, *_ in times]
        return [sum(each[start:stop]) for start, stop in cuts]


def imbalance(times: Sequence[int]) -> float:
    """Largest over mean, less 1: 0 where all are equal."""
    return max(times) * len(times) / sum(times) - 1 if any(times) else 0.0


def objective_of(text: str, scorer: Scorer, space: Space, steps: int | None) -> Objective:
    """Reads --objective. Raises PlanError for what is unknown or lacks its figures."""
    name, _, value = text.partition("=")
    problem = scorer.problem
    per_node = problem.devices_per_node
    if name in ("step_time", MEMORY) and not value:  # the least memory was found before
        return TimeToLoss() if space.has_codecs else StepTime()
    if name == "cost" and not value:
        if problem.cluster.price_per_node_hour_usd is None:
            raise PlanError(
                "--objective cost needs a price: put  price: {per_node_hour: 32.77 USD}  into the "
                "cluster file"
            )
        return Cost(devices_per_node=per_node)
    if name == "deadline" and value:
        if not steps:
            raise PlanError("--objective deadline=… needs --steps, the steps to be done by then")
        most = problem.cluster.num_devices
        return Deadline(limit_ns=max(1, parse_ns(value) // steps), most_devices=most)
    if name == "goodput" and not value:
        return Goodput(failures=failures_of(problem.cluster, scorer), devices_per_node=per_node)
    if name == "balanced":
        balance, compute = _weights(value)
        least = max(1, int(GroupBounds(scorer, space).even_ns.min(initial=sys.maxsize)))
        return Balanced(
            scorer=scorer, least_ns=least, balance_weight=balance, compute_weight=compute
        )
    raise PlanError(f"--objective is one of {', '.join(NAMES)}, but got {text!r}")


def _weights(text: str) -> tuple[float, float]:
    """'0.7:0.3' to the weights; they are normalised to add up to 1."""
    if not text:
        return BALANCE_WEIGHT, COMPUTE_WEIGHT
    try:
        balance, compute = (float(part) for part in text.split(":"))
    except ValueError:
        balance, compute = -1.0, -1.0
    if balance < 0 or compute <= 0:
        raise PlanError(
            f"--objective balanced takes two weights, as in balanced=0.7:0.3; got {text!r}"
        )
    return balance / (balance + compute), compute / (balance + compute)


def failures_of(cluster: Cluster, scorer: Scorer) -> Failures:
    """What the cluster file says of failures, and the states a checkpoint holds."""
    if cluster.node_mtbf_ns is None:
        raise PlanError(
            "--objective goodput needs the failure rate: put  failures: {node_mtbf: 2000 h}  into "
            "the cluster file"
        )
    states = 1 + OPTIMIZER_STATES[scorer.problem.training.optimizer]
    states *= STORED_BYTES * scorer.problem.graph.num_parameters
    return Failures(node_mtbf_ns=cluster.node_mtbf_ns, state_bytes=states)


def check_met(objective: Objective, candidate: Candidate, time_ns: int) -> None:
    """Raises InfeasiblePlan when not even the fastest plan meets the deadline."""
    if isinstance(objective, Deadline) and time_ns > objective.limit_ns:
        raise InfeasiblePlan(
            f"no plan meets the deadline: a step may take {format_ns(objective.limit_ns)}, the "
            f"fastest ({candidate.short()}) takes {format_ns(time_ns)}; give it more time, fewer "
            "steps or more devices"
        )


def said_of(objective: Objective, cluster: Cluster, candidate: Candidate, time_ns: int) -> str:
    """A sentence on the answer in the objective's own figures."""
    if isinstance(objective, Cost):
        nodes = objective.nodes(candidate.num_devices)
        hours = s_from_ns(time_ns) / 3600 * nodes
        price = cluster.price_per_node_hour_usd
        assert price is not None, "objective_of asks for it"
        return f"objective cost: {hours * price:.3g} USD a step on {nodes} node{'s' * (nodes > 1)}"
    if isinstance(objective, Deadline):
        return (
            f"objective deadline: {candidate.num_devices} devices are the fewest whose step takes "
            f"at most {format_ns(objective.limit_ns)}"
        )
    if isinstance(objective, Goodput):
        nodes = -(-candidate.num_devices // objective.devices_per_node)
        return f"objective goodput: {objective.failures.sentence(nodes)}"
    if isinstance(objective, Balanced):
        return (
            f"objective balanced: {objective.balance_weight:.2f} x imbalance + "
            f"{objective.compute_weight:.2f} x time over its bound"
        )
    return (
        "objective memory: with 1 % of the usable memory less no plan fits; of those that do, the "
        "fastest"
    )

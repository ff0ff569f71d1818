"""A policy gradient over `Choices`: REINFORCE with a baseline, and policies kept as files.

The policy gives each option of each variable a logit: a small network of the option's features
and of the problem's mean ones, plus a number of its own for this problem. Variables are drawn
independently. The network can be trained on other problems before (`pretrain`), so it is told of
memory and time in relative terms only (`Choices.features`).

    gradient of  mean((cost - baseline) * log p(assignment)) - ENTROPY * entropy

Source: Williams 1992, Machine Learning 8; for placement Mirhoseini et al. 2017, arXiv 1706.04972.
The baseline is the mean of the batch's other assignments (Kool et al. 2019, DeepRLStructPred at
ICLR); advantages are divided by their spread. One learned from the problem's features would have
to predict costs that lie within a percent of each other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from claw_plan.planner.choices import Choices, Evaluations
from claw_plan.planner.errors import PlanError
from claw_plan.profiles.files import write_atomic

BATCH = 20
"""Assignments drawn for one step of the optimizer."""

HIDDEN = 32
ENTROPY = 1e-3

KNOWN_LOGIT = 3.0
"""What an option of the best known assignment begins with, of nine drawn with 0.71, where the
policy has learned nothing yet. A trained one knows better than a start that takes least memory."""

OWN_RATE, NETWORK_RATE = 0.2, 0.01
"""Adam's rates for the problem's own numbers and for the network."""


class Policy(nn.Module):
    """Logits of options from features."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features
        self.network = nn.Sequential(
            nn.Linear(2 * num_features, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)
        )

    def forward(self, features: Tensor) -> Tensor:
        """Logits [variable, option]."""
        mean = features.mean((0, 1))
        both = torch.cat([features, mean.expand_as(features)], dim=2)
        logits: Tensor = self.network(both).squeeze(2)
        return logits


def new_policy(num_features: int, seed: int) -> Policy:
    """An untrained policy, the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Policy(num_features)


def policy_searcher(path: Path | None) -> Callable[[Evaluations, int], None]:
    """A searcher that starts from the policy of a file, or from an untrained one."""

    def search(evaluations: Evaluations, seed: int) -> None:
        features = _features(evaluations.choices)
        width = features.shape[2]
        policy = new_policy(width, seed) if path is None else load_policy(path)
        if policy.num_features != width:
            raise PlanError(
                f"{path}: the policy reads {policy.num_features} features, but this problem has "
                f"{width}; train another"
            )
        known_logit = KNOWN_LOGIT if path is None else 0.0
        _search(evaluations, policy, features, known_logit, seed)

    return search


def _search(
    evaluations: Evaluations, policy: Policy, features: Tensor, known_logit: float, seed: int
) -> None:
    own = torch.zeros(features.shape[:2])
    best = torch.tensor(evaluations.best.assignment)
    own[torch.arange(len(best)), best] = known_logit
    own.requires_grad_()
    rates = [
        {"params": [own], "lr": OWN_RATE},
        {"params": list(policy.parameters()), "lr": NETWORK_RATE},
    ]
    optimizer = torch.optim.Adam(rates)
    generator = torch.Generator().manual_seed(seed)
    mask = _mask(evaluations.choices)
    while evaluations.left:
        count = min(BATCH, evaluations.left)
        _step(evaluations, policy, features, mask, own, optimizer, generator, count)


def _step(
    evaluations: Evaluations,
    policy: Policy,
    features: Tensor,
    mask: Tensor,
    own: Tensor | None,
    optimizer: torch.optim.Optimizer,
    generator: torch.Generator,
    count: int,
) -> None:
    """Draws some assignments, scores them, and makes the cheap ones more likely."""
    logits = policy(features) + mask
    logits = logits if own is None else logits + own
    log_p = torch.log_softmax(logits, dim=1)
    drawn = torch.multinomial(log_p.detach().exp(), count, replacement=True, generator=generator)
    scores = evaluations.ask(drawn.T.numpy().astype(np.int64))
    costs = torch.from_numpy(evaluations.cost(scores)).float()
    advantage = _advantage(costs)
    chosen = log_p.gather(1, drawn).sum(0)
    # Options that a variable does not have count with 0 * -inf otherwise.
    entropy = -(log_p.exp() * log_p.clamp(min=-1e3)).sum(1).mean()
    loss = (advantage * chosen).mean() - ENTROPY * entropy
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _advantage(costs: Tensor) -> Tensor:
    """How much each costs more than the others' mean, in units of their spread."""
    count = len(costs)
    if count == 1:
        return torch.zeros(1)
    above = (costs - costs.mean()) * count / (count - 1)
    return above / (above.std() + 1e-9)


def pretrain(problems: Sequence[Choices], rounds: int, seed: int) -> Policy:
    """A policy trained on each problem once a round; only its network learns."""
    policy = new_policy(_features(problems[0]).shape[2], seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=NETWORK_RATE)
    generator = torch.Generator().manual_seed(seed)
    prepared = []
    for choices in problems:
        evaluations = Evaluations(choices, rounds * BATCH + 1)
        evaluations.ask([choices.start])  # costs are relative to the start's time
        prepared.append((evaluations, _features(choices), _mask(choices)))
    for _ in range(rounds):
        for evaluations, features, mask in prepared:
            _step(evaluations, policy, features, mask, None, optimizer, generator, BATCH)
    return policy


def _features(choices: Choices) -> Tensor:
    return torch.from_numpy(choices.features)


def _mask(choices: Choices) -> Tensor:
    """-inf for options that a variable does not have."""
    sizes = torch.tensor(choices.sizes)
    most = int(sizes.max())
    return torch.where(torch.arange(most) < sizes[:, None], 0.0, -torch.inf)


def save_policy(policy: Policy, path: Path) -> None:
    """Writes the policy as JSON, whole or not at all."""
    state = {name: tensor.tolist() for name, tensor in policy.state_dict().items()}
    kept = {"num_features": policy.num_features, "state": state}
    write_atomic(path, json.dumps(kept) + "\n")


def load_policy(path: Path) -> Policy:
    """Reads a policy; raises PlanError for a file that holds none."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        policy = Policy(int(kept["num_features"]))
        policy.load_state_dict({name: torch.tensor(v) for name, v in kept["state"].items()})
    except OSError as error:
        raise PlanError(f"cannot read the policy {path}: {error.strerror}") from None
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise PlanError(f"{path} holds no policy of --search rl ({error})") from None
    return policy

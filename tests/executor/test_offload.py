from __future__ import annotations

import torch
import torch.nn as nn

from claw_plan.executor.offload import HostOptimizer


def make(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)  # type: ignore[arg-type]


def trained(offloads: bool, steps: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(2))]
    optimizer = HostOptimizer(make, parameters) if offloads else make(parameters)
    for step in range(steps):
        parameters[0].grad = torch.full((3,), float(step - 1))
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)  # as a scheduler does
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in parameters]


def test_the_step_on_the_host_is_bitwise_that_on_the_device() -> None:
    for host, device in zip(trained(offloads=True), trained(offloads=False), strict=True):
        assert torch.equal(host, device)


def test_states_stand_under_the_devices_parameters_and_what_is_put_there_counts() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = HostOptimizer(make, [parameter])
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert optimizer.state[parameter]["step"].item() == 1
    optimizer.state[parameter] = {
        "step": torch.tensor(7.0),
        "exp_avg": torch.zeros(2),
        "exp_avg_sq": torch.ones(2),
    }
    optimizer.step()
    assert optimizer.state[parameter]["step"].item() == 8


def test_values_set_on_the_device_count() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = HostOptimizer(lambda host: torch.optim.SGD(host, lr=1.0), [parameter])
    with torch.no_grad():
        parameter.fill_(5.0)
    parameter.grad = torch.ones(2)
    optimizer.step()
    assert parameter.tolist() == [4.0, 4.0]


def test_a_parameter_without_gradient_stays() -> None:
    parameter = nn.Parameter(torch.ones(2))
    HostOptimizer(make, [parameter]).step()
    assert parameter.tolist() == [1.0, 1.0]

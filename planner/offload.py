"""How long an optimizer step on the host takes, and what it needs there.

    t = (D + U) E / r_link + n B E / r_memory

E elements of a rank's part; D bytes of each that go down (parameter and gradient, fp32) and U that
come up (the new parameter); r_link the device's link to the host; n ranks of a node step at the
same time; B bytes that the step moves for each element in the host's memory, r_memory its rate.

Source: Ren et al. 2021, "ZeRO-Offload" (arXiv 2101.06840), section 4, with the traffic of
`executor.offload`, which does not hide it behind the backward pass. On CPUs the host is the
device: only the copies are added. Not modelled: arithmetic, which memory hides; NUMA.
"""

from __future__ import annotations

from claw_plan.planner.problem import Problem, optimizer_work

DOWN_BYTES, UP_BYTES = 8, 4
"""Of each element over the link; on CPUs the same copies within memory, read and written."""

LINK_BYTES_PER_S = 25e9
"""PCIe 4.0 x16: 31.5 GB/s by its specification, of which packets of 256 bytes leave some 80 %."""

HOST_BYTES_PER_S = 300e9
"""Two sockets of eight channels DDR4-3200: 409.6 GB/s (AMD EPYC 7742 product brief), of which
STREAM-like loops reach some three quarters."""

HOST_STEP_BYTES = {"adamw": 84, "sgd": 12}
"""Read and written by torch's per-tensor CPU loops for each element: `_single_tensor_adamw` makes
seven passes of three operands each; SGD one."""

HOST_STATES = 2
"""fp32 tensors of a rank's part that the host keeps beside the optimizer's own states: parameters
and gradients."""


def host_step_ns(problem: Problem, elements: int) -> int:
    """Copies down, the step on the host, copies up."""
    optimizer, copied = problem.training.optimizer, (DOWN_BYTES + UP_BYTES) * elements
    if problem.device.kind == "cpu":
        step = problem.cost.op(optimizer_work(optimizer, elements)).ns
        return step + problem.memory_op_ns(2 * copied)
    moved = HOST_STEP_BYTES[optimizer] * elements * problem.devices_per_node
    return round(1e9 * (copied / LINK_BYTES_PER_S + moved / HOST_BYTES_PER_S))

"""Tensor arithmetic on the wire and in the optimizer.

Begin with codec.py: flat gradients to bytes and back. Each codec is written once, over a few
primitive passes (signs to bits, blocks to small numbers), and those exist three times: in plain
torch (reference.py, the definition), compiled for the CPU (compiled.py) and for GPUs
(triton_kernels.py). Tests hold that the three agree.
"""

"""Tensor arithmetic on the wire and in the optimizer: codecs, quantised blocks, erasure coding.

Nothing stands here yet; the room is kept because plans already name a codec (`none`).
"""

"""Deep Gradient Compression's momentum on each rank, in the place of a worker's error feedback.

Sparse codecs send an element once in many steps. With momentum in the optimizer, what waited gets
the momentum of a single gradient; so momentum is kept before the codec, chunk by chunk of the
two-phase mean, and masked where something was sent (`kernels.momentum_correction`). The optimizer
that takes the mean is SGD without momentum. The server keeps plain errors: momentum is in already.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from claw_plan.executor.communication.compressed import TwoPhaseFeedback
from claw_plan.kernels.codec import CodecError
from claw_plan.kernels.error_feedback import ErrorFeedback
from claw_plan.kernels.momentum_correction import MomentumCorrection
from claw_plan.kernels.sparse import SparseCodec


class CorrectedChunks(ErrorFeedback):
    """A momentum correction for each chunk of a bucket."""

    def __init__(self, codec: SparseCodec, momentum: float) -> None:
        super().__init__(codec)
        self._sparse, self._momentum = codec, momentum
        self._chunks: list[MomentumCorrection] = []

    def encode_chunks(self, flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """The codes of what is large of each chunk's momentum that has not been sent."""
        while len(self._chunks) < len(sizes):
            self._chunks.append(MomentumCorrection(self._sparse, self._momentum))
        parts = flat.detach().reshape(-1).split(list(sizes))
        return [chunk.encode(part) for chunk, part in zip(self._chunks, parts, strict=True)]

    def reset(self) -> None:
        """Forgets what was not sent, and all momentum."""
        self._chunks = []

    def state_dict(self) -> dict[str, Tensor]:
        """Each chunk's, `<kind>_<number>`."""
        return {
            f"{kind}_{number}": value
            for number, chunk in enumerate(self._chunks)
            for kind, value in chunk.state_dict().items()
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes up what `state_dict` gave."""
        self.reset()
        for number in range(len(state) // 2):
            own = {kind: state[f"{kind}_{number}"] for kind in ("velocity", "unsent")}
            self._chunks.append(MomentumCorrection(self._sparse, self._momentum))
            self._chunks[-1].load_state_dict(own)


def with_momentum(codec: object, momentum: float) -> TwoPhaseFeedback:
    """The feedback of one bucket; raises CodecError unless the codec is a sparse one."""
    if not isinstance(codec, SparseCodec):
        raise CodecError(
            f"momentum={momentum} before a codec needs one that leaves elements out (top_k, "
            f"threshold), got {codec}"
        )
    feedback = TwoPhaseFeedback(codec)
    feedback.worker = CorrectedChunks(codec, momentum)
    return feedback

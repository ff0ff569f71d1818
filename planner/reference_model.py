"""The transformer that stands for published runs: one rank's part of it, from its dimensions.

Papers and result logs print sizes, not code. This module builds what they describe the way
Megatron-LM divides it (Shoeybi et al. 2019, arXiv 1909.08053; sequence parallelism: Korthikanti et
al. 2022, arXiv 2205.05198; experts: Lepikhin et al. 2020, arXiv 2006.16668; latent attention:
DeepSeek-AI 2024, arXiv 2405.04434), on the local shapes of one rank, with stand-ins for the
collectives, so that `reference_trace` records it like any other model. Each element-wise
operator here is one fused kernel there: rotation of q and k is one multiplication, a gated
activation `glu`.
Biases and dropout are left out: their kernels are fused into others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from claw_plan.planner.attention_op import grouped_product
from claw_plan.planner.tp_autograd import (
    StandIn,
    enter,
    gather_sequence,
    reduce,
    reduce_scatter_sequence,
)
from claw_plan.profiles.training_row import Dimensions, MixtureOfExperts

Ranks = Mapping[str, StandIn]
"""The stand-in of each axis a rank exchanges over: 'tp', 'cp' and 'ep'."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How one replica is divided, and which kernels its trainer uses.

    `ep` ranks share the experts, each divided `etp` ways. `fused_attention` is a flash kernel,
    else scores are written to memory; `fused_loss` computes the cross entropy in one pass over
    the logits. `cp_kind` is 'ring' (keys and values go round) or 'a2a' (heads are exchanged).
    """

    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    cp_kind: str = "ring"
    ep: int = 1
    etp: int = 1
    fused_attention: bool = True
    fused_loss: bool = True


class _AllToAll(torch.autograd.Function):
    """Every rank sends an equal part to every other; the shape stays."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: StandIn, where: str) -> torch.Tensor:
        ctx.ranks, ctx.where = ranks, where
        return ranks.all_to_all(tensor, where)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.ranks.all_to_all(gradient, ctx.where), None, None


def all_to_all(tensor: torch.Tensor, ranks: StandIn, where: str) -> torch.Tensor:
    """Exchanges equal parts among the ranks, forward and backward."""
    result: torch.Tensor = _AllToAll.apply(tensor, ranks, where)  # type: ignore[no-untyped-call]
    return result


class Linear(nn.Module):
    """A matrix without bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, hidden] in and out; see the class."""
        return F.linear(x, self.weight)


class Norm(nn.Module):
    """A layer or RMS norm: both read and write the hidden state once."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.hidden = (hidden,)
        self.weight = nn.Parameter(torch.empty(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, hidden] in and out; see the class."""
        return F.layer_norm(x, self.hidden, self.weight)


class Divided(nn.Module):
    """What enters and leaves work that is divided over the tensor-parallel ranks."""

    def __init__(self, division: Division, ranks: Ranks) -> None:
        super().__init__()
        self.division, self.ranks = division, ranks

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """Whole hidden states on every rank."""
        if self.division.tp == 1:
            return x
        take = gather_sequence if self.division.sequence_parallel else enter
        return take(x, self.ranks["tp"], "")

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, or this rank's part of the sequence of it."""
        if self.division.tp == 1:
            return x
        give = reduce_scatter_sequence if self.division.sequence_parallel else reduce
        return give(x, self.ranks["tp"], "")


class Attention(Divided):
    """Self-attention over the local heads; `window` is 0 or how many tokens back it sees."""

    def __init__(self, dims: Dimensions, division: Division, ranks: Ranks, window: int) -> None:
        super().__init__(division, ranks)
        self.heads = max(1, dims.heads // division.tp)
        self.kv_heads = max(1, dims.kv_heads // division.tp)
        self.causal, self.window, self.mla = dims.causal, window, dims.mla
        self.rotates = not dims.learned_positions
        if self.mla is None:
            self.qk_dim = self.v_dim = dims.head_dim
            width = (self.heads + 2 * self.kv_heads) * dims.head_dim
            self.qkv = Linear(dims.hidden, width)
        else:
            mla = self.mla
            self.kv_heads = self.heads
            self.qk_dim, self.v_dim = mla.qk_nope_dim + mla.qk_rope_dim, mla.v_head_dim
            if mla.q_lora_rank:  # else, as in DeepSeek-V2-Lite, queries come from the hidden state
                self.q_down = Linear(dims.hidden, mla.q_lora_rank)
                self.q_norm = Norm(mla.q_lora_rank)
            self.q_up = Linear(mla.q_lora_rank or dims.hidden, self.heads * self.qk_dim)
            self.kv_down = Linear(dims.hidden, mla.kv_lora_rank + mla.qk_rope_dim)
            self.kv_norm = Norm(mla.kv_lora_rank)
            self.kv_up = Linear(mla.kv_lora_rank, self.heads * (mla.qk_nope_dim + self.v_dim))
        self.out = Linear(self.heads * self.v_dim, dims.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, hidden] in and out; see the class."""
        x = self.enter(x)
        q, k, v = self._latent(x) if self.mla else self._plain(x)
        batch, seq = x.shape[:2]
        y = self._attend(*(part.transpose(1, 2) for part in (q, k, v)))
        return self.leave(self.out(y.transpose(1, 2).reshape(batch, seq, -1)))

    def _plain(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        heads, kv = self.heads, self.kv_heads
        qkv = self.qkv(x).unflatten(-1, (heads + 2 * kv, self.qk_dim))
        q, k, v = qkv.split((heads, kv, kv), dim=2)
        if self.rotates:
            angle = x.new_empty(1, x.shape[1], 1, self.qk_dim)
            q, k = q * angle, k * angle
        return q, k, v

    def _latent(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert self.mla is not None
        mla, shape = self.mla, x.shape[:2]
        through = self.q_norm(self.q_down(x)) if mla.q_lora_rank else x
        q = self.q_up(through).view(*shape, self.heads, self.qk_dim)
        latent, rope = self.kv_down(x).split((mla.kv_lora_rank, mla.qk_rope_dim), dim=-1)
        kv = self.kv_up(self.kv_norm(latent)).view(*shape, self.heads, -1)
        k, v = kv.split((mla.qk_nope_dim, self.v_dim), dim=-1)
        shared = rope.unsqueeze(2).expand(*shape, self.heads, mla.qk_rope_dim)
        return q, torch.cat((k, shared), dim=-1), v

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if self.division.cp > 1:
            return self._across_contexts(q, k, v)
        if self.window and 2 * self.window < k.shape[2]:
            # A causal kernel computes half the square; of a window w it computes seq x w.
            k, v = k[:, :, : 2 * self.window], v[:, :, : 2 * self.window]
        if self.division.fused_attention:
            return F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, dim=1) for part in (k, v))
        weights = torch.softmax(q @ k.transpose(-1, -2), dim=-1)
        return (weights * weights.new_empty(())) @ v  # scaling by dropout: one more kernel

    def _across_contexts(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cp = self.division.cp
        if self.division.cp_kind == "a2a":
            exchanged = [all_to_all(part, self.ranks["cp"], "") for part in (q, k, v)]
            q, k, v = (part.reshape(part.shape[0], -1, part.shape[2] * cp, part.shape[3])
                       if part.shape[1] % cp == 0 else part.repeat(1, 1, cp, 1)
                       for part in exchanged)  # fmt: skip
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
            back = y.reshape(y.shape[0], -1, y.shape[2] // cp, y.shape[3])
            return all_to_all(back[:, : self.heads], self.ranks["cp"], "")
        k, v = (gather_sequence(part.transpose(1, 2), self.ranks["cp"], "").transpose(1, 2)
                for part in (k, v))  # fmt: skip
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        for _ in range(cp - 1):
            # One kernel for each pair of contexts, whose results are merged by their sums.
            y = y * y.new_empty(y.shape[0], y.shape[1], y.shape[2], 1)
        return y


class MLP(Divided):
    """The plain MLP; a gated one has twice the columns."""

    def __init__(self, dims: Dimensions, division: Division, ranks: Ranks, ffn: int) -> None:
        super().__init__(division, ranks)
        self.gated = dims.activation == "swiglu"
        width = max(1, ffn // division.tp)
        self.up = Linear(dims.hidden, width * (2 if self.gated else 1))
        self.down = Linear(width, dims.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, hidden] in and out; see the class."""
        x = self.up(self.enter(x))
        return self.leave(self.down(F.glu(x) if self.gated else F.gelu(x)))


class Experts(nn.Module):
    """Routed experts with a perfectly balanced router, and the shared expert.

    Tokens are sorted by expert, exchanged among the expert-parallel ranks, multiplied group by
    group, exchanged back and summed with their weights.
    """

    def __init__(
        self, dims: Dimensions, moe: MixtureOfExperts, division: Division, ranks: Ranks
    ) -> None:
        super().__init__()
        self.moe, self.division, self.ranks = moe, division, ranks
        self.gated = dims.activation == "swiglu"
        self.local = moe.experts // division.ep
        width = moe.expert_ffn // division.etp
        self.router = Linear(dims.hidden, moe.experts)
        up = width * (2 if self.gated else 1)
        self.up = nn.Parameter(torch.empty(self.local, dims.hidden, up))
        self.down = nn.Parameter(torch.empty(self.local, width, dims.hidden))
        self.shared = MLP(dims, division, ranks, moe.shared_ffn) if moe.shared_ffn else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, hidden] in and out; see the class."""
        batch, seq, hidden = x.shape
        division, topk = self.division, self.moe.topk
        if division.tp > 1 and not division.sequence_parallel:
            x = enter(x, self.ranks["tp"], "")
        tokens = x.reshape(-1, hidden)
        if division.tp > 1 and not division.sequence_parallel and division.etp == 1:
            tokens = tokens[: len(tokens) // division.tp]  # each rank routes its own part
        weights = torch.softmax(self.router(tokens).float(), dim=-1)[:, :topk].to(x.dtype)
        order = torch.empty(len(tokens) * topk, dtype=torch.int64, device=x.device)
        sent = tokens.index_select(0, order)
        if division.ep > 1:
            sent = all_to_all(sent, self.ranks["ep"], "")
        if division.etp > 1 and division.sequence_parallel:
            sent = gather_sequence(sent.unsqueeze(0), self.ranks["tp"], "").squeeze(0)
        rows = len(sent) // self.local
        groups = sent[: rows * self.local].view(self.local, rows, hidden)
        made = grouped_product(groups, self.up)
        made = grouped_product(F.glu(made) if self.gated else F.gelu(made), self.down)
        made = made.flatten(0, 1)
        if rows * self.local < len(sent):
            made = F.pad(made, (0, 0, 0, len(sent) - rows * self.local))
        if division.etp > 1:
            give = reduce_scatter_sequence if division.sequence_parallel else reduce
            made = give(made.unsqueeze(0), self.ranks["tp"], "").squeeze(0)
        if division.ep > 1:
            made = all_to_all(made, self.ranks["ep"], "")
        out = (made.view(-1, topk, hidden) * weights.unsqueeze(-1)).sum(dim=1)
        if len(out) < batch * seq:
            out = gather_sequence(out.unsqueeze(0), self.ranks["tp"], "").squeeze(0)
        out = out.view(batch, seq, hidden)
        return out + self.shared(x) if self.shared is not None else out


class Block(nn.Module):
    """Attention and MLP or experts, each behind a norm and around it the residual."""

    def __init__(
        self, dims: Dimensions, division: Division, ranks: Ranks, *, window: int, dense: bool
    ) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = Norm(dims.hidden), Norm(dims.hidden)
        self.attention = Attention(dims, division, ranks, window)
        if dense or dims.moe is None:
            ffn = dims.moe.dense_ffn if dims.moe else dims.ffn
            self.mlp: nn.Module = MLP(dims, division, ranks, ffn)
        else:
            self.mlp = Experts(dims, dims.moe, division, ranks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, hidden] in and out; see the class."""
        x = x + self.attention(self.norm_1(x))
        y: torch.Tensor = x + self.mlp(self.norm_2(x))
        return y


class ReferenceTransformer(Divided):
    """One rank's part: embedding by vocabulary, one block of each kind, head and loss.

    `kinds` says of each block (window, dense). Inputs are [batch, seq / cp] tokens and targets.
    """

    def __init__(
        self,
        dims: Dimensions,
        division: Division,
        ranks: Ranks,
        kinds: tuple[tuple[int, bool], ...],
    ) -> None:
        super().__init__(division, ranks)
        vocab = -(-dims.vocab // division.tp)
        self.embedding = nn.Parameter(torch.empty(vocab, dims.hidden))
        self.positions = (
            nn.Parameter(torch.empty(dims.seq_len, dims.hidden))
            if dims.learned_positions
            else None
        )
        self.blocks = nn.ModuleList(
            Block(dims, division, ranks, window=window, dense=dense) for window, dense in kinds
        )
        self.norm = Norm(dims.hidden)
        self.head = self.embedding if dims.tied else nn.Parameter(torch.empty(vocab, dims.hidden))

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """[batch, sequence, hidden] in and out; see the class."""
        x = self.leave(F.embedding(tokens, self.embedding))
        if self.positions is not None:
            own = self.positions[: x.shape[1]]
            x = x + own
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.enter(self.norm(x)), self.head).flatten(0, 1)
        return self._loss(logits, targets.flatten())

    def _loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Cross entropy in fp32: one pass, or one kernel for each step of the formula.

        Over a divided vocabulary maxima and sums, two numbers a token, are exchanged: left out.
        """
        scores = logits.float()
        if self.division.fused_loss:
            return F.cross_entropy(scores, targets)
        scores = scores - scores.amax(dim=-1, keepdim=True).detach()
        chosen = scores.gather(1, targets.unsqueeze(1)).squeeze(1)
        return (scores.exp().sum(dim=-1).log() - chosen).mean()

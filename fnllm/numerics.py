"""Batch-invariant numerics: the same step with layer functions that compute every row independently, bit for bit.

Only a few functions and the order of two reductions differ; swapped functions stay swapped. Gradients are those of the
plain functions.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from fnllm import layers as plain
from fnllm.context import Context
from fnllm.layers import Layers
from fnllm.packed_attention import packed_attention
from fnllm.tensor_parallel import Ordered, TensorParallel
from fnllm_kernels.attention import paged_attention
from fnllm_kernels.invariant_linear import invariant_linear
from fnllm_kernels.norm import rms_norm
from fnllm_kernels.qk_norm_rope_store import qk_norm_rope_store
from fnllm_kernels.silu_mul import silu_mul

NUMERICS = ("default", "batch_invariant")
BACKEND = "triton_invariant"  # of paged attention; on a CPU its plain form


def check_numerics(numerics: str) -> None:
    """Raise ValueError for an unknown mode."""
    if numerics not in NUMERICS:
        raise ValueError(f"numerics must be one of {', '.join(NUMERICS)}, found {numerics!r}")


def layers_for(layers: Layers, numerics: str, on_gpu: bool = False) -> Layers:
    """The layers with the functions that the mode needs, except where the caller has swapped one.

    In generation `on_gpu` the kernels of `norm`, `attend` and `activation` already compute each row independently, so
    these stay; gradients and the CPU need other functions.
    """
    if numerics == "default":
        return layers
    wanted = Layers()._replace(linear=linear, attention=attention)
    if not on_gpu:
        wanted = wanted._replace(norm=norm, attend=attend, activation=activation)
    return Layers(*(new if mine is usual else mine for mine, usual, new in zip(layers, Layers(), wanted, strict=True)))


def by_kernels(x: Tensor) -> bool:
    """Whether generating and scoring run the same kernels, so that their bits agree; there are none for float64."""
    return x.is_cuda and x.dtype != torch.float64


def exchanges_for(tp: TensorParallel, numerics: str) -> TensorParallel:
    """The exchanges that the mode needs: sums over the ranks in rank order."""
    return tp if numerics == "default" or tp.size == 1 else Ordered(tp)


class Substitute(torch.autograd.Function):
    """One function's value with another's gradient: the two differ only in rounding."""

    @staticmethod
    def forward(value: Callable[..., Tensor], smooth: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        return value(*tensors)

    @staticmethod
    def setup_context(ctx, inputs: tuple, output: Tensor) -> None:
        _, ctx.smooth, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple:
        tensors, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]

        def of_needed(*some: Tensor) -> Tensor:
            left = iter(some)
            return ctx.smooth(*(next(left) if need else t for t, need in zip(tensors, needed, strict=True)))

        # By torch.func, so that it can be differentiated again, by torch.func too.
        pull = torch.func.vjp(of_needed, *(t for t, need in zip(tensors, needed, strict=True) if need))[1]
        found = iter(pull(grad))
        return None, None, *(next(found) if need else None for need in needed)


def linear(p: Float[Tensor, "O I"], x: Float[Tensor, "... I"], ctx: Context) -> Float[Tensor, "... O"]:
    """`layers.linear` by tiles of fixed shape."""
    return Substitute.apply(_flat_linear, F.linear, x, p)


def _flat_linear(x: Tensor, p: Tensor) -> Tensor:
    return invariant_linear(x.reshape(-1, x.shape[-1]), p).view(*x.shape[:-1], p.shape[0])


def norm(p: Float[Tensor, " H"], x: Float[Tensor, "... H"], ctx: Context) -> Float[Tensor, "... H"]:
    """`layers.norm`; on a GPU by the kernel that computes each row in one program."""
    if not by_kernels(x):
        return plain.norm(p, x, ctx)

    def value(p: Tensor, x: Tensor) -> Tensor:
        return rms_norm(x.reshape(-1, x.shape[-1]), p, ctx.config.rms_norm_eps).view(x.shape)

    return Substitute.apply(value, lambda p, x: plain.norm(p, x, ctx), p, x)


def activation(gate_up: Float[Tensor, "... two_I"], ctx: Context) -> Float[Tensor, "... I"]:
    """`layers.activation` with a SiLU whose rounding does not depend on an element's position.

    On a CPU the library's SiLU uses another exponential for the elements after the last full vector.
    """
    if by_kernels(gate_up):

        def value(x: Tensor) -> Tensor:
            return silu_mul(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

        return Substitute.apply(value, lambda x: plain.activation(x, ctx), gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
    return (wide / (1 + torch.exp(-wide))).to(gate.dtype) * up


def attention(p: dict, x: Float[Tensor, "T H"], ctx: Context) -> Float[Tensor, "T H"]:
    """`layers.attention`, whose q and k have the same bits whether or not they are captured or edited."""
    usual = ctx.layers.norm in (plain.norm, norm)
    return plain.attention(p, x, ctx, heads_by_kernel if by_kernels(x) and usual else None)


def heads_by_kernel(
    p: dict, qkv: Float[Tensor, "T QKV"], ctx: Context
) -> tuple[Float[Tensor, "T N D"], Float[Tensor, "T K D"], Float[Tensor, "T K D"]]:
    """`layers.turned_heads` by the kernel that generation runs; the keys come from a cache of blocks of one token."""
    heads, kv_heads, tokens = ctx.sizes.heads, ctx.sizes.kv_heads, qkv.shape[0]
    names = [name for name in ("q_norm", "k_norm") if name in p]

    def value(qkv: Tensor, *norms: Tensor) -> Tensor:
        keys = qkv.new_empty(tokens, 1, kv_heads, ctx.config.head_dim)
        slots = torch.arange(tokens, dtype=torch.int32, device=qkv.device)
        eps, batch = ctx.config.rms_norm_eps, ctx.batch
        q = qk_norm_rope_store(
            qkv, *(norms or (None, None)), eps, batch.cos, batch.sin, keys, torch.empty_like(keys), slots, heads,
            kv_heads,
        )  # fmt: skip
        return torch.cat((q, keys[:, 0]), 1)

    def smooth(qkv: Tensor, *norms: Tensor) -> Tensor:
        q, k, _ = plain.turned_heads(dict(zip(names, norms, strict=True)), qkv, ctx)
        return torch.cat((q, k), 1)

    qk = Substitute.apply(value, smooth, qkv, *(p[name] for name in names))
    v = qkv.unflatten(-1, (-1, ctx.config.head_dim))[:, heads + kv_heads :]
    return qk[:, :heads], qk[:, heads:], v


def attend(
    q: Float[Tensor, "T N D"], k: Float[Tensor, "T K D"], v: Float[Tensor, "T K D"], ctx: Context
) -> Float[Tensor, "T N D"]:
    """`layers.attend`; without a cache the batch itself serves as one, of blocks of one token."""
    if ctx.cache is not None:
        return plain.attend(q, k, v, ctx)
    batch = ctx.batch
    scale, window = ctx.config.head_dim**-0.5, ctx.config.sliding_window[ctx.layer] or 0
    place = torch.arange(batch.max_seqlen, device=q.device)
    tables = (batch.cu_seqlens[:-1, None] + place).clamp(max=q.shape[0] - 1).int()

    def value(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return paged_attention(
            q,
            k.contiguous()[:, None],
            v.contiguous()[:, None],
            tables,
            batch.cu_seqlens,
            batch.context_lens,
            max_seqlen_q=batch.max_seqlen,
            scale=scale,
            window=window,
            backend=BACKEND,
        )

    def smooth(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return packed_attention(q, k, v, batch.cu_seqlens, batch.max_seqlen, scale=scale, window=window)

    return Substitute.apply(value, smooth, q, k, v)

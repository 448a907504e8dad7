"""The gate of a gated MLP: silu(gate) * up.

Axes: T packed tokens, I MLP width.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from .dependent_launch import launch_options

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


def silu_mul(gate_up: Float[Tensor, "T two_I"]) -> Float[Tensor, "T I"]:
    """silu of the first half of each row, rounded to the dtype, times the second half.

    Raises ValueError if the rows cannot be halved.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"silu_mul: gate_up is {tuple(gate_up.shape)}; it must be [T, 2 * I], gate first, then up")
    return _silu_mul_op(gate_up) if gate_up.is_cuda else silu_mul_reference(gate_up)


def silu_mul_reference(gate_up: Float[Tensor, "T two_I"]) -> Float[Tensor, "T I"]:
    """Plain torch of `silu_mul`."""
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@torch.library.custom_op("fnllm::silu_mul", mutates_args=(), schema="(Tensor gate_up) -> Tensor")
def _silu_mul_op(gate_up):
    run = _silu_mul_triton if gate_up.is_cuda and triton is not None else silu_mul_reference
    return run(gate_up)


@_silu_mul_op.register_fake
def _silu_mul_fake(gate_up):
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


def _silu_mul_triton(gate_up: Tensor, *, pdl: bool | None = None) -> Tensor:
    tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    out = gate_up.new_empty(tokens, width)
    # Few rows: small blocks, so that the row spreads over many multiprocessors.
    block = min(triton.next_power_of_2(width), 256 if tokens < 32 else 1024)
    if tokens and width:
        _silu_mul_kernel[(tokens, triton.cdiv(width, block))](
            gate_up, out, width, gate_up.stride(0), BLOCK=block, num_warps=max(1, block // 256),
            **launch_options(gate_up.device, pdl),
        )  # fmt: skip
    return out


if triton is not None:

    @triton.jit
    def _silu_mul_kernel(gate_up, out, width, row_stride, BLOCK: tl.constexpr, PDL: tl.constexpr):
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        token = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        row = gate_up + token * row_stride + column
        gate = tl.load(row, mask=inside, other=0.0, cache_modifier=".cg")
        up = tl.load(row + width, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        wide = gate.to(tl.float32)
        silu = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
        tl.store(out + token * width + column, (silu * up).to(gate.dtype), mask=inside)

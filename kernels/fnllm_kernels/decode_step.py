"""One token's forward pass through all layers in one launch, for batch 1 on a GPU: see decode_step_kernel."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fnllm_kernels.decode_attention import decode_attention_reference
from fnllm_kernels.decode_step_kernel import ALL_PHASES, COLUMNS, WIDTH_OF_TABLE, WINDOW_COLUMN
from fnllm_kernels.decode_tiles import triton
from fnllm_kernels.small_linear import linear_reference


class StepShape(NamedTuple):
    """Sizes and switches of the model that the kernel is compiled for."""

    hidden: int
    mlp: int
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    eps: float
    qk_norm: bool
    qkv_bias: bool


class PhaseTiles(NamedTuple):
    """How a phase's matrix is cut: rows a warp at once, chunks of a row at once, pieces of H, groups of rows a warp."""

    rows: int
    chunks: int
    units: int
    groups: int


class StepTiles(NamedTuple):
    """The whole kernel's cut; programs is a power of 2, at most the GPU's multiprocessors."""

    programs: int
    warps: int
    pairs: int
    qkv: PhaseTiles
    o: PhaseTiles
    up: PhaseTiles
    down: PhaseTiles
    keys: int = 64
    least: int = 128


def phase_tiles(outputs: int, width: int, programs: int, warps: int, pairs: int, gated: bool, held: int) -> PhaseTiles:
    """Rows and chunks so that at most `held` tiles (4 registers a thread each) are loaded at a time."""
    rows = -(-outputs // (programs * warps))
    whole = -(-width // (2 * pairs))
    factor = 2 if gated else 1
    if rows * factor * whole <= held:
        return PhaseTiles(rows, whole, 1, 1)
    if whole * factor <= held // 2 and whole <= 8:  # short rows: some rows at a time, all of each
        at_once = max(r for r in range(1, rows + 1) if rows % r == 0 and r * factor * whole <= held)
        return PhaseTiles(at_once, whole, 1, rows // at_once)
    at_once = max(r for r in range(1, min(rows, 8 // factor) + 1) if rows % r == 0)
    chunks = max(c for c in (1, 2, 4, 8) if c == 1 or c * at_once * factor <= held // 2)
    chunks = min(chunks, whole)
    return PhaseTiles(at_once, chunks, -(-whole // chunks), rows // at_once)


def step_tiles(shape: StepShape, multiprocessors: int, *, warps: int = 8, held: int = 24) -> StepTiles:
    """The default cut: one program of 8 warps to a multiprocessor, whole phases in registers where they fit."""
    programs = 1 << (multiprocessors.bit_length() - 1)
    pairs = min(128, triton.next_power_of_2(shape.hidden // 2)) if triton is not None else 128
    width = shape.heads * shape.head_dim

    def cut(outputs, length, gated=False):
        return phase_tiles(outputs, length, programs, warps, pairs, gated, held)

    return StepTiles(
        programs, warps, pairs, cut((shape.heads + 2 * shape.kv_heads) * shape.head_dim, shape.hidden),
        cut(shape.hidden, width), cut(shape.mlp, shape.hidden, True), cut(shape.hidden, shape.mlp),
    )  # fmt: skip


def check_step(shape: StepShape, programs: int) -> None:
    """Raises ValueError for a model that the kernel cannot run."""
    problems = []
    if shape.head_dim not in (32, 64, 128, 256):
        problems.append(f"head_dim={shape.head_dim}, allowed are 32, 64, 128, 256")
    if shape.heads % shape.kv_heads or shape.heads // shape.kv_heads > 8:
        problems.append(f"{shape.heads} heads over {shape.kv_heads} KV heads, allowed are groups of 1 to 8")
    if shape.hidden % 8 or shape.mlp % 8:
        problems.append(f"hidden size {shape.hidden} and MLP width {shape.mlp} must be multiples of 8")
    if programs % shape.kv_heads:
        problems.append(f"{shape.kv_heads} KV heads do not divide {programs} programs")
    if problems:
        raise ValueError("decode_step cannot run this model: " + "; ".join(problems) + "; use the layer functions")


def layer_table(layers: Sequence[dict[str, Tensor]], caches: Sequence[tuple[Tensor, Tensor]], windows: Sequence[int]):
    """The table of data pointers [L, 16] int64, on the layers' device; it is valid while those tensors live.

    Raises ValueError for tensors that are not bf16, contiguous and on one device, or layers with other parts (o_bias,
    MLP biases, experts).
    """
    known = set(COLUMNS)
    table = torch.zeros(len(layers), WIDTH_OF_TABLE, dtype=torch.int64)
    for index, (layer, (k_cache, v_cache), window) in enumerate(zip(layers, caches, windows, strict=True)):
        parts = dict(layer) | {"k_cache": k_cache, "v_cache": v_cache}
        if set(parts) - known:
            raise ValueError(f"layers[{index}] has {sorted(set(parts) - known)}, which decode_step does not run")
        for column, name in enumerate(COLUMNS):
            tensor = parts.get(name)
            if tensor is None:
                continue
            if tensor.dtype != torch.bfloat16 or not tensor.is_contiguous() or tensor.data_ptr() % 16:
                raise ValueError(f"layers[{index}].{name} must be contiguous bf16 at a multiple of 16 bytes")
            table[index, column] = tensor.data_ptr()
        table[index, WINDOW_COLUMN] = window
    return table.to(layers[0]["qkv"].device)


def new_step_state(device, kv_heads: int) -> Tensor:
    """The kernel's counters, int64 [1 + K], all zero before the first step; one for all steps that run in turn."""
    return torch.zeros(1 + kv_heads, dtype=torch.int64, device=device)


def launch_decode_step(
    token, embed, table, cos, sin, block_table, context_len, slot, state, shape: StepShape, scale: float, *,
    tiles: StepTiles, phase_by_phase: bool = False, cooperative: bool = True, phases: int = ALL_PHASES,
):  # fmt: skip
    """Runs the kernel; phase_by_phase: one launch a phase, without barriers (no co-residency needed, and for tests);
    phases: leave some out, to time the others."""
    from fnllm_kernels.decode_step_kernel import decode_step_kernel

    device, layers, group = embed.device, table.shape[0], shape.heads // shape.kv_heads
    splits = tiles.programs // shape.kv_heads
    h, mid = embed.new_empty(1, shape.hidden), embed.new_empty(shape.hidden)
    qkv = embed.new_empty((shape.heads + 2 * shape.kv_heads) * shape.head_dim)
    attended, act = embed.new_empty(shape.heads * shape.head_dim), embed.new_empty(shape.mlp)
    part = torch.empty(shape.heads * splits * shape.head_dim, dtype=torch.float32, device=device)
    stat = torch.empty(shape.heads * splits, dtype=torch.float32, device=device)
    pairs = shape.head_dim // 2
    wide = max(1, tiles.warps * 128 // pairs)
    constants = dict(
        H=shape.hidden, I=shape.mlp, G=group, KV_HEADS=shape.kv_heads, HEAD_PAIRS=pairs, BLOCK_SIZE=shape.block_size,
        QK_NORM=shape.qk_norm, QKV_BIAS=shape.qkv_bias, PROGRAMS=tiles.programs, NS=splits, WARPS=tiles.warps,
        PAIRS=tiles.pairs, KW=wide, KI=max(1, tiles.keys // wide), LEAST=tiles.least, num_warps=tiles.warps,
    )  # fmt: skip
    for name, cut in (("QKV", tiles.qkv), ("O", tiles.o), ("UP", tiles.up), ("DOWN", tiles.down)):
        constants |= dict(zip((f"{name}_R", f"{name}_C", f"{name}_U", f"{name}_G"), cut, strict=True))

    def launch(first, last, phases, barrier):
        extra = {"launch_cooperative_grid": True} if barrier and cooperative else {}
        decode_step_kernel[(tiles.programs,)](
            table, token, embed.view(torch.int32), cos.view(torch.int64), sin.view(torch.int64), block_table,
            context_len, slot, h, mid, qkv, attended, act, part, stat, state[1:].view(torch.int32), state, shape.eps,
            scale, first, last, layers, PHASES=phases, BARRIER=barrier, **constants, **extra,
        )  # fmt: skip

    if not phase_by_phase:
        launch(0, layers, phases, True)
        return h
    launch(0, 0, 1, False)
    for layer in range(layers):
        for phase in (2, 4, 8, 16, 32):
            launch(layer, layer + 1, phase, False)
    return h


def decode_step_reference(
    token, embed, layers, caches, windows, cos, sin, block_table, context_len, slot, shape, scale
):
    """The same in plain torch from the layers' dicts."""
    h = embed[token.view(1)]
    for layer, (k_cache, v_cache), window in zip(layers, caches, windows, strict=True):
        qkv = linear_reference(
            h, layer["qkv"], bias=layer.get("qkv_bias"), norm=layer["input_norm"], eps=shape.eps
        )  # fmt: skip
        y = decode_attention_reference(
            qkv, layer.get("q_norm"), layer.get("k_norm"), shape.eps, cos, sin, k_cache, v_cache, block_table,
            context_len, slot, shape.heads, scale, window,
        )  # fmt: skip
        h = linear_reference(y, layer["o"], residual=h)
        act = linear_reference(h, layer["gate_up"], norm=layer["post_norm"], eps=shape.eps, gated=True)
        h = linear_reference(act, layer["down"], residual=h)
    return h

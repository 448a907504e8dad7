"""x @ w.T for many rows: one program per multiprocessor, which goes from tile to tile of the result.

The next tile's operands are on their way while a finished one is written; the tensor memory accelerator (TMA) does
both. Each output is one chain along the inputs, with the bits of `tiled_linear.py`. With gate and up, a tile of the
weight is a box of as many rows of either half, so that both are one product of the tensor cores' full width.
"""

from jaxtyping import Float
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

ROWS, OUTPUTS, INPUTS = 128, 128, 64  # of a tile, which holds as many outputs twice: gate and up, or neighbours
LEAST_ROWS = 512  # below, cuBLAS and smaller tiles are faster
LEAST_FULL = 0.8  # share of the programs' time in which all have a tile
SHARED = 230_000  # bytes of a multiprocessor's memory that a program needs


def keeps_busy(rows: int, outputs: int, gated: bool, multiprocessors: int, shared: int) -> bool:
    """Whether the machine holds these programs, and none of them is without a tile for long; pure.

    >>> [keeps_busy(rows, 12288, True, 132, 232448) for rows in (256, 512, 8192)]
    [False, True, True]
    """
    if shared < SHARED or rows < LEAST_ROWS or outputs < OUTPUTS * (2 - gated) or outputs % 8:
        return False
    tiles = -(-rows // ROWS) * -(-outputs // (OUTPUTS * (2 - gated)))
    return tiles >= LEAST_FULL * -(-tiles // multiprocessors) * multiprocessors


def launch_persistent(
    x: Float[Tensor, "T I"], w: Float[Tensor, "O I"], *, gated: bool = False, programs: int
) -> Float[Tensor, "T Y"]:
    """x @ w.T, with `gated` silu(gate) * up of w's two halves; for matrices that TMA can fetch and `keeps_busy` takes.

    At 8192 rows of 24576 x 4096 on an H200, gated: 2,299 us, cuBLAS and SiLU 2,435; at its limit of power 2,456 against
    2,655, and 2,545 against 2,547 in another run. Without gates as long as cuBLAS
    (benchmarks/results/linear_tiles.json).
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    (tokens, inputs), outputs = x.shape, w.shape[0] // 2 if gated else w.shape[0]
    out = x.new_empty(tokens, outputs)
    if gated:
        weight = TensorDescriptor.from_tensor(w.view(2, outputs, inputs), [2, OUTPUTS, INPUTS])
    else:
        weight = TensorDescriptor.from_tensor(w, [2 * OUTPUTS, INPUTS])
    tiles = triton.cdiv(tokens, ROWS) * triton.cdiv(outputs, OUTPUTS * (2 - gated))
    persistent_linear_kernel[(min(programs, tiles),)](
        TensorDescriptor.from_tensor(x, [ROWS, INPUTS]), weight, TensorDescriptor.from_tensor(out, [ROWS, OUTPUTS]),
        tokens, outputs, inputs, GATED=gated, ROWS=ROWS, OUTPUTS=OUTPUTS, INPUTS=INPUTS,
        num_warps=8, num_stages=3 if gated else 4,
    )  # fmt: skip
    return out


if triton is not None:
    GROUP = tl.constexpr(16)  # tiles of rows whose programs run side by side and find a weight in the L2 cache

    @triton.jit(do_not_specialize=["tokens"])
    def persistent_linear_kernel(
        x, w, out, tokens, outputs, inputs,
        GATED: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    ):  # fmt: skip
        """out [tokens, outputs]; all three are descriptors of tiles."""
        WIDTH: tl.constexpr = OUTPUTS if GATED else 2 * OUTPUTS
        all_rows = tl.cdiv(tokens, ROWS)
        in_group = GROUP * tl.cdiv(outputs, WIDTH)
        for tile in tl.range(tl.program_id(0), all_rows * tl.cdiv(outputs, WIDTH), tl.num_programs(0), flatten=True):
            first = tile // in_group * GROUP
            group = tl.minimum(all_rows - first, GROUP)
            # A last tile lies over the one before rather than past the end: both write the same there.
            row = tl.minimum((first + tile % in_group % group) * ROWS, tokens - ROWS)
            column = tl.minimum(tile % in_group // group * WIDTH, outputs - WIDTH)
            total = tl.zeros((ROWS, 2 * OUTPUTS), tl.float32)
            for i in range(0, inputs, INPUTS):
                if GATED:
                    weights = tl.reshape(w.load([0, column, i]), (2 * OUTPUTS, INPUTS))
                else:
                    weights = w.load([column, i])
                total = tl.dot(x.load([row, i]), tl.trans(weights), total)
            left, right = tl.split(tl.permute(tl.reshape(total, (ROWS, 2, OUTPUTS)), (0, 2, 1)))
            left, right = left.to(out.dtype), right.to(out.dtype)
            if GATED:
                gate = left.to(tl.float32)
                gate = (gate / (1.0 + tl.exp(-gate))).to(out.dtype).to(tl.float32)
                out.store([row, column], (gate * right.to(tl.float32)).to(out.dtype))
            else:
                out.store([row, column], left)
                out.store([row, column + OUTPUTS], right)

"""Rows times their group's matrix: against float64, gradients of any order, traced, and the kernel in both its forms.

Run as a program with TRITON_INTERPRET=1, this file checks the Triton kernel on the CPU.
"""

import sys
from pathlib import Path

import pytest
import torch

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "kernels")]

from interpreted import interpreted
from kernel_cases import apart

from fnllm_kernels import grouped_linear as op

torch.set_num_threads(1)
# rows of each group, width, outputs
CASES = {
    "odd": ([3, 0, 1, 5], 10, 7),
    "one row": ([0, 1, 0], 8, 12),
    "one group": ([37], 24, 40),
    "many": ([0, 40, 17, 16, 33, 0, 2], 40, 70),
    "no rows": ([0, 0], 8, 8),
}


def case_of(name: str, dtype=torch.float32, device="cpu"):
    sizes, width, outputs = CASES[name]
    torch.manual_seed(len(name))
    x = torch.randn(sum(sizes), width, device=device).to(dtype)
    w = torch.randn(len(sizes), outputs, width, device=device).to(dtype)
    ends = torch.tensor(sizes).cumsum(0).int().to(device)
    groups = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(device)
    return x, w, ends, groups


def exact(x, w, groups):
    return torch.einsum("roh,rh->ro", w[groups].double(), x.double())


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_every_row_meets_its_groups_matrix(name, dtype):
    x, w, ends, groups = case_of(name, dtype)
    got = op.grouped_linear(x, w, ends)
    assert got.dtype == dtype
    tolerance = {torch.float32: 5e-5, torch.bfloat16: 2e-1, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(got.double(), exact(x, w, groups), rtol=0, atol=tolerance)


def test_first_and_second_gradients():
    x, w, ends, _ = case_of("odd", torch.float64)
    x, w = x.requires_grad_(), w.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: op.grouped_linear(x, w, ends), (x, w))
    assert torch.autograd.gradgradcheck(lambda x, w: op.grouped_linear(x, w, ends), (x, w))


def test_gradients_of_each_example_by_torch_func():
    x, w, ends, groups = case_of("odd", torch.float64)
    batch = torch.stack([x, 2 * x, x + 1])

    def loss(w, x):
        return op.grouped_linear(x, w, ends).square().sum()

    def want(w, x):
        return torch.einsum("roh,rh->ro", w[groups], x).square().sum()

    got, expected = (torch.func.vmap(torch.func.grad(f), in_dims=(None, 0))(w, batch) for f in (loss, want))
    torch.testing.assert_close(got, expected)


@pytest.mark.compiled
def test_it_traces_for_any_number_of_rows():
    run = torch.compile(op.grouped_linear, fullgraph=True, dynamic=True)
    for name in ("odd", "many"):
        x, w, ends, groups = case_of(name)
        torch.testing.assert_close(run(x, w, ends).double(), exact(x, w, groups), rtol=0, atol=5e-5)


@pytest.mark.compiled
def test_its_gradients_trace():
    x, w, ends, _ = case_of("odd", torch.float64)
    x, w = x.requires_grad_(), w.requires_grad_()

    def loss(x, w):
        return op.grouped_linear(x, w, ends).square().sum()

    traced = torch.compile(loss, fullgraph=True, backend="aot_eager")
    got, want = (torch.autograd.grad(function(x, w), (x, w)) for function in (traced, loss))
    torch.testing.assert_close(got, want)


def check_kernel(device: str, dtypes=(torch.float32,), config: dict | None = None) -> None:
    for name in CASES:
        for dtype in dtypes:
            x, w, ends, groups = case_of(name, dtype, device)
            if not len(x):
                continue
            turned = w.transpose(1, 2).contiguous().transpose(1, 2)
            for weight, rows in ((w, x), (turned, torch.cat([x, x], 1)[:, : x.shape[1]])):
                got = op.launch_grouped_linear(rows, weight, ends, config)
                difference = (got.double() - exact(x, w, groups)).norm() / exact(x, w, groups).norm()
                assert difference < (1e-6 if dtype == torch.float32 else 5e-3), (name, dtype, float(difference))
            assert torch.equal(op.launch_grouped_linear(rows, weight, apart(ends), config), got)


def test_the_interpreted_kernel():
    assert "ok" in interpreted(__file__)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 65, 2000])
@pytest.mark.parametrize("groups", [3, 128])
def test_the_kernel_on_a_gpu(rows, groups):
    check_kernel("cuda", (torch.float32, torch.bfloat16, torch.float16))
    torch.manual_seed(rows)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(rows, 200, device="cuda").to(dtype)
        w = torch.randn(groups, 136, 200, device="cuda").to(dtype)
        chosen = torch.randint(0, groups, (rows,), device="cuda").sort().values
        ends = torch.searchsorted(chosen, torch.arange(groups, device="cuda"), right=True, out_int32=True)
        got, want = op.grouped_linear(x, w, ends).double(), exact(x, w, chosen)
        assert (got - want).norm() / want.norm() < (1e-6 if dtype == torch.float32 else 5e-3)
        # A row's value depends on no other row.
        alone = op.launch_grouped_linear(x[-1:], w[chosen[-1] : chosen[-1] + 1], torch.tensor([1], device="cuda"))
        assert (alone.double() - got[-1:]).norm() / got[-1:].norm() < (1e-6 if dtype == torch.float32 else 5e-3)


if __name__ == "__main__":
    check_kernel("cpu", (torch.float32,), {"BLOCK_R": 16, "BLOCK_O": 16, "BLOCK_H": 16})
    check_kernel("cpu", (torch.float32,))
    print("ok")

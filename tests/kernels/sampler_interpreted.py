"""The sampler's Triton kernels against their references on CPU tensors; run with TRITON_INTERPRET=1.

`test_sampler_kernels.py` starts this in its own process, since Triton reads that variable when kernels are defined.
"""

import sys
from pathlib import Path

sys.path.extend([str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "kernels")])

import torch
from kernel_cases import apart

from fnllm_kernels import sample_logits, threshold
from fnllm_kernels.order_keys import NAN_ID, NOTHING_ID, packed_ids, packed_scores


def check_sample(device: str = "cpu") -> None:
    torch.manual_seed(0)
    logits = torch.randn(10, 1501, device=device) * 2
    logits[0, 700] = logits[0, 30] = 50.0  # equal maxima: the lower id
    logits[5, 3] = torch.nan
    logits[6, 1450] = torch.nan  # in the second slice past its end
    logits[7] = -torch.inf
    logits[8, 9] = torch.inf
    logits[9, 1400] = torch.nan
    logits[4] = 0.0
    logits[4, 8] = -0.0
    temperature = torch.tensor([0.0, 1.0, 0.7, 1e-12, 0.0, 1.3, 0.0, 1.0, 0.0, 0.5], device=device)
    seed = torch.tensor([1, -5, 2**62, 3, 4, 5, 6, 7, 8, 9], device=device)
    position = torch.tensor([0, 1, 2, 70000, 4, 5, 6, 7, 8, 9], device=device)
    for dtype in (torch.float32, torch.float16):
        for start, valid in ((0, 1501), (3002, 1444)):
            args = (logits.to(dtype), temperature, seed, position, start, valid)
            got, want = sample_logits.launch_sample_logits(*args), sample_logits.sample_logits_reference(*args)
            assert torch.equal(packed_ids(got), packed_ids(want)), (dtype, start)
            torch.testing.assert_close(packed_scores(got), packed_scores(want), rtol=1e-5, atol=1e-5, equal_nan=True)
            found = packed_ids(got).tolist()
            assert found[0] == start + 30 and found[4] == start
            assert [i for i, id in enumerate(found) if id == NAN_ID] == ([5, 6, 8, 9] if valid == 1501 else [5, 8, 9])
            assert [i for i, id in enumerate(found) if id == NOTHING_ID] == [7]


def check_threshold(device: str = "cpu") -> None:
    torch.manual_seed(2)
    for dtype in (torch.float32, torch.bfloat16):
        logits = (torch.randn(4, 300, device=device) * 3).to(dtype)
        logits[1, :200] = logits[1, 200]
        logits[2, 100:] = -torch.inf
        top = logits.float().amax(-1)
        temperature = torch.tensor([1.0, 0.6, 2.0, 1e-30], device=device)
        for valid in (257,):
            counts = torch.tensor([1, 150, 400, 2**62], device=device)
            for by_mass, target in ((False, counts), (True, (counts.double() * 2.0**38).clamp(max=2.0**62).long())):
                args = (logits, top, temperature, target, by_mass, valid)
                (value, above), (want_value, want_above) = (
                    threshold.launch_reach(*args),
                    threshold.reach_reference(*args),
                )
                assert torch.equal(value, want_value), (dtype, valid, by_mass, value, want_value)
                torch.testing.assert_close(above, want_above, rtol=1e-6, atol=300)
                probes = torch.stack([value, value - 1, torch.full_like(value, torch.nan)], 1)
                args = (logits, top, temperature, probes, by_mass, valid)
                torch.testing.assert_close(
                    threshold.launch_measure_above(*args), threshold.measure_above_reference(*args), rtol=1e-6, atol=300
                )


def check_strides(device: str = "cpu") -> None:
    """Settings of rows lie apart, or are one number for all, where a `sample` of one's own changes them."""
    torch.manual_seed(3)
    logits = torch.randn(3, 70, device=device)
    top, one, seed = logits.amax(-1), torch.tensor(0.7, device=device), torch.tensor([5, 6, 7], device=device)
    target, probes = torch.tensor([2, 5, 9], device=device), torch.zeros(3, 1, device=device)
    for form, temperature in ((apart, one.repeat(3)), (lambda x: x, one.expand(3))):
        plain = temperature.contiguous()
        for run, usual, strided in (
            (sample_logits.launch_sample_logits, (plain, seed, seed), (form(temperature), form(seed), form(seed))),
            (threshold.launch_reach, (top, plain, target, True), (form(top), form(temperature), form(target), True)),
            (threshold.launch_measure_above, (top, plain, probes, True), (form(top), form(temperature), probes, True)),
        ):
            last = (0, 70) if run is sample_logits.launch_sample_logits else (70,)
            torch.testing.assert_close(run(logits, *strided, *last), run(logits, *usual, *last), rtol=0, atol=0)


if __name__ == "__main__":
    for name, check in (("sample", check_sample), ("threshold", check_threshold), ("strides", check_strides)):
        check()
        print(name)

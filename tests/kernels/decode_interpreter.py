"""Triton's interpreter with bf16 as a GPU has it (rounding to nearest even, products of bf16 operands), and with
numbers read from memory as loop bounds, which NumPy 2.4 refuses for arrays of one element."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_convert = interpreter._convert_float


def _convert_float(data, source, target, mode):
    if source == tl.float32 and target == tl.bfloat16:
        bits = np.ascontiguousarray(data).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    if source == tl.bfloat16 and target == tl.float32:
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return _convert(data, source, target, mode)


def _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    operands = [
        _convert_float(v.data, tl.bfloat16, tl.float32, None) if v.dtype == tl.bfloat16 else v.data for v in (a, b)
    ]
    return TensorHandle(np.matmul(*operands, dtype=d.data.dtype) + d.data, d.dtype.scalar)


_patch_tensor = interpreter._patch_lang_tensor


def _patch_lang_tensor(tensor, scope):
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_lang_tensor
interpreter._convert_float = _convert_float
InterpreterBuilder.create_dot = _create_dot

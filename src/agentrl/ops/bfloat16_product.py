"""A product of bfloat16 matrices, in float32 sums on CPU, which PyTorch's own operators do not have.

PyTorch gives it only for widened factors under `torch.backends.mkldnn.matmul.fp32_precision = "bf16"`: a
setting of the process, under which other threads' float32 products would be rounded too. The BLAS that
PyTorch links has the product as one call, without a setting.
"""

# M, N sides of the result; K the depth

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

# Of CBLAS: matrices whose rows, or whose columns, stand one after the other.
_ROW_MAJOR, _AS_IS, _TRANSPOSED = 101, 111, 112
# MKL's integers have 32 bits in PyTorch's builds; it would read the lower half of a larger one.
_LARGEST = 2**31 - 1


@cache
def multiplies_bfloat16() -> bool:
    """Whether `mm_float32_` runs here, and faster than a product of widened factors: with Intel's AMX.

    Without AMX, bfloat16 instructions or not, MKL multiplies no faster than in float32.
    """
    return torch.cpu.get_capabilities().get("amx_bf16", False) and linked_gemm() is not None


@cache
def linked_gemm() -> Callable[..., None] | None:
    """oneMKL's cblas_gemm_bf16bf16f32 as PyTorch links it; None for builds without it."""
    # the symbols of a library that is loaded include those of what it depends on: libtorch_cpu, MKL
    gemm = getattr(ctypes.CDLL(torch._C.__file__), "cblas_gemm_bf16bf16f32", None)
    if gemm is not None:
        order, size, scale, matrix = ctypes.c_int, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
        # layout, 2 transpositions, M N K, alpha, A lda, B ldb, beta, C ldc; sizes in 64 bits, for either MKL
        gemm.argtypes = [order] * 3 + [size] * 3 + [scale] + [matrix, size] * 2 + [scale, matrix, size]
        gemm.restype = None
    return gemm


def _multiply(out: Tensor, lhs: Tensor, rhs: Tensor, accumulate: bool = False) -> Tensor:
    gemm = linked_gemm()
    assert gemm is not None
    assert (lhs.dtype, rhs.dtype, out.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    assert out.is_contiguous()
    assert (*out.shape, lhs.shape[1]) == (lhs.shape[0], rhs.shape[1], rhs.shape[0])
    sides = *out.shape, lhs.shape[1]
    if max(sides) > _LARGEST:
        raise ValueError(f"a bfloat16 product's sides end at {_LARGEST:,}, got {sides}; use smaller tiles")
    if min(sides) == 0:
        return out if accumulate else out.zero_()
    (lhs, *first), (rhs, *second) = _blas_operand(lhs), _blas_operand(rhs)
    gemm(
        _ROW_MAJOR, first[0], second[0], *sides, 1.0, lhs.data_ptr(), first[1], rhs.data_ptr(), second[1],
        float(accumulate), out.data_ptr(), out.shape[1],
    )  # fmt: skip
    return out


def _blas_operand(matrix: Tensor) -> tuple[Tensor, int, int]:
    """The matrix as BLAS can read it, copied where it must be; whether transposed; its leading dimension."""
    (rows, columns), (down, across) = matrix.shape, matrix.stride()
    if across == 1 and columns <= down <= _LARGEST:
        return matrix, _AS_IS, down
    if down == 1 and rows <= across <= _LARGEST:
        return matrix, _TRANSPOSED, across
    return matrix.contiguous(), _AS_IS, columns


# An operator, so that whoever counts or profiles matrix products in the dispatcher sees it.
_LIBRARY = torch.library.Library("agentrl", "FRAGMENT")
_LIBRARY.define("mm_float32_(Tensor(a!) self, Tensor lhs, Tensor rhs, bool accumulate=False) -> Tensor(a!)")
_LIBRARY.impl("mm_float32_", _multiply, "CPU")


def mm_float32_(out: Tensor, lhs: Tensor, rhs: Tensor, *, accumulate: bool = False) -> Tensor:
    """Overwrite out [M, N], contiguous float32, with lhs [M, K] @ rhs [K, N], both bfloat16, or add it there.

    Each term is exact, and terms are summed in float32. Only where `multiplies_bfloat16`. Raises ValueError
    for a side above 2^31 - 1.
    """
    return torch.ops.agentrl.mm_float32_.default(out, lhs, rhs, accumulate)

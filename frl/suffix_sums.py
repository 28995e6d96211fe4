"""Discounted suffix sums as one operation (:mod:`frl.one_operation`): one pass over the data, from the last step to the first."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from frl.one_operation import library, vectorised

SOURCE = vectorised(r"""
#include <cstdint>
// y[t][i] = x[t][i] + factor[i] * (linked[t][i] ? y[t + 1][i] : 0) over `steps` steps of `n` numbers; `stride` of the factor is 0 or 1.
template <typename T> static void frl_suffix_sums(int64_t steps, int64_t n, const T* x, const T* factor, int64_t stride, const uint8_t* linked, T* y) {
  if (steps == 0) return;
  for (int64_t i = 0; i < n; ++i) y[(steps - 1) * n + i] = x[(steps - 1) * n + i];
  for (int64_t t = steps - 2; t >= 0; --t) {
    const T* const a = x + t * n;
    const uint8_t* const l = linked + t * n;
    const T* const after = y + (t + 1) * n;
    T* const b = y + t * n;
    if (stride == 0) {
      const T f = factor[0];
      #pragma omp simd
      for (int64_t i = 0; i < n; ++i) b[i] = a[i] + f * (l[i] ? after[i] : T(0));
    } else {
      #pragma omp simd
      for (int64_t i = 0; i < n; ++i) b[i] = a[i] + factor[i] * (l[i] ? after[i] : T(0));
    }
  }
}
""")
_ENTRIES = """
extern "C" void frl_suffix_sums_float(int64_t s, int64_t n, const float* x, const float* f, int64_t d, const uint8_t* l, float* y) {
  frl_suffix_sums(s, n, x, f, d, l, y);
}
extern "C" void frl_suffix_sums_double(int64_t s, int64_t n, const double* x, const double* f, int64_t d, const uint8_t* l, double* y) {
  frl_suffix_sums(s, n, x, f, d, l, y);
}
"""
NAMES = {torch.float32: "float", torch.float64: "double"}


def applies(x: Tensor, factor: Tensor) -> bool:
    """Whether the operation takes these, and nobody can ask for a gradient."""
    return x.dtype in NAMES and factor.dtype == x.dtype and x.device.type == "cpu" and not (x.requires_grad or factor.requires_grad)


def suffix_sums(x: Tensor, factor: Tensor, linked: Tensor) -> Tensor:
    """What :func:`frl.returns.discounted_suffix_sums` says, for arguments that :func:`applies` takes."""
    if factor.numel() > 1:
        factor = factor.expand(x.shape[1:])
    return operation(x.contiguous(), factor.contiguous(), linked.contiguous())


@torch.library.custom_op("frl::suffix_sums", mutates_args=(), device_types="cpu")
def operation(x: Tensor, factor: Tensor, linked: Tensor) -> Tensor:
    """Contiguous ``x`` and ``linked [T, ...]``; ``factor`` of one element, or contiguous with the shape of a step."""
    y = torch.empty_like(x)
    if x.numel():
        pointers = [ctypes.c_void_p(v.data_ptr()) for v in (x, factor, linked, y)]
        steps, stride = x.shape[0], int(factor.numel() > 1)
        getattr(library(SOURCE + _ENTRIES), f"frl_suffix_sums_{NAMES[x.dtype]}")(
            ctypes.c_int64(steps), ctypes.c_int64(x.numel() // steps), *pointers[:2], ctypes.c_int64(stride), *pointers[2:]
        )
    return y


@operation.register_fake
def _(x: Tensor, factor: Tensor, linked: Tensor) -> Tensor:
    return torch.empty_like(x)


@operation.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Tensor) -> tuple[Tensor, int]:
    size = info.batch_size
    last = lambda v, d: v.unsqueeze(-1).expand(*v.shape, size) if d is None else v.movedim(d, -1)
    x, factor, linked = (last(v, d) for v, d in zip(args, in_dims, strict=True))
    return suffix_sums(x, factor, linked), x.ndim - 1

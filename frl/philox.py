"""Philox4x32-10 as one operation (:mod:`frl.one_operation`).

Written out, ten rounds are two hundred operations on integers, which take a compiler seconds for every place where numbers are drawn. As one operation
they take none, and C++ is faster than what would be generated. Same words as :func:`frl.rng.philox4x32`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from frl.one_operation import library, vectorised

SOURCE = vectorised(r"""
#include <cstdint>
static inline void rounds(int n, uint32_t* a, uint32_t* b, uint32_t* c, uint32_t* d, uint32_t* k, uint32_t* l) {
  for (int r = 0; r < 10; ++r) {
    #pragma omp simd
    for (int i = 0; i < n; ++i) {
      const uint64_t p = (uint64_t)a[i] * 0xD2511F53u, q = (uint64_t)c[i] * 0xCD9E8D57u;
      a[i] = (uint32_t)(q >> 32) ^ b[i] ^ k[i];
      b[i] = (uint32_t)q;
      c[i] = (uint32_t)(p >> 32) ^ d[i] ^ l[i];
      d[i] = (uint32_t)p;
      k[i] += 0x9E3779B9u;
      l[i] += 0xBB67AE85u;
    }
  }
}
// Counter (first, operand 0, third, operand 1), key (operand 2, operand 3): operands with strides in elements, 0 where they are broadcast, over a shape of
// `ndim` dimensions. `out` holds the first words of all elements, then the second ones, and so on.
extern "C" void frl_philox(
    int ndim, const int64_t* shape, const int64_t* strides, const int64_t* const* operands, int64_t first, int64_t third, int64_t* out, int threads) {
  constexpr int tile = 64;
  int64_t total = 1;
  for (int d = 0; d < ndim; ++d) total *= shape[d];
  // Tiles lie along the last dimension if that is long, and else wherever they come to lie.
  const bool along = ndim > 0 && shape[ndim - 1] >= tile / 2;
  const int64_t inner = along ? shape[ndim - 1] : total, per_row = (inner + tile - 1) / tile, tiles = inner ? total / inner * per_row : 0;
  #pragma omp parallel for num_threads(threads) if (threads > 1) schedule(static)
  for (int64_t m = 0; m < tiles; ++m) {
    uint32_t w[4][tile] = {}, a[tile], c[tile];
    const int64_t from = m % per_row * tile, start = m / per_row * inner + from;
    const int n = (int)(inner - from < tile ? inner - from : tile);
    int64_t index[16], offset[4] = {0, 0, 0, 0}, rest = start;
    for (int d = ndim - 1; d >= 0; --d) {
      index[d] = rest % shape[d];
      rest /= shape[d];
      for (int j = 0; j < 4; ++j) offset[j] += index[d] * strides[j * ndim + d];
    }
    if (along) {
      for (int j = 0; j < 4; ++j) {
        const int64_t* const x = operands[j] + offset[j];
        const int64_t stride = strides[j * ndim + ndim - 1];
        if (stride == 0) for (int i = 0; i < n; ++i) w[j][i] = (uint32_t)x[0];
        else if (stride == 1) for (int i = 0; i < n; ++i) w[j][i] = (uint32_t)x[i];
        else for (int i = 0; i < n; ++i) w[j][i] = (uint32_t)x[i * stride];
      }
    } else {
      for (int i = 0; i < n; ++i) {
        for (int j = 0; j < 4; ++j) w[j][i] = (uint32_t)operands[j][offset[j]];
        for (int d = ndim - 1; d >= 0; --d) {
          for (int j = 0; j < 4; ++j) offset[j] += strides[j * ndim + d];
          if (++index[d] < shape[d]) break;
          for (int j = 0; j < 4; ++j) offset[j] -= shape[d] * strides[j * ndim + d];
          index[d] = 0;
        }
      }
    }
    for (int i = 0; i < tile; ++i) a[i] = (uint32_t)first, c[i] = (uint32_t)third;
    rounds(tile, a, w[0], c, w[1], w[2], w[3]);
    const uint32_t* const words[4] = {a, w[0], c, w[1]};
    for (int j = 0; j < 4; ++j) for (int i = 0; i < n; ++i) out[j * total + start + i] = words[j][i];
  }
}
""")
_MAX_DIMS = 16


def layout(*operands: Tensor) -> tuple[list[int], list[int]]:
    """Common shape, and the strides of all operands in it, one after the other."""
    words = torch.broadcast_tensors(*operands)
    if words[0].ndim > _MAX_DIMS:
        raise ValueError(f"at most {_MAX_DIMS} dimensions, got {words[0].ndim}")
    return list(words[0].shape), [s for x in words for s in x.stride()]


def philox(c1: Tensor, c3: Tensor, k0: Tensor, k1: Tensor, c0: int, c2: int) -> Tensor:
    """Four words ``[..., 4]`` for the counter ``(c0, c1, c2, c3)`` under the key ``(k0, k1)``: int64 tensors that broadcast, values in [0, 2^32).

    In memory the first words of all elements come first, then the second ones; under ``vmap`` what is mapped comes last. Loops over rows then read one
    number after the other.
    """
    return operation(c1, c3, k0, k1, c0, c2).movedim(0, -1)


@torch.library.custom_op("frl::philox", mutates_args=(), device_types="cpu")
def operation(c1: Tensor, c3: Tensor, k0: Tensor, k1: Tensor, c0: int, c2: int) -> Tensor:
    """The words as ``[4, ...]``."""
    shape, strides = layout(c1, c3, k0, k1)
    out = torch.empty((4, *shape), dtype=torch.int64)
    if out.numel():
        library(SOURCE).frl_philox(
            len(shape),
            (ctypes.c_int64 * len(shape))(*shape),
            (ctypes.c_int64 * len(strides))(*strides),
            (ctypes.c_void_p * 4)(*(x.data_ptr() for x in (c1, c3, k0, k1))),
            ctypes.c_int64(c0),
            ctypes.c_int64(c2),
            ctypes.c_void_p(out.data_ptr()),
            torch.get_num_threads() if out.numel() >= 2**14 else 1,
        )
    return out


@operation.register_fake
def _(c1: Tensor, c3: Tensor, k0: Tensor, k1: Tensor, c0: int, c2: int) -> Tensor:
    return torch.empty((4, *torch.broadcast_shapes(c1.shape, c3.shape, k0.shape, k1.shape)), dtype=torch.int64, device=k0.device)


@operation.register_vmap
def _(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    aligned = [x.unsqueeze(-1) if d is None else x.movedim(d, -1) for x, d in zip(args[:4], in_dims[:4], strict=True)]
    words = operation(*aligned, *args[4:])
    return words, words.ndim - 1

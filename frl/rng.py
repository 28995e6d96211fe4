"""Counter-based random numbers: keys are tensors, draws are pure functions of them.

The generator is Philox4x32-10 on int64 tensors whose values stay below 2^32. A key is int64 ``[2]`` (two 32-bit words); a batch of keys ``[..., 2]`` draws
``[..., *shape]``, the same bits as one draw for each key, with or without ``vmap``. Element ``j`` of a draw depends on the key and on ``j`` alone, so a longer
draw begins with the shorter one. A key is used once: ``split`` or ``fold_in`` it for more; both encrypt other counters than the draws do. Words, float32
uniforms, float64 ones on [0, 1) and integers are the same bits eagerly, compiled, under ``vmap`` and on every device;
what passes a logarithm agrees to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from frl import philox
from frl.one_operation import in_use

Word: TypeAlias = Tensor | int

_MASK = 0xFFFFFFFF
_ROUNDS = 10
# The multipliers are kept as M - 2^32: the product of such a number with a 32-bit word fits a signed 64-bit integer, M times the word does not.
_M0 = 0xD2511F53 - 2**32
_M1 = 0xCD9E8D57 - 2**32
_W0 = 0x9E3779B9
_W1 = 0xBB67AE85
# The first counter word tells what a block of words is for, so that derived keys and drawn words come from disjoint parts of the counter space. What varies
# goes into the second and fourth words, which the first round does not multiply: most of that round is arithmetic on constants.
_DRAW, _SPLIT, _FOLD = 0, 1, 2


def _multiply(x: Word, multiplier: int) -> tuple[Word, Word]:
    """High and low 32 bits of ``x * (multiplier + 2^32) = p + x 2^32``: the shift of the signed ``p`` rounds down, so the high word is exact."""
    product = x * multiplier
    return (product >> 32) + x, product & _MASK


def philox4x32(counter: Tensor | Sequence[Word], key: Tensor) -> Tensor:
    """Philox4x32-10: encrypts a 128-bit counter under a 64-bit key.

    Args:
        counter: int64 ``[..., 4]``, or four words (int64 tensors or ints) that broadcast; values in [0, 2^32).
        key: int64 ``[2]``, or ``[..., 2]`` whose leading dimensions broadcast with the counter's.

    Returns:
        int64 ``[..., 4]``, words in [0, 2^32).

    Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Unsigned 32-bit arithmetic is done in int64.
    """
    c0, c1, c2, c3 = counter.unbind(-1) if isinstance(counter, Tensor) else counter
    k0, k1 = key.unbind(-1)
    if in_use() and isinstance(c0, int) and isinstance(c2, int):
        return philox.philox(torch.as_tensor(c1, dtype=torch.int64), torch.as_tensor(c3, dtype=torch.int64), k0, k1, c0, c2)
    # Inductor's vector code takes the product of an arange and a large constant modulo 2^32; the mask makes it multiply an ordinary tensor.
    c0, c2 = c0 & _MASK, c2 & _MASK
    for i in range(_ROUNDS):
        high0, low0 = _multiply(c0, _M0)
        high1, low1 = _multiply(c2, _M1)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        if i < _ROUNDS - 1:
            k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    # By now each word is a tensor and has met the shapes of all the others.
    return torch.stack((c0, c1, c2, c3), -1)  # pyright: ignore[reportArgumentType]


def _blocks(key: Tensor, count: int, purpose: int) -> Tensor:
    """Blocks 0 .. count - 1 of a key's stream: ``[..., 2] -> [..., count, 4]``."""
    index = torch.arange(count, dtype=torch.int64, device=key.device)
    return philox4x32((purpose, index, 0, 0), key.unsqueeze(-2))


def _arrange(values: Tensor, shape: Sequence[int]) -> Tensor:
    """Lay the first ``prod(shape)`` numbers of ``[..., blocks, width]`` out as ``[..., *shape]``."""
    lead = values.shape[:-2]
    return values.flatten(-2)[..., : math.prod(shape)].reshape((*lead, *shape))


def key(seed: int, device: torch.device | str | None = None) -> Tensor:
    """The root key of a seed, int64 ``[2]``: its low and its high 32 bits.

    Args:
        seed: a Python int in [-2^63, 2^64); negative ones stand for their two's complement.
        device: where the key, and all that is drawn from it, lives.

    Raises:
        TypeError: ``seed`` is not an int (``bool`` is none).
        ValueError: ``seed`` has more than 64 bits.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, got {type(seed).__name__}")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed must fit 64 bits, got {seed}")
    return torch.tensor([seed & _MASK, (seed >> 32) & _MASK], dtype=torch.int64, device=device)


def split(key: Tensor, num: int = 2) -> Tensor:
    """``num`` new keys, ``[..., 2] -> [..., num, 2]``; the first ones do not depend on ``num``."""
    if num < 0:
        raise ValueError(f"num must be >= 0, got {num}")
    blocks = _blocks(key, (num + 1) // 2, _SPLIT)
    return blocks.reshape(*blocks.shape[:-2], 2 * blocks.shape[-2], 2)[..., :num, :]


def fold_in(key: Tensor, data: Tensor | int) -> Tensor:
    """The key of item ``data`` under ``key``: ``fold_in(key, torch.arange(N))`` are the ``[N, 2]`` keys of N rows, each independent of N.

    Args:
        key: int64 ``[2]``, or ``[..., 2]`` whose leading dimensions broadcast with ``data``.
        data: an int or an integer tensor ``[...]`` of at most 64 bits; a number that changes at run time is passed as a tensor.

    Returns:
        int64 ``[..., 2]``.
    """
    if isinstance(data, Tensor):
        if data.is_floating_point() or data.is_complex() or data.dtype == torch.bool:
            raise TypeError(f"data must be an integer tensor, got {data.dtype}")
        data = data.to(torch.int64)
    return philox4x32((_FOLD, data & _MASK, 0, (data >> 32) & _MASK), key)[..., :2]


def bits(key: Tensor, shape: Sequence[int] = ()) -> Tensor:
    """Random 32-bit words, int64 ``[..., *shape]`` in [0, 2^32)."""
    return _arrange(_blocks(key, -(-math.prod(shape) // 4), _DRAW), shape)


def _wide(words: Tensor) -> Tensor:
    """Pairs of words as 53-bit integers: ``[..., 4] -> [..., 2]``."""
    return (words[..., 0::2] << 21) | (words[..., 1::2] >> 11)


def _wide_blocks(key: Tensor, shape: Sequence[int]) -> Tensor:
    return _wide(_blocks(key, -(-math.prod(shape) // 2), _DRAW))


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype}; draw float32 and convert for narrower types")


def _float64(x: Tensor | float, device: torch.device) -> Tensor:
    return x.to(torch.float64) if isinstance(x, Tensor) else torch.full((), x, dtype=torch.float64, device=device)


def _unit(key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uniform numbers in [0, 1), as fine as keeps them below 1."""
    if dtype == torch.float64:
        return _arrange(_wide_blocks(key, shape), shape).to(dtype) * 2.0**-53
    return (bits(key, shape) >> 8).to(dtype) * 2.0**-24


def uniform(key: Tensor, shape: Sequence[int] = (), *, low: Tensor | float = 0.0, high: Tensor | float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Uniform numbers ``low + (high - low) u`` with ``u`` in [0, 1): multiples of 2^-24 in float32, of 2^-53 in float64.

    Args:
        key: int64 ``[..., 2]``.
        shape: static shape of one key's draw.
        low: lower bound, a number or a tensor that broadcasts with the result; gradients flow through both bounds.
        high: upper bound. With other bounds than 0 and 1 a result can be rounded up to ``high`` itself, never beyond.
        dtype: ``torch.float32`` or ``torch.float64``.

    Returns:
        ``[..., *shape]`` of ``dtype``.
    """
    _check_dtype(dtype)
    u = _unit(key, shape, dtype)
    if not isinstance(low, Tensor) and not isinstance(high, Tensor) and low == 0.0 and high == 1.0:
        return u
    # With a span of 24 bits the product is exact in float64: a compiler that contracts the sum to a fused multiply-add cannot change a bit of a float32 result.
    start = _float64(low, key.device)
    span = (_float64(high, key.device) - start).to(dtype).to(torch.float64)
    return (start + span * u.to(torch.float64)).to(dtype)


def normal(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers, always finite: ``sqrt(-2 log u) (cos, sin)(2 pi v)`` with ``u`` in (0, 1].

    Args:
        key: int64 ``[..., 2]``.
        shape: static shape of one key's draw.
        dtype: ``torch.float32`` (magnitude below 6.7) or ``torch.float64`` (below 8.6).

    Returns:
        ``[..., *shape]`` of ``dtype``.

    Source: Box and Muller, "A note on the generation of random normal deviates", Annals of Mathematical Statistics 29, 1958.
    """
    _check_dtype(dtype)
    if dtype == torch.float64:
        words = _wide_blocks(key, shape)
        u, v = (words[..., :1] + 1).to(dtype) * 2.0**-53, words[..., 1:].to(dtype) * 2.0**-53
    else:
        words = _blocks(key, -(-math.prod(shape) // 4), _DRAW)
        u, v = (words[..., :2] + 1).to(dtype) * 2.0**-32, (words[..., 2:] >> 8).to(dtype) * 2.0**-24
    radius, angle = torch.sqrt(-2.0 * torch.log(u)), (2.0 * math.pi) * v
    return _arrange(torch.cat([radius * torch.cos(angle), radius * torch.sin(angle)], -1), shape)


def gumbel(key: Tensor, shape: Sequence[int] = (), dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard Gumbel numbers ``-log(-log(1 - v))``, always finite, ``[..., *shape]`` of ``dtype`` (float32 or float64)."""
    _check_dtype(dtype)
    # The large values, which decide an argmax, come from small v, where log1p keeps every digit. v = 1 has no finite image.
    if dtype == torch.float64:
        v = ((_arrange(_wide_blocks(key, shape), shape) + 1).to(dtype) * 2.0**-53).clamp(max=1.0 - 2.0**-53)
    else:
        v = ((bits(key, shape) + 1).to(dtype) * 2.0**-32).clamp(max=1.0 - 2.0**-24)
    return -torch.log(-torch.log1p(-v))


def categorical(key: Tensor, logits: Tensor) -> Tensor:
    """Indices drawn with probabilities ``softmax(logits)`` over the last dimension, by ``argmax(logits + gumbel)``.

    Args:
        key: int64 ``[2]``, or ``[..., 2]`` whose leading dimensions are the first ones of ``logits``.
        logits: ``[..., C]``, float32 or float64; an impossible class has -inf.

    Returns:
        int64 ``[...]`` in [0, C).
    """
    return torch.argmax(logits + gumbel(key, logits.shape[key.ndim - 1 :], logits.dtype), -1)


def randint(key: Tensor, shape: Sequence[int], low: Tensor | int, high: Tensor | int) -> Tensor:
    """Integers in [low, high), ``low + floor(word (high - low) / 2^32)``: probabilities are off by a relative (high - low) 2^-32 at most.

    Args:
        key: int64 ``[..., 2]``.
        shape: static shape of one key's draw.
        low: smallest value, an int or an integer tensor that broadcasts with the result.
        high: one more than the largest value; ``1 <= high - low <= 2^31``, which is checked for ints and is the caller's word for tensors.

    Returns:
        int64 ``[..., *shape]``.
    """
    if not isinstance(low, Tensor) and not isinstance(high, Tensor) and not 1 <= high - low <= 2**31:
        raise ValueError(f"high - low must be in [1, 2^31], got low={low}, high={high}")
    return low + ((bits(key, shape) * (high - low)) >> 32)


def permutation(key: Tensor, n: int) -> Tensor:
    """A random order of ``0 .. n - 1``, int64 ``[..., n]`` (n up to 2^31): the order of ``n`` random words; equal words are ordered by index.

    Words meet in about n^2 / 2^33 pairs, so the bias of that rule is below what a test could see.
    """
    index = torch.arange(n, dtype=torch.int64, device=key.device)
    # The index in the low bits makes all elements distinct: every sorting algorithm returns the same order.
    return torch.sort((bits(key, (n,)) << 31) | index, dim=-1).values & (2**31 - 1)

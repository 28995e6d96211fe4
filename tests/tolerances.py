"""One source of numerical tolerances."""

from __future__ import annotations

import torch


def tolerance(dtype: torch.dtype, ops: int = 1) -> float:
    """Relative tolerance for a result of about ``ops`` rounded operations: rounding errors add like a random walk, with a safety factor of 8."""
    return 8 * torch.finfo(dtype).eps * max(1.0, ops**0.5)

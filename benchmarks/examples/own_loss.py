"""frl's optimizer on a loss of one's own: parameters and state are trees, the learning rate is a tensor, nothing is changed in place.

python benchmarks/examples/own_loss.py
"""

from __future__ import annotations

import math

import torch

import frl
from frl import rng


def fit(steps: int = 300) -> list[float]:
    """Fit a sine by a small network; the loss of every step."""
    network = frl.mlp(1, 1, hidden_sizes=[16], activation="tanh")
    optimizer = frl.chain(frl.clip_by_global_norm(1.0), frl.adamw(weight_decay=1e-4))
    params = network.init(rng.key(0))
    state, x = optimizer.init(params), torch.linspace(-2, 2, 64)[:, None]

    def loss(params):
        return (network.apply(params, x) - torch.sin(2 * x)).square().mean()

    losses = []
    for i in range(steps):
        grads, value = torch.func.grad_and_value(loss)(params)
        rate = torch.tensor(0.02 * 0.5 * (1 + math.cos(math.pi * i / steps)))
        updates, state = optimizer.update(grads, state, params, {"learning_rate": rate})
        params = frl.apply_updates(params, updates)
        losses.append(float(value))
    return losses


if __name__ == "__main__":
    losses = fit()
    print(f"loss {losses[0]:.3f} at the start, {losses[-1]:.5f} after {len(losses)} steps")

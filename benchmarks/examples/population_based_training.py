"""Population-based training: members that lag behind go on from a copy of a leader with perturbed hyper-parameters.

All members are one state, so that exploiting is an index and exploring a product (Jaderberg et al. 2017).

    python benchmarks/examples/population_based_training.py
"""

from __future__ import annotations

from typing import Any

import torch

import frl
from frl import rng
from frl.envs.double_integrator import double_integrator
from frl.optim import adam


def train(size: int = 8, rounds: int = 6, updates: int = 10, *, mode: str = "inductor") -> list[dict[str, Any]]:
    """Train, and every few updates replace the worst quarter by the best; ``rates``, ``objective`` and ``parents`` of every round."""
    env = frl.make_vec_env(double_integrator(), 16)
    policy = frl.actor_only(2, 1, network={"type": "mlp", "network_cfg": {"hidden_sizes": [16], "activation": "tanh"}}, initial_log_std=-2.0)
    config = frl.ApgConfig(rollout_mode="complete", segment_length=20, compile_mode=mode)
    many = frl.population(frl.make_apg(env, policy, adam(), config), size)
    state = frl.with_hyper(many.init(rng.key(0)), {"optimizer.learning_rate": torch.logspace(-5, -1, size)})
    key, history = rng.key(1), []
    for _ in range(rounds):
        for _ in range(updates):
            state, rollout = many.collect(state)
            state = many.update(state, rollout)
        objective = state.metrics["objective"].nan_to_num(-torch.inf)
        order, quarter = objective.argsort(descending=True), max(1, size // 4)
        parents = torch.arange(size).scatter(0, order[-quarter:], order[:quarter])
        history.append({"rates": state.hyper["optimizer.learning_rate"].tolist(), "objective": objective.tolist(), "parents": parents.tolist()})
        key, k_explore = rng.split(key)
        state = frl.copy_members(state, parents)
        state = frl.perturb_hyper(state, k_explore, ["optimizer.learning_rate"], members=parents != torch.arange(size))
    return history


if __name__ == "__main__":
    for row in train():
        objective, rate = max(zip(row["objective"], row["rates"], strict=True))
        print(f"best objective {objective:.4f} at learning rate {rate:.1e}, mean {sum(row['objective']) / len(row['objective']):.4f}")

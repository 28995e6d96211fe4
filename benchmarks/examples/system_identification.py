"""System identification: mass and damping of PointMass from trajectories, by the gradient through ``unroll``.

A rollout is a pure function of environment parameters and noise. So a measured rollout can be replayed with other parameters, and how far the replay is from
the measurement can be differentiated with respect to them.

    python benchmarks/examples/system_identification.py
"""

from __future__ import annotations

import torch

import frl
from frl import rng, tree
from frl.envs.point_mass import point_mass
from frl.optim import adam


def identify(true: tuple[float, float] = (1.7, 3.1), *, rows: int = 16, steps: int = 20, iterations: int = 150, mode: str = "eager") -> dict[str, float]:
    """Mass [kg] and damping [1/s] that replay measured positions best, from a start at the environment's own values.

    Args:
        true: those with which the measurement is made.
        rows, steps: size of the measurement.
        iterations: steps of the optimizer.
        mode: a mode of :mod:`frl.compile`.

    Returns:
        ``mass``, ``damping`` and the root mean square distance ``residual`` [m].
    """
    env = frl.make_vec_env(point_mass(), rows)
    policy = frl.actor_only(14, 2, network={"type": "mlp", "network_cfg": {"hidden_sizes": [8]}}, initial_log_std=0.0)
    unroll = frl.make_unroll(env, policy, record=("obs",), attach=("obs",), mode=mode)
    # A network of zeros acts by the noise alone: the same thrusts, whatever the state.
    params = tree.map(torch.zeros_like, policy.init(rng.key(0)))
    start, noise = env.reset(env.row_keys(rng.key(1)), env.default_params), policy.noise(rng.key(2), steps, rows)

    def positions(logs: torch.Tensor) -> torch.Tensor:
        mass, damping = torch.exp(logs)
        _, played = unroll(params, (), start, env.default_params._replace(mass=mass, linear_damping=damping), noise)
        return played.obs[..., :4]  # position [m] and velocity [m/s]

    measured = positions(torch.log(torch.tensor(true)))

    def distance(logs: torch.Tensor) -> torch.Tensor:
        return (positions(logs) - measured).square().mean()

    optimizer = adam()
    logs = torch.stack([env.default_params.mass, env.default_params.linear_damping]).log()
    moments = optimizer.init(logs)
    for i in range(iterations):
        slope = torch.func.grad(distance)(logs)
        change, moments = optimizer.update(slope, moments, logs, {"learning_rate": torch.tensor(0.1 * 0.97**i)})
        logs = logs + change
    mass, damping = torch.exp(logs).tolist()
    return {"mass": mass, "damping": damping, "residual": distance(logs).sqrt().item()}


if __name__ == "__main__":
    found = identify()
    print(f"mass {found['mass']:.4f} kg (true 1.7), damping {found['damping']:.4f} 1/s (true 3.1), residual {found['residual']:.1e}")

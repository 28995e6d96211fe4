"""Only the rollout function, in a model-predictive loop: plan by the gradient of the return with respect to the actions, act once, plan again.

``unroll`` takes its noise as an argument, and a policy whose network is zero acts by the noise alone. So the noise is the plan, ``[T, N, A]``, and
``torch.func.grad`` of the return improves it. Nothing is trained.

    python benchmarks/examples/model_predictive_control.py
"""

from __future__ import annotations

import torch

import frl
from frl import rng, tree
from frl.envs.double_integrator import double_integrator
from frl.optim import adam


def control(steps: int = 40, horizon: int = 12, sweeps: int = 8, rows: int = 4, *, mode: str = "eager") -> tuple[float, float]:
    """Mean return over an episode of the loop, and of doing nothing."""
    env = frl.make_vec_env(double_integrator(max_episode_steps=None), rows)
    policy = frl.actor_only(2, 1, network={"type": "mlp", "network_cfg": {"hidden_sizes": [2]}}, initial_log_std=0.0)
    params = tree.map(torch.zeros_like, policy.init(rng.key(0)))
    unroll = frl.make_unroll(env, policy, record=(), clip_actions=True, mode=mode)
    optimizer = adam()

    def cost(plan, state):
        _, played = unroll(params, (), state, env.default_params, plan)
        return -played.reward.sum(0).mean()

    def play(state, plan_next):
        total, plan = torch.zeros(rows), torch.zeros(horizon, rows, 1)
        for _ in range(steps):
            plan = plan_next(plan, state)
            state, played = unroll(params, (), state, env.default_params, plan[:1])
            total, plan = total + played.reward[0], torch.cat([plan[1:], plan[-1:]])
        return float(total.mean())

    def improve(plan, state):
        moments = optimizer.init(plan)
        for _ in range(sweeps):
            change, moments = optimizer.update(torch.func.grad(cost)(plan, state), moments, plan, {"learning_rate": torch.tensor(0.2)})
            plan = plan + change
        return plan

    start = env.reset(env.row_keys(rng.key(1)), env.default_params)
    return play(start, improve), play(start, lambda plan, state: plan)


if __name__ == "__main__":
    planned, idle = control(mode="inductor")
    print(f"return {planned:.3f} with planning, {idle:.3f} without")

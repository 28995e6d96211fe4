"""An environment of one's own in ten lines, driven by an ``nn.Module`` of one's own and trained by analytic policy gradients.

python benchmarks/examples/own_environment_and_module.py
"""

from __future__ import annotations

import torch
from gymnasium.spaces import Box
from torch import nn

import frl
from frl import rng

# -- the environment: a block on a spring is pushed to where it must stay ----------------------------------------------------------------------------------
block = frl.Env(
    spec=frl.EnvSpec(name="block", max_episode_steps=40, dt=0.1, differentiable=True),
    observation_space=Box(-10.0, 10.0, (2,)),
    action_space=Box(-2.0, 2.0, (1,)),
    default_params={"stiffness": torch.tensor(1.0), "goal": torch.tensor(0.5)},
    reset=lambda key, p: 2.0 * rng.uniform(key, (2,)) - 1.0,
    observe=lambda state, p: state,
    step=lambda state, action, p: (
        new := torch.stack([state[0] + 0.1 * state[1], state[1] + 0.1 * (action[0] - p["stiffness"] * state[0])]),
        frl.Outcome(reward=-((new[0] - p["goal"]) ** 2) - 0.01 * action[0] ** 2, terminated=torch.zeros((), dtype=torch.bool), metrics={}),
    ),
)


# -- the policy: any module without state -----------------------------------------------------------------------------------------------------------------
class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain, self.net = nn.Linear(2, 1), nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.gain(obs) + 0.1 * self.net(obs)


def train(updates: int = 60, *, mode: str = "inductor") -> list[float]:
    """The objective of every update."""
    torch.manual_seed(0)
    env, policy = frl.make_vec_env(block, 32), frl.actor_only(2, 1, network=Residual(), initial_log_std=-2.0)
    apg = frl.make_apg(env, policy, frl.adam(), frl.ApgConfig(rollout_mode="complete", segment_length=40, compile_mode=mode), learning_rate=0.02)
    state, objectives = apg.init(rng.key(0)), []
    for _ in range(updates):
        state, rollout = apg.collect(state)
        state = apg.update(state, rollout)
        objectives.append(float(state.metrics["objective"]))
    return objectives


if __name__ == "__main__":
    values = train()
    print(f"objective {values[0]:.3f} at the start, {values[-1]:.3f} after {len(values)} updates")

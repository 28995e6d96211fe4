"""Rollouts of frl for a loss of torchrl: what ``collect`` of PPO records is a TensorDict that ``ClipPPOLoss`` reads.

Needs torchrl, which frl does not (``pip install torchrl``).

    python benchmarks/examples/torchrl_loss.py
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

import frl
from frl import rng
from frl.envs.pendulum import pendulum


def train(rows: int = 16, steps: int = 32, epochs: int = 4, *, mode: str = "eager") -> list[float]:
    """Losses of torchrl's PPO on one rollout, its networks being modules that begin with the parameters that played."""
    from torchrl.modules import NormalParamExtractor, ProbabilisticActor, ValueOperator  # pyright: ignore[reportMissingImports]
    from torchrl.objectives import ClipPPOLoss  # pyright: ignore[reportMissingImports]

    env = frl.make_vec_env(pendulum(), rows)
    network = {"type": "mlp", "network_cfg": {"hidden_sizes": [16], "activation": "tanh"}}
    policy = frl.actor_critic(3, 1, actor=network, critic=network)
    ppo = frl.make_ppo(env, policy, frl.adam(), frl.PpoConfig(buffer_size=steps, compile_mode=mode))
    state, rollout = ppo.collect(ppo.init(rng.key(0)))
    gae = frl.compute_gae_rollout(rollout, gamma=0.99, gae_lambda=0.95)
    data = frl.transition_view(gae, flatten=True)

    layers = lambda out: nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, out))
    torch.manual_seed(0)
    actor = nn.Sequential(layers(2), NormalParamExtractor())
    module = TensorDictModule(actor, in_keys=["obs"], out_keys=["loc", "scale"])
    acting = ProbabilisticActor(module, in_keys=["loc", "scale"], distribution_class=torch.distributions.Normal, return_log_prob=True)
    loss = ClipPPOLoss(acting, ValueOperator(layers(1), in_keys=["obs"]))
    loss.set_keys(value_target="return", sample_log_prob="sample_log_prob")
    batch = TensorDict(
        {
            "obs": data["obs"],
            "action": data["action"],
            "sample_log_prob": data["sample_log_prob"],
            "advantage": data["advantage"].unsqueeze(-1),
            "return": data["return"].unsqueeze(-1),
        },
        batch_size=data.batch_size,
    )
    optimizer, losses = torch.optim.Adam(loss.parameters(), lr=1e-3), []
    for _ in range(epochs):
        parts = loss(batch)
        total = parts["loss_objective"] + parts["loss_critic"] + parts["loss_entropy"]
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(float(total.detach()))
    return losses


if __name__ == "__main__":
    print("losses of torchrl's ClipPPOLoss:", ", ".join(f"{x:.4f}" for x in train()))

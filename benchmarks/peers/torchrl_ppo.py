"""torchrl's PPO as a worker of benchmarks/ppo.py; runs in the environment that ``peers/setup torchrl`` makes.

Its synchronous single-process ``Collector``, ``GAE`` and ``ClipPPOLoss`` on gymnasium's CartPole-v1, in one ``SyncVectorEnv``, which is faster here than its
own ``SerialEnv`` and than processes.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
import timing

sys.path.pop()  # torchrl looks for a module named mujoco, and benchmarks has one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--horizon", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--started", type=float, required=True)
    args = parser.parse_args()
    timing.serve(lambda: prepare(args), seconds=args.seconds)


def prepare(args: argparse.Namespace) -> tuple[Callable[[], Any], int, dict[str, Any]]:
    warnings.filterwarnings("ignore")
    import gymnasium as gym
    import torch
    from tensordict.nn import TensorDictModule
    from torch import nn
    from torchrl.collectors import Collector
    from torchrl.envs import GymWrapper
    from torchrl.modules import ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows = gym.vector.SyncVectorEnv([lambda: gym.make("CartPole-v1")] * args.num_envs, autoreset_mode=gym.vector.AutoresetMode.SAME_STEP)
    env = GymWrapper(rows, categorical_action_encoding=True)

    def network(outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))

    head = TensorDictModule(network(2), in_keys=["observation"], out_keys=["logits"])
    actor = ProbabilisticActor(head, in_keys=["logits"], distribution_class=torch.distributions.Categorical, return_log_prob=True)
    critic = ValueOperator(network(1), in_keys=["observation"])
    steps = args.num_envs * args.horizon
    batches = iter(Collector(env, actor, frames_per_batch=steps, total_frames=-1, device="cpu"))
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic, average_gae=False)
    loss = ClipPPOLoss(actor, critic, clip_epsilon=0.2, entropy_coeff=0.01, critic_coeff=0.5, loss_critic_type="l2", normalize_advantage=True)
    optimizer = torch.optim.Adam(loss.parameters(), lr=7.5e-4)

    def update() -> None:
        data = next(batches)
        for _ in range(args.epochs):
            with torch.no_grad():
                advantage(data)
            flat = data.reshape(-1)
            for rows in torch.randperm(steps).split(steps // args.minibatches):
                terms = loss(flat[rows])
                optimizer.zero_grad(set_to_none=True)
                (terms["loss_objective"] + terms["loss_critic"] + terms["loss_entropy"]).backward()
                nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()

    update()
    first = time.time() - args.started
    update()
    count = sum(p.numel() for module in (actor, critic) for p in module.parameters())
    return update, steps, {"first_update": first, "parameters": count}


if __name__ == "__main__":
    main()

"""stable-baselines3 as a worker of benchmarks/ppo.py and benchmarks/gae.py; runs in the environment that ``peers/setup sb3`` makes.

Of its PPO the two calls that ``learn`` makes for an update are timed, ``collect_rollouts`` and ``train``, without its logging. The environments are
gymnasium's own, one after the other in this process (``DummyVecEnv``), which is its fastest arrangement for such cheap ones.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
import timing

ENVIRONMENTS = {"cartpole": "CartPole-v1", "pendulum": "Pendulum-v1"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=("ppo", "gae"), default="ppo")
    parser.add_argument("--env", choices=tuple(ENVIRONMENTS), default="cartpole")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--horizon", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--started", type=float, required=True)
    args = parser.parse_args()
    prepare = prepare_ppo if args.work == "ppo" else prepare_gae
    timing.serve(lambda: prepare(args), seconds=args.seconds)


def prepare_ppo(args: argparse.Namespace) -> tuple[Callable[[], Any], int, dict[str, Any]]:
    import torch

    torch.set_num_threads(args.threads)
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv

    env = make_vec_env(ENVIRONMENTS[args.env], n_envs=args.num_envs, seed=0, vec_env_cls=DummyVecEnv)
    steps = args.num_envs * args.horizon
    settings: dict[str, Any] = {"gamma": 0.99, "gae_lambda": 0.95, "ent_coef": 0.01, "learning_rate": 7.5e-4, "device": "cpu", "seed": 0}
    model = PPO("MlpPolicy", env, n_steps=args.horizon, batch_size=steps // args.minibatches, n_epochs=args.epochs, **settings)
    _, callback = model._setup_learn(steps)
    callback.on_training_start({}, {})

    def update() -> None:
        model.collect_rollouts(model.env, callback, model.rollout_buffer, n_rollout_steps=args.horizon)
        model.train()

    update()
    first = time.time() - args.started
    for _ in range(2):
        update()
    return update, steps, {"first_update": first, "parameters": sum(p.numel() for p in model.policy.parameters())}


def prepare_gae(args: argparse.Namespace) -> tuple[Callable[[], Any], int, dict[str, Any]]:
    import numpy as np
    import torch

    torch.set_num_threads(args.threads)
    from gymnasium import spaces
    from stable_baselines3.common.buffers import RolloutBuffer

    rng = np.random.default_rng(0)
    shape = (args.horizon, args.num_envs)
    buffer = RolloutBuffer(args.horizon, spaces.Box(-1, 1, (4,)), spaces.Discrete(2), "cpu", gae_lambda=0.95, gamma=0.99, n_envs=args.num_envs)
    buffer.rewards[:], buffer.values[:] = rng.standard_normal(shape), rng.standard_normal(shape)
    buffer.episode_starts[:] = rng.random(shape) < 0.02
    last, done = torch.from_numpy(rng.standard_normal(args.num_envs).astype(np.float32)), np.zeros(args.num_envs)
    return lambda: buffer.compute_returns_and_advantage(last, done), args.num_envs * args.horizon, {}


if __name__ == "__main__":
    main()

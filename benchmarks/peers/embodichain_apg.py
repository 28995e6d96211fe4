"""embodichain's APG as a worker of benchmarks/apg_update.py; runs in the environment that ``peers/setup embodichain`` makes.

Its own trainer, collector, policy, normalizer, adjoint clip and optimizer on the environment of :mod:`eager_point_mass`, which is given the interface that the
trainer asks for. A call is one ``DifferentiableTrainer.train`` to the next update.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--horizon", type=int, default=64)
    parser.add_argument("--limit", type=float, default=0.1, help="adjoint limit times N")
    parser.add_argument("--cases", nargs="*", default=[])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--started", type=float, required=True)
    args = parser.parse_args()
    timing.serve(lambda: prepare(args), seconds=args.seconds)


def prepare(args: argparse.Namespace) -> tuple[Callable[[], Any], int, dict[str, Any]]:
    import torch

    torch.set_num_threads(args.threads)
    from eager_point_mass import PointMass, golden

    torch.manual_seed(0)
    trainer, _ = make_trainer(vectorised(PointMass)(args.num_envs), args.horizon, args.limit / args.num_envs)
    count = 0

    def update() -> None:
        nonlocal count
        count += 1
        trainer.train(total_updates=count)

    update()
    first = time.time() - args.started
    golden()
    differences = check(args.cases) if args.cases else {}
    for _ in range(3):
        update()
    if trainer.train_history[-1]["train/skipped_update"]:
        raise SystemExit("an update was skipped")
    return update, args.num_envs * args.horizon, {"first_update": first, **differences}


def vectorised(point_mass: type) -> type:
    """The environment with the interface that the trainer asks for."""
    import torch
    from gymnasium import spaces

    class Vectorised(point_mass):
        device = torch.device("cpu")
        single_observation_space = observation_space = spaces.Box(-float("inf"), float("inf"), (14,))
        single_action_space = action_space = spaces.Box(-1.0, 1.0, (2,))

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
            return self.observe(), {}

        def step(self, action: Any) -> tuple[Any, ...]:
            obs, reward, terminated, truncated = super().step(action)
            return obs, reward, terminated, truncated, {"success": terminated}

        def detach_state(self) -> Any:
            return self.detach()

        def close(self) -> None:
            pass

    return Vectorised


def make_trainer(env: Any, horizon: int, limit: float) -> tuple[Any, Any]:
    """Trainer and policy with the settings of :mod:`eager_point_mass`."""
    import torch
    from eager_point_mass import GAMMA, LAYERS, LEARNING_RATE, LOG_STD, MAX_GRAD_NORM
    from embodichain.learning.models import build_mlp_from_cfg
    from embodichain.learning.rl import DifferentiableTrainer, DifferentiableTrainerCfg
    from embodichain.learning.rl.algo import build_algo
    from embodichain.learning.rl.policies import build_policy

    device = torch.device("cpu")
    network = {"hidden_sizes": [64, 64], "activation": "tanh", "last_activation": "tanh", "orthogonal_init": [gain for _, _, gain in LAYERS]}
    policy = build_policy({"name": "actor_only"}, 14, 2, device, actor=build_mlp_from_cfg({"type": "mlp", "network_cfg": network}, 14, 2))
    with torch.no_grad():
        policy.log_std.fill_(LOG_STD)
    settings = {"optimizer": {"name": "adam", "learning_rate": LEARNING_RATE}, "gamma": GAMMA, "max_grad_norm": MAX_GRAD_NORM}
    algorithm = build_algo("apg", settings, policy, device)
    cfg = DifferentiableTrainerCfg(segment_length=horizon, update_horizon=horizon, action_adjoint_max_norm=limit, normalize_observations=True)
    return DifferentiableTrainer(cfg, env, policy, algorithm), policy


def check(paths: list[str]) -> dict[str, float]:
    """Repeat updates of ours: its sampling is given our noise, its environment our fresh states."""
    import case as cases
    import numpy as np
    import torch
    from eager_point_mass import replayed

    def repeat(case: dict[str, np.ndarray]) -> tuple[np.ndarray, float]:
        env = vectorised(replayed(case))(case["x"].shape[0])
        horizon = len(case["noise"])
        trainer, policy = make_trainer(env, horizon, float(case["limit"]))
        layers = [module for module in policy.actor.modules() if isinstance(module, torch.nn.Linear)]
        owners = [*(layer.weight for layer in layers), *(layer.bias for layer in layers), policy.log_std]
        normalizer = trainer.observation_normalizer
        with torch.no_grad():
            for parameter, name in zip(owners, cases.PARAMETERS, strict=True):
                parameter.copy_(torch.from_numpy(case[name]))
            normalizer.mean.copy_(torch.from_numpy(case["mean"]))
            normalizer.var.copy_(torch.from_numpy(case["var"]))
        noise = iter(torch.from_numpy(case["noise"]))
        normal = torch.distributions.normal
        original, normal._standard_normal = normal._standard_normal, lambda *_, **__: next(noise)
        try:
            algorithm = trainer.algorithm
            algorithm.begin_update()
            algorithm.accumulate_segment(trainer.collector.collect(horizon))
            objective = algorithm._objective_total
            algorithm.finish_update()
        finally:
            normal._standard_normal = original
        return np.concatenate([parameter.grad.numpy().ravel() for parameter in owners]), objective

    return cases.check(paths, repeat)


if __name__ == "__main__":
    main()

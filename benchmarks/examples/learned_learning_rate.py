"""A learning rate that is learned: the return after K updates is differentiated with respect to the rate, through gradient, adjoint clip, norm clip and Adam.

``torch.func.grad`` of a function that trains is the gradient of training. It is a reverse pass over K rollouts that were each differentiated already, so its
memory grows with K times the horizon (``--memory`` prints the peak for a few K).

    python benchmarks/examples/learned_learning_rate.py
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from collections.abc import Callable

import torch

import frl
from frl import rng
from frl.envs.double_integrator import double_integrator
from frl.optim import adam


def build(updates: int, rows: int, steps: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """``log rate -> mean return of the policy that the updates leave``, on episodes that no update has seen."""
    env = frl.make_vec_env(double_integrator(), rows)
    policy = frl.actor_only(2, 1, network={"type": "mlp", "network_cfg": {"hidden_sizes": [16], "activation": "tanh"}}, initial_log_std=-2.0)
    config = frl.ApgConfig(rollout_mode="complete", segment_length=steps, action_adjoint_max_norm=0.05, compile_mode="eager")
    apg = frl.make_apg(env, policy, adam(), config)
    play = frl.make_unroll(env, policy, record=(), deterministic=True, mode="eager")
    first = apg.init(rng.key(0))
    start, noise = env.reset(env.row_keys(rng.key(1)), env.default_params), torch.zeros(steps, rows, 1)

    def after_training(log_rate: torch.Tensor) -> torch.Tensor:
        state = first._replace(hyper={**first.hyper, "optimizer.learning_rate": torch.exp(log_rate)})
        for _ in range(updates):
            state = apg.update(*apg.collect(state))
        _, played = play(state.params, (), start, env.default_params, noise)
        return played.reward.sum(0).mean()

    return after_training


def learn(rounds: int = 12, updates: int = 4, rows: int = 8, steps: int = 16, rate: float = 1e-3) -> list[tuple[float, float]]:
    """``(rate, return after training with it)`` of every round; Adam climbs in the logarithm of the rate."""
    after_training, optimizer = build(updates, rows, steps), adam()
    log_rate = torch.log(torch.tensor(rate))
    moments, history = optimizer.init(log_rate), []
    for _ in range(rounds):
        slope, value = torch.func.grad_and_value(after_training)(log_rate)
        history.append((float(torch.exp(log_rate)), float(value)))
        change, moments = optimizer.update(-slope, moments, log_rate, {"learning_rate": torch.tensor(0.4)})
        log_rate = log_rate + change
    return history


def peak(updates: int) -> float:
    """Peak memory of the meta-gradient of so many updates of 64 rows x 32 steps, over that of the process before it [MiB]."""
    after_training = build(updates, 64, 32)
    after_training(torch.tensor(-6.0))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.func.grad(after_training)(torch.tensor(-6.0))
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=int, nargs="*", help="print the peak memory for these numbers of updates (1 2 4 8)")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(f"{args.one} updates: {peak(args.one):.0f} MiB")
    elif args.memory is not None:
        for count in args.memory or (1, 2, 4, 8):
            subprocess.run([sys.executable, __file__, "--one", str(count)], check=True)  # a process each: a peak does not go down again
    else:
        for rate, value in learn():
            print(f"learning rate {rate:.2e}: return after training {value:.4f}")

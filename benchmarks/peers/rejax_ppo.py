"""rejax's PPO as a worker of benchmarks/ppo.py; runs in the environment that ``peers/setup jax`` makes.

``train_iteration`` of its PPO on gymnax's CartPole-v1, several in one jitted ``lax.scan``, without evaluations.
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

ITERATIONS = 5  # of one call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--horizon", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--started", type=float, required=True)
    args = parser.parse_args()
    timing.serve(lambda: prepare(args), seconds=args.seconds, settle=settle)


def settle(result: Any) -> None:
    import jax

    jax.block_until_ready(result)


def prepare(args: argparse.Namespace) -> tuple[Callable[[], Any], int, dict[str, Any]]:
    import jax
    from rejax import PPO

    steps = args.num_envs * args.horizon
    algorithm = PPO.create(
        env="CartPole-v1",
        agent_kwargs={"activation": "tanh"},
        num_envs=args.num_envs,
        num_steps=args.horizon,
        num_epochs=args.epochs,
        num_minibatches=args.minibatches,
        learning_rate=7.5e-4,
        max_grad_norm=0.5,
        total_timesteps=1000 * steps,
        eval_freq=1000 * steps,
        skip_initial_evaluation=True,
        gamma=0.99,
        gae_lambda=0.95,
        clip_eps=0.2,
        ent_coef=0.01,
        vf_coef=0.5,
    )

    def several(state: Any) -> Any:
        return jax.lax.scan(lambda s, _: (algorithm.train_iteration(s), None), state, None, length=ITERATIONS)[0]

    run, state = jax.jit(several), jax.jit(algorithm.init_state)(jax.random.PRNGKey(0))
    count = sum(x.size for train_state in (state.actor_ts, state.critic_ts) for x in jax.tree.leaves(train_state.params))

    def call() -> Any:
        nonlocal state
        state = run(state)
        return state

    settle(call())
    first = time.time() - args.started
    for _ in range(2):
        settle(call())
    return call, ITERATIONS * steps, {"first_update": first, "parameters": int(count)}


if __name__ == "__main__":
    main()

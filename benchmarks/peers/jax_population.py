"""A population in JAX as a worker of benchmarks/population.py: the vmapped jitted APG update of jax_scan, or vmapped seeds of rejax's PPO.

Runs in the environment that ``peers/setup jax`` makes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
import timing

ITERATIONS = 2  # of PPO in one call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=("apg", "ppo"), required=True)
    parser.add_argument("--members", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--started", type=float, required=True)
    args = parser.parse_args()
    timing.serve(lambda: (apg if args.task == "apg" else ppo)(args.members), seconds=args.seconds)


def apg(members: int, rows: int = 64, steps: int = 64) -> tuple[Callable[[], Any], int, dict[str, Any]]:
    import jax
    from jax_scan import init, make_update

    keys = jax.random.split(jax.random.key(0), members)
    state = jax.vmap(lambda key: init(key, rows))(keys)
    run = jax.jit(jax.vmap(make_update(rows, steps, 0.1 / rows, 1)))
    return _worker(run, state, lambda result: result[0], members * rows * steps)


def ppo(members: int, rows: int = 64, steps: int = 128) -> tuple[Callable[[], Any], int, dict[str, Any]]:
    import jax
    from rejax import PPO

    algorithm = PPO.create(
        env="CartPole-v1",
        agent_kwargs={"activation": "tanh"},
        num_envs=rows,
        num_steps=steps,
        num_epochs=4,
        num_minibatches=4,
        learning_rate=7.5e-4,
        max_grad_norm=0.5,
        total_timesteps=1000 * rows * steps,
        eval_freq=1000 * rows * steps,
        skip_initial_evaluation=True,
        gamma=0.99,
        gae_lambda=0.95,
        clip_eps=0.2,
        ent_coef=0.01,
        vf_coef=0.5,
    )

    def several(state: Any) -> Any:
        return jax.lax.scan(lambda s, _: (algorithm.train_iteration(s), None), state, None, length=ITERATIONS)[0]

    state = jax.jit(jax.vmap(algorithm.init_state))(jax.random.split(jax.random.PRNGKey(0), members))
    return _worker(jax.jit(jax.vmap(several)), state, lambda result: result, members * ITERATIONS * rows * steps)


def _worker(run: Callable, state: Any, next_state: Callable[[Any], Any], amount: int) -> tuple[Callable[[], Any], int, dict[str, Any]]:
    import jax

    def call() -> None:
        nonlocal state
        state = next_state(jax.block_until_ready(run(state)))

    for _ in range(2):
        call()
    return call, amount, {}


if __name__ == "__main__":
    main()

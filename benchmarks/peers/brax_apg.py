"""brax's APG as a worker of benchmarks/apg_update.py; runs in the environment that ``peers/setup brax`` makes.

``brax.training.agents.apg.train`` on PointMass, written as a plain environment without a physics pipeline. It has its own loss and clips, and no clip of the
action adjoint, so its gradient is not that of the others: only the step of the environment is checked. It runs through all its epochs in one call; a block is
one epoch, of which it reports the rate itself, and between two blocks it waits in the callback that it gives the report to.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
import contextlib

import timing


class Closed(Exception):
    """The parent wants no more blocks."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--horizon", type=int, default=64)
    parser.add_argument("--updates", type=int, default=60, help="of one block")
    parser.add_argument("--rounds", type=int, default=9, help="the most blocks that it will be asked for")
    parser.add_argument("--started", type=float, required=True)
    args = parser.parse_args()
    channel = timing.take_stdout()

    import functools

    import jax.numpy as jnp
    import point_mass_jax
    from brax.training.agents.apg import networks
    from brax.training.agents.apg import train as apg

    point_mass_jax.golden()
    seen = 0

    def progress(step: int, metrics: dict[str, Any]) -> None:
        """Called before the first epoch and after each; the first two epochs are the warm-up."""
        nonlocal seen
        seen += 1
        if seen < 3:
            return
        if seen == 3:
            first = {"first_epoch": time.time() - args.started}
            print(json.dumps(first), file=channel, flush=True)
        else:
            rate = float(metrics["training/sps"])
            print(json.dumps({"rate": rate, "cpu_rate": rate}), file=channel, flush=True)
        if not sys.stdin.readline():
            raise Closed

    with contextlib.suppress(Closed):
        apg.train(
            environment=environment(),
            episode_length=100,
            policy_updates=(args.rounds + 3) * args.updates,
            horizon_length=args.horizon,
            num_envs=args.num_envs,
            num_evals=args.rounds + 4,
            num_eval_envs=8,
            learning_rate=2.5e-4,
            use_schedule=False,
            max_gradient_norm=0.5,
            normalize_observations=True,
            network_factory=functools.partial(networks.make_apg_networks, hidden_layer_sizes=(64, 64), activation=jnp.tanh, layer_norm=False),
            progress_fn=progress,
            seed=0,
        )


def environment() -> Any:
    import jax
    import jax.numpy as jnp
    import point_mass_jax as pm
    from brax.envs.base import Env, State

    class PointMass(Env):
        def reset(self, rng: Any) -> State:
            x, task = pm.draw(rng)
            zero = jnp.zeros(2)
            state = {"x": x, "v": zero, "a": zero, "task": task}
            return State(state, pm.observe(x, zero, zero, task), jnp.zeros(()), jnp.zeros(()), {"success": jnp.zeros(())}, {})

        def step(self, state: State, action: Any) -> State:
            s = state.pipeline_state
            x, v, a, reward, hit = pm.move(s["x"], s["v"], s["a"], s["task"], action)
            a, hit = jax.lax.stop_gradient(a), hit.astype(jnp.float32)
            after = {"x": x, "v": v, "a": a, "task": s["task"]}
            obs = pm.observe(x, v, a, s["task"])
            return state.replace(pipeline_state=after, obs=obs, reward=reward, done=hit, metrics={**state.metrics, "success": hit})

        observation_size = property(lambda self: 14)
        action_size = property(lambda self: 2)
        backend = property(lambda self: "none")

    return PointMass()


if __name__ == "__main__":
    main()

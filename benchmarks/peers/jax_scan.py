"""APG in JAX as a worker of benchmarks/apg_update.py: ``lax.scan`` and ``value_and_grad`` in one jitted update; needs the environment of ``peers/setup jax``.

The update of ``eager_point_mass.EagerApg``: same dynamics, policy, discount that starts again where a row is done, adjoint clip (``custom_vjp``), normalizer,
global-norm clip and Adam (optax). A row that is done takes the next of four episodes that were drawn for it before time started.

With ``--devices 2`` the rows are split over two host devices of XLA, one thread each, because XLA's own threads hardly use a second core at these sizes. The
parts are combined on the first device without collectives: XLA's rendezvous starves on two cores.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
import timing

POOL, GAMMA, LEARNING_RATE, MAX_GRAD_NORM = 4, 0.99, 2.5e-4, 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--horizon", type=int, default=64)
    parser.add_argument("--limit", type=float, default=0.1, help="adjoint limit times N")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--unroll", type=int, default=1)
    parser.add_argument("--cases", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--started", type=float, required=True)
    args = parser.parse_args()
    if args.devices > 1:
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={args.devices}"
    timing.serve(lambda: prepare(args), seconds=args.seconds, settle=settle)


def settle(result: Any) -> None:
    import jax

    jax.block_until_ready(result)


def prepare(args: argparse.Namespace) -> tuple[Callable[[], Any], int, dict[str, Any]]:
    import jax
    import point_mass_jax

    limit, n, t = args.limit / args.num_envs, args.num_envs, args.horizon
    if args.devices > 1:
        call = make_split(jax.random.key(0), n, t, limit, args.unroll, args.devices)
    else:
        update = jax.jit(make_update(n, t, limit, args.unroll), donate_argnums=0)
        state = init(jax.random.key(0), n)

        def call() -> Any:
            nonlocal state
            state, loss = update(state)
            return state, loss

    jax.block_until_ready(call())
    first = time.time() - args.started
    point_mass_jax.golden()
    differences = check(args.cases, args.unroll, args.devices) if args.cases else {}
    for _ in range(3):
        jax.block_until_ready(call())
    return call, n * t, {"first_update": first, "devices": len(jax.devices()), **differences}


def check(paths: list[str], unroll: int, parts: int) -> dict[str, float]:
    """Repeat updates of ours, in as many parts as the rows are split into: every step of a row has an episode of its own to start from."""
    import case as cases
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    @jax.jit
    def one(case: dict[str, Any]) -> tuple[Any, Any]:
        params = {name: case[name].T if name.startswith("w") else case[name] for name in cases.PARAMETERS}
        norm = {"mean": case["mean"], "var": case["var"], "count": jnp.float32(1)}
        env = {"x": case["x"], "v": case["v"], "a": case["a"], "task": case["task"], "t": case["t"].astype(jnp.int32)}
        pool = jnp.concatenate((case["fresh_x"], case["fresh_task"]), -1)
        size = pool.shape[1] // parts

        def part(p: Any, i: int) -> Any:
            rows = slice(i * size, (i + 1) * size)
            some = jax.tree.map(lambda x: x[rows], env)
            return loss_fn(p, norm, some, pool[:, rows], case["noise"][:, rows], case["limit"] * parts, unroll, each_step=True)[0]

        found = [jax.value_and_grad(part)(params, i) for i in range(parts)]
        loss, grads = jax.tree.map(lambda *x: sum(x) / parts, *found)
        clip = optax.clip_by_global_norm(MAX_GRAD_NORM)
        grads, _ = clip.update(grads, clip.init(params))
        return grads, -loss

    def repeat(case: dict[str, np.ndarray]) -> tuple[np.ndarray, float]:
        grads, objective = one({name: value for name, value in case.items() if name not in ("gradient", "objective")})
        flat = [np.asarray(grads[name].T if name.startswith("w") else grads[name]).ravel() for name in cases.PARAMETERS]
        return np.concatenate(flat), float(objective)

    return cases.check(paths, repeat)


# -- the update ----------------------------------------------------------------------------------------------------------------------------------


@functools.cache
def row_clip() -> Callable:
    """``(action, limit) -> action`` whose gradient is scaled to at most ``limit`` in every row; rows that are not finite become 0."""
    import jax
    import jax.numpy as jnp

    @jax.custom_vjp
    def clip(a: Any, limit: Any) -> Any:
        return a

    def backward(limit: Any, g: Any) -> tuple[Any, None]:
        finite = jnp.isfinite(g).all(-1, keepdims=True)
        g = jnp.where(finite, g, 0.0)
        size = jnp.maximum(jnp.abs(g).max(-1, keepdims=True), 1e-12)
        norm = jnp.sqrt(((g / size) ** 2).sum(-1, keepdims=True))
        return g * jnp.minimum(1.0, (limit / size) / jnp.maximum(norm, 1.0)), None

    clip.defvjp(lambda a, limit: (a, limit), backward)
    return clip


def optimizer() -> Any:
    import optax

    return optax.chain(optax.clip_by_global_norm(MAX_GRAD_NORM), optax.adam(LEARNING_RATE))


def init(key: Any, n: int) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import point_mass_jax as pm

    kp, ke, kr = jax.random.split(key, 3)
    keys = jax.random.split(kp, 3)
    params: dict[str, Any] = {"log_std": jnp.full(2, -2.0)}
    for i, (inputs, outputs, gain) in enumerate(((14, 64, 1.414), (64, 64, 1.414), (64, 2, 0.01))):
        params[f"w{i + 1}"] = jax.nn.initializers.orthogonal(gain)(keys[i], (inputs, outputs))
        params[f"b{i + 1}"] = jnp.zeros(outputs)
    x, task = pm.draw(ke, (n,))
    env = {"x": x, "v": jnp.zeros((n, 2)), "a": jnp.zeros((n, 2)), "task": task, "t": jnp.zeros(n, jnp.int32)}
    norm = {"mean": jnp.zeros(14), "var": jnp.ones(14), "count": jnp.float32(1e-4)}
    return {"params": params, "opt": optimizer().init(params), "key": kr, "env": env, "norm": norm}


def loss_fn(p: Any, norm: Any, env: Any, pool: Any, noise: Any, limit: Any, unroll: int, *, each_step: bool = False) -> Any:
    """Loss, and (state after, observations ``[T, N, 14]``, done ``[T, N]``).

    Args:
        p, norm, env: parameters, statistics, start states.
        pool: ``[K, N, 10]`` episodes to start again from. The next one for each done, or, with ``each_step``, number t for a done at step t.
        noise: ``[T, N, 2]``.
        limit: of the action adjoint.
        unroll: of the scan.
    """
    import jax
    import jax.numpy as jnp
    import point_mass_jax as pm

    std = jnp.exp(jnp.clip(p["log_std"], -5, 2))
    n = noise.shape[1]
    rows, clip = jnp.arange(n), row_clip()

    def body(carry: Any, eps: Any) -> tuple[Any, Any]:
        e, discount, number = carry
        obs = pm.observe(e["x"], e["v"], e["a"], e["task"])
        h = (obs - norm["mean"]) / (jnp.sqrt(norm["var"]) + 1e-8)
        h = jnp.tanh(h @ p["w1"] + p["b1"])
        h = jnp.tanh(h @ p["w2"] + p["b2"])
        action = clip(jnp.tanh(h @ p["w3"] + p["b3"]) + std * eps, limit)
        x, v, a, reward, hit = pm.move(e["x"], e["v"], e["a"], e["task"], action)
        t = e["t"] + 1
        done = hit | (t >= pm.MAX_STEPS)
        m, new = done[:, None], pool[number, rows]
        after = {
            "x": jnp.where(m, new[:, :2], x),
            "v": jnp.where(m, 0.0, v),
            "a": jnp.where(m, 0.0, jax.lax.stop_gradient(a)),
            "task": jnp.where(m, new[:, 2:], e["task"]),
            "t": jnp.where(done, 0, t),
        }
        number = (number + (1 if each_step else done)) % pool.shape[0]
        return (after, jnp.where(done, 1.0, discount * GAMMA), number), (discount * reward, obs, done)

    start = (env, jnp.ones(n), jnp.zeros(n, jnp.int32))
    (env, _, _), (gains, obs, done) = jax.lax.scan(body, start, noise, unroll=unroll)
    return -gains.sum(0).mean(), (env, obs, done)


def statistics(obs: Any, done: Any) -> tuple[Any, Any, Any]:
    """Count, mean and variance over each row's steps up to its first done."""
    import jax.numpy as jnp

    alive = (jnp.cumsum(done.astype(jnp.int32), 0) - done) == 0
    w = alive.astype(obs.dtype)[..., None]
    n = w.sum()
    mean = (obs * w).sum((0, 1)) / n
    return n, mean, (((obs - mean) ** 2) * w).sum((0, 1)) / n


def merge(norm: Any, n: Any, mean: Any, var: Any) -> Any:
    total, d = norm["count"] + n, mean - norm["mean"]
    pooled = (norm["var"] * norm["count"] + var * n + d * d * norm["count"] * n / total) / total
    return {"mean": norm["mean"] + d * n / total, "var": pooled, "count": total}


def step(params: Any, opt: Any, grads: Any, loss: Any) -> tuple[Any, Any]:
    """Global clip, Adam, and the old values where something is not finite."""
    import jax
    import jax.numpy as jnp
    import optax

    good = jnp.isfinite(optax.global_norm(grads)) & jnp.isfinite(loss)
    updates, new = optimizer().update(grads, opt, params)

    def keep(a: Any, b: Any) -> Any:
        return jax.tree.map(lambda x, y: jnp.where(good, x, y), a, b)

    return keep(optax.apply_updates(params, updates), params), keep(new, opt)


def inputs(key: Any, n: int, t: int) -> tuple[Any, Any, Any]:
    """Next key, pool of episodes and noise of an update."""
    import jax
    import jax.numpy as jnp
    import point_mass_jax as pm

    key, kp, kn = jax.random.split(key, 3)
    return key, jnp.concatenate(pm.draw(kp, (POOL, n)), -1), jax.random.normal(kn, (t, n, 2))


def make_update(n: int, t: int, limit: float, unroll: int = 1) -> Callable:
    """``state -> (state, loss)``."""
    import jax

    def update(state: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        key, pool, noise = inputs(state["key"], n, t)
        gradient = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (env, obs, done)), grads = gradient(state["params"], state["norm"], state["env"], pool, noise, limit, unroll)
        params, opt = step(state["params"], state["opt"], grads, loss)
        norm = merge(state["norm"], *statistics(jax.lax.stop_gradient(obs), done))
        return {"params": params, "opt": opt, "key": key, "env": env, "norm": norm}, loss

    return update


def make_split(key: Any, n: int, t: int, limit: float, unroll: int, count: int) -> Callable[[], Any]:
    """The same update with its rows split over ``count`` devices, as a function that keeps its state."""
    import jax

    m, devices = n // count, jax.devices()[:count]

    def local(params: Any, norm: Any, env: Any, key: Any) -> Any:
        key, pool, noise = inputs(key, m, t)
        # A part is a mean over fewer rows: its adjoints are larger.
        (loss, (env, obs, done)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, norm, env, pool, noise, limit * count, unroll)
        return env, key, (loss, grads, statistics(obs, done))

    def combine(params: Any, opt: Any, norm: Any, parts: Any) -> Any:
        loss, grads = jax.tree.map(lambda *x: sum(x) / count, *[part[:2] for part in parts])
        params, opt = step(params, opt, grads, loss)
        for part in parts:
            norm = merge(norm, *part[2])
        return params, opt, norm, loss

    local, combine = jax.jit(local, donate_argnums=2), jax.jit(combine)
    states = [init(k, m) for k in jax.random.split(key, count)]
    params, opt, norm = states[0]["params"], states[0]["opt"], states[0]["norm"]
    envs = [jax.device_put(s["env"], d) for s, d in zip(states, devices, strict=True)]
    keys = [jax.device_put(s["key"], d) for s, d in zip(states, devices, strict=True)]

    def update() -> Any:
        nonlocal params, opt, norm
        parts = []
        for i, device in enumerate(devices):
            p, s = jax.device_put((params, norm), device)
            envs[i], keys[i], part = local(p, s, envs[i], keys[i])
            parts.append(part)
        params, opt, norm, loss = combine(params, opt, norm, jax.device_put(parts, devices[0]))
        return params, opt, norm, loss

    return update


if __name__ == "__main__":
    main()

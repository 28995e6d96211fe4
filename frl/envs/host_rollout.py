"""Rollouts on a host environment: a policy played step by step, recorded in the words of :func:`frl.make_unroll`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from frl import compile as compiler
from frl import tree
from frl.envs.host import HostEnv
from frl.envs.host_values import filler
from frl.observations import flatten_observation_groups
from frl.types import Metrics, Normalizer, Params, PyTree, TimeStep, Trajectory

# Those of frl.rollout, which a module of this layer may not import.
FIELDS = ("obs", "final_obs", "action", "raw", "log_prob", "entropy", "metrics")


def make_host_unroll(
    env: HostEnv,
    policy: Any,
    normalizer: Normalizer | None = None,
    *,
    record: Sequence[str] = FIELDS,
    deterministic: bool = False,
    clip_actions: bool = False,
    mode: str = "inductor",
) -> Callable[..., tuple[PyTree, Trajectory]]:
    """Build the rollout function of a host environment and a policy: :func:`frl.make_unroll` without derivatives.

    The policy is compiled and called once for each step. It begins where the environment stands, not at the ``env_state`` that it is given: call
    :meth:`HostEnv.reset` for new episodes. Nothing is recorded for differentiation.

    Args:
        env: see :class:`HostEnv`.
        policy: see :mod:`frl.policies`.
        normalizer: observation normalizer, frozen during the rollout; ``None`` for raw observations.
        record: optional trajectory fields, as for :func:`frl.make_unroll`.
        deterministic: act by the distribution's mode; the noise only gives the number of steps.
        clip_actions: record actions clamped to the action space; the environment gets them so in any case.
        mode: a mode of :mod:`frl.compile`.

    Returns:
        ``unroll(params, norm_state, env_state, env_params, noise) -> (env_state, Trajectory)``. Noise is ``[T, N, noise_dim]`` and gives the dtype that the
        policy computes in; the new ``env_state`` is the observation to act on next, of the dtype of the recorded ones. Those are as the environment gave
        them where a normalizer wants every digit, and in the dtype of the noise without one. ``metrics["valid"]`` is false in steps that only reset a row:
        nothing of them may reach a loss, a statistic or a count.

    Raises:
        ValueError: for an unknown field.
        TypeError: for ``clip_actions`` without bounds.
    """
    unknown = sorted(set(record) - set(FIELDS))
    if unknown:
        raise ValueError(f"unknown trajectory field {unknown[0]!r} (known: {', '.join(FIELDS)})")
    if clip_actions and not isinstance(env.single_action_space, spaces.Box):
        raise TypeError(f"clip_actions needs an action space with bounds, got {env.single_action_space}")
    low = high = None
    if clip_actions:
        low, high = (torch.as_tensor(bound, device=env.device) for bound in (env.single_action_space.low, env.single_action_space.high))  # pyright: ignore[reportAttributeAccessIssue]
    distribution = policy.distribution

    def act(params: Params, view: PyTree, obs: PyTree, noise: Tensor) -> dict[str, Tensor]:
        x = flatten_observation_groups(obs, policy.obs_groups)
        if normalizer is not None:
            x = normalizer.apply(view, x)
        dist = policy.apply(params, x.to(noise.dtype))
        if deterministic:
            out = {"action": distribution.mode(dist)}
        else:
            sample = distribution.sample(dist, noise)
            out = {"action": sample.action}
            if "raw" in record:
                out["raw"] = sample.raw
            if "log_prob" in record:
                out["log_prob"] = distribution.log_prob(dist, sample)
        if "entropy" in record:
            out["entropy"] = distribution.entropy(dist, noise)
        if low is not None and high is not None:
            out["action"] = torch.clamp(out["action"], low.to(noise.dtype), high.to(noise.dtype))
        return out

    compiled = compiler.jit(act, mode=mode)

    @torch.no_grad()
    def unroll(params: Params, norm_state: PyTree, env_state: PyTree, env_params: PyTree, noise: Tensor) -> tuple[PyTree, Trajectory]:
        if noise.ndim < 2 or noise.shape[0] < 1 or noise.shape[1] != env.num_envs:
            raise ValueError(f"noise must be [T, {env.num_envs}, noise_dim] with T of at least 1, got {list(noise.shape)}")
        params = tree.map(_constant, params)
        view = normalizer.prepare(norm_state, noise.dtype) if normalizer is not None else ()
        narrow = (lambda x: x) if normalizer is not None else (lambda x: x.to(noise.dtype))
        obs = tree.map(narrow, env.obs)
        acted: dict[str, list] = {"obs": []}
        steps: list[TimeStep] = []
        for t in range(noise.shape[0]):
            out = compiled(params, view, obs, noise[t])
            if "obs" in record:
                acted["obs"].append(obs)
            for name, value in out.items():
                acted.setdefault(name, []).append(value)
            steps.append(env.advance(out["action"]))
            obs = tree.map(lambda x: narrow(x.to(env.device)), steps[-1].obs)

        def stack(values: Sequence[Any]) -> Any:
            return tree.map(lambda x: x.to(env.device), tree.stack(values)) if values else ()

        terminated, truncated = stack([s.terminated for s in steps]), stack([s.truncated for s in steps])
        done = terminated | truncated
        observed = stack(acted["obs"])
        trajectory = Trajectory(
            obs=observed,
            final_obs=tree.map(narrow, stack([s.final_obs for s in steps])) if "final_obs" in record else (),
            action=stack(acted["action"] if "action" in record else []),
            raw=stack(acted.get("raw", [])),
            log_prob=stack(acted.get("log_prob", [])),
            entropy=stack(acted.get("entropy", [])),
            reward=stack([s.reward for s in steps]).to(noise.dtype),
            terminated=terminated,
            truncated=truncated,
            alive=(done.cumsum(0) - done.to(torch.int64)) == 0,
            metrics=stack(_complete([s.metrics for s in steps])) if "metrics" in record else {},
            initial_obs=tree.index(observed, 0) if "obs" in record else (),
        )
        return obs, trajectory

    return unroll


def host_rollout(
    env: HostEnv,
    policy: Any,
    params: Params,
    norm_state: PyTree = (),
    *,
    noise: Tensor | None = None,
    key: Tensor | None = None,
    num_steps: int | None = None,
    normalizer: Normalizer | None = None,
    mode: str = "eager",
    **options: Any,
) -> Trajectory:
    """One rollout from where the environment stands: :func:`make_host_unroll`, called once. Build that yourself for compiled rollouts, many of them.

    Args:
        env, policy, params, norm_state, normalizer: see :func:`make_host_unroll`.
        noise: ``[T, N, noise_dim]``; or
        key, num_steps: to draw it, in the dtype of the parameters.
        mode: of :mod:`frl.compile`.
        **options: of :func:`make_host_unroll`.

    Returns:
        :class:`~frl.types.Trajectory` ``[T, N]``; the observation that comes next is ``env.obs``.

    Raises:
        ValueError: unless either ``noise`` or ``key`` and ``num_steps`` are given.
    """
    if (noise is None) == (key is None) or (key is None) != (num_steps is None):
        raise ValueError("give either noise, or key and num_steps")
    if noise is None:
        dtype = next((x.dtype for x in tree.floating(params)), env.dtype)
        noise = policy.noise(key, num_steps, env.num_envs, dtype=dtype)
    return make_host_unroll(env, policy, normalizer, mode=mode, **options)(params, norm_state, (), (), noise)[1]


def _constant(x: Tensor) -> Tensor:
    x = x.detach()
    if compiler.plain(x) is not x or compiler.is_transformed(x):
        raise TypeError("a host environment cannot be differentiated or mapped through; move the rollout outside of torch.func.grad, vjp and vmap")
    return x


def _complete(steps: Sequence[Metrics]) -> list[Metrics]:
    """Metrics by step with the same names: those which the environment came to report later are NaN (or False) before."""
    last = steps[-1]
    return [{name: step[name] if name in step else filler(x.dtype, x) for name, x in last.items()} for step in steps]

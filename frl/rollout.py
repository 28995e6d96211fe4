"""Policy and environment through time: the rollout function that APG differentiates and every other algorithm records.

``make_unroll`` builds ``unroll(params, norm_state, env_state, env_params, noise) -> (env_state, Trajectory)``: pure, differentiable in ``params``,
``env_params`` and ``env_state``, and deterministic, since its noise is an argument. Inside, time is ``frl.scan`` and rows are the last dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from frl import compile as compiler
from frl import tree
from frl.envs.vector import VecEnv, VecState
from frl.gradients import clip_adjoint, clip_adjoint_tree
from frl.packing import Packing
from frl.returns import alive_mask
from frl.scan import scan, scan_shards
from frl.types import Normalizer, PyTree, Trajectory

FIELDS = ("obs", "final_obs", "action", "raw", "log_prob", "entropy", "metrics")
BLOCK = 16  # steps drawn by one call when the number of steps is not known beforehand, so that any number uses the same graph
ACTION_LIMIT = "action_adjoint_max_norm"
STATE_LIMIT = "state_adjoint_max_norm"


def flatten_observation(obs: PyTree, groups: Sequence[str] | None = None) -> Tensor:
    """One row's observation as a vector ``[O]``: leaves in sorted key order, or the entries that ``groups`` names (dotted paths) in its order."""
    if groups is not None:
        picked = []
        for path in groups:
            part = obs
            for name in path.split("."):
                part = part[name]
            picked.append(part)
        obs = tuple(picked)
    leaves = [x.reshape(-1) for x in tree.leaves(obs)]
    return leaves[0] if len(leaves) == 1 else torch.cat(leaves)


def make_unroll(
    vec: VecEnv,
    policy: Any,
    normalizer: Normalizer | None = None,
    *,
    record: Sequence[str] = FIELDS,
    attach: Sequence[str] = FIELDS,
    metrics: Sequence[str] | None = None,
    deterministic: bool = False,
    clip_actions: bool = False,
    segment_length: int | None = None,
    complete: bool = False,
    adjoint_limits: Sequence[str] = (),
    horizon: int | None = None,
    steps_per_graph: int = 1,
    shards: int | None = None,
    memory: str = "save",
    mode: str = "inductor",
) -> Callable[..., tuple[VecState, Trajectory]]:
    """Build the rollout function of an environment and a policy.

    Args:
        vec: N rows of an environment.
        policy: see :mod:`frl.policies`.
        normalizer: observation normalizer, frozen during the rollout; ``None`` for raw observations.
        record: optional trajectory fields to compute, among ``obs, final_obs, action, raw, log_prob, entropy, metrics``; the others are ``()``. Reward,
            flags and ``alive`` are always there.
        attach: recorded fields that carry gradients (reward always does); leaving out what no loss reads saves work in the backward.
        metrics: names of the metrics to record where the environment has them; all when ``None``.
        deterministic: act by the distribution's mode; the noise only gives the number of steps.
        clip_actions: clamp actions to the action space before the step (gradient 0 outside, 1 at a bound); log-probabilities stay those of the sample.
        segment_length: detach the env state every so many steps (truncated back-propagation); ``None`` never.
        adjoint_limits: which limits of ``hyper`` to apply: ``"action_adjoint_max_norm"``, ``"state_adjoint_max_norm"``.
        horizon: the usual number of steps: fresh states for that many are drawn by one graph. Other numbers work too, in blocks.
        steps_per_graph: steps compiled together; one when the rows are split into shards.
        shards: threads that each run the loop for a part of the rows (mode ``"inductor"`` on a CPU); by default the threads of torch when each gets at
            least 128 rows. The sum of the parts' gradients differs from the whole's by rounding.
        memory, mode: see :func:`frl.scan.scan`.

    Returns:
        ``unroll(params, norm_state, env_state, env_params, noise, *, hyper={}, probe=())``: noise is ``[T, N, A]``; ``hyper`` holds the limits as 0-d
        tensors; ``probe``, zeros of the noise's shape, is added to the action after the adjoint clip, so that its gradient is the adjoint that reaches
        each action, before clipping.
    """
    unknown = sorted((set(record) | set(attach)) - set(FIELDS))
    if unknown:
        raise ValueError(f"unknown trajectory field {unknown[0]!r} (known: {', '.join(FIELDS)})")
    if segment_length is not None and (isinstance(segment_length, bool) or segment_length < 1):
        raise ValueError(f"segment_length must be a positive integer or None, got {segment_length!r}")
    low, high = _bounds(vec) if clip_actions else (None, None)
    distribution = policy.distribution

    def act(params: PyTree, view: PyTree, obs: PyTree, noise: Tensor) -> dict[str, Tensor]:
        """One row."""
        x = flatten_observation(obs, policy.obs_groups)
        if normalizer is not None:
            x = normalizer.apply(view, x)
        dist = policy.apply(params, x)
        out = {}
        if deterministic:
            out["action"] = distribution.mode(dist)
        else:
            sample = distribution.sample(dist, noise)
            out["action"] = sample.action
            if "raw" in record:
                out["raw"] = sample.raw
            if "log_prob" in record:
                out["log_prob"] = distribution.log_prob(dist, sample)
        if "entropy" in record:
            out["entropy"] = distribution.entropy(dist, noise)
        return out

    def step(consts: tuple, state: VecState, x: dict[str, Any]) -> tuple[VecState, dict[str, Any]]:
        params, view, env_params, limits = consts
        if STATE_LIMIT in limits:
            state = state._replace(env=clip_adjoint_tree(state.env, limits[STATE_LIMIT], rows=-1))
        obs = vec.observe(state, env_params, rows=-1)
        out = torch.func.vmap(act, in_dims=(None, None, -1, -1))(params, view, obs, x["noise"])
        out = tree.map(lambda v: v.movedim(0, -1), out)
        action = out["action"]
        if clip_actions:
            # Not torch.clamp, whose gradient at a bound differs between releases.
            floor, ceiling = _column(low, action), _column(high, action)
            action = torch.where(action < floor, floor, torch.where(action > ceiling, ceiling, action))
        if complete:
            # elapsed is the time of the rollout until the first done; what a row does later must not reach the gradient, not even as 0 * inf.
            action = torch.where(state.elapsed == x["t"], action, action.detach())
        if ACTION_LIMIT in limits:
            action = clip_adjoint(action, limits[ACTION_LIMIT], rows=-1)
        if "probe" in x:
            action = action + x["probe"]
        leaves, structure = tree.flatten(state.env)
        fresh = tree.unflatten(structure, Packing([leaf.detach() for leaf in leaves]).split(x["fresh"]))
        state, outcome = vec.step(state, action, env_params, fresh=fresh, rows=-1)
        y: dict[str, Any] = {"reward": outcome.reward, "terminated": outcome.terminated, "truncated": outcome.truncated}
        kept = outcome.metrics if metrics is None else {name: v for name, v in outcome.metrics.items() if name in metrics}
        extra = {"obs": obs, "final_obs": outcome.final_obs, "action": action, "metrics": kept, **{k: v for k, v in out.items() if k != "action"}}
        for name, value in extra.items():
            if name in record:
                y[name] = value if name in attach else tree.detach(value)
        return state, y

    def draw_block(state: VecState, env_params: PyTree, length: int) -> list[Tensor]:
        leaves = [x.movedim(1, -1) for x in tree.leaves(vec.draw_resets(state, length, env_params))]
        return Packing([x[0] for x in leaves]).join_stacked(leaves)

    draw = compiler.jit(draw_block, mode=mode)

    def draw_resets(state: VecState, env_params: PyTree, length: int) -> list[Tensor]:
        """Fresh states of all steps, ``[T, total]`` for each dtype."""
        state = state._replace(env=())
        if length == horizon and memory == "save":
            return draw(state, env_params, length)
        packs: list[Tensor] = []
        for start in range(0, length, BLOCK):
            block = draw(state, env_params, BLOCK)
            if not packs:
                packs = [x.new_empty((length, *x.shape[1:])) for x in block]
            for pack, x in zip(packs, block, strict=True):
                pack[start : start + BLOCK] = x[: length - start]
            state = state._replace(steps=state.steps + BLOCK)
        return packs

    def prepare(norm_state: PyTree, env_state: VecState, env_params: PyTree, noise: Tensor) -> tuple[PyTree, PyTree, list[PyTree], list[dict[str, Any]]]:
        """What the loop takes and no parameter touches: normalizer view, environment parameters, and for each shard start state and xs with rows last."""
        view = normalizer.prepare(norm_state, noise.dtype) if normalizer is not None else ()
        length, count = noise.shape[:2]
        size = count // _shard_count(vec, env_params, count, mode, shards)
        starts, xs = [], []
        for at in range(0, count, size):
            part = tree.map(lambda x: x[at : at + size], env_state) if size < count else env_state  # noqa: B023
            # Keys and step numbers only choose the fresh states, which are drawn already: they stay outside the loop.
            starts.append(tree.map(lambda x: x.movedim(0, -1).contiguous(), part._replace(key=(), steps=())))
            x: dict[str, Any] = {"noise": noise[:, at : at + size].movedim(1, -1).contiguous(), "fresh": draw_resets(part, env_params, length)}
            if complete:
                x["t"] = torch.arange(length, device=noise.device)
            xs.append(x)
        return view, vec.rows_last(env_params), starts, xs

    def unroll(
        params: PyTree,
        norm_state: PyTree,
        env_state: VecState,
        env_params: PyTree,
        noise: Tensor,
        *,
        hyper: Mapping[str, Tensor] | None = None,
        probe: Tensor | tuple = (),
    ) -> tuple[Any, Trajectory]:
        hyper = hyper or {}
        length = noise.shape[0]
        if length == 0:
            raise ValueError("a rollout needs at least one step, got noise with leading dimension 0")
        limits = {name: hyper[name] for name in adjoint_limits}
        view, by_row, states, xs = compiler.outside(prepare, norm_state, env_state, env_params, noise)
        consts = (params, view, by_row, limits)
        if isinstance(probe, Tensor):
            # Split, whose derivative joins its parts; that of slices would be a sum of parts with zeros around each.
            for x, part in zip(xs, probe.split(probe.shape[1] // len(xs), 1), strict=True):
                x["probe"] = part.movedim(1, -1)
        size = segment_length or length
        segments = list(zip(*(_segments(x, size) for x in xs), strict=True)) if size < length else [xs]
        parts = []
        for part in segments:
            if parts:
                states = [tree.map(compiler.cut, state) for state in states]
            if len(xs) > 1:
                states, ys = zip(*scan_shards(step, consts, states, part, memory=memory, mode=mode), strict=True)
                y = _join(ys)
            else:
                state, y = scan(step, consts, states[0], part[0], unroll=steps_per_graph, memory=memory, mode=mode)
                states = [state]
            parts.append(y)
        y: Any = tree.map(lambda *leaves: torch.cat(leaves), *parts) if len(parts) > 1 else parts[0]
        y = compiler.map_outside(lambda x: x.movedim(-1, 1), y)
        trajectory = Trajectory(
            obs=y.get("obs", ()),
            final_obs=y.get("final_obs", ()),
            action=y.get("action", ()),
            raw=y.get("raw", ()),
            log_prob=y.get("log_prob", ()),
            entropy=y.get("entropy", ()),
            reward=y["reward"],
            terminated=y["terminated"],
            truncated=y["truncated"],
            alive=compiler.outside(lambda a, b: alive_mask(a | b), y["terminated"], y["truncated"]),
            metrics=y.get("metrics", {}),
            initial_obs=tree.index(y["obs"], 0) if "obs" in y else (),
        )
        state = states[0] if len(states) == 1 else _join(states)
        state = compiler.map_outside(lambda x: x.movedim(-1, 0).contiguous(), state)
        return state._replace(key=env_state.key, steps=env_state.steps + length), trajectory

    return unroll


def _segments(x: PyTree, size: int) -> list[PyTree]:
    """Stretches of ``size`` steps."""
    leaves, structure = tree.flatten(x)
    return [tree.unflatten(structure, stretch) for stretch in zip(*(leaf.split(size) for leaf in leaves), strict=True)]


_SHARD_ROWS = 128  # below this a thread of its own costs more than it brings


def _shard_count(vec: VecEnv, env_params: PyTree, rows: int, mode: str, shards: int | None) -> int:
    """Into how many shards the rows of a rollout go."""
    if mode != "inductor" or vec.device.type != "cpu" or vec.varies_by_row(env_params):
        return 1
    count = torch.get_num_threads() if shards is None else shards
    return count if count > 1 and rows % count == 0 and (shards is not None or rows // count >= _SHARD_ROWS) else 1


def _join(parts: Sequence[PyTree]) -> PyTree:
    """Rows of all shards, in the last dimension."""
    leaves, structures = zip(*map(tree.flatten, parts), strict=True)
    return tree.unflatten(structures[0], [compiler.outside(torch.cat, column, -1) for column in zip(*leaves, strict=True)])


def _bounds(vec: VecEnv) -> tuple[Tensor, Tensor]:
    space = vec.single_action_space
    if not hasattr(space, "low") or not hasattr(space, "high"):
        raise TypeError(f"clip_actions needs an action space with bounds, got {space}")
    return torch.as_tensor(space.low, device=vec.device), torch.as_tensor(space.high, device=vec.device)


def _column(bound: Any, action: Tensor) -> Tensor:
    return bound.to(action.dtype).reshape(-1, *([1] * (action.ndim - 1)))

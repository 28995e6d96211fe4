"""A trained policy at work: ``act``, evaluation and export, with normalizer and action handling as they were trained."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from frl import rng, tree
from frl.build import DTYPES, FINAL_SEED
from frl.config import RunConfig
from frl.envs.vector import VecEnv
from frl.evaluate import EvaluationResult, make_evaluator
from frl.export import clamp_action, export_policy
from frl.observations import entry_names, infer_policy_action, is_mapping, policy_dtype
from frl.policies import Policy
from frl.types import Normalizer, Params, PyTree


@dataclass(frozen=True, kw_only=True)
class LoadedRun:
    """What a run trained.

    Attributes:
        path: run directory.
        checkpoint: the file that the parameters come from.
        config: the run file, every default resolved.
        env: rows to play on; those of the run, or another environment that was asked for.
        policy: see :class:`frl.Policy`.
        normalizer: of observations, ``None`` without one.
        params, norm_state: as trained; ``()`` without a normalizer.
        observation_space, action_space: of one row of the training environment.
        clamp_to: the space that actions are clamped to, as in training; ``None`` where they are not.
        global_step, num_updates: environment steps and updates that the parameters have seen.
        seed: of the training; ``None`` where it was drawn and is not recorded.
    """

    path: Path
    checkpoint: Path
    config: RunConfig
    env: Any
    policy: Any
    normalizer: Normalizer | None
    params: Params
    norm_state: PyTree
    observation_space: spaces.Space
    action_space: spaces.Space
    clamp_to: spaces.Box | None
    device: torch.device
    global_step: int
    num_updates: int
    seed: int | None

    @property
    def env_name(self) -> str:
        """Name of the environment to play on."""
        return self.env.spec.name

    @property
    def eval_seed(self) -> int:
        """Seed of the evaluations during training."""
        given = self.config.trainer.eval_seed
        return (self.seed or 0) + 10_000 if given is None else given

    @property
    def final_seed(self) -> int:
        """Seed of the final evaluation: episodes that no evaluation during training has played."""
        return self.eval_seed + FINAL_SEED

    def act(self, obs: PyTree, key: Tensor | None = None) -> Tensor:
        """The action for raw observations, as the environment takes it: normalised, inferred and clamped as in training. A pure function.

        Args:
            obs: what the environment observes, a tensor (or array) ``[..., O]`` or a mapping of them, with any leading dimensions. Of a mapping the
                entries that the actor looks at are enough.
            key: int64 ``[2]`` for a sample of the policy's distribution; its mode without one.

        Returns:
            ``[..., A]``, or ``[...]`` of one discrete choice.

        Raises:
            ValueError, KeyError, TypeError: for an observation that does not have the shape of the training environment's, by key path.
        """
        rows, lead = observation_rows(obs, self.observation_space, self.policy.obs_groups, self.device)
        noise: Any = ()
        if key is not None:
            count = tree.leaves(rows)[0].shape[0]
            dtype = policy_dtype(self.params, torch.zeros(0))
            noise = self.policy.noise(key.to(self.device), 1, count, dtype=dtype)[0]
        action = infer_policy_action(self.policy, self.params, rows, normalizer=self.normalizer, norm_state=self.norm_state, noise=noise)
        action = action if self.clamp_to is None else clamp_action(action, self.clamp_to)
        return action.reshape((*lead, *action.shape[1:]))

    def evaluate(
        self,
        num_episodes: int | None = None,
        *,
        seed: int | None = None,
        deterministic: bool = True,
        max_steps: int | None = None,
        compile_mode: str = "eager",
    ) -> EvaluationResult:
        """Play exactly ``num_episodes`` episodes on the rows of ``env``.

        Args:
            num_episodes: those of the run's final evaluation by default, or 100 where it has none.
            seed: :attr:`final_seed` by default.
            deterministic: act by the mode of the distribution.
            max_steps: cap on vector steps; the run's own by default.
            compile_mode: a mode of :mod:`frl.compile`. Compiling takes longer than a few hundred episodes do; the run's own mode
                (``config.trainer.compile_mode``) repeats its final evaluation bit for bit.
        """
        cfg = self.config.trainer
        actor = self.policy
        if isinstance(actor, Policy):  # a critic sees what another environment need not show
            actor = dataclasses.replace(actor, value=None, critic_obs_dim=None, critic_obs_groups=None)
        evaluate = make_evaluator(
            self.env,
            actor,
            self.normalizer,
            deterministic=deterministic,
            clip_actions=self.clamp_to is not None,
            mode=cfg.evaluation_mode,
            max_steps=cfg.max_eval_steps if max_steps is None else max_steps,
            dtype=DTYPES[cfg.dtype],
            compile_mode=compile_mode,
        )
        episodes = (cfg.final_eval_episodes or 100) if num_episodes is None else num_episodes
        return evaluate(self.params, self.norm_state, num_episodes=episodes, seed=self.final_seed if seed is None else seed)

    def export(self, path: str | Path) -> Path:
        """Write the policy with its normalizer as a program of ``torch.export``, which runs without ``frl``.

        ``torch.export.load(path).module()(obs)`` gives what ``act(obs)`` gives for N rows ``obs`` ``[N, ...]`` on the same device. The file also holds
        ``frl.json``: shapes of observation and action, and where the policy comes from.

        Args:
            path: a file that ends in ``.pt2``; its folder is made.

        Returns:
            The path.

        Raises:
            ValueError: for another suffix.
        """
        about = {
            "run": self.path.resolve().name,
            "checkpoint": self.checkpoint.name,
            "global_step": self.global_step,
            "environment": self.config.trainer.learning_env.name,
            "action_space": str(self.action_space),
        }
        return export_policy(
            path,
            self.policy,
            self.params,
            self._example(),
            normalizer=self.normalizer,
            norm_state=self.norm_state,
            clamp_to=self.clamp_to,
            about=about,
        )

    def _example(self) -> PyTree:
        """An observation ``[1, ...]`` of the dtypes that the environment gives."""
        if isinstance(self.env, VecEnv):
            env, params = self.env.env, self.env.default_params
            return tree.map(lambda x: x.unsqueeze(0), env.observe(env.reset(rng.key(0, self.device), params), params))
        return _zeros(self.observation_space, self.device)

    def close(self) -> None:
        """Close the environment, where it holds anything."""
        if hasattr(self.env, "close"):
            self.env.close()

    def __enter__(self) -> LoadedRun:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()


def observation_entries(space: spaces.Space, groups: Sequence[str] | None = None) -> dict[tuple[str, ...], spaces.Space]:
    """``{path: space}`` of what a policy looks at: the entries of ``groups``, or all of them; ``{(): space}`` of a space without names.

    Raises:
        KeyError: for a group that the space lacks.
    """
    if not isinstance(space, spaces.Dict):
        return {(): space}
    if groups is None:
        return {(name, *path): leaf for name, part in space.spaces.items() for path, leaf in observation_entries(part).items()}
    found: dict[tuple[str, ...], spaces.Space] = {}
    for group in groups:
        path, part = (group,) if group in space.spaces else tuple(group.split(".")), space
        for name in path:
            if not isinstance(part, spaces.Dict) or name not in part.spaces:
                raise KeyError(f"observation group {group!r} is not in the observation space (entries: {', '.join(space.spaces)})")
            part = part[name]
        found[path] = part
    return found


def observation_rows(obs: PyTree, space: spaces.Space, groups: Sequence[str] | None, device: torch.device) -> tuple[PyTree, tuple[int, ...]]:
    """What a policy looks at of an observation with any leading dimensions, as rows.

    Args:
        obs: a tensor (or array) ``[..., *shape]``, or a mapping of them, of which ``groups`` are read.
        space: of one row.
        groups: entries that count; all of them, and no others, when ``None``.
        device: where the result is.

    Returns:
        ``(rows [N, ...], or a mapping of them, leading dimensions)``.

    Raises:
        ValueError, KeyError, TypeError: for an observation that does not fit, by key path.
    """
    entries = observation_entries(space, groups)
    given = _values(obs, (), entries)
    missing = [f"{key_path(path)}: missing" for path in entries if path not in given]
    unexpected = [f"{key_path(path)}: unexpected" for path in given if path not in entries and groups is None]
    if missing or unexpected:
        raise KeyError("; ".join(missing + unexpected))
    rows: Any = {}
    leads = {}
    for path, part in entries.items():
        where, shape = key_path(path), tuple(part.shape or ())
        expected = f"({', '.join(['...', *map(str, shape)])})"
        if is_mapping(given[path]):
            raise TypeError(f"{where}: got a mapping, expected a tensor of shape {expected}")
        x = torch.as_tensor(given[path], device=device)
        leads[where] = tuple(x.shape[: max(0, x.ndim - len(shape))])
        if tuple(x.shape) != (*leads[where], *shape):
            raise ValueError(f"{where}: got shape {tuple(x.shape)}, expected {expected}")
        x = x.reshape(math.prod(leads[where]), *shape)
        if path == ():
            return x, leads[where]
        inner = rows
        for name in path[:-1]:
            inner = inner.setdefault(name, {})
        inner[path[-1]] = x
    lead = next(iter(leads.values()))
    for where, other in leads.items():
        if other != lead:
            raise ValueError(f"{where}: got the leading dimensions {other}, other entries have {lead}")
    return rows, lead


def key_path(path: Sequence[str], root: str = "obs") -> str:
    """A path as text: ``obs.camera.depth``."""
    return ".".join((root, *path))


def _values(obs: Any, path: tuple[str, ...], entries: dict[tuple[str, ...], spaces.Space]) -> dict[tuple[str, ...], Any]:
    """``{path: value}``, down to what ``entries`` names."""
    if path in entries:
        return {path: obs}
    if not is_mapping(obs):
        if any(entry[: len(path)] == path for entry in entries):
            raise TypeError(f"{key_path(path)}: got {type(obs).__name__}, expected a mapping")
        return {path: obs}
    return {inner: value for name in entry_names(obs) for inner, value in _values(obs[name], (*path, name), entries).items()}


def _zeros(space: Any, device: torch.device) -> PyTree:
    """An observation ``[1, ...]`` of a space."""
    if isinstance(space, spaces.Dict):
        return {name: _zeros(part, device) for name, part in space.spaces.items()}
    return torch.as_tensor(np.zeros((1, *space.shape), space.dtype), device=device)

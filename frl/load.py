"""A trained policy from its run directory: environment, policy, parameters and normalizer as they were trained, and ``act``.

Everything comes from the checkpoint and the settings stored in it, so a run directory can be moved, and nothing but ``trainer.imports`` must be installed.
"""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from frl import checkpoint as checkpoints
from frl import rng, tree
from frl.build import DTYPES, FINAL_SEED, build_run
from frl.config import RunConfig, parse_run_config
from frl.envs.registry import build_learning_env
from frl.envs.vector import VecEnv
from frl.evaluate import EvaluationResult, make_evaluator
from frl.export import clamp_action, export_policy
from frl.observations import infer_policy_action, is_mapping, policy_dtype
from frl.policy_registry import observation_dim
from frl.resume import SavedRun
from frl.run_directory import MANIFEST, resolve_resume
from frl.types import Normalizer, Params, PyTree

CHECKPOINT_SUFFIX = ".safetensors"


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
        return self.env.env.spec.name if isinstance(self.env, VecEnv) else self.env.spec.name

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
            obs: what the environment observes, a tensor (or array) ``[..., O]`` or a mapping of them, with any leading dimensions.
            key: int64 ``[2]`` for a sample of the policy's distribution; its mode without one.

        Returns:
            ``[..., A]``, or ``[...]`` of one discrete choice.

        Raises:
            ValueError, KeyError, TypeError: for an observation that does not have the shape of the training environment's, by key path.
        """
        rows, lead = _as_rows(obs, self.observation_space, self.device)
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
        compile_mode: str | None = None,
    ) -> EvaluationResult:
        """Play exactly ``num_episodes`` episodes on the rows of ``env``.

        Args:
            num_episodes: those of the run's final evaluation by default, or 100 where it has none.
            seed: :attr:`final_seed` by default.
            deterministic: act by the mode of the distribution.
            max_steps: cap on vector steps; the run's own by default.
            compile_mode: a mode of :mod:`frl.compile`; the run's own by default.
        """
        cfg = self.config.trainer
        evaluate = make_evaluator(
            self.env,
            self.policy,
            self.normalizer,
            deterministic=deterministic,
            clip_actions=self.clamp_to is not None,
            mode=cfg.evaluation_mode,
            max_steps=cfg.max_eval_steps if max_steps is None else max_steps,
            dtype=DTYPES[cfg.dtype],
            compile_mode=cfg.compile_mode if compile_mode is None else compile_mode,
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


# -- loading -----------------------------------------------------------------------------------------------------------------------------------------


def load_run(
    path: str | Path,
    *,
    checkpoint: str | Path = "latest",
    env: str | None = None,
    env_cfg: dict[str, Any] | None = None,
    num_envs: int | None = None,
    device: torch.device | str | None = None,
) -> LoadedRun:
    """Rebuild what a run trained from its directory alone.

    Args:
        path: a run directory, or a checkpoint file.
        checkpoint: ``"latest"``, ``"best"``, or a file (also by its name within the run's ``checkpoints``).
        env: another environment to play on, by its registered name or ``gymnasium:ID``; it must fit the policy.
        env_cfg: settings of that environment, or other settings of the run's own; those of the run when ``None``.
        num_envs: rows to play on, the run's ``num_eval_envs`` by default.
        device: the run's own by default, the CPU where that is missing here.

    Returns:
        See :class:`LoadedRun`.

    Raises:
        FileNotFoundError: the directory, its manifest or the checkpoint is missing.
        CheckpointError: the checkpoint is damaged, of another version, or does not fit the policy; every mismatch by key path.
        ConfigError: the stored settings cannot be built, for example because a module of ``trainer.imports`` is missing.
        ValueError: an environment that does not fit the policy.
    """
    file, directory = _resolve(Path(path), checkpoint)
    saved = SavedRun.read(file)
    config = _here(parse_run_config(saved.config, source=f"settings in {file}"), device, num_envs)
    parts = build_run(config, source=f"settings in {file}")
    like = {
        "params": parts.policy.init(rng.key(0, parts.env.device), dtype=DTYPES[config.trainer.dtype]),
        "norm_state": parts.normalizer.init(device=parts.env.device) if parts.normalizer is not None else (),
    }
    restored = checkpoints.restore({name: x for name, x in saved.tensors.items() if name.split(".")[0] in like}, like, what=str(file))
    own = parts.eval_env
    played = own
    if env is not None or env_cfg is not None:
        name = config.trainer.learning_env.name if env is None else env
        rows = config.trainer.num_eval_envs
        try:
            played = build_learning_env(name, num_envs=rows, device=config.trainer.device, **(env_cfg or {}))
        except (ValueError, TypeError) as error:
            raise ValueError(f"environment {name!r} cannot be built: {error}") from error
        _check_fit(parts.policy, own, played, name)
    space = own.single_action_space
    # A host environment clips what it is given.
    clamped = isinstance(space, spaces.Box) and (config.trainer.clip_actions_to_space or not isinstance(own, VecEnv))
    return LoadedRun(
        path=directory,
        checkpoint=file,
        config=config,
        env=played,
        policy=parts.policy,
        normalizer=parts.normalizer,
        params=restored["params"],
        norm_state=restored["norm_state"],
        observation_space=own.single_observation_space,
        action_space=space,
        clamp_to=space if clamped else None,
        device=own.device,
        global_step=int(saved.loop["global_step"]),
        num_updates=int(saved.loop["num_updates"]),
        seed=_seed(config, directory),
    )


def newest_run(path: str | Path) -> Path:
    """``path`` itself if it is a run directory, else the newest run directory in it.

    Raises:
        FileNotFoundError: there is none.
    """
    path = Path(path)
    if (path / MANIFEST).is_file() or path.suffix == CHECKPOINT_SUFFIX:
        return path
    found = sorted(path.glob(f"*/{MANIFEST}"), key=lambda file: file.stat().st_mtime)
    if not found:
        what = "does not exist" if not path.exists() else "is not a run directory and holds none"
        raise FileNotFoundError(f"{path} {what} (a run directory has a {MANIFEST})")
    return found[-1].parent


def _resolve(path: Path, checkpoint: str | Path) -> tuple[Path, Path]:
    """``(checkpoint file, run directory)``."""
    if path.suffix == CHECKPOINT_SUFFIX:
        if str(checkpoint) != "latest":
            raise ValueError(f"{path} is a checkpoint itself; give its run directory together with checkpoint={str(checkpoint)!r}")
        directory = path.parent.parent if (path.parent.parent / MANIFEST).is_file() else path.parent
        return path, directory
    if not path.is_dir():
        raise FileNotFoundError(f"run directory {path} does not exist")
    if str(checkpoint) in ("latest", "best"):
        file = resolve_resume(str(checkpoint), path)
        assert file is not None
        return file, path
    for place in (Path(checkpoint), path / checkpoint, path / "checkpoints" / checkpoint):
        if place.is_file():
            return place, path
    raise FileNotFoundError(f"checkpoint {checkpoint} does not exist, neither here nor in {path / 'checkpoints'}")


def _here(config: RunConfig, device: torch.device | str | None, num_envs: int | None) -> RunConfig:
    """The run's settings on this machine."""
    changes: dict[str, Any] = {}
    if num_envs is not None:
        if isinstance(num_envs, bool) or not isinstance(num_envs, int) or num_envs < 1:
            raise ValueError(f"num_envs must be a positive integer, got {num_envs!r}")
        changes["num_eval_envs"] = num_envs
    if device is not None:
        changes["device"] = str(device)
    elif config.trainer.device.startswith("cuda") and not torch.cuda.is_available():
        warnings.warn(f"the run was trained on {config.trainer.device}, which torch does not see here; it is loaded on the CPU", RuntimeWarning, stacklevel=3)
        changes["device"] = "cpu"
    return RunConfig(trainer=config.trainer.model_copy(update=changes), policy=config.policy, algorithm=config.algorithm)


def _seed(config: RunConfig, directory: Path) -> int | None:
    """The seed of the training, also where the run drew it."""
    if config.trainer.seed >= 0:
        return config.trainer.seed
    try:
        seed = json.loads((directory / "environment.json").read_text(encoding="utf-8"))["seed"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return seed if isinstance(seed, int) and not isinstance(seed, bool) else None


def _check_fit(policy: Any, own: Any, other: Any, name: str) -> None:
    """``ValueError`` that lists why a policy cannot act in ``other``; other bounds of the actions are only said."""
    problems = []
    try:
        features = observation_dim(other.single_observation_space, policy.obs_groups)
        if features != policy.obs_dim:
            problems.append(f"observation: got {features} features, the policy was trained on {policy.obs_dim}")
    except (KeyError, TypeError) as error:
        problems.append(f"observation: {error.args[0]}")
    trained, got = own.single_action_space, other.single_action_space
    if isinstance(trained, spaces.Box) and isinstance(got, spaces.Box):
        if trained.shape != got.shape:
            problems.append(f"action: got shape {got.shape}, the policy was trained on {trained.shape}")
        elif not (np.allclose(trained.low, got.low) and np.allclose(trained.high, got.high)):
            warnings.warn(f"{name} has other action bounds than the policy was trained with: got {got}, trained on {trained}", RuntimeWarning, stacklevel=3)
    elif trained != got:
        problems.append(f"action: got {got}, the policy was trained on {trained}")
    if problems:
        raise ValueError(f"environment {name!r} does not fit the policy: {'; '.join(problems)}")


# -- observations and actions ------------------------------------------------------------------------------------------------------------------------


def _as_rows(obs: PyTree, space: spaces.Space, device: torch.device) -> tuple[PyTree, tuple[int, ...]]:
    """``(observations [N, ...], leading dimensions)``."""
    leads: dict[str, tuple[int, ...]] = {}

    def rows(part: Any, inner: Any, path: str) -> Any:
        if isinstance(inner, spaces.Dict):
            if not is_mapping(part):
                raise TypeError(f"{path}: got {type(part).__name__}, expected a mapping with the entries {', '.join(inner.spaces)}")
            missing, unexpected = [name for name in inner.spaces if name not in part], [str(name) for name in part if name not in inner.spaces]
            if missing or unexpected:
                texts = [f"{path}.{name}: missing" for name in missing] + [f"{path}.{name}: unexpected" for name in unexpected]
                raise KeyError("; ".join(texts))
            return {name: rows(part[name], inner[name], f"{path}.{name}") for name in inner.spaces}
        if is_mapping(part):
            raise TypeError(f"{path}: got a mapping, expected a tensor of shape {_expected(inner)}")
        x = torch.as_tensor(part, device=device)
        shape = tuple(inner.shape or ())
        if x.ndim < len(shape) or tuple(x.shape[x.ndim - len(shape) :]) != shape:
            raise ValueError(f"{path}: got shape {tuple(x.shape)}, expected {_expected(inner)}")
        leads[path] = tuple(x.shape[: x.ndim - len(shape)])
        return x.reshape(math.prod(leads[path]), *shape)

    flat = rows(obs, space, "obs")
    lead = next(iter(leads.values()))
    for path, other in leads.items():
        if other != lead:
            raise ValueError(f"{path}: got leading dimensions {other}, others have {lead}")
    return flat, lead


def _expected(space: spaces.Space) -> str:
    return f"({', '.join(['...', *(str(n) for n in space.shape or ())])})"


def _zeros(space: Any, device: torch.device) -> PyTree:
    """An observation ``[1, ...]`` of a space."""
    if isinstance(space, spaces.Dict):
        return {name: _zeros(part, device) for name, part in space.spaces.items()}
    return torch.as_tensor(np.zeros((1, *space.shape), space.dtype), device=device)

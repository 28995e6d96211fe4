"""A trained policy from its run directory alone: environment, policy, parameters and normalizer, rebuilt as they were trained.

Everything comes from the checkpoint and the settings stored in it, so a run directory can be moved, and nothing but what ``trainer.imports`` names has to be
there.
"""

from __future__ import annotations

import json
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from frl import checkpoint as checkpoints
from frl import rng
from frl.build import DTYPES, build_actor
from frl.config import RunConfig, parse_run_config
from frl.envs.host import HostEnv
from frl.envs.registry import build_learning_env
from frl.envs.vector import VecEnv
from frl.resume import SavedRun
from frl.run_directory import MANIFEST, POPULATION
from frl.runtime import LoadedRun, key_path, observation_entries

CHECKPOINT_SUFFIX = ".safetensors"


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
        path: a run directory, that of a population for its best member, or a checkpoint file.
        checkpoint: ``"latest"`` (the one before, with a warning, where that file is missing or damaged), ``"best"``, or a file (also by its name within the
            run's ``checkpoints``).
        env: another environment to play on, by its registered name or ``gymnasium:ID``; it must fit the policy.
        env_cfg: settings of that environment; without ``env``, settings of the run's own that are to differ.
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
    saved, directory = _find(Path(path), checkpoint)
    source = f"settings in {saved.path}"
    config = _here(parse_run_config(saved.config, source=source), device, num_envs)
    rows, another = config.trainer.num_eval_envs, env is not None or env_cfg is not None
    with ExitStack() as opened:
        # Of an environment that is not played only the spaces are needed.
        parts = build_actor(config, num_envs=1 if another else rows, source=source)
        opened.callback(_close, parts.env)
        like = {
            "params": parts.policy.init(rng.key(0, parts.env.device), dtype=DTYPES[config.trainer.dtype]),
            "norm_state": parts.normalizer.init(device=parts.env.device) if parts.normalizer is not None else (),
        }
        restored = checkpoints.restore({name: x for name, x in saved.tensors.items() if name.split(".")[0] in like}, like, what=str(saved.path))
        played = parts.env
        if another:
            played = _build_another(config, env, env_cfg or {}, rows)
            opened.callback(_close, played)
            _check_fit(parts.policy, parts.env, played)
            _close(parts.env)
        opened.pop_all()
    space = parts.env.single_action_space
    clamps = config.trainer.clip_actions_to_space or isinstance(parts.env, HostEnv)  # which clips what it is given
    return LoadedRun(
        path=directory,
        checkpoint=saved.path,
        config=config,
        env=played,
        policy=parts.policy,
        normalizer=parts.normalizer,
        params=restored["params"],
        norm_state=restored["norm_state"],
        observation_space=parts.env.single_observation_space,
        action_space=space,
        clamp_to=space if clamps and isinstance(space, spaces.Box) else None,
        device=parts.env.device,
        global_step=int(saved.loop["global_step"]),
        num_updates=int(saved.loop["num_updates"]),
        seed=_seed(config, directory),
    )


def _close(env: Any) -> None:
    if isinstance(env, HostEnv):
        env.close()


def _build_another(config: RunConfig, name: str | None, env_cfg: dict[str, Any], rows: int) -> Any:
    """Rows of another environment than the run's, or of the run's with other settings."""
    cfg = config.trainer
    own = {**cfg.learning_env.cfg, **env_cfg} if name is None else env_cfg
    name, dtype = name or cfg.learning_env.name, DTYPES[cfg.dtype]
    try:
        env = build_learning_env(name, num_envs=rows, device=cfg.device, dtype=None if dtype == torch.float32 else dtype, **own)
    except (ValueError, TypeError) as error:
        raise ValueError(f"environment {name!r} cannot be built: {error}") from error
    if not isinstance(env, (VecEnv, HostEnv)):
        raise ValueError(f"environment {name!r} made a {type(env).__name__}, which is neither a functional nor a host environment")
    return env


def newest_run(path: str | Path) -> Path:
    """``path`` itself if it is a run directory, the best member of a population's, else the newest run directory in it.

    Raises:
        FileNotFoundError: there is none.
    """
    path = Path(path)
    if (path / MANIFEST).is_file() or path.suffix == CHECKPOINT_SUFFIX:
        return path
    if (path / POPULATION).is_file():
        return _best_member(path)
    found = sorted((*path.glob(f"*/{MANIFEST}"), *path.glob(f"*/{POPULATION}")), key=lambda file: file.stat().st_mtime)
    if not found:
        what = "does not exist" if not path.exists() else "is not a run directory and holds none"
        raise FileNotFoundError(f"{path} {what} (a run directory has a {MANIFEST})")
    return found[-1].parent if found[-1].name == MANIFEST else newest_run(found[-1].parent)


def _best_member(path: Path) -> Path:
    """Run directory of the best member of a population."""
    try:
        return path / json.loads((path / POPULATION).read_text(encoding="utf-8"))["members"][0]["directory"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise checkpoints.CheckpointError(f"{path / POPULATION} is damaged; name a member's directory instead") from error


def _find(path: Path, checkpoint: str | Path) -> tuple[SavedRun, Path]:
    """``(checkpoint, run directory)``."""
    if path.suffix == CHECKPOINT_SUFFIX:
        if str(checkpoint) != "latest":
            raise ValueError(f"{path} is a checkpoint itself; give its run directory together with checkpoint={str(checkpoint)!r}")
        directory = path.parent.parent if (path.parent.parent / MANIFEST).is_file() else path.parent
        return SavedRun.read(path), directory
    if not path.is_dir():
        raise FileNotFoundError(f"run directory {path} does not exist")
    if (path / POPULATION).is_file():
        path = _best_member(path)
    if str(checkpoint) in ("latest", "best"):
        saved = SavedRun.find(str(checkpoint), path)
        assert saved is not None
        return saved, path
    for place in (Path(checkpoint), path / checkpoint, path / "checkpoints" / checkpoint):
        if place.is_file():
            return SavedRun.read(place), path
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


def _check_fit(policy: Any, own: Any, other: Any) -> None:
    """``ValueError`` that lists why a policy cannot act in ``other``; other bounds of the actions are only said."""
    problems, name = [], other.spec.name
    try:
        wanted = {path: part.shape for path, part in observation_entries(own.single_observation_space, policy.obs_groups).items()}
        offered = {path: part.shape for path, part in observation_entries(other.single_observation_space, policy.obs_groups).items()}
        for path in {**wanted, **offered}:
            if wanted.get(path) != offered.get(path):
                problems.append(f"{key_path(path, 'observation')}: got {_shape(offered.get(path))}, the policy was trained on {_shape(wanted.get(path))}")
    except KeyError as error:
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


def _shape(shape: tuple[int, ...] | None) -> str:
    return "no such entry" if shape is None else f"shape {tuple(shape)}"

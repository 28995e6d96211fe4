"""Observations: from what an environment says to what a policy takes.

An observation is a tensor ``[N, ...]`` or a (nested) mapping or TensorDict of them. Here it is flattened, its entries are picked by name, what a space declares
is encoded as floating numbers, and a policy is asked for an action. Names are visited in sorted order, so nothing depends on the order of insertion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from frl import tree
from frl.types import Normalizer, Params, PyTree

if TYPE_CHECKING:
    from tensordict import TensorDict

# Declared types whose every value float32 holds; the other integers are kept in float64.
_EXACT_IN_FLOAT32 = ("bool", "int8", "uint8", "int16", "uint16", "float16", "float32")


def is_mapping(obs: Any) -> bool:
    """Whether ``obs`` has named entries: a mapping or a TensorDict."""
    return isinstance(obs, Mapping) or (not isinstance(obs, Tensor) and hasattr(obs, "keys") and hasattr(obs, "batch_size"))


def entry_names(obs: Any) -> list[str]:
    """The names of a mapping or TensorDict in sorted order."""
    return sorted(obs.keys())


def _leaves(obs: Any, path: str = "") -> list[Tensor]:
    if isinstance(obs, Tensor):
        return [obs]
    if not is_mapping(obs):
        raise TypeError(f"observation {path or 'as a whole'} must be a tensor or a mapping of tensors, got {type(obs).__name__}")
    return [leaf for name in entry_names(obs) for leaf in _leaves(obs[name], f"{path}.{name}".lstrip("."))]


def _join(leaves: Sequence[Tensor]) -> Tensor:
    rows = [x.flatten(1) if x.ndim > 1 else x.unsqueeze(1) for x in leaves]
    return rows[0] if len(rows) == 1 else torch.cat(rows, -1)


def flatten_dict_observation(obs: PyTree) -> Tensor:
    """All entries of an observation as one vector for each row: depth first, names in sorted order, each entry flattened.

    Args:
        obs: (nested) mapping or TensorDict of tensors ``[N, ...]``, or one tensor.

    Returns:
        ``[N, O]``.

    Raises:
        ValueError: without any entry.
        TypeError: for an entry that is neither a tensor nor a mapping.
    """
    leaves = _leaves(obs)
    if not leaves:
        raise ValueError("the observation has no entries")
    return _join(leaves)


def flatten_observation_groups(obs: PyTree, groups: Sequence[str] | None) -> Tensor:
    """The entries that ``groups`` names as one vector for each row, in the order of ``groups``.

    Args:
        obs: as for :func:`flatten_dict_observation`.
        groups: names or dotted paths (``"camera.depth"``); all entries when ``None``.

    Returns:
        ``[N, O]``.

    Raises:
        ValueError: for no groups.
        KeyError: for a name that the observation lacks.
        TypeError: for a name of something that is not a tensor.
    """
    if groups is None:
        return flatten_dict_observation(obs)
    if isinstance(groups, str):
        raise TypeError(f"observation groups must be a list of names, got the string {groups!r}")
    if not groups:
        raise ValueError("observation groups must name at least one entry")
    return _join([_entry(obs, path) for path in groups])


def _entry(obs: Any, path: str) -> Tensor:
    part: Any = obs
    known = ", ".join(entry_names(obs)) if is_mapping(obs) else "none, it is one tensor"
    for name in [path] if is_mapping(obs) and path in entry_names(obs) else path.split("."):
        if not is_mapping(part) or name not in entry_names(part):
            raise KeyError(f"observation group {path!r} is not in the observation (entries: {known})")
        part = part[name]
    if not isinstance(part, Tensor):
        inner = f"; name its entries, such as {path}.{entry_names(part)[0]}" if is_mapping(part) and entry_names(part) else ""
        raise TypeError(f"observation group {path!r} must be a tensor, got {type(part).__name__}{inner}")
    return part


def dict_to_tensordict(obs: PyTree, device: torch.device | str | None = None) -> TensorDict:
    """An observation as a TensorDict on ``device``.

    A tensor becomes the entry ``"obs"``, of batch size ``[N]``, or ``[]`` for one row ``[O]``. A mapping gets batch size ``[N]`` if all entries share their
    first dimension, else ``[]``. A TensorDict keeps its batch size. The given object stays as it is.

    Raises:
        TypeError: for anything else.
    """
    from tensordict import TensorDict

    if isinstance(obs, TensorDict):
        return obs.clone(recurse=False).to(device)
    if isinstance(obs, Tensor):
        return TensorDict({"obs": obs}, batch_size=list(obs.shape[:1]) if obs.ndim > 1 else []).to(device)
    if isinstance(obs, Mapping):
        sizes = {tuple(x.shape[:1]) for x in _leaves(obs)}
        return TensorDict.from_dict(dict(obs), batch_size=list(sizes.pop()) if len(sizes) == 1 else []).to(device)
    raise TypeError(f"an observation must be a TensorDict, a tensor or a mapping, got {type(obs).__name__}")


def prepare_policy_observation(
    obs: PyTree, device: torch.device | str | None = None, groups: Sequence[str] | None = None, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The vector that a policy looks at, ``[N, O]``: the entries of ``groups`` (all when ``None``), flattened and joined.

    Args:
        obs: see :func:`flatten_dict_observation`.
        device: where to put it; where it is when ``None``.
        groups: see :func:`flatten_observation_groups`.
        dtype: its dtype; as it comes when ``None``.
    """
    return flatten_observation_groups(obs, groups).to(device=device, dtype=dtype)


def infer_policy_action(
    policy: Any,
    params: Params,
    obs: PyTree,
    *,
    num_envs: int | None = None,
    normalizer: Normalizer | None = None,
    norm_state: PyTree = (),
    observation_transform: Callable[[Tensor], Tensor] | None = None,
    noise: Tensor | tuple[()] = (),
    device: torch.device | str | None = None,
) -> Tensor:
    """The action of a policy for raw observations: pick, normalise, narrow to the dtype of the parameters, act.

    Args:
        policy: see :class:`frl.policies.Policy`.
        params: its parameters.
        obs: raw observations of N rows.
        num_envs: N to check against; not checked when ``None``.
        normalizer, norm_state: as trained; frozen.
        observation_transform: applied to the picked entries ``[N, O]`` instead of a normalizer.
        noise: ``[N, noise_dim]`` for a sample; the mode of the distribution for ``()``.
        device: where the observation is moved to; where it is when ``None``.

    Returns:
        ``[N, A]``, or ``[N]`` of one discrete choice, in the numbering of the action space.

    Raises:
        ValueError: for another number of rows than ``num_envs``, or a normalizer and a transform together.
    """
    if normalizer is not None and observation_transform is not None:
        raise ValueError("give normalizer or observation_transform, not both")
    x = prepare_policy_observation(obs, device, policy.obs_groups)
    if num_envs is not None and x.shape[0] != num_envs:
        raise ValueError(f"the observation must have {num_envs} rows, got {x.shape[0]}")
    if normalizer is not None:
        x = normalizer.apply(norm_state, x)
    elif observation_transform is not None:
        x = observation_transform(x)
    dist = policy.apply(params, x.to(policy_dtype(params, x)))
    return policy.distribution.sample(dist, noise).action if isinstance(noise, Tensor) else policy.distribution.mode(dist)


def policy_dtype(params: Params, x: Tensor) -> torch.dtype:
    """The floating dtype that a policy with ``params`` computes in; that of ``x``, or the default one, for a policy without floating parameters."""
    found = tree.floating(params)
    return found[0].dtype if found else x.dtype if x.is_floating_point() else torch.get_default_dtype()


def convert_policy_action_for_env(env: Any, action: Tensor) -> Tensor:
    """The action on the device of ``env`` (its own attribute or that of an environment which it wraps); its values stay as they are."""
    device = getattr(env, "device", None)
    if device is None and hasattr(env, "get_wrapper_attr"):
        device = env.get_wrapper_attr("device")
    return action.to(device)


# -- what a space declares, as floating numbers ------------------------------------------------------------------------------------------------------


def encoded_space(space: spaces.Space, dtype: torch.dtype = torch.float32) -> spaces.Box | spaces.Dict:
    """The space of :func:`encode_observation`: a floating ``Box (O,)``, or a ``Dict`` of them.

    Raises:
        TypeError: for a kind of space that has no encoding.
    """
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: encoded_space(part, dtype) for name, part in space.spaces.items()})
    number = np.float64 if encoded_dtype(space, dtype) == torch.float64 else np.float32
    if isinstance(space, spaces.Box):
        low, high = (np.asarray(bound).reshape(-1).astype(number) for bound in (space.low, space.high))
        return spaces.Box(low, high, dtype=number)
    if isinstance(space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        width = int(np.sum(space.nvec) if isinstance(space, spaces.MultiDiscrete) else space.n if isinstance(space, spaces.Discrete) else np.prod(space.shape))
        return spaces.Box(0.0, 1.0, (width,), dtype=number)
    raise TypeError(f"observations of {type(space).__name__} have no encoding as numbers (known: Box, Discrete, MultiDiscrete, MultiBinary, Dict)")


def encoded_dtype(space: spaces.Space, dtype: torch.dtype) -> torch.dtype:
    """``dtype``, or float64 for a ``Box`` that declares values which float32 cannot hold (float64 and wide integers)."""
    return torch.float64 if isinstance(space, spaces.Box) and np.dtype(space.dtype).name not in _EXACT_IN_FLOAT32 else dtype


def encode_observation(space: spaces.Space, obs: Any, dtype: torch.dtype = torch.float32) -> PyTree:
    """N observations of ``space`` as floating numbers, each entry ``[N, k]``; always new memory.

    ``Box``: flattened and brought to the declared precision: float64 and wide integers stay exact in float64, so that statistics see every digit; the
    policy's side narrows. ``Discrete`` (counted from its start) and ``MultiDiscrete``: one-hot, side by side. ``MultiBinary``: 0 and 1.

    Args:
        space: of one row.
        obs: tensor ``[N, ...]``, or a mapping or TensorDict of them for a ``Dict``.
        dtype: float32 or float64.

    Raises:
        KeyError: for a missing entry of a ``Dict``.
        TypeError: for something else than a tensor where the space has one.
        ValueError: for a shape that the space does not have.
    """
    if isinstance(space, spaces.Dict):
        missing = [name for name in space.spaces if not is_mapping(obs) or name not in entry_names(obs)]
        if missing:
            raise KeyError(f"the observation lacks {missing[0]!r} of its space (entries: {', '.join(space.spaces)})")
        return {name: encode_observation(part, obs[name], dtype) for name, part in space.spaces.items()}
    if not isinstance(obs, Tensor):
        raise TypeError(f"an observation of {space} must be a tensor, got {type(obs).__name__}")
    shape = tuple(space.shape or ())
    if tuple(obs.shape[1:]) != shape and not (shape == () and tuple(obs.shape[1:]) == (1,)):
        raise ValueError(f"an observation of {space} must have shape {['N', *shape]}, got {list(obs.shape)}")
    x = obs.detach().reshape(obs.shape[0], -1)
    if isinstance(space, spaces.Discrete):
        return _one_hot(x, [int(space.n)], [int(space.start)], dtype)
    if isinstance(space, spaces.MultiDiscrete):
        return _one_hot(x, [int(n) for n in space.nvec.reshape(-1)], [int(s) for s in space.start.reshape(-1)], dtype)
    return x.to(dtype=encoded_dtype(space, dtype), copy=True)


def _one_hot(x: Tensor, sizes: Sequence[int], starts: Sequence[int], dtype: torch.dtype) -> Tensor:
    parts = [x[:, i : i + 1] == torch.arange(start, start + n, device=x.device) for i, (n, start) in enumerate(zip(sizes, starts, strict=True))]
    return torch.cat(parts, -1).to(dtype)

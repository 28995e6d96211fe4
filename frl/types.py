"""The words of the library: what flows through every pure function.

Values that flow through transforms are ``NamedTuple`` pytrees that hold tensors only; absence is ``()``, never ``None``; a number that changes is
a 0-d tensor. Sizes in shapes: ``T`` steps, ``N`` env rows, ``O`` observation features, ``A`` action features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

PyTree: TypeAlias = Any
Params: TypeAlias = Any
Metrics: TypeAlias = dict[str, Tensor]
Hyper: TypeAlias = dict[str, Tensor]


class Outcome(NamedTuple):
    """What one environment row says of one step."""

    reward: Tensor  # []
    terminated: Tensor  # [] bool: the task ended (success or failure), time limits excluded
    metrics: Metrics  # {name: []}, after the step and before any reset; "success" (bool) is the name that evaluation looks for


class TimeStep(NamedTuple):
    """What a vectorised environment returns for one step of N rows."""

    obs: PyTree  # [N, ...] to act on next: the new episode's first observation where the row is done
    final_obs: PyTree  # [N, ...] after the step, before any reset
    reward: Tensor  # [N]
    terminated: Tensor  # [N] bool
    truncated: Tensor  # [N] bool, time limit (can be true together with terminated)
    metrics: Metrics  # {name: [N]}, before any reset


class Trajectory(NamedTuple):
    """A rollout as it was played, time-major. Fields that were not asked for are ``()``."""

    obs: PyTree  # [T, N, ...] raw observation that the policy acted on
    final_obs: PyTree  # [T, N, ...] after the step, before any reset
    action: Tensor  # [T, N, A] (or [T, N] for a discrete action) as given to the environment
    raw: Tensor  # the same before squashing, clamping or a start offset: what log_prob scores
    log_prob: Tensor  # [T, N]
    entropy: Tensor  # [T, N]
    reward: Tensor  # [T, N]
    terminated: Tensor  # [T, N] bool
    truncated: Tensor  # [T, N] bool
    alive: Tensor  # [T, N] bool: no earlier step of this rollout was done
    metrics: Metrics  # {name: [T, N]}
    initial_obs: PyTree  # [N, ...] (when obs is recorded)


class Rollout(NamedTuple):
    """The inputs of a complete rollout: with the parameters they determine every bit of it."""

    env_state: PyTree  # state of the N rows at the first step
    env_params: PyTree
    noise: Tensor  # [T, N, noise_dim] of the policy's distribution
    objective_scale: Tensor  # [] or [N]
    metadata: PyTree = ()  # {label: []} of a scheduled rollout, for the metrics rollout_<label>_mean


class TrainState(NamedTuple):
    """All that training remembers; ``update`` maps one to the next."""

    params: Params
    opt_state: PyTree
    norm_state: PyTree
    env_state: PyTree
    key: Tensor  # int64 [2]
    hyper: Hyper  # {dotted config path: []}
    counters: dict[str, Tensor]  # {name: []} int64
    metrics: Metrics  # of the last update
    extra: dict[str, PyTree]  # per algorithm


class Optimizer(NamedTuple):
    """A pair of pure functions. ``hyper`` maps names such as ``"learning_rate"`` to 0-d tensors."""

    init: Callable[[Params], PyTree]
    update: Callable[[Params, PyTree, Params, Mapping[str, Tensor]], tuple[Params, PyTree]]


def _as_it_is(state: PyTree, dtype: Any) -> PyTree:
    return state


class Normalizer(NamedTuple):
    """Pure functions for running observation statistics: ``init(device=None)``, ``update(state, obs, mask)``, ``apply(state or view, obs)``.

    ``prepare(state, dtype)`` gives the view that ``apply`` takes most cheaply: what does not change during a rollout is computed once before it.
    """

    init: Callable[..., PyTree]
    update: Callable[..., PyTree]
    apply: Callable[[PyTree, Tensor], Tensor]
    prepare: Callable[[PyTree, Any], PyTree] = _as_it_is


class Algorithm(NamedTuple):
    """``state, rollout = collect(state)``, then ``state = update(state, rollout)``; neither changes its input."""

    init: Callable[[Tensor], TrainState]
    collect: Callable[[TrainState], tuple[TrainState, Any]]
    update: Callable[[TrainState, Any], TrainState]


@runtime_checkable
class LearningVecEnv(Protocol):
    """A stateful vector environment of another package (gymnasium style)."""

    num_envs: int
    device: Any
    single_observation_space: Any
    single_action_space: Any

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[Any, dict]: ...

    def step(self, action: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict]: ...

    def close(self) -> None: ...

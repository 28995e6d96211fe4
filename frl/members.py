"""Populations: P members, each a training state of its own, in one state with a leading dimension.

``population`` lifts an algorithm's ``init``, ``collect`` and ``update`` by ``torch.func.vmap``: one Python pass for all members. On a CPU, compiled parts run
the code that is compiled for one member once for each, a thread each, so that a member's result is that of the member alone; elsewhere the mapped step is
compiled. Members differ by their keys and, where wanted, by entries of ``state.hyper``. Selecting, copying and perturbing members, which is all that
population-based training needs, are functions of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from frl import rng, tree
from frl.types import Algorithm, PyTree, TrainState

_OWN_EXTRA = ("reward_returns",)  # belong to the rows of a member's environment, not to what it has learned


def population(algorithm: Algorithm, size: int, *, chunk: int | None = None) -> Algorithm:
    """P members of an algorithm as one, with a leading dimension P on every leaf of state and rollout.

    Member i's state after any number of updates is that of its solo run from the same key and ``hyper``. A member whose update is not finite is skipped alone.

    Args:
        algorithm: on a functional environment (a host's cannot be played by several members at once).
        size: P.
        chunk: members that one pass of ``update`` takes together; it bounds the memory of activations. All when ``None``.

    Returns:
        ``Algorithm(init, collect, update)``. ``init`` takes the members' keys ``[P, 2]``, or one key ``[2]``, under which member i's is ``fold_in(key, i)``.

    Raises:
        ValueError: for a size or chunk that is not a positive integer.
    """
    for name, value in (("size", size), *([("chunk", chunk)] if chunk is not None else [])):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a positive integer, got {value!r}")
    step = size if chunk is None else min(chunk, size)

    def init(key: Tensor) -> TrainState:
        """First states of all members."""
        if tuple(key.shape) not in ((2,), (size, 2)):
            raise ValueError(f"a population of {size} is made from one key [2] or from keys [{size}, 2], got shape {list(key.shape)}")
        keys = rng.fold_in(key, torch.arange(size, device=key.device)) if key.ndim == 1 else key
        return tree.stack([algorithm.init(k) for k in keys])

    def collect(state: TrainState) -> tuple[TrainState, Any]:
        """Rollouts of all members."""
        _check_size(state, size)
        return _map_members(algorithm.collect, state)

    def update(state: TrainState, rollout: Any) -> TrainState:
        """One update of every member on its own rollout."""
        _check_size(state, size)
        fields = _plain(rollout)
        parts = [tree.index((state, fields), slice(i, i + step)) for i in range(0, size, step)] if step < size else [(state, fields)]
        done = [_map_members(algorithm.update, *part) for part in parts]
        return done[0] if len(done) == 1 else tree.map(lambda *x: torch.cat(x), *done)

    return Algorithm(init=init, collect=collect, update=update)


# -- members ---------------------------------------------------------------------------------------------------------------------------------------------


def with_hyper(state: TrainState, values: Mapping[str, Tensor | Sequence[float] | float]) -> TrainState:
    """The population with other hyper-parameters.

    Args:
        state: of a population of P.
        values: ``{name in state.hyper: P numbers, or one for all}``.

    Raises:
        ValueError: for a name that the algorithm does not have, and a wrong number of values.
    """
    hyper = dict(state.hyper)
    for name, value in values.items():
        if name not in hyper:
            raise ValueError(f"there is no hyper-parameter {name!r} (known: {', '.join(sorted(hyper))})")
        old = hyper[name]
        new = torch.as_tensor(value, dtype=old.dtype, device=old.device)
        if new.shape not in (old.shape, old.shape[1:]):
            raise ValueError(f"{name} takes one number or one for each of {old.shape[0]} members, got shape {list(new.shape)}")
        hyper[name] = new.expand(old.shape).clone()
    return state._replace(hyper=hyper)


def select_members(state: PyTree, members: int | Sequence[int] | Tensor) -> PyTree:
    """Members by number, of a state or of any tree with members first: an int gives a solo state, K numbers a population of K."""
    return tree.index(state, members if isinstance(members, int) else torch.as_tensor(members))


def copy_members(state: TrainState, parents: Sequence[int] | Tensor) -> TrainState:
    """Member i goes on with what member ``parents[i]`` has learned.

    Parameters, moments, statistics, hyper-parameters and what else the algorithm learns are the parent's; episodes under way, keys and counters stay a
    member's own, so that copies of one parent go different ways.

    Args:
        state: of a population of P.
        parents: P numbers; ``range(P)`` changes nothing.

    Raises:
        ValueError: for another number of parents.
    """
    index = torch.as_tensor(parents, device=state.key.device)
    if tuple(index.shape) != (state.key.shape[0],):
        raise ValueError(f"parents must be {state.key.shape[0]} numbers of members, got shape {list(index.shape)}")
    taken = tree.index({name: getattr(state, name) for name in ("params", "opt_state", "norm_state", "hyper")}, index)
    own = {name: value for name, value in state.extra.items() if name in _OWN_EXTRA}
    return state._replace(**taken, extra={**tree.index(state.extra, index), **own})


def perturb_hyper(state: TrainState, key: Tensor, names: Sequence[str], *, factors: Sequence[float] = (0.8, 1.25), members: Any = None) -> TrainState:
    """Multiply hyper-parameters by one of ``factors``, drawn for each member and name.

    Args:
        state: of a population of P.
        key: int64 ``[2]``; member i draws from ``fold_in(key, i)``.
        names: entries of ``state.hyper``.
        factors: what to choose from.
        members: bool ``[P]``, which members change; all when ``None``.

    Source: Jaderberg et al. 2017, "Population based training of neural networks", section 4.1.1.
    """
    size = state.key.shape[0]
    keys = rng.fold_in(key, torch.arange(size, device=key.device))
    chosen = torch.ones(size, dtype=torch.bool, device=key.device) if members is None else torch.as_tensor(members, device=key.device)
    values = {}
    for i, name in enumerate(names):
        if name not in state.hyper:
            raise ValueError(f"there is no hyper-parameter {name!r} (known: {', '.join(sorted(state.hyper))})")
        old = state.hyper[name]
        pick = torch.func.vmap(lambda k, i=i: rng.randint(rng.fold_in(k, i), (), 0, len(factors)))(keys)
        values[name] = torch.where(chosen, old * torch.as_tensor(factors, dtype=old.dtype, device=old.device)[pick], old)
    return with_hyper(state, values)


# -- mapping ---------------------------------------------------------------------------------------------------------------------------------------------


def _check_size(state: TrainState, size: int) -> None:
    if state.key.ndim != 2 or state.key.shape[0] != size:
        raise ValueError(f"the state is not one of {size} members: its key has shape {list(state.key.shape)}, expected [{size}, 2]")


def _clocks(state: TrainState) -> dict[str, Tensor]:
    """Counters that an algorithm may read on the host: what is scheduled by rollouts or updates. They are those of the first member for all."""
    return {name: state.counters[name][0] for name in ("rollouts", "updates") if name in state.counters}


def _map_members(fn: Callable, state: TrainState, *rest: PyTree) -> Any:
    """``fn(state, *rest)`` for each member; the result is a state, or a state and a rollout."""
    clocks = _clocks(state)
    leaves, structure = tree.flatten((state, *rest))
    out: list[Any] = []

    def flat(*values: Tensor) -> tuple[Tensor, ...]:
        state, *rest = tree.unflatten(structure, values)
        result = fn(state._replace(counters={**state.counters, **clocks}), *rest)
        new, *rollout = result if not isinstance(result, TrainState) else (result,)
        own = {name: state.counters[name] + (new.counters[name] - clock) for name, clock in clocks.items()}
        new = new._replace(counters={**new.counters, **own})
        kept = [_plain(x) for x in rollout]
        results, made = tree.flatten((new, *kept))
        out[:] = [made, [tuple(x.batch_size) if hasattr(x, "batch_size") else None for x in rollout]]
        return tuple(results)

    values = torch.func.vmap(flat)(*leaves)
    new, *rollout = tree.unflatten(out[0], values)
    if not rollout:
        return new
    return new, _recorded(rollout[0], out[1][0], state.key.shape[0])


def _recorded(rollout: Any, batch_size: tuple[int, ...] | None, size: int) -> Any:
    """A rollout that was a TensorDict as one, with members first."""
    if batch_size is None:
        return rollout
    from tensordict import TensorDict

    return TensorDict(rollout, batch_size=(size, *batch_size))


def _plain(rollout: Any) -> Any:
    """A TensorDict as a dict; anything else as it is."""
    return rollout.to_dict() if hasattr(rollout, "batch_size") else rollout

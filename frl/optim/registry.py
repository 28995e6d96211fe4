"""Optimizers and learning-rate schedules by name: what a run file says, checked when it is said.

The configurations are validated on construction down to the factory's own checks (it is called once and the result dropped), so that a wrong option is refused
before anything runs. Other packages add their own with :func:`register_optimizer` and :func:`register_lr_scheduler`, before a configuration names them.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from frl.optim.adam import adam, adamw
from frl.optim.rmsprop import rmsprop
from frl.optim.schedules import Schedule, constant_schedule, cosine_schedule, exponential_schedule, linear_schedule, step_schedule
from frl.optim.sgd import sgd
from frl.registry import Registry
from frl.types import Optimizer
from frl.validate import require_count, require_number

_Cfg = TypeVar("_Cfg")
_OPTIMIZERS = Registry("optimizer")
_SCHEDULERS = Registry("lr_scheduler")


@dataclass(frozen=True)
class _Scheduler:
    """A registered schedule: its factory, and the option that holds its length in updates (``None`` when it has none)."""

    factory: Callable[..., Schedule]
    horizon: str | None


@dataclass(frozen=True)
class OptimizerCfg:
    """Which optimizer, with which options.

    Attributes:
        name: registered name, any case (kept in lower case).
        learning_rate: finite, at least 0.
        kwargs: the factory's other options, as ``torch.optim`` names them. Copied.
    """

    name: str = "adam"
    learning_rate: float = 3e-4
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kwargs", _copied("optimizer", self.kwargs))
        object.__setattr__(self, "learning_rate", require_number("optimizer: learning_rate", self.learning_rate, at_least=0.0))
        build_optimizer(self)
        object.__setattr__(self, "name", self.name.lower())


@dataclass(frozen=True)
class LRSchedulerCfg:
    """Which learning-rate schedule, with which options.

    Attributes:
        name: registered name, any case (kept in lower case), or ``None`` for a constant rate.
        kwargs: the factory's options, as ``torch.optim.lr_scheduler`` names them. Copied. The horizon of a linear or cosine schedule may be left out and bound
            later with :func:`bind_scheduler_horizon`.
    """

    name: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "kwargs", _copied("lr_scheduler", self.kwargs))
        if self.name is None:
            if self.kwargs:
                raise ValueError(f"lr_scheduler: kwargs {sorted(self.kwargs)} are given without a name (known: {', '.join(_SCHEDULERS.names())})")
            return
        horizon = _SCHEDULERS.get(self.name).horizon
        _build_schedule(self.name, self.kwargs if horizon is None else {horizon: 1, **self.kwargs})
        object.__setattr__(self, "name", self.name.lower())


# ---- building ----


def build_optimizer(cfg: OptimizerCfg | Mapping[str, Any] | None) -> Optimizer:
    """The optimizer that ``cfg`` describes; its learning rate is the default for a ``hyper`` without one.

    Raises:
        TypeError: for a ``cfg`` that is neither a configuration nor a mapping of its fields.
        ValueError: for an unknown name or option, or an option out of its range.
    """
    cfg = coerce_optimizer_cfg(cfg)
    if "lr" in cfg.kwargs or "learning_rate" in cfg.kwargs:
        raise ValueError("optimizer: the learning rate belongs in optimizer.learning_rate, not in optimizer.kwargs")
    factory = _OPTIMIZERS.get(cfg.name)
    options = {"learning_rate": cfg.learning_rate, **cfg.kwargs}
    _check_options("optimizer", cfg.name, factory, options, reserved="learning_rate")
    return factory(**options)


def build_lr_scheduler(cfg: LRSchedulerCfg | Mapping[str, Any] | None) -> Schedule:
    """The schedule that ``cfg`` describes, ``schedule(base_learning_rate, step) -> learning_rate``; constant without a name.

    Raises:
        ValueError: for an unknown name or option, a missing one (a horizon that was not bound, for example), or one out of its range.
    """
    cfg = coerce_lr_scheduler_cfg(cfg)
    return constant_schedule() if cfg.name is None else _build_schedule(cfg.name, cfg.kwargs)


def scheduler_needs_horizon(cfg: LRSchedulerCfg | Mapping[str, Any] | None) -> bool:
    """Whether the schedule has a length that ``cfg`` leaves open."""
    cfg = coerce_lr_scheduler_cfg(cfg)
    horizon = None if cfg.name is None else _SCHEDULERS.get(cfg.name).horizon
    return horizon is not None and horizon not in cfg.kwargs


def bind_scheduler_horizon(cfg: LRSchedulerCfg | Mapping[str, Any] | None, n: int) -> LRSchedulerCfg:
    """``cfg`` with its open length set to ``n`` updates; a length that is already there wins, and a schedule without one comes back as it is.

    Raises:
        ValueError: if ``n`` is not a whole number above 0.
    """
    n, cfg = require_count("lr_scheduler: the number of updates", n), coerce_lr_scheduler_cfg(cfg)
    if not scheduler_needs_horizon(cfg):
        return cfg
    return dataclasses.replace(cfg, kwargs={**cfg.kwargs, _SCHEDULERS.get(str(cfg.name)).horizon: n})


# ---- registering ----


def register_optimizer(name: str, factory: Callable[..., Optimizer] | None = None, *, override: bool = False) -> Any:
    """Add ``factory(learning_rate=..., **kwargs) -> Optimizer`` under ``name``; without ``factory`` returns a decorator. Returns the factory."""
    _check_callable("optimizer", name, factory)
    return _OPTIMIZERS.register(name, factory, override=override)


def register_lr_scheduler(name: str, factory: Callable[..., Schedule] | None = None, *, horizon: str | None = None, override: bool = False) -> Any:
    """Add ``factory(**kwargs) -> schedule`` under ``name``; without ``factory`` returns a decorator. Returns the factory.

    Args:
        name: name in a run file.
        factory: returns ``schedule(base_learning_rate, step) -> learning_rate``.
        horizon: the option that holds the schedule's length in updates, if it has one; it may be left open in a run file.
        override: replace a schedule of the same name.
    """
    if factory is None:
        return lambda item: register_lr_scheduler(name, item, horizon=horizon, override=override)
    _check_callable("lr_scheduler", name, factory)
    _SCHEDULERS.register(name, _Scheduler(factory, horizon), override=override)
    return factory


def get_registered_optimizer_names() -> list[str]:
    """Sorted names."""
    return _OPTIMIZERS.names()


def get_registered_lr_scheduler_names() -> list[str]:
    """Sorted names."""
    return _SCHEDULERS.names()


# ---- coercion ----


def coerce_optimizer_cfg(value: OptimizerCfg | Mapping[str, Any] | None) -> OptimizerCfg:
    """An :class:`OptimizerCfg` from an instance, a mapping of its fields or ``None`` (the defaults); ``TypeError`` for another type."""
    return _coerce(OptimizerCfg, "optimizer", value)


def coerce_lr_scheduler_cfg(value: LRSchedulerCfg | Mapping[str, Any] | None) -> LRSchedulerCfg:
    """An :class:`LRSchedulerCfg` from an instance, a mapping of its fields or ``None`` (the defaults); ``TypeError`` for another type."""
    return _coerce(LRSchedulerCfg, "lr_scheduler", value)


def _coerce(cls: type[_Cfg], owner: str, value: Any) -> _Cfg:
    if value is None:
        return cls()
    if isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"{owner} must be a mapping, {cls.__name__} or None, got {type(value).__name__}")
    _refuse_unknown(owner, value, [item.name for item in dataclasses.fields(cls)])  # pyright: ignore[reportArgumentType]
    return cls(**value)


# ---- checks ----


def _build_schedule(name: str, kwargs: Mapping[str, Any]) -> Schedule:
    factory = _SCHEDULERS.get(name).factory
    _check_options("lr_scheduler", name, factory, kwargs)
    return factory(**kwargs)


def _copied(owner: str, kwargs: Any) -> dict[str, Any]:
    if not isinstance(kwargs, Mapping):
        raise ValueError(f"{owner}: kwargs must be a mapping of option names to values, got {kwargs!r}")
    return copy.deepcopy(dict(kwargs))


def _check_callable(owner: str, name: str, factory: Any) -> None:
    if factory is not None and not callable(factory):
        raise ValueError(f"{owner} {name!r} must be registered with a callable factory, got {type(factory).__name__}")


def _check_options(owner: str, name: str, factory: Callable, options: Mapping[str, Any], reserved: str | None = None) -> None:
    """``ValueError`` for options the factory does not take, and for required ones that are missing."""
    parameters = inspect.signature(factory).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        allowed = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        _refuse_unknown(f"{owner} {name!r}", options, allowed, hide=reserved)
    required = [p.name for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [option for option in required if option not in options]
    if missing:
        raise ValueError(f"{owner} {name!r} needs {', '.join(missing)} in its kwargs")


def _refuse_unknown(owner: str, given: Iterable[Any], allowed: list[str], hide: str | None = None) -> None:
    shown = sorted(option for option in allowed if option != hide)
    for option in given:
        if option not in allowed:
            near = difflib.get_close_matches(str(option), shown, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{owner} has no option {option!r}{hint} (allowed: {', '.join(shown) or 'none'})")


register_optimizer("adam", adam)
register_optimizer("adamw", adamw)
register_optimizer("rmsprop", rmsprop)
register_optimizer("sgd", sgd)
register_lr_scheduler("linear", linear_schedule, horizon="total_iters")
register_lr_scheduler("cosine", cosine_schedule, horizon="T_max")
register_lr_scheduler("step", step_schedule)
register_lr_scheduler("exponential", exponential_schedule)

"""Analytic policy gradients: differentiate the return of a rollout through the environment.

``make_apg`` gives ``init``, ``collect`` and ``update``. A rollout is the complete rollout's inputs (start state, environment parameters, noise), and
``update`` is ``torch.func.grad`` over the
rollout function. Two modes: *segmented* continues the episodes of the last update and cuts the gradient every ``segment_length`` steps; *complete*
starts new episodes, differentiates through all of them and counts each row up to its first done.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from frl import compile as compiler
from frl import rng, tree
from frl.algorithms import episodes
from frl.algorithms.options import check_gate, check_limit
from frl.algorithms.play import check_stagger
from frl.envs.vector import VecEnv
from frl.gradients import BatchedGradientNormStats, adjoint_norm_per_step, adjoint_statistics, merge_stats, stats_metrics
from frl.losses import apg_loss
from frl.optim import apply_updates, global_norm
from frl.rollout import ACTION_LIMIT, BLOCK, STATE_LIMIT, make_unroll
from frl.scan import MEMORY, gradient_taken_once
from frl.types import Algorithm, Hyper, Metrics, Normalizer, Optimizer, Params, PyTree, Rollout, TrainState, Trajectory
from frl.validate import require_choice, require_count, require_number, require_switch


@dataclass(frozen=True, kw_only=True)
class ApgConfig:
    """Decisions of an APG run. Those marked (hyper) are start values of ``state.hyper`` and may change while training.

    Attributes:
        gamma: discount in [0, 1] (hyper).
        ent_coef: entropy coefficient, at least 0 (hyper).
        max_grad_norm: limit of the global gradient norm; ``None`` or infinity is off (hyper).
        max_grad_norm_before_clip: updates whose gradient norm exceeds it are skipped; 0 or ``None`` is off (hyper).
        rollout_mode: ``"segmented"`` or ``"complete"``.
        segment_length: steps between cuts of the gradient in segmented mode.
        update_horizon: steps of one update; ``segment_length`` when ``None``. A multiple of it in segmented mode.
        gradient_accumulation_steps: rollouts averaged in one update (complete mode).
        stagger_episodes: rows begin at different times of their episodes (:meth:`frl.VecEnv.stagger`), so that every rollout has all parts of an episode; in
            segmented mode.
        deterministic_actions: roll out the distribution's mode.
        clip_actions_to_space: clamp actions to the action space.
        action_adjoint_max_norm: row limit of the action adjoint at every step; 0 or ``None`` is off (hyper when on).
        state_adjoint_max_norm: row limit of the env state's adjoint at every step; 0 or ``None`` is off (hyper when on).
        adjoint_norm_per_step: report the mean action adjoint norm of every step as ``action_adjoint_norm_by_step`` in ``state.extra``.
        skip_nonfinite_updates: the training loop raises ``FloatingPointError`` on a skipped update when false; ``update`` itself always skips.
        memory: ``"save"`` or ``"recompute"`` (:func:`frl.scan.scan`).
        steps_per_graph: steps compiled together.
        compile_mode: a mode of :mod:`frl.compile`.
    """

    gamma: float = 0.99
    ent_coef: float = 0.0
    max_grad_norm: float | None = 0.5
    max_grad_norm_before_clip: float | None = 0.0
    rollout_mode: str = "segmented"
    segment_length: int = 16
    update_horizon: int | None = None
    gradient_accumulation_steps: int = 1
    stagger_episodes: bool = False
    deterministic_actions: bool = False
    clip_actions_to_space: bool = False
    action_adjoint_max_norm: float | None = 0.0
    state_adjoint_max_norm: float | None = 0.0
    adjoint_norm_per_step: bool = False
    skip_nonfinite_updates: bool = True
    memory: str = "save"
    steps_per_graph: int = 1
    compile_mode: str = "inductor"

    def __post_init__(self) -> None:
        require_number("gamma", self.gamma, at_least=0.0, at_most=1.0)
        require_number("ent_coef", self.ent_coef, at_least=0.0)
        check_limit("max_grad_norm", self.max_grad_norm)
        for name in ("max_grad_norm_before_clip", ACTION_LIMIT, STATE_LIMIT):
            check_gate(name, getattr(self, name))
        require_choice("rollout_mode", self.rollout_mode, ("segmented", "complete"))
        for name in ("segment_length", "gradient_accumulation_steps", "steps_per_graph", *(["update_horizon"] if self.update_horizon is not None else [])):
            require_count(name, getattr(self, name))
        if self.complete and self.stagger_episodes:
            raise ValueError("stagger_episodes needs rollout_mode 'segmented': complete rollouts begin with new episodes")
        if self.rollout_mode == "segmented":
            if self.horizon % self.segment_length:
                raise ValueError(f"update_horizon must be a multiple of segment_length in segmented mode, got {self.horizon} and {self.segment_length}")
            if self.gradient_accumulation_steps > 1:
                raise ValueError("gradient_accumulation_steps needs rollout_mode 'complete'; a longer update_horizon accumulates segments")
        compiler.check_mode(self.compile_mode)
        require_choice("memory", self.memory, MEMORY)
        for name in ("stagger_episodes", "deterministic_actions", "clip_actions_to_space", "adjoint_norm_per_step", "skip_nonfinite_updates"):
            require_switch(name, getattr(self, name))

    @property
    def horizon(self) -> int:
        """Steps of one rollout."""
        return self.segment_length if self.update_horizon is None else self.update_horizon

    @property
    def complete(self) -> bool:
        return self.rollout_mode == "complete"


def _on(limit: float | None) -> bool:
    return limit is not None and 0 < limit < math.inf


def apg_gradient(
    unroll: Callable[..., tuple[PyTree, Trajectory]],
    params: Params,
    norm_state: PyTree,
    rollout: Rollout,
    *,
    gamma: float | Tensor = 0.99,
    ent_coef: float | Tensor = 0.0,
    complete: bool = False,
    unroll_kwargs: Mapping[str, Any] | None = None,
    probe: PyTree = (),
) -> tuple[Params, dict[str, Any]]:
    """Gradient of the APG loss with respect to ``params`` by ``torch.func.grad`` over ``unroll``.

    Args:
        unroll: ``(params, norm_state, env_state, env_params, noise) -> (env_state, Trajectory)``, from :func:`frl.make_unroll` or your own.
        params: policy parameters.
        norm_state: normalizer state, a constant here.
        rollout: the inputs.
        gamma, ent_coef, complete: see :func:`frl.losses.apg_loss`.
        unroll_kwargs: passed on to ``unroll``.
        probe: zeros ``[T, N, A]`` for an ``unroll`` that takes ``probe=``: its gradient, the action adjoints, is returned too.

    Returns:
        ``(grads, aux)``: aux has ``loss``, ``objective``, ``entropy`` (0-d), ``env_state``, ``trajectory`` (constants of this gradient) and ``adjoint``
        (``()`` without a probe).
    """
    extra = dict(unroll_kwargs or {})
    probing = not (isinstance(probe, tuple) and probe == ())
    found: list[Any] = []

    # torch.func walks its arguments in Python: it is given a flat list.
    leaves, structure = tree.flatten(params)

    def loss(leaves: list[Tensor], probe: PyTree) -> tuple[Tensor, Any]:
        if probing:
            extra["probe"] = probe
        env_state, trajectory = unroll(tree.unflatten(structure, leaves), norm_state, rollout.env_state, rollout.env_params, rollout.noise, **extra)
        terms = apg_loss(trajectory, gamma, ent_coef, complete=complete, objective_scale=rollout.objective_scale)
        values = (terms, env_state, trajectory)
        if compiler.is_tracing():
            return terms.loss, tree.detach(values)
        # Constants of this gradient, but not of one that the whole update is differentiated by. They need not pass through the transform, which would wrap and
        # unwrap every one of them.
        found[:] = [tree.map(compiler.cut, values)]
        return terms.loss, ()

    (grads, adjoint), aux = torch.func.grad(loss, argnums=(0, 1), has_aux=True)(leaves, probe) if probing else _without_probe(loss, leaves)
    terms, env_state, trajectory = found[0] if found else aux
    values = {"loss": terms.loss, "objective": terms.objective, "entropy": terms.entropy}
    return tree.unflatten(structure, grads), {**values, "env_state": env_state, "trajectory": trajectory, "adjoint": adjoint}


def _without_probe(loss: Callable, leaves: list[Tensor]) -> tuple[tuple[list[Tensor], tuple], Any]:
    grads, aux = torch.func.grad(loss, has_aux=True)(leaves, ())
    return (grads, ()), aux


def make_apg(
    env: VecEnv,
    policy: Any,
    optimizer: Optimizer,
    config: ApgConfig | None = None,
    *,
    normalizer: Normalizer | None = None,
    schedule: Callable[[Tensor, Tensor], Tensor] | None = None,
    learning_rate: float = 3e-4,
    unroll: Callable[..., tuple[PyTree, Trajectory]] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Algorithm:
    """APG as three pure functions.

    Args:
        env: N rows of a differentiable environment (:func:`frl.make_vec_env`).
        policy: a policy with reparameterised actions (:func:`frl.actor_only`).
        optimizer: :func:`frl.optim.build_optimizer` or any ``Optimizer``.
        config: see :class:`ApgConfig`.
        normalizer: observation normalizer, frozen during an update and updated after it: from every row and step in segmented mode, from each row's first
            episode in complete mode.
        schedule: ``(base rate, successful updates so far) -> rate``; constant when ``None``.
        learning_rate: start value of ``state.hyper["optimizer.learning_rate"]``.
        unroll: your own rollout function instead of the one made from env and policy. Adjoint limits are then yours to apply (:func:`frl.clip_adjoint`).
        dtype: of parameters and noise.

    Returns:
        ``Algorithm(init, collect, update)``.

    Raises:
        TypeError: for an environment that is not a ``VecEnv``.
        ValueError: for an environment that is not differentiable, an action space that the policy does not fit, or options that exclude each other.
    """
    config = config or ApgConfig()
    if not isinstance(env, VecEnv):
        raise TypeError(f"APG differentiates through the environment and needs a functional one (frl.make_vec_env), got {type(env).__name__}")
    if not env.env.spec.differentiable:
        raise ValueError(f"APG needs a differentiable environment, and {env.env.spec.name!r} is not (its spec says differentiable=False)")
    space = env.single_action_space
    if len(getattr(space, "shape", None) or ()) != 1 or not hasattr(space, "low") or space.shape[0] != policy.action_dim:
        raise ValueError(f"the policy has {policy.action_dim} actions, but the action space of {env.env.spec.name!r} is {space}")
    require_number("learning_rate", learning_rate, at_least=0.0)
    if config.stagger_episodes:
        check_stagger(env)
    limits = [name for name in (ACTION_LIMIT, STATE_LIMIT) if _on(getattr(config, name))]
    if unroll is not None and (limits or config.adjoint_norm_per_step):
        raise ValueError(f"{(limits or ['adjoint_norm_per_step'])[0]} cannot be applied inside your own unroll; call frl.clip_adjoint there and leave it off")
    prepare = env.env.prepare_differentiable_rollout if config.complete else None
    probing = unroll is None and (ACTION_LIMIT in limits or config.adjoint_norm_per_step)
    roll = unroll or make_unroll(
        env,
        policy,
        normalizer,
        record=("obs", "entropy", "metrics") if normalizer is not None else ("entropy", "metrics"),
        attach=("entropy",),
        metrics=episodes.METRICS,
        deterministic=config.deterministic_actions,
        clip_actions=config.clip_actions_to_space,
        segment_length=None if config.complete else config.segment_length,
        complete=config.complete,
        adjoint_limits=limits,
        horizon=config.horizon,
        steps_per_graph=config.steps_per_graph,
        memory=config.memory,
        mode=config.compile_mode,
    )
    built_in = unroll is None

    def next_rollout(key: Tensor, env_params: PyTree, steps: int) -> tuple[Tensor, PyTree, Tensor]:
        """Next key, start states (complete mode) and noise ``[T, N, A]``."""
        key, k_env, k_noise = rng.split(key, 3)
        start = env.reset(env.row_keys(k_env), env_params) if config.complete else ()
        return key, start, policy.noise(k_noise, steps, env.num_envs, dtype=dtype)

    def scheduled_noise(key: Tensor, steps: int) -> Tensor:
        """Noise for any number of steps, by blocks of one size, so that a changing horizon needs no new graph."""
        blocks = [noise_block(key, torch.full((), b, dtype=torch.int64, device=env.device)) for b in range(-(-steps // BLOCK))]
        return torch.cat(blocks)[:steps]

    draw = compiler.jit(next_rollout, mode=config.compile_mode)
    noise_block = compiler.jit(lambda key, b: policy.noise(rng.fold_in(key, b), BLOCK, env.num_envs, dtype=dtype), mode=config.compile_mode)

    # -- init ----------------------------------------------------------------------------------------------------------------------------------

    def init(key: Tensor) -> TrainState:
        """The first state of a run."""
        key = key.to(env.device)
        k_params, k_env, k_run = rng.split(key, 3)
        params = policy.init(k_params, dtype=dtype, device=env.device)
        zero = torch.zeros((), dtype=torch.int64, device=env.device)
        number = lambda x: torch.as_tensor(math.inf if x is None else float(x), dtype=dtype, device=env.device)
        gate = config.max_grad_norm_before_clip
        hyper: Hyper = {
            "optimizer.learning_rate": number(learning_rate),
            "gamma": number(config.gamma),
            "ent_coef": number(config.ent_coef),
            "max_grad_norm": number(config.max_grad_norm),
            "max_grad_norm_before_clip": number(gate if _on(gate) else None),
        }
        hyper.update({name: number(getattr(config, name)) for name in limits})
        window = episodes.init(dtype, env.device)
        env_state = env.reset(env.row_keys(k_env), env.default_params)
        state = TrainState(
            params=params,
            opt_state=optimizer.init(params),
            norm_state=normalizer.init(device=env.device) if normalizer is not None else (),
            env_state=env.stagger(env_state) if config.stagger_episodes else env_state,
            key=k_run,
            hyper=hyper,
            counters={name: zero for name in ("updates", "successful_updates", "skipped_updates", "env_steps", "rollouts", "nonfinite_rows")},
            metrics={},
            extra={"episodes": window, **({"action_adjoint_norm_by_step": torch.zeros(config.horizon, dtype=dtype)} if config.adjoint_norm_per_step else {})},
        )
        return state._replace(metrics=_empty_metrics(state))

    def _empty_metrics(state: TrainState) -> Metrics:
        nan = torch.full((), float("nan"), dtype=dtype, device=env.device)
        names = ["loss", "objective", "entropy", "grad_norm", "skipped_update", "skipped_excessive_gradient", "learning_rate"]
        names += list(stats_metrics(_no_stats())) if probing else []
        return {**{name: nan for name in names}, **episodes.episode_metrics(state.extra["episodes"], episodes.no_sums(dtype, env.device))}

    def _no_stats() -> BatchedGradientNormStats:
        return adjoint_statistics(torch.zeros(1, 1, policy.action_dim, dtype=dtype, device=env.device), 1.0)

    # -- collect -------------------------------------------------------------------------------------------------------------------------------

    def collect(state: TrainState) -> tuple[TrainState, Any]:
        """The inputs of the next rollout: start states and noise. In segmented mode episodes continue; in complete mode they start anew."""
        one = torch.ones((), dtype=dtype, device=env.device)
        rollouts, key, env_params = [], state.key, env.default_params
        for k in range(config.gradient_accumulation_steps):
            if prepare is None:
                key, start, noise = draw(key, env_params, config.horizon)
                scale, labels = one, ()
            else:
                spec, env_params = prepare(int(state.counters["rollouts"]) + k)
                key, start, _ = draw(key, env_params, BLOCK)
                noise, scale = scheduled_noise(rng.fold_in(key, 0), spec.num_steps), torch.as_tensor(spec.objective_scale, dtype=dtype, device=env.device)
                labels = {name: torch.as_tensor(value, dtype=dtype, device=env.device) for name, value in spec.metadata.items()}
            start = start if config.complete else state.env_state
            rollouts.append(Rollout(env_state=start, env_params=env_params, noise=noise, objective_scale=scale, metadata=labels))
        return state._replace(key=key), rollouts[0] if len(rollouts) == 1 else tuple(rollouts)

    # -- update --------------------------------------------------------------------------------------------------------------------------------

    def update(state: TrainState, rollout: Any) -> TrainState:
        """One gradient step; bit for bit the same result for the same arguments, which it leaves as they were."""
        usual = built_in and prepare is None and config.memory == "save" and isinstance(rollout, Rollout) and rollout.noise.shape[0] == config.horizon
        kept = {"key": state.key, "hyper": state.hyper}
        return (at_once if usual else gradient_step)(state._replace(key=(), metrics={}), rollout)._replace(**kept)  # type: ignore[arg-type]

    def gradient_step(state: TrainState, rollout: Any) -> TrainState:
        """An update of compiled parts."""
        parts = [rollout] if isinstance(rollout, Rollout) else list(rollout)
        results = []
        rest = state._replace(env_state=())
        for part in parts:
            extra: dict[str, Any] = {"hyper": state.hyper} if built_in else {}
            probe = torch.zeros_like(part.noise) if probing else ()
            with gradient_taken_once() if built_in else nullcontext():
                results.append(
                    apg_gradient(
                        roll,
                        state.params,
                        state.norm_state,
                        part,
                        gamma=state.hyper["gamma"],
                        ent_coef=state.hyper["ent_coef"],
                        complete=config.complete,
                        unroll_kwargs=extra,
                        probe=probe,
                    )
                )
        grads = [g for g, _ in results]
        terms = [{name: aux[name] for name in ("loss", "objective", "entropy")} for _, aux in results]
        for part, values in zip(parts, terms, strict=True):
            values.update({f"rollout_{name}_mean": value for name, value in (part.metadata or {}).items()})
        played = [(aux["trajectory"], aux["adjoint"]) for _, aux in results]
        # With scheduled horizons the shapes of what was played change; what depends on them then runs eagerly.
        new = finish(rest, grads, terms, played) if prepare is None else finish_digest(rest, grads, terms, digest(rest, played))
        return new._replace(env_state=results[-1][1]["env_state"], hyper={})

    def digest(state: TrainState, played: list[tuple[Trajectory, Any]]) -> dict[str, Any]:
        """What the rest of the update needs of the trajectories; nothing in it has the horizon in its shape."""
        window = state.extra["episodes"]
        norm_state, steps, sums = state.norm_state, 0, episodes.no_sums(dtype, env.device)
        stats = []
        for trajectory, adjoint in played:
            steps += trajectory.reward.numel()
            if normalizer is not None and not isinstance(trajectory.obs, tuple):
                norm_state = normalizer.update(norm_state, _flat_obs(trajectory.obs), trajectory.alive if config.complete else ())
            if "episode_return" in trajectory.metrics:
                window, more = episodes.track(window, trajectory, complete=config.complete)
                sums = tree.map(torch.add, sums, more)
            if probing:
                limit = state.hyper.get(ACTION_LIMIT, torch.full((), math.inf, dtype=dtype, device=env.device))
                stats.append(adjoint_statistics(adjoint, limit))
        pooled: Any = ()
        if probing:
            pooled = stats[0]
            for more in stats[1:]:
                pooled = merge_stats(pooled, more)
        by_step = adjoint_norm_per_step(played[-1][1]) if config.adjoint_norm_per_step else ()
        steps_taken = torch.full((), steps, dtype=torch.int64, device=env.device)
        return {
            "window": window,
            "norm_state": norm_state,
            "metrics": episodes.episode_metrics(window, sums),
            "steps": steps_taken,
            "bad": sums.nonfinite_rows,
            "stats": pooled,
            "by_step": by_step,
        }

    def _finish(state: TrainState, grads: list[Params], terms: list[dict[str, Tensor]], played: list[tuple[Trajectory, Any]]) -> TrainState:
        return _finish_digest(state, grads, terms, digest(state, played))

    def _finish_digest(state: TrainState, parts: list[Params], terms: list[dict[str, Tensor]], played: dict[str, Any]) -> TrainState:
        """Average the gradients, decide, clip, step."""
        hyper, count = state.hyper, len(parts)
        grads = tree.map(lambda *g: sum(g[1:], g[0]) / count, *parts)
        mean = {name: torch.stack([t[name] for t in terms]).mean() for name in terms[0]}
        norm = global_norm(grads)
        finite = torch.isfinite(mean["loss"]) & tree.all_finite(grads)
        gate = hyper["max_grad_norm_before_clip"]
        ok = finite & torch.isfinite(norm) & ((norm <= gate) | (gate <= 0))
        # Same formula as torch.nn.utils.clip_grad_norm_; the guard keeps an infinite limit from making 0 * inf.
        scale = torch.where(torch.isfinite(hyper["max_grad_norm"]), (hyper["max_grad_norm"] / (norm + 1e-6)).clamp(max=1.0), 1.0)
        safe = tree.map(lambda g: torch.where(ok, g * scale, 0.0), grads)
        base = hyper["optimizer.learning_rate"]
        rate = base if schedule is None else schedule(base, state.counters["successful_updates"])
        updates, opt_state = optimizer.update(safe, state.opt_state, state.params, {**hyper, "learning_rate": rate})

        def keep(new: PyTree, old: PyTree) -> PyTree:
            return tree.map(lambda a, b: torch.where(ok, a, b), new, old)

        one = torch.ones((), dtype=torch.int64, device=norm.device)
        added = {
            "updates": one,
            "successful_updates": ok,
            "skipped_updates": ~ok,
            "env_steps": played["steps"],
            "rollouts": one * count,
            "nonfinite_rows": played["bad"],
        }
        metrics = {
            **played["metrics"],
            **mean,
            "grad_norm": torch.where(finite, norm, float("nan")),
            "skipped_update": (~ok).to(norm.dtype),
            "skipped_excessive_gradient": (finite & ~ok).to(norm.dtype),
            "learning_rate": rate,
            **(stats_metrics(played["stats"]) if probing else {}),
        }
        return TrainState(
            params=keep(apply_updates(state.params, updates), state.params),
            opt_state=keep(opt_state, state.opt_state),
            norm_state=keep(played["norm_state"], state.norm_state),
            env_state=(),
            key=(),  # type: ignore[arg-type]
            hyper=hyper,
            counters={name: state.counters[name] + added[name] for name in state.counters},
            metrics=metrics,
            extra={**state.extra, "episodes": played["window"], **({"action_adjoint_norm_by_step": played["by_step"]} if config.adjoint_norm_per_step else {})},
        )

    finish_digest = compiler.jit(_finish_digest, mode=config.compile_mode)
    finish = compiler.jit(_finish, mode=config.compile_mode)
    at_once = compiler.whole(gradient_step, mode=config.compile_mode)
    ahead = compiler.captured_ahead(collect, update, mode=config.compile_mode) if built_in else collect
    return Algorithm(init=init, collect=ahead, update=update)


def _flat_obs(obs: PyTree) -> Tensor:
    leaves = tree.leaves(obs)
    if len(leaves) == 1:
        return leaves[0]
    return torch.cat([x.flatten(2) for x in leaves], dim=-1)

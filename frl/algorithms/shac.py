"""Short-horizon actor-critic: analytic policy gradients of short windows, each ending in the value of the state that it reaches.

``make_shac`` gives ``init``, ``collect`` and ``update``. A rollout is its inputs, as for APG in segmented mode: episodes go on where the last one ended.
``update`` is ``torch.func.grad`` over the rollout function and the terminal values for the actor; the critic is fitted to TD(lambda) targets in minibatches,
and a slow copy of it, the target critic, follows. All values come from that copy. Observation statistics are frozen within an update.

With ``ent_coef`` above 0 the entropy of the policy is part of every reward, so the critic learns a soft value; the coefficient, a temperature, can be learned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from frl import compile as compiler
from frl import rng, tree
from frl.advantages import explained_variance
from frl.algorithms import episodes
from frl.algorithms.epochs import mean_metrics, minibatch_step, plan_minibatches, run_minibatches
from frl.algorithms.minibatch import minibatch_count
from frl.algorithms.options import check_gate, check_limit, check_normalizers
from frl.algorithms.play import check_fit, check_stagger
from frl.algorithms.record import flat_observations, normalized, scale_of
from frl.algorithms.states import first_state
from frl.critic_policies import join_parameter_groups
from frl.envs.vector import VecEnv
from frl.gradients import adjoint_statistics, stats_metrics
from frl.losses import shac_loss, value_loss
from frl.normalizers import running_normalizer
from frl.numerics import masked_mean
from frl.optim import apply_updates, global_norm
from frl.optim.transform import clip_global_norm
from frl.returns import td_lambda_returns
from frl.rollout import ACTION_LIMIT, STATE_LIMIT, make_unroll
from frl.scan import MEMORY
from frl.types import Algorithm, Hyper, Metrics, Normalizer, Optimizer, Params, PyTree, Rollout, TrainState, Trajectory
from frl.validate import require_choice, require_count, require_number, require_switch

_SCALAR = running_normalizer(1)  # statistics of the critic's targets
ACTOR_RATE, CRITIC_RATE, TEMPERATURE_RATE = "optimizer.learning_rate", "critic_optimizer.learning_rate", "temperature_learning_rate"
_OWN_METRICS = (
    *("loss", "objective", "entropy", "grad_norm", "skipped_update", "skipped_excessive_gradient", "learning_rate"),
    *("value_loss", "value_mean", "critic_grad_norm", "critic_learning_rate", "explained_variance", "temperature"),
)


@dataclass(frozen=True, kw_only=True)
class ShacConfig:
    """Decisions of a SHAC run. Those marked (hyper) are start values of ``state.hyper`` and may change while training.

    Attributes:
        segment_length: steps of one window, which ends in a value and through whose end no gradient passes.
        update_horizon: steps of one update, a multiple of ``segment_length`` (one window when ``None``): its windows are averaged, and TD(lambda) looks
            across them.
        gamma: discount in [0, 1] (hyper).
        td_lambda: lambda of the critic's targets, in [0, 1] (hyper).
        target_tau: how far the target critic moves towards the critic in an update, in [0, 1]: 1 follows it at once, 0 never (hyper).
        n_epochs: passes of the critic over a rollout.
        num_mini_batches: minibatches of one pass; from ``batch_size`` when ``None``.
        batch_size: largest size of a minibatch when ``num_mini_batches`` is ``None``.
        max_grad_norm: limit of the actor's gradient norm; ``None`` or infinity is off (hyper).
        max_grad_norm_before_clip: updates whose actor gradient norm exceeds it are skipped; 0 or ``None`` is off (hyper).
        normalize_values: the critic learns targets that are normalised by their running mean and std.
        critic_max_grad_norm: limit of the critic's gradient norm in each minibatch; ``None`` or infinity is off (hyper).
        ent_coef: coefficient of the policy's entropy in every reward, at least 0 (hyper, or the start value of the learned one).
        learn_temperature: learn the coefficient so that the entropy becomes ``target_entropy``.
        target_entropy: [nat] with ``learn_temperature``; minus half the action features when ``None`` (hyper).
        normalize_entropy: with ``learn_temperature``, add ``(H - target) / (2 |target|)`` instead of ``H``, which is 0 at the target.
        temperature_learning_rate: of the logarithm of the coefficient (hyper).
        stagger_episodes: rows begin at different times of their episodes (:meth:`frl.VecEnv.stagger`), so that every rollout has all parts of an episode.
        deterministic_actions: roll out the distribution's mode.
        clip_actions_to_space: clamp actions to the action space.
        action_adjoint_max_norm: row limit of the action adjoint at every step; 0 or ``None`` is off (hyper when on).
        state_adjoint_max_norm: row limit of the env state's adjoint at every step; 0 or ``None`` is off (hyper when on).
        skip_nonfinite_updates: the training loop raises ``FloatingPointError`` on a skipped update when false; ``update`` itself always skips.
        memory: ``"save"`` or ``"recompute"`` (:func:`frl.scan.scan`).
        steps_per_graph: steps compiled together.
        compile_mode: a mode of :mod:`frl.compile`.
    """

    segment_length: int = 32
    update_horizon: int | None = None
    gamma: float = 0.99
    td_lambda: float = 0.95
    target_tau: float = 0.8
    n_epochs: int = 16
    num_mini_batches: int | None = 4
    batch_size: int = 64
    max_grad_norm: float | None = 1.0
    max_grad_norm_before_clip: float | None = 0.0
    normalize_values: bool = True
    critic_max_grad_norm: float | None = None
    ent_coef: float = 0.0
    learn_temperature: bool = False
    target_entropy: float | None = None
    normalize_entropy: bool = False
    temperature_learning_rate: float = 5e-3
    stagger_episodes: bool = False
    deterministic_actions: bool = False
    clip_actions_to_space: bool = False
    action_adjoint_max_norm: float | None = 0.0
    state_adjoint_max_norm: float | None = 0.0
    skip_nonfinite_updates: bool = True
    memory: str = "save"
    steps_per_graph: int = 1
    compile_mode: str = "inductor"

    def __post_init__(self) -> None:
        optional = [name for name in ("update_horizon", "num_mini_batches") if getattr(self, name) is not None]
        for name in ("segment_length", "n_epochs", "batch_size", "steps_per_graph", *optional):
            require_count(name, getattr(self, name))
        if self.horizon % self.segment_length:
            raise ValueError(f"update_horizon must be a multiple of segment_length, got {self.horizon} and {self.segment_length}")
        for name in ("gamma", "td_lambda", "target_tau"):
            require_number(name, getattr(self, name), at_least=0.0, at_most=1.0)
        for name in ("ent_coef", "temperature_learning_rate"):
            require_number(name, getattr(self, name), at_least=0.0)
        for name in ("max_grad_norm", "critic_max_grad_norm"):
            check_limit(name, getattr(self, name))
        for name in ("max_grad_norm_before_clip", ACTION_LIMIT, STATE_LIMIT):
            check_gate(name, getattr(self, name))
        for name in (
            "stagger_episodes",
            "normalize_values",
            "learn_temperature",
            "normalize_entropy",
            "deterministic_actions",
            "clip_actions_to_space",
            "skip_nonfinite_updates",
        ):
            require_switch(name, getattr(self, name))
        if self.target_entropy is not None:
            require_number("target_entropy", self.target_entropy)
        if self.learn_temperature:
            if self.ent_coef == 0:
                raise ValueError("learn_temperature starts at ent_coef, which must be positive, got 0")
            if self.normalize_entropy and self.target_entropy == 0:
                raise ValueError("normalize_entropy divides by target_entropy, which must not be 0")
        else:
            for name, off in (("target_entropy", None), ("normalize_entropy", False)):
                if getattr(self, name) != off:
                    raise ValueError(f"{name} has no effect without learn_temperature, got {getattr(self, name)!r}")
        require_choice("memory", self.memory, MEMORY)
        compiler.check_mode(self.compile_mode)

    @property
    def horizon(self) -> int:
        """Steps of one rollout."""
        return self.segment_length if self.update_horizon is None else self.update_horizon


def _on(limit: float | None) -> bool:
    return limit is not None and 0 < limit < math.inf


# -- the gradient of windows -----------------------------------------------------------------------------------------------------------------------------


def shac_gradient(
    unroll: Callable[..., tuple[PyTree, Trajectory]],
    value: Callable[[PyTree], Tensor],
    params: Params,
    norm_state: PyTree,
    rollout: Rollout,
    *,
    gamma: float | Tensor = 0.99,
    ent_coef: float | Tensor = 0.0,
    segment_length: int | None = None,
    unroll_kwargs: Mapping[str, Any] | None = None,
    probe: PyTree = (),
) -> tuple[Params, dict[str, Any]]:
    """Gradient of the SHAC loss with respect to ``params``: of the rewards of each window and of the value that it ends in.

    Args:
        unroll: ``(params, norm_state, env_state, env_params, noise) -> (env_state, Trajectory)`` whose ``final_obs`` carries gradients, from
            :func:`frl.make_unroll` or your own.
        value: ``final_obs [T, N, ...] -> [T, N]``, a constant function here: the gradient flows through what it is given. It sees zeros where the episode
            terminated: what a state is worth that was the last, or is not finite, is not asked.
        params: policy parameters.
        norm_state: normalizer state, a constant here.
        rollout: the inputs.
        gamma, ent_coef, segment_length: see :func:`frl.losses.shac_loss`. For more than one window ``unroll`` cuts the gradient between them.
        unroll_kwargs: passed on to ``unroll``.
        probe: as in :func:`frl.apg_gradient`.

    Returns:
        ``(grads, aux)``: aux has ``loss``, ``objective``, ``entropy`` (0-d), ``final_value`` ``[T, N]``, ``env_state``, ``trajectory`` (all detached) and
        ``adjoint`` (``()`` without a probe).
    """
    extra = dict(unroll_kwargs or {})
    probes: tuple[Any, ...] = () if isinstance(probe, tuple) and probe == () else (probe,)
    found: list[Any] = []

    def loss(params: Params, *probes: Tensor) -> tuple[Tensor, Any]:
        given = {**extra, "probe": probes[0]} if probes else extra
        env_state, trajectory = unroll(params, norm_state, rollout.env_state, rollout.env_params, rollout.noise, **given)
        values = value(tree.map(lambda x: _zero_where(trajectory.terminated, x), trajectory.final_obs))
        terms = shac_loss(trajectory, values, gamma, ent_coef, segment_length=segment_length, objective_scale=rollout.objective_scale)
        aux = tree.detach((terms, values, env_state, trajectory))
        if any(compiler.is_transformed(x) for x in tree.leaves(aux)):
            return terms.loss, aux
        # Plain values need not pass through the transform, which would wrap and unwrap every one of them.
        found[:] = [tree.map(compiler.plain, aux)]
        return terms.loss, ()

    (grads, *adjoint), aux = torch.func.grad(loss, argnums=tuple(range(1 + len(probes))), has_aux=True)(params, *probes)
    terms, values, env_state, trajectory = found[0] if found else aux
    return grads, {**terms._asdict(), "final_value": values, "env_state": env_state, "trajectory": trajectory, "adjoint": adjoint[0] if adjoint else ()}


def _zero_where(mask: Tensor, x: Tensor) -> Tensor:
    return torch.where(mask.reshape(mask.shape + (1,) * (x.ndim - mask.ndim)), 0, x)


# -- SHAC ------------------------------------------------------------------------------------------------------------------------------------------------


def make_shac(
    env: VecEnv,
    policy: Any,
    optimizer: Optimizer,
    config: ShacConfig | None = None,
    *,
    critic_optimizer: Optimizer | None = None,
    normalizer: Normalizer | None = None,
    critic_normalizer: Normalizer | None = None,
    schedule: Callable[[Tensor, Tensor], Tensor] | None = None,
    learning_rate: float = 2e-3,
    critic_learning_rate: float | None = None,
    unroll: Callable[..., tuple[PyTree, Trajectory]] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Algorithm:
    """SHAC as three pure functions.

    An update with a loss or gradient that is not finite, the actor's or the critic's, is skipped as a whole: parameters, moments, statistics, target critic and
    temperature keep every bit.

    Args:
        env: N rows of a differentiable environment (:func:`frl.make_vec_env`).
        policy: an actor-critic with reparameterised actions (:func:`frl.actor_critic`) whose actor and critic share no parameters.
        optimizer: of the actor, and with a state of its own of the temperature.
        config: see :class:`ShacConfig`.
        critic_optimizer: of the critic; ``optimizer`` when ``None``.
        normalizer: of the actor's observation; its state is ``state.norm_state``, frozen during an update and updated after it.
        critic_normalizer: of the critic's; its state is ``state.extra["critic_norm_state"]``. Pass ``normalizer`` itself where both see the same.
        schedule: ``(base rate, successful updates so far) -> rate`` of every learning rate; constant when ``None``.
        learning_rate: start value of ``state.hyper["optimizer.learning_rate"]``.
        critic_learning_rate: of ``state.hyper["critic_optimizer.learning_rate"]``; ``learning_rate`` when ``None``.
        unroll: your own rollout function instead of the one made from env and policy, with ``obs`` and ``final_obs`` recorded. Adjoint limits are then yours to
            apply (:func:`frl.clip_adjoint`), as is the cut between windows.
        dtype: of parameters and noise.

    Returns:
        ``Algorithm(init, collect, update)``. ``state.extra`` has the ``target_critic`` and the ``log_temperature`` where it is learned.

    Raises:
        TypeError: for an environment that is not a ``VecEnv``.
        ValueError: for an environment that is not differentiable, a policy that does not fit it, has no critic or shares parameters between actor and critic,
            more minibatches than transitions, normalizers that the policy asks for and that are missing, or options that exclude each other.

    Source: Xu et al. 2022, "Accelerated policy learning with parallel differentiable simulation". Differences: values are normalised (``normalize_values``),
    without which a critic of large returns lags behind; the objective is a mean over rows and a sum over steps. The learned temperature is that of Xing et al.
    2024, "Stabilizing reinforcement learning in differentiable multiphysics simulation" (SAPO), here with one critic and its target.
    """
    config = config or ShacConfig()
    critic_optimizer = critic_optimizer or optimizer
    critic_learning_rate = learning_rate if critic_learning_rate is None else critic_learning_rate
    for name, rate in (("learning_rate", learning_rate), ("critic_learning_rate", critic_learning_rate)):
        require_number(name, rate, at_least=0.0)
    _check_env(env, policy)
    if config.stagger_episodes:
        check_stagger(env)
    shared = check_normalizers(policy, normalizer, critic_normalizer)
    parts = minibatch_count(env.num_envs * config.horizon, num_minibatches=config.num_mini_batches, batch_size=config.batch_size)
    limits = [name for name in (ACTION_LIMIT, STATE_LIMIT) if _on(getattr(config, name))]
    if unroll is not None and limits:
        raise ValueError(f"{limits[0]} cannot be applied inside your own unroll; call frl.clip_adjoint there and leave it off")
    probing, mode = ACTION_LIMIT in limits, config.compile_mode
    target_entropy = -0.5 * policy.action_dim if config.target_entropy is None else config.target_entropy
    roll = unroll or make_unroll(
        env,
        policy,
        normalizer,
        record=("obs", "final_obs", "entropy", "metrics"),
        attach=("final_obs", "entropy"),
        metrics=episodes.METRICS,
        deterministic=config.deterministic_actions,
        clip_actions=config.clip_actions_to_space,
        segment_length=config.segment_length,
        adjoint_limits=limits,
        horizon=config.horizon,
        steps_per_graph=config.steps_per_graph,
        memory=config.memory,
        mode=mode,
    )
    built_in = unroll is None
    split = policy.optimization_parameter_groups

    # -- init --------------------------------------------------------------------------------------------------------------------------------------------

    def init(key: Tensor) -> TrainState:
        """The first state of a run."""
        gate = config.max_grad_norm_before_clip
        hyper: dict[str, float | None] = {
            ACTOR_RATE: learning_rate,
            CRITIC_RATE: critic_learning_rate,
            "max_grad_norm_before_clip": gate if _on(gate) else None,
            **{name: getattr(config, name) for name in ("gamma", "td_lambda", "target_tau", "max_grad_norm", "critic_max_grad_norm", *limits)},
        }
        if config.learn_temperature:
            hyper.update({"target_entropy": target_entropy, TEMPERATURE_RATE: config.temperature_learning_rate})
        else:
            hyper["ent_coef"] = config.ent_coef
        adjoints = stats_metrics(adjoint_statistics(torch.zeros(1, 1, policy.action_dim), 1.0)) if probing else {}
        names = (*_OWN_METRICS, *adjoints)
        state = first_state(key, env, policy, optimizer, normalizer, hyper=hyper, metrics=names, dtype=dtype, stagger=config.stagger_episodes)
        groups = split(state.params)
        opt_state = {"actor": optimizer.init(groups["actor"]), "critic": critic_optimizer.init(groups["critic"])}
        extra: dict[str, PyTree] = {**state.extra, "target_critic": tree.map(torch.clone, groups["critic"])}
        if critic_normalizer is not None and not shared:
            extra["critic_norm_state"] = critic_normalizer.init(device=env.device)
        if config.normalize_values:
            extra["value_stats"] = _SCALAR.init(device=env.device)
        if config.learn_temperature:
            extra["log_temperature"] = torch.full((), math.log(config.ent_coef), dtype=dtype, device=env.device)
            opt_state["temperature"] = optimizer.init(extra["log_temperature"])
        return state._replace(opt_state=opt_state, extra=extra)

    # -- collect -----------------------------------------------------------------------------------------------------------------------------------------

    def collect(state: TrainState) -> tuple[TrainState, Rollout]:
        """The inputs of the next rollout: where the rows are, and noise."""
        key, k_noise = rng.split(state.key, 2)
        noise = policy.noise(k_noise, config.horizon, env.num_envs, dtype=dtype)
        one = torch.ones((), dtype=dtype, device=env.device)
        return state._replace(key=key), Rollout(env_state=state.env_state, env_params=env.default_params, noise=noise, objective_scale=one)

    # -- update ------------------------------------------------------------------------------------------------------------------------------------------

    # What runs once in an update runs eagerly: compiling it would cost half a minute and save a hundredth of a second each time.

    def critic_state(state: TrainState) -> PyTree:
        return state.norm_state if shared else state.extra.get("critic_norm_state", ())

    def value_scale(extra: Mapping[str, PyTree]) -> tuple[Any, Any]:
        """Mean and std of what the critic has learned, which its output is scaled by."""
        return scale_of(extra["value_stats"], dtype) if config.normalize_values else (0.0, 1.0)

    def critic_input(state: TrainState, obs: PyTree) -> Tensor:
        """What the critic sees of observations ``[T, N, ...]``: ``[T N, C]``, normalised."""
        flat = flat_observations(obs, policy.critic_obs_groups).movedim(0, 1).flatten(0, 1)
        return normalized(critic_normalizer, critic_state(state), flat, dtype)

    def differentiate(state: TrainState, rollout: Rollout) -> tuple[Params, dict[str, Any]]:
        """Gradient of the actor's parameters; aux has the ``temperature`` too, and in ``entropy_mean`` [nat] what the policy's entropy was."""
        hyper, groups = state.hyper, split(state.params)
        temperature = torch.exp(state.extra["log_temperature"]) if config.learn_temperature else hyper["ent_coef"]
        offset = hyper["target_entropy"] if config.normalize_entropy else 0.0
        unit = 2 * hyper["target_entropy"].abs() if config.normalize_entropy else 1.0

        def actor_roll(actor: Params, *args: Any, **kwargs: Any) -> tuple[PyTree, Trajectory]:
            env_state, trajectory = roll(join_parameter_groups({"actor": actor, "critic": groups["critic"]}), *args, **kwargs)
            if not isinstance(trajectory.entropy, Tensor):
                trajectory = trajectory._replace(entropy=torch.zeros_like(trajectory.reward))
            bonus = (trajectory.entropy - offset) / unit if config.normalize_entropy else trajectory.entropy
            return env_state, trajectory._replace(entropy=bonus)

        mean, std = value_scale(state.extra)

        def value(obs: PyTree) -> Tensor:
            return mean + std * policy.value(state.extra["target_critic"], critic_input(state, obs)).reshape(tree.leaves(obs)[0].shape[:2])

        grads, aux = shac_gradient(
            actor_roll,
            value,
            groups["actor"],
            state.norm_state,
            rollout,
            gamma=hyper["gamma"],
            ent_coef=temperature,
            segment_length=config.segment_length,
            unroll_kwargs={"hyper": hyper} if built_in else {},
            probe=torch.zeros_like(rollout.noise) if probing else (),
        )
        return grads, {**aux, "temperature": temperature, "entropy_mean": aux["trajectory"].entropy.mean() * unit + offset}

    def critic_data(state: TrainState, aux: dict[str, Any]) -> dict[str, Tensor]:
        """Observations, targets and which of them count, ``[T N, ...]``."""
        played, temperature = aux["trajectory"], aux["temperature"]
        reward = played.reward + torch.where(temperature != 0, temperature * played.entropy, 0)
        gamma, td_lambda = state.hyper["gamma"], state.hyper["td_lambda"]
        returns = td_lambda_returns(reward, aux["final_value"], played.terminated, played.truncated, gamma=gamma, td_lambda=td_lambda)
        valid = (~played.metrics["nonfinite"] if "nonfinite" in played.metrics else torch.ones_like(played.terminated)).flatten()
        return {"obs": critic_input(state, played.obs), "returns": torch.where(valid, returns.flatten(), 0), "valid": valid}

    def critic_loss(critic: Params, mini: dict[str, Any], hyper: Hyper) -> tuple[Tensor, Metrics]:
        loss = value_loss(policy.value(critic, mini["obs"]), mini["returns"], valid=mini["valid"])
        return loss, {"loss": loss}

    step = minibatch_step(critic_loss, critic_optimizer)

    def fit_critic(state: TrainState, key: Tensor, data: dict[str, Tensor], rate: Tensor) -> tuple[dict[str, Any], dict[str, PyTree], Metrics]:
        """All epochs: the last carry of :func:`frl.algorithms.ppo.minibatch_step`, new statistics of values, and metrics."""
        critic, returns, own = split(state.params)["critic"], data["returns"], {}
        now = policy.value(critic, data["obs"])
        old_mean, old_std = value_scale(state.extra)
        told = {
            "value_mean": masked_mean(old_mean + old_std * now, data["valid"]),
            "explained_variance": explained_variance(old_mean + old_std * now, returns, data["valid"]),
        }
        if config.normalize_values:
            own = {"value_stats": _SCALAR.update(state.extra["value_stats"], returns.unsqueeze(-1), data["valid"])}
            mean, std = value_scale(own)
            data = {**data, "returns": (returns - mean) / std}
        plan = plan_minibatches(key, now.shape[0], config.n_epochs, parts)
        hyper = {"max_grad_norm": state.hyper["critic_max_grad_norm"]}
        start = state._replace(params=critic, opt_state=state.opt_state["critic"], hyper=hyper)
        carry, per_step = run_minibatches(step, start, data, plan, rate, mode=mode)
        fitted = mean_metrics(per_step)
        return carry, own, {**told, "value_loss": fitted["loss"], "critic_grad_norm": fitted["grad_norm"]}

    def new_statistics(state: TrainState, obs: PyTree) -> tuple[PyTree, dict[str, PyTree]]:
        """Statistics of the actor's and, where it has its own, the critic's observations."""
        own: dict[str, PyTree] = {}
        if critic_normalizer is not None and not shared:
            own["critic_norm_state"] = critic_normalizer.update(critic_state(state), flat_observations(obs, policy.critic_obs_groups), ())
        return normalizer.update(state.norm_state, flat_observations(obs, policy.obs_groups), ()) if normalizer is not None else (), own

    def update(state: TrainState, rollout: Rollout) -> TrainState:
        """One step of the actor and all epochs of the critic; bit for bit the same result for the same arguments, which it leaves as they were."""
        hyper, groups = state.hyper, split(state.params)
        count = state.counters["successful_updates"]
        rates = {name: hyper[name] if schedule is None else schedule(hyper[name], count) for name in (ACTOR_RATE, CRITIC_RATE)}
        key, k_plan = rng.split(state.key, 2)
        grads, aux = differentiate(state, rollout)
        played: Trajectory = aux["trajectory"]
        carry, value_stats, fitted = fit_critic(state, k_plan, critic_data(state, aux), rates[CRITIC_RATE])

        norm = global_norm(grads)
        finite = torch.isfinite(aux["loss"]) & tree.all_finite(grads) & torch.isfinite(norm) & carry["ok"] & tree.all_finite(carry["params"])
        gate = hyper["max_grad_norm_before_clip"]
        ok = finite & ((norm <= gate) | (gate <= 0))
        safe = clip_global_norm(tree.map(lambda g: torch.where(ok, g, 0), grads), hyper["max_grad_norm"])[0]
        updates, actor_state = optimizer.update(safe, state.opt_state["actor"], groups["actor"], {**hyper, "learning_rate": rates[ACTOR_RATE]})
        params = join_parameter_groups({"actor": apply_updates(groups["actor"], updates), "critic": carry["params"]})
        opt_state = {"actor": actor_state, "critic": carry["opt_state"]}
        tau = hyper["target_tau"]
        norm_state, extra = new_statistics(state, played.obs)
        extra.update(value_stats)
        # A sum of two products, which is exact for tau 0 and 1.
        extra["target_critic"] = tree.map(lambda old, new: (1 - tau) * old + tau * new, state.extra["target_critic"], carry["params"])
        if config.learn_temperature:
            # The derivative of E[temperature (H - target)] in the logarithm of the temperature.
            pull = torch.where(ok, aux["temperature"] * (aux["entropy_mean"] - hyper["target_entropy"]), 0)
            rate = hyper[TEMPERATURE_RATE] if schedule is None else schedule(hyper[TEMPERATURE_RATE], count)
            old = state.extra["log_temperature"]
            change, opt_state["temperature"] = optimizer.update(pull, state.opt_state["temperature"], old, {**hyper, "learning_rate": rate})
            extra["log_temperature"] = apply_updates(old, change)

        window, sums = state.extra["episodes"], episodes.no_sums(dtype, norm.device)
        if "episode_return" in played.metrics:
            window, sums = episodes.track(window, played, complete=False)
        steps = played.reward.numel()
        added = {"updates": 1, "successful_updates": ok, "skipped_updates": ~ok, "env_steps": steps, "rollouts": 1, "nonfinite_rows": sums.nonfinite_rows}
        metrics = {
            **episodes.episode_metrics(window, sums),
            **fitted,
            "loss": aux["loss"],
            "objective": aux["objective"],
            "entropy": aux["entropy_mean"],
            "temperature": aux["temperature"],
            "grad_norm": torch.where(finite, norm, math.nan),
            "skipped_update": (~ok).to(norm.dtype),
            "skipped_excessive_gradient": (finite & ~ok).to(norm.dtype),
            "learning_rate": rates[ACTOR_RATE],
            "critic_learning_rate": rates[CRITIC_RATE],
            **(stats_metrics(adjoint_statistics(aux["adjoint"], hyper[ACTION_LIMIT])) if probing else {}),
        }
        kept = tree.where(ok, extra, {name: state.extra[name] for name in extra})
        return TrainState(
            params=tree.where(ok, params, state.params),
            opt_state=tree.where(ok, opt_state, state.opt_state),
            norm_state=tree.where(ok, norm_state, state.norm_state),
            env_state=aux["env_state"],
            key=key,
            hyper=hyper,
            counters={name: state.counters[name] + added[name] for name in state.counters},
            metrics=metrics,
            extra={**state.extra, **kept, "episodes": window},
        )

    return Algorithm(init=init, collect=compiler.captured_ahead(collect, update, mode=config.compile_mode), update=update)


def _check_env(env: Any, policy: Any) -> None:
    """Refuse what SHAC cannot differentiate, and a policy that does not fit or whose parts cannot be told apart."""
    if not isinstance(env, VecEnv):
        raise TypeError(f"SHAC differentiates through the environment and needs a functional one (frl.make_vec_env), got {type(env).__name__}")
    if not env.env.spec.differentiable:
        raise ValueError(f"SHAC needs a differentiable environment, and {env.env.spec.name!r} is not (its spec says differentiable=False)")
    name = repr(getattr(policy, "name", policy))
    if not getattr(policy, "has_critic", False):
        raise ValueError(f"SHAC needs a policy with a critic, such as frl.actor_critic, and {name} has none")
    check_fit(env, policy, "SHAC")
    params = policy.init(rng.key(0))
    split = policy.optimization_parameter_groups
    groups = split(params) if split is not None else {}
    if set(groups) != {"actor", "critic"}:
        raise ValueError(f"SHAC steps actor and critic apart: optimization_parameter_groups of {name} must give 'actor' and 'critic', got {sorted(groups)}")
    try:
        policy.value(groups["critic"], torch.zeros(1, policy.critic_obs_dim))
        policy.apply(groups["actor"], torch.zeros(1, policy.obs_dim))
    except KeyError as error:
        raise ValueError(f"SHAC steps actor and critic apart, and in {name} one of them reads the parameter {error} of the other") from None

"""Proximal policy optimization: several epochs of clipped policy-gradient steps on one recorded rollout.

``make_ppo`` gives ``init``, ``collect`` and ``update``. ``collect`` plays and records (:mod:`frl.algorithms.record`); ``update`` estimates advantages, then
runs epochs of minibatches (:mod:`frl.algorithms.epochs`). Statistics of observations, rewards and returns are frozen within an update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from frl import compile as compiler
from frl import rng
from frl.advantages import BOOTSTRAPS, compute_gae, explained_variance, normalize_advantage
from frl.algorithms.epochs import mean_metrics, minibatch_step, plan_minibatches, run_minibatches
from frl.algorithms.minibatch import minibatch_count
from frl.algorithms.options import check_limit, check_normalizers
from frl.algorithms.play import check_fit, check_stagger
from frl.algorithms.record import PLAYED, distribution_names, make_recorder, normalized, recorded_distribution, scale_of
from frl.algorithms.states import finish_update, first_state
from frl.algorithms.transitions import by_time, cleared, flat_transitions, read_rollout, valid_steps
from frl.envs.vector import VecEnv
from frl.losses import ppo_loss
from frl.normalizers import running_normalizer
from frl.numerics import masked_mean
from frl.returns import discounted_suffix_sums
from frl.types import Algorithm, Hyper, Metrics, Normalizer, Optimizer, Params, PyTree, TrainState
from frl.validate import require_choice, require_count, require_number, require_switch

SCALED_REWARD_LIMIT = 10.0
LOSS_METRICS = ("loss", "actor_loss", "value_loss", "action_bound_loss", "entropy", "kl", "approx_kl", "clip_fraction", "grad_norm")
_SCALAR = running_normalizer(1)  # statistics of one number: rewards' returns, value targets


@dataclass(frozen=True, kw_only=True)
class PpoConfig:
    """Decisions of a PPO run. Those marked (hyper) are start values of ``state.hyper`` and may change while training.

    Attributes:
        buffer_size: T, steps of one rollout.
        n_epochs: passes over a rollout.
        num_mini_batches: minibatches of one pass; from ``batch_size`` when ``None``.
        batch_size: largest size of a minibatch when ``num_mini_batches`` is ``None``.
        gamma: discount in [0, 1] (hyper).
        gae_lambda: in [0, 1] (hyper).
        clip_coef: width of the ratio's clip, and of the value's (hyper).
        ent_coef: entropy coefficient, at least 0 (hyper).
        vf_coef: coefficient of the value loss, at least 0 (hyper).
        action_bound_coef: coefficient of the penalty on mean actions outside [-1, 1], at least 0 (hyper).
        use_clipped_value_loss: clip the value's step too.
        schedule: ``"fixed"``, or ``"adaptive"``: the learning rate follows the KL of every minibatch (:func:`frl.losses.adaptive_learning_rate`).
        desired_kl: of the adaptive schedule (hyper).
        minimum_learning_rate, maximum_learning_rate: of the adaptive schedule (hyper).
        early_stop_kl: once the KL of a minibatch exceeds it, that minibatch and all later ones change nothing; ``None`` or infinity is off (hyper).
        max_grad_norm: limit of the gradient norm of each parameter group, actor and critic; ``None`` or infinity is off (hyper).
        normalize_advantage_per_mini_batch: normalise advantages in each minibatch and not over the whole rollout.
        truncation_bootstrap: ``"final_obs"`` or ``"pre_step"`` (:func:`frl.advantages.compute_gae`).
        normalize_rewards: divide rewards by the running std of their discounted returns, and clip them to [-10, 10].
        normalize_values: the critic learns returns that are normalised by their running mean and std.
        stagger_episodes: rows begin at different times of their episodes (:meth:`frl.VecEnv.stagger`), so that every rollout has all parts of an episode.
        clip_actions_to_space: clamp actions to the action space; their score stays that of the sample.
        compile_mode: a mode of :mod:`frl.compile`.
    """

    buffer_size: int = 256
    n_epochs: int = 10
    num_mini_batches: int | None = None
    batch_size: int = 64
    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_coef: float = 0.2
    ent_coef: float = 0.01
    vf_coef: float = 0.5
    action_bound_coef: float = 0.0
    use_clipped_value_loss: bool = False
    schedule: str = "fixed"
    desired_kl: float | None = None
    minimum_learning_rate: float = 1e-5
    maximum_learning_rate: float = 1e-2
    early_stop_kl: float | None = None
    max_grad_norm: float | None = 0.5
    normalize_advantage_per_mini_batch: bool = False
    truncation_bootstrap: str = "final_obs"
    normalize_rewards: bool = False
    normalize_values: bool = False
    stagger_episodes: bool = False
    clip_actions_to_space: bool = False
    compile_mode: str = "inductor"

    def __post_init__(self) -> None:
        for name in ("buffer_size", "n_epochs", "batch_size", *(["num_mini_batches"] if self.num_mini_batches is not None else [])):
            require_count(name, getattr(self, name))
        require_number("gamma", self.gamma, at_least=0.0, at_most=1.0)
        require_number("gae_lambda", self.gae_lambda, at_least=0.0, at_most=1.0)
        require_switch("stagger_episodes", self.stagger_episodes)
        for name in ("clip_coef", "ent_coef", "vf_coef", "action_bound_coef"):
            require_number(name, getattr(self, name), at_least=0.0)
        check_limit("max_grad_norm", self.max_grad_norm)
        check_limit("early_stop_kl", self.early_stop_kl)
        require_choice("schedule", self.schedule, ("fixed", "adaptive"))
        if self.schedule == "fixed" and self.desired_kl is not None:
            raise ValueError(f"desired_kl has no effect with schedule 'fixed', got {self.desired_kl!r}; pass schedule='adaptive' or leave it out")
        if self.schedule == "adaptive" and self.desired_kl is None:
            raise ValueError("schedule 'adaptive' needs desired_kl, a positive number")
        for name in ("minimum_learning_rate", "maximum_learning_rate", *(["desired_kl"] if self.desired_kl is not None else [])):
            require_number(name, getattr(self, name), above=0.0)
        if self.maximum_learning_rate < self.minimum_learning_rate:
            least = self.minimum_learning_rate
            raise ValueError(f"maximum_learning_rate must be at least minimum_learning_rate, {least:g}, got {self.maximum_learning_rate:g}")
        require_choice("truncation_bootstrap", self.truncation_bootstrap, BOOTSTRAPS)
        compiler.check_mode(self.compile_mode)

    @property
    def adaptive(self) -> bool:
        return self.schedule == "adaptive"


def make_ppo(
    env: Any,
    policy: Any,
    optimizer: Optimizer,
    config: PpoConfig | None = None,
    *,
    normalizer: Normalizer | None = None,
    critic_normalizer: Normalizer | None = None,
    schedule: Callable[[Tensor, Tensor], Tensor] | None = None,
    learning_rate: float = 3e-4,
    dtype: torch.dtype = torch.float32,
) -> Algorithm:
    """PPO as three pure functions.

    A reward that is not finite skips the whole update, as does a loss or gradient that is not finite in any minibatch; a step whose state alone is not finite
    is left out.

    Args:
        env: N rows of an environment (:func:`frl.make_vec_env`), or of a host's (:class:`frl.HostEnv`), which changes as it is played.
        policy: a policy with a critic (:func:`frl.actor_critic`).
        optimizer: :func:`frl.optim.build_optimizer` or any ``Optimizer``.
        config: see :class:`PpoConfig`.
        normalizer: of the actor's observation; its state is ``state.norm_state``, frozen during an update and updated after it.
        critic_normalizer: of the critic's observation; its state is ``state.extra["critic_norm_state"]``. Pass ``normalizer`` itself where both see the same.
        schedule: ``(base rate, successful updates so far) -> rate``; constant when ``None``.
        learning_rate: start value of ``state.hyper["optimizer.learning_rate"]``.
        dtype: of parameters and noise.

    Returns:
        ``Algorithm(init, collect, update)``; the rollout is a TensorDict ``[N, T+1]`` (:func:`frl.algorithms.record.make_recorder`).

    Raises:
        TypeError: for something else than rows of an environment.
        ValueError: for a policy without a critic or one that does not fit the environment, more minibatches than transitions, a schedule beside the adaptive
            one, and normalizers that the policy asks for and that are missing.

    Source: Schulman et al. 2017, "Proximal policy optimization algorithms", algorithm 1.
    """
    config = config or PpoConfig()
    if not getattr(policy, "has_critic", False):
        raise ValueError(f"PPO needs a policy with a critic, such as frl.actor_critic, and {getattr(policy, 'name', policy)!r} has none")
    check_fit(env, policy, "PPO")
    require_number("learning_rate", learning_rate, at_least=0.0)
    if config.adaptive and schedule is not None:
        raise ValueError("schedule 'adaptive' sets the learning rate itself; leave the learning-rate schedule out, or pass schedule='fixed'")
    if config.stagger_episodes:
        check_stagger(env)
    shared = check_normalizers(policy, normalizer, critic_normalizer)
    minibatch_count(env.num_envs * config.buffer_size, num_minibatches=config.num_mini_batches, batch_size=config.batch_size)
    names = distribution_names(policy)
    if config.action_bound_coef and "action_mean" not in names:
        raise ValueError(f"action_bound_coef needs continuous actions with a mean, got {config.action_bound_coef:g} with {policy.distribution.name!r}")
    mode = config.compile_mode
    one_input = not policy.uses_separate_critic_obs and critic_normalizer is normalizer
    needed = (*PLAYED, "value", *(["critic_obs"] if policy.uses_separate_critic_obs else []), *names)
    if config.truncation_bootstrap == "final_obs":
        needed = (*needed, "final_value")
    record = make_recorder(
        env,
        policy,
        length=config.buffer_size,
        normalizer=normalizer,
        critic_normalizer=critic_normalizer,
        clip_actions=config.clip_actions_to_space,
        mode=mode,
    )

    # -- init ----------------------------------------------------------------------------------------------------------------------------------------

    def init(key: Tensor) -> TrainState:
        """The first state of a run."""
        own = ("gamma", "gae_lambda", "clip_coef", "ent_coef", "vf_coef", "action_bound_coef", "max_grad_norm")
        adaptive = ("desired_kl", "minimum_learning_rate", "maximum_learning_rate") if config.adaptive else ()
        stop = ("early_stop_kl",) if config.early_stop_kl is not None else ()
        state = first_state(
            key,
            env,
            policy,
            optimizer,
            normalizer,
            hyper={"optimizer.learning_rate": learning_rate, **{name: getattr(config, name) for name in (*own, *adaptive, *stop)}},
            metrics=(*LOSS_METRICS, "ratio_error", "explained_variance", "steps", "skipped_update", "learning_rate"),
            dtype=dtype,
            stagger=config.stagger_episodes,
        )
        extra = dict(state.extra)
        if critic_normalizer is not None and not shared:
            extra["critic_norm_state"] = critic_normalizer.init(device=env.device)
        if config.normalize_values:
            extra["value_stats"] = _SCALAR.init(device=env.device)
        if config.normalize_rewards:
            extra["reward_stats"] = _SCALAR.init(device=env.device)
            extra["reward_returns"] = torch.zeros(env.num_envs, dtype=dtype, device=env.device)
        return state._replace(extra=extra)

    # -- collect -------------------------------------------------------------------------------------------------------------------------------------

    def next_noise(key: Tensor) -> tuple[Tensor, Tensor]:
        key, k_noise = rng.split(key, 2)
        return key, policy.noise(k_noise, config.buffer_size, env.num_envs, dtype=dtype)

    draw = compiler.jit(next_noise, mode=mode)

    def critic_state(state: TrainState) -> PyTree:
        return state.norm_state if shared else state.extra.get("critic_norm_state", ())

    def collect(state: TrainState) -> tuple[TrainState, Any]:
        """Play ``buffer_size`` steps with the current policy, where the last rollout ended, and record them."""
        key, noise = draw(state.key)
        statistics = {"actor": state.norm_state, "critic": critic_state(state), "value": state.extra.get("value_stats", ())}
        env_state, rollout = record(state.params, statistics, state.env_state, env.default_params, noise)
        return state._replace(key=key, env_state=env_state), rollout

    # -- update --------------------------------------------------------------------------------------------------------------------------------------

    def _prepare(state: TrainState, fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor], Tensor, dict[str, Any]]:
        """Minibatch data ``[N T, ...]``, the plan of all epochs, the learning rate, and what the end of the update needs."""
        hyper = state.hyper
        extra: dict[str, PyTree] = {}
        rows, steps = fields["reward"].shape[0], fields["reward"].shape[1] - 1
        valid = valid_steps(fields)
        truncated = by_time(fields["truncated"])
        # A done that neither flag explains counts as a termination.
        terminated = by_time(fields["terminated"]) | (by_time(fields["done"]) & ~truncated)
        reward = by_time(fields["reward"])
        fine = torch.isfinite(reward).all()
        if config.normalize_rewards:
            reward, extra["reward_stats"], returns = _scaled_rewards(state, reward, terminated | truncated, valid, hyper["gamma"])
            extra["reward_returns"] = returns
        value = fields["value"].movedim(0, 1)
        gae = compute_gae(
            reward,
            value,
            terminated,
            truncated,
            gamma=hyper["gamma"],
            gae_lambda=hyper["gae_lambda"],
            final_value=by_time(fields["final_value"]) if "final_value" in fields else (),
            bootstrap=config.truncation_bootstrap,
            valid=valid,
        )
        advantage = gae.advantage if config.normalize_advantage_per_mini_batch else normalize_advantage(gae.advantage, valid)
        now, target = value[:-1], gae.returns
        found: dict[str, Any] = {"fine": fine, "explained_variance": explained_variance(now, target, valid)}
        if config.normalize_values:
            extra["value_stats"] = _SCALAR.update(state.extra["value_stats"], gae.returns.unsqueeze(-1), valid)
            mean, std = scale_of(extra["value_stats"], now.dtype)
            now, target = (now - mean) / std, (target - mean) / std
        counted = valid.movedim(0, 1).flatten()
        flat = lambda x: cleared(counted, x.movedim(0, 1).flatten())
        take = lambda name: cleared(counted, flat_transitions(fields[name]))
        raw_obs = take("obs")
        batch: dict[str, Any] = {
            "obs": normalized(normalizer, state.norm_state, raw_obs, now.dtype),
            "action": take("action"),
            "log_prob": take("sample_log_prob"),
            "advantage": flat(advantage),
            "returns": flat(target),
            "value": flat(now),
            "valid": counted,
            "dist": {name: take(name) for name in names},
        }
        raw_critic_obs = take("critic_obs") if policy.uses_separate_critic_obs else raw_obs
        if not one_input:
            batch["critic_obs"] = normalized(critic_normalizer, critic_state(state), raw_critic_obs, now.dtype)
        if "critic_norm_state" in state.extra and critic_normalizer is not None:
            extra["critic_norm_state"] = critic_normalizer.update(state.extra["critic_norm_state"], raw_critic_obs, counted)
        found["norm_state"] = normalizer.update(state.norm_state, raw_obs, counted) if normalizer is not None else ()
        key, k_plan = rng.split(state.key, 2)
        parts = minibatch_count(rows * steps, num_minibatches=config.num_mini_batches, batch_size=config.batch_size)
        base = hyper["optimizer.learning_rate"]
        rate = base if schedule is None else schedule(base, state.counters["successful_updates"])
        return batch, plan_minibatches(k_plan, rows * steps, config.n_epochs, parts), rate, {**found, "key": key, "extra": extra}

    def loss(params: Params, mini: dict[str, Any], hyper: Hyper) -> tuple[Tensor, Metrics]:
        valid = mini["valid"]
        dist = policy.apply(params, mini["obs"])
        log_prob = policy.distribution.log_prob(dist, mini["action"])
        terms = ppo_loss(
            log_prob=log_prob,
            old_log_prob=mini["log_prob"],
            advantage=mini["advantage"],
            value=policy.value(params, mini["obs" if one_input else "critic_obs"]),
            returns=mini["returns"],
            entropy=policy.distribution.entropy(dist),
            clip_coef=hyper["clip_coef"],
            vf_coef=hyper["vf_coef"],
            ent_coef=hyper["ent_coef"],
            action_bound_coef=hyper["action_bound_coef"],
            old_value=mini["value"],
            clip_value_loss=config.use_clipped_value_loss,
            action_mean=dist.mean if "action_mean" in names else (),
            valid=valid,
        )
        kl = masked_mean(policy.distribution.kl(recorded_distribution(dist, mini["dist"]), dist), valid)
        error = torch.where(valid, torch.exp(log_prob - mini["log_prob"]) - 1, 0).abs().amax()
        return terms.loss, {**terms._asdict(), "kl": kl, "ratio_error": error}

    def normalized_by_minibatch(mini: dict[str, Any]) -> dict[str, Any]:
        return {**mini, "advantage": torch.func.vmap(normalize_advantage)(mini["advantage"], mini["valid"])}

    step = minibatch_step(
        loss,
        optimizer,
        policy.optimization_parameter_groups,
        adaptive=config.adaptive,
        early_stop=config.early_stop_kl is not None,
        largest=("ratio_error",),
    )

    def _finish(state: TrainState, carry: dict[str, Any], per_step: dict[str, Tensor], found: dict[str, Any], fields: dict[str, Any]) -> TrainState:
        error = per_step["ratio_error"][0]
        metrics = mean_metrics({name: x for name, x in per_step.items() if name != "ratio_error"})
        metrics.update(ratio_error=error, explained_variance=found["explained_variance"], steps=per_step["stepped"].sum().to(error.dtype))
        extra = dict(found["extra"])
        # The returns of the rows belong to the environment: they go on, whatever becomes of the update.
        going_on = {"reward_returns": extra.pop("reward_returns")} if config.normalize_rewards else {}
        new = finish_update(
            state,
            carry,
            found["fine"],
            metrics,
            fields,
            rate_in_hyper=config.adaptive,
            complete=False,
            norm_state=found["norm_state"],
            extra=extra,
            key=found["key"],
        )
        return new._replace(extra={**new.extra, **going_on})

    prepare, finish = compiler.jit(_prepare, mode=mode), compiler.jit(_finish, mode=mode)

    def update(state: TrainState, rollout: Any) -> TrainState:
        """All epochs on one rollout; bit for bit the same result for the same arguments, which it leaves as they were."""
        fields = read_rollout(rollout, needed, ("valid", "metrics"))
        return learn(state._replace(env_state=(), metrics={}), fields)._replace(env_state=state.env_state)

    def all_epochs(state: TrainState, fields: dict[str, Any]) -> TrainState:
        batch, plan, rate, found = prepare(state, fields)
        by_minibatch = normalized_by_minibatch if config.normalize_advantage_per_mini_batch else None
        carry, per_step = run_minibatches(step, state, batch, plan, rate, mode=mode, prepare=by_minibatch)
        return finish(state, carry, per_step, found, fields)

    learn = compiler.whole(all_epochs, mode=mode)

    ahead = compiler.captured_ahead(collect, update, mode=mode) if isinstance(env, VecEnv) else collect  # playing a host environment would move it on
    return Algorithm(init=init, collect=ahead, update=update)


def _scaled_rewards(state: TrainState, reward: Tensor, done: Tensor, valid: Tensor, gamma: Tensor) -> tuple[Tensor, PyTree, Tensor]:
    """Rewards over the std of their discounted returns so far, new statistics, and the returns with which the rows go on.

    The return of a row runs forward in time, ``R_t = gamma R_{t-1} + r_t``, and restarts after a done. ``[T, N]``, time first.
    """
    counted = torch.where(valid & torch.isfinite(reward), reward, 0)
    before = torch.cat([torch.ones_like(done[:1]), done[:-1]])
    first = counted[:1] + gamma * state.extra["reward_returns"]
    backward = torch.cat([first, counted[1:]]).flip(0)
    returns = discounted_suffix_sums(backward, gamma, ~before.flip(0)).flip(0)
    stats = _SCALAR.update(state.extra["reward_stats"], returns.unsqueeze(-1), valid)
    std = scale_of(stats, reward.dtype)[1]
    return torch.clamp(reward / std, -SCALED_REWARD_LIMIT, SCALED_REWARD_LIMIT), stats, torch.where(done[-1], 0, returns[-1])

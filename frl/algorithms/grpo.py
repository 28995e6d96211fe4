"""Group-relative policy optimization: PPO's steps without a critic, the advantage of a row being its return compared with those of its group.

The rows of a group start every rollout in the same state and draw different actions, so that their returns differ by what the policy did and by nothing else.
``make_grpo`` gives ``init``, ``collect`` and ``update`` over recorded rollouts; a frozen copy of the first policy can hold the new one near.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from frl import compile as compiler
from frl import rng, tree
from frl.advantages import group_advantages
from frl.algorithms.epochs import mean_metrics, minibatch_step, plan_minibatches, run_minibatches
from frl.algorithms.minibatch import minibatch_count
from frl.algorithms.options import check_limit
from frl.algorithms.play import check_fit, make_begin
from frl.algorithms.record import PLAYED, distribution_fields, make_recorder, normalized, recorded_distribution
from frl.algorithms.states import finish_update, first_state, group_keys
from frl.algorithms.transitions import by_time, cleared, flat_transitions, read_rollout, valid_steps
from frl.envs.vector import VecEnv
from frl.losses import grpo_loss, k3
from frl.returns import alive_mask, discounted_returns_to_go
from frl.types import Algorithm, Hyper, Metrics, Normalizer, Optimizer, Params, TrainState
from frl.validate import require_choice, require_count, require_number

KL_ESTIMATORS = ("exact", "k3")
LOSS_METRICS = ("loss", "actor_loss", "entropy", "approx_ref_kl", "approx_kl", "clip_fraction", "grad_norm")


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """Decisions of a GRPO run. Those marked (hyper) are start values of ``state.hyper`` and may change while training.

    Attributes:
        buffer_size: T, steps of one rollout, which starts anew every time.
        group_size: rows of a group, at least 2; divides the number of rows.
        n_epochs: passes over a rollout.
        batch_size: largest size of a minibatch, steps that do not count included.
        gamma: discount in [0, 1] (hyper).
        clip_coef: width of the ratio's clip (hyper).
        ent_coef: entropy coefficient, at least 0 (hyper).
        kl_coef: coefficient of the divergence from the reference policy; 0 keeps no reference (hyper when above 0).
        kl_estimator: ``"exact"`` between the action distributions, or ``"k3"`` from the recorded actions, whose gradient is that of ``KL(reference || policy)``
            (:func:`frl.losses.k3`).
        eps: added to the std of a group's returns.
        truncate_at_first_done: count a row up to its first done.
        max_grad_norm: limit of the global gradient norm; ``None`` or infinity is off (hyper).
        clip_actions_to_space: clamp actions to the action space; their score stays that of the sample.
        compile_mode: a mode of :mod:`frl.compile`.
    """

    buffer_size: int = 256
    group_size: int = 4
    n_epochs: int = 10
    batch_size: int = 64
    gamma: float = 0.99
    clip_coef: float = 0.2
    ent_coef: float = 0.0
    kl_coef: float = 0.02
    kl_estimator: str = "exact"
    eps: float = 1e-8
    truncate_at_first_done: bool = True
    max_grad_norm: float | None = 0.5
    clip_actions_to_space: bool = False
    compile_mode: str = "inductor"

    def __post_init__(self) -> None:
        for name, low in (("buffer_size", 1), ("group_size", 2), ("n_epochs", 1), ("batch_size", 1)):
            require_count(name, getattr(self, name), low)
        require_number("gamma", self.gamma, at_least=0.0, at_most=1.0)
        for name in ("clip_coef", "ent_coef", "kl_coef", "eps"):
            require_number(name, getattr(self, name), at_least=0.0)
        check_limit("max_grad_norm", self.max_grad_norm)
        require_choice("kl_estimator", self.kl_estimator, KL_ESTIMATORS)
        compiler.check_mode(self.compile_mode)


def make_grpo(
    env: Any,
    policy: Any,
    optimizer: Optimizer,
    config: GrpoConfig | None = None,
    *,
    normalizer: Normalizer | None = None,
    schedule: Callable[[Tensor, Tensor], Tensor] | None = None,
    learning_rate: float = 3e-4,
    dtype: torch.dtype = torch.float32,
) -> Algorithm:
    """GRPO as three pure functions.

    Row ``i`` starts under the key ``fold_in(key, i // G)``, so the rows of a group share their start bit for bit. A group whose returns are equal has
    advantages of exactly 0; the KL term still pulls its samples towards the reference policy. A reward that is not finite skips the whole update, as does a
    loss or gradient that is not finite in any minibatch.

    Args:
        env: N rows of an environment (:func:`frl.make_vec_env`), or of a host's (:class:`frl.HostEnv`), which changes as it is played.
        policy: any policy; a critic is not used.
        optimizer: :func:`frl.optim.build_optimizer` or any ``Optimizer``.
        config: see :class:`GrpoConfig`.
        normalizer: observation normalizer, frozen during an update and updated after it. The reference policy keeps the statistics of its time.
        schedule: ``(base rate, successful updates so far) -> rate``; constant when ``None``.
        learning_rate: start value of ``state.hyper["optimizer.learning_rate"]``.
        dtype: of parameters and noise.

    Returns:
        ``Algorithm(init, collect, update)``; the rollout is a TensorDict ``[N, T+1]`` (:func:`frl.algorithms.record.make_recorder`).

    Raises:
        TypeError: for something else than rows of an environment.
        ValueError: for a policy that does not fit the environment, rows that are no multiple of ``group_size``, and a host environment whose rows cannot be
            seeded one by one.

    Source: Shao et al. 2024, "DeepSeekMath: Pushing the limits of mathematical reasoning in open language models", algorithm 1.
    """
    config = config or GrpoConfig()
    check_fit(env, policy, "GRPO")
    require_number("learning_rate", learning_rate, at_least=0.0)
    if env.num_envs % config.group_size:
        raise ValueError(f"the number of rows must be a multiple of group_size, got {env.num_envs} rows and group_size {config.group_size}")
    if not getattr(env, "seeds_rows", True):
        raise ValueError(f"the rows of a group must share one start state, but {env.spec.name!r} cannot be seeded row by row; use 'sync' or 'async' rows")
    if policy.actor_obs_normalization and normalizer is None:
        raise ValueError("the policy asks for actor_obs_normalization: pass normalizer, such as frl.empirical_normalizer(features)")
    mode, anchored = config.compile_mode, config.kl_coef > 0
    record = make_recorder(env, policy, length=config.buffer_size, normalizer=normalizer, critic=False, clip_actions=config.clip_actions_to_space, mode=mode)

    # -- init ----------------------------------------------------------------------------------------------------------------------------------------

    def init(key: Tensor) -> TrainState:
        """The first state of a run."""
        names = ("gamma", "clip_coef", "ent_coef", "max_grad_norm", *(["kl_coef"] if anchored else []))
        state = first_state(
            key,
            env,
            policy,
            optimizer,
            normalizer,
            hyper={"optimizer.learning_rate": learning_rate, **{name: getattr(config, name) for name in names}},
            metrics=(*LOSS_METRICS, "tied_fraction", "steps", "skipped_update", "learning_rate"),
            dtype=dtype,
            group_size=config.group_size,
        )
        if not anchored:
            return state
        reference = tree.map(torch.clone, {"params": state.params, "norm_state": state.norm_state})
        return state._replace(extra={**state.extra, "reference": reference})

    # -- collect -------------------------------------------------------------------------------------------------------------------------------------

    def next_noise(key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        key, k_env, k_noise = rng.split(key, 3)
        return key, group_keys(k_env, env.num_envs, config.group_size), policy.noise(k_noise, config.buffer_size, env.num_envs, dtype=dtype)

    draw = compiler.jit(next_noise, mode=mode)
    begin = make_begin(env, mode=mode)

    def collect(state: TrainState) -> tuple[TrainState, Any]:
        """Start every row anew, play ``buffer_size`` steps with the current policy and record them."""
        env_params = env.default_params
        key, keys, noise = draw(state.key)
        start = begin(keys, env_params)
        env_state, rollout = record(state.params, {"actor": state.norm_state, "critic": (), "value": ()}, start, env_params, noise)
        return state._replace(key=key, env_state=env_state), rollout

    # -- update --------------------------------------------------------------------------------------------------------------------------------------

    def _prepare(state: TrainState, fields: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor], Tensor, dict[str, Any]]:
        """Minibatch data ``[N T, ...]``, the plan of all epochs, the learning rate, and what the end of the update needs."""
        hyper = state.hyper
        rows, steps = fields["reward"].shape[0], fields["reward"].shape[1] - 1
        done, reward = by_time(fields["done"]), by_time(fields["reward"])
        valid = valid_steps(fields)
        counted = valid & (alive_mask(done) if config.truncate_at_first_done else torch.ones_like(done))
        # A step that is left out, its reward included, also ends what the steps before it can be told.
        returns = discounted_returns_to_go(torch.where(valid, reward, 0), done | ~valid, hyper["gamma"])
        groups = group_advantages(returns, counted, config.group_size, config.eps)
        chosen = counted.movedim(0, 1).flatten()
        take = lambda name: cleared(chosen, flat_transitions(fields[name]))
        raw_obs = take("obs")
        batch: dict[str, Any] = {
            "obs": normalized(normalizer, state.norm_state, raw_obs, reward.dtype),
            "action": take("action"),
            "log_prob": take("sample_log_prob"),
            "advantage": groups.advantage.movedim(0, 1).flatten(),
            "valid": chosen,
        }
        if anchored:
            reference = state.extra["reference"]
            dist = policy.apply(reference["params"], normalized(normalizer, reference["norm_state"], raw_obs, reward.dtype))
            if config.kl_estimator == "exact":
                batch["reference"] = distribution_fields(dist)
            else:
                batch["reference_log_prob"] = policy.distribution.log_prob(dist, batch["action"])
        norm_state = normalizer.update(state.norm_state, raw_obs, chosen) if normalizer is not None else ()
        key, k_plan = rng.split(state.key, 2)
        plan = plan_minibatches(k_plan, rows * steps, config.n_epochs, minibatch_count(rows * steps, batch_size=config.batch_size))
        base = hyper["optimizer.learning_rate"]
        rate = base if schedule is None else schedule(base, state.counters["successful_updates"])
        found = {"fine": torch.isfinite(reward).all(), "tied": groups.tied_fraction, "norm_state": norm_state, "key": key}
        return batch, plan, rate, found

    def loss(params: Params, mini: dict[str, Any], hyper: Hyper) -> tuple[Tensor, Metrics]:
        dist = policy.apply(params, mini["obs"])
        log_prob = policy.distribution.log_prob(dist, mini["action"])
        kl: Any = ()
        if anchored and config.kl_estimator == "exact":
            kl = policy.distribution.kl(dist, recorded_distribution(dist, mini["reference"]))
        elif anchored:
            kl = k3(log_prob, mini["reference_log_prob"])
        terms = grpo_loss(
            log_prob=log_prob,
            old_log_prob=mini["log_prob"],
            advantage=mini["advantage"],
            entropy=policy.distribution.entropy(dist),
            clip_coef=hyper["clip_coef"],
            ent_coef=hyper["ent_coef"],
            kl=kl,
            kl_coef=hyper["kl_coef"] if anchored else 0.0,
            valid=mini["valid"],
        )
        return terms.loss, {**terms._asdict(), "kl": terms.approx_kl}

    step = minibatch_step(loss, optimizer)

    def _finish(state: TrainState, carry: dict[str, Any], per_step: dict[str, Tensor], found: dict[str, Any], fields: dict[str, Any]) -> TrainState:
        metrics = mean_metrics({name: x for name, x in per_step.items() if name != "kl"})
        metrics.update(tied_fraction=found["tied"], steps=per_step["stepped"].sum().to(metrics["loss"].dtype))
        return finish_update(
            state,
            carry,
            found["fine"],
            metrics,
            fields,
            rate_in_hyper=False,
            complete=config.truncate_at_first_done,
            norm_state=found["norm_state"],
            extra={},
            key=found["key"],
        )

    prepare, finish = compiler.jit(_prepare, mode=mode), compiler.jit(_finish, mode=mode)

    def update(state: TrainState, rollout: Any) -> TrainState:
        """All epochs on one rollout; bit for bit the same result for the same arguments, which it leaves as they were."""
        fields = read_rollout(rollout, PLAYED, ("valid", "metrics"))
        if fields["reward"].shape[0] % config.group_size:
            raise ValueError(f"the rollout's rows must be a multiple of group_size, got {fields['reward'].shape[0]} rows and group_size {config.group_size}")
        # The reference does not change: it goes in, and round what comes out.
        new = learn(state._replace(env_state=(), metrics={}), fields)
        kept = {name: value for name, value in state.extra.items() if name == "reference"}
        return new._replace(env_state=state.env_state, extra={**new.extra, **kept})

    def all_epochs(state: TrainState, fields: dict[str, Any]) -> TrainState:
        batch, plan, rate, found = prepare(state, fields)
        carry, per_step = run_minibatches(step, state, batch, plan, rate, mode=mode)
        changing = {name: value for name, value in state.extra.items() if name != "reference"}
        return finish(state._replace(extra=changing), carry, per_step, found, fields)

    learn = compiler.whole(all_epochs, mode=mode)

    ahead = compiler.captured_ahead(collect, update, mode=mode) if isinstance(env, VecEnv) else collect  # playing a host environment would move it on
    return Algorithm(init=init, collect=ahead, update=update)

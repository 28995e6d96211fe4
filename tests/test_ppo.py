"""PPO: an update against plain PyTorch, what is recorded, skips, rates, statistics, graphs that stay, and probes with known solutions."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from typing import Any, NamedTuple

import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.distributions import Independent, Normal, kl_divergence

from frl import compile as compiler
from frl import rng, tree
from frl.advantages import compute_gae
from frl.algorithms.epochs import minibatch_step
from frl.algorithms.minibatch import minibatch_indices, transition_view
from frl.algorithms.ppo import PpoConfig, make_ppo
from frl.algorithms.registry import build_algo
from frl.critic_policies import actor_critic
from frl.envs.cartpole import cartpole
from frl.envs.env import Env, EnvSpec
from frl.envs.probes import SOLUTIONS
from frl.envs.registry import build_learning_env
from frl.envs.vector import make_vec_env
from frl.networks import mlp
from frl.normalizers import empirical_normalizer, running_normalizer, variance
from frl.optim import adam, linear_schedule, sgd
from frl.policies import actor_only
from frl.rng import key
from frl.types import Outcome
from tests.host_envs import scripted
from tests.strategies import assert_trees_close, assert_trees_equal, copy_of, draw, toy_env
from tests.tolerances import tolerance

F64 = torch.float64
CAPTURED = "aot_eager"
N, T = 4, 6
BOX = spaces.Box(-1.0, 1.0, (2,))
NET = {"type": "mlp", "network_cfg": {"hidden_sizes": [4], "activation": "tanh"}}
KEPT = ("params", "opt_state", "norm_state", "hyper")


@pytest.fixture(autouse=True)
def _no_fallback(monkeypatch):
    monkeypatch.setattr(compiler, "_warned", False)
    monkeypatch.setattr(compiler, "_broken", False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="frl could not compile")
        yield


@functools.cache
def toy():
    return toy_env(life=(3, 9), max_episode_steps=5)


@functools.cache
def policy(**options):
    return actor_critic(2, BOX, actor=NET, critic=NET, **options)


@functools.cache
def algorithm(*, n=N, optimizer="adam", normalize=False, decay=None, std=1.0, distribution="normal", learning_rate=0.01, **config):
    """One algorithm for each set of options, so that graphs are shared by the tests."""
    config = {"buffer_size": T, "n_epochs": 2, "num_mini_batches": 3, "compile_mode": "eager", **config}
    normalizer = running_normalizer(2) if normalize else None
    return make_ppo(
        make_vec_env(toy(), n),
        policy(initial_action_std=std, distribution=distribution),
        {"sgd": sgd(), "adam": adam()}[optimizer],
        PpoConfig(**config),
        normalizer=normalizer,
        critic_normalizer=normalizer,
        schedule=None if decay is None else linear_schedule(decay),
        learning_rate=learning_rate,
        dtype=F64,
    )


def begin(algo, seed=0, env_params=None):
    """A state whose policy is not the small one of the initialiser, and its first rollout."""
    state = algo.init(key(seed))
    state = state._replace(params=tree.map(lambda x: x + 0.3 * draw(*x.shape, seed=9), state.params))
    return algo.collect(state)


def opened(rollout) -> dict[str, Any]:
    return rollout.to_dict()


def changed(rollout, **fields):
    """A copy of the rollout with other fields."""
    out = rollout.clone()
    for name, value in fields.items():
        out.set(name, value)
    return out


def steps(x: Tensor) -> Tensor:
    return x[:, :-1]


# -- what is recorded ------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("distribution", ["normal", "tanh_normal"])
def test_a_rollout_holds_what_was_played_and_its_scores(distribution):
    algo, pol = algorithm(distribution=distribution), policy(initial_action_std=1.0, distribution=distribution)
    state = algo.init(key(0))
    after, rollout = algo.collect(state)
    assert tuple(rollout.batch_size) == (N, T + 1)
    vec = make_vec_env(toy(), N)
    env_state, params = state.env_state, vec.default_params
    dist = pol.apply(state.params, steps(rollout["obs"]))
    torch.testing.assert_close(rollout["sample_log_prob"][:, :-1], pol.distribution.log_prob(dist, steps(rollout["action"])))
    torch.testing.assert_close(rollout["action_mean"][:, :-1], dist.mean)
    torch.testing.assert_close(rollout["action_std"][:, :-1], torch.exp(dist.log_std))
    torch.testing.assert_close(rollout["value"], pol.value(state.params, rollout["obs"]))
    played = steps(rollout["env_action"]) if distribution == "tanh_normal" else steps(rollout["action"])
    assert ("env_action" in rollout) == (distribution == "tanh_normal")
    if distribution == "tanh_normal":
        assert torch.equal(played, pol.distribution.squash(steps(rollout["action"])))
    ends = {"terminated": 0, "truncated": 0}
    for t in range(T):
        torch.testing.assert_close(rollout["obs"][:, t], vec.observe(env_state, params))
        env_state, step = vec.step(env_state, played[:, t], params)
        torch.testing.assert_close(rollout["reward"][:, t], step.reward)
        assert torch.equal(rollout["terminated"][:, t], step.terminated)
        assert torch.equal(rollout["truncated"][:, t], step.truncated)
        worth = torch.where(step.terminated, 0.0, pol.value(state.params, step.final_obs))
        torch.testing.assert_close(rollout["final_value"][:, t], worth)
        for name in ends:
            ends[name] += int(getattr(step, name).sum())
    assert all(ends.values()), "the toy no longer ends both ways"
    assert torch.equal(rollout["done"], rollout["terminated"] | rollout["truncated"])
    torch.testing.assert_close(rollout["obs"][:, T], vec.observe(env_state, params))
    assert_trees_close(after.env_state, env_state, ops=64)
    assert bool(rollout["valid"][:, :-1].all())
    for name in opened(rollout):
        if name not in ("obs", "value", "metrics"):
            assert not rollout[name][:, T].any(), name
    assert tuple(transition_view(rollout, flatten=True).batch_size) == (N * T,)


FIRST: list[dict[str, Any]] = [{}, {"std": 5.0, "clip_actions_to_space": True}, {"distribution": "tanh_normal", "std": 3.0}, {"n": 1, "num_mini_batches": 1}]


def test_every_cut_of_a_row_has_the_value_of_its_own_final_observation():
    vec = build_learning_env("probe_final_observation", num_envs=3)
    pol = actor_critic(1, vec.single_action_space, actor=mlp(1, 2, []), critic=mlp(1, 1, []))
    algo = make_ppo(vec, pol, adam(), PpoConfig(buffer_size=5, num_mini_batches=1, compile_mode="eager"))
    state, rollout = algo.collect(algo.init(key(0)))
    assert bool(steps(rollout["truncated"]).all())
    torch.testing.assert_close(steps(rollout["final_value"]), pol.value(state.params, 1 - steps(rollout["obs"])))


@pytest.mark.parametrize("config", FIRST)
def test_the_first_ratio_is_one(config):
    algo = algorithm(learning_rate=0.0, **config)
    state, rollout = begin(algo)
    state = algo.update(state, rollout)
    assert float(state.metrics["ratio_error"]) <= 1e-6
    assert float(state.metrics["approx_kl"]) <= 1e-6
    assert float(state.metrics["clip_fraction"]) == 0.0
    if config.get("clip_actions_to_space"):
        # What was scored left the box, what was played did not.
        assert float(rollout["action"].abs().max()) > 1
        assert float(rollout["env_action"].abs().max()) == 1


def test_the_first_ratio_of_choices_is_one_in_single_precision():
    env = make_vec_env(cartpole(), 8)
    pol = actor_critic(4, env.single_action_space, actor=NET, critic=NET)
    algo = make_ppo(env, pol, adam(), PpoConfig(buffer_size=16, num_mini_batches=5, n_epochs=1, compile_mode="eager"))
    state, rollout = algo.collect(algo.init(key(0)))
    assert torch.equal(rollout["env_action"], rollout["action"])
    assert rollout["action_logits"].shape == (8, 17, 2)
    assert float(algo.update(state, rollout).metrics["ratio_error"]) <= 1e-6


# -- an update -------------------------------------------------------------------------------------------------------------------------------------------


def plain_update(state, rollout, config: PpoConfig, make_optimizer) -> dict[str, Any]:
    """One update with loops, autograd, clip_grad_norm_ and torch.optim."""
    f = opened(rollout)
    advantage = torch.zeros(N, T, dtype=F64)
    for n in range(N):
        later = torch.zeros((), dtype=F64)
        for t in reversed(range(T)):
            ended, cut = bool(f["terminated"][n, t]), bool(f["truncated"][n, t])
            after = 0.0 if ended else f["final_value"][n, t] if cut else f["value"][n, t + 1]
            later = f["reward"][n, t] + config.gamma * after - f["value"][n, t] + (0.0 if ended or cut else config.gamma * config.gae_lambda * later)
            advantage[n, t] = later
    returns = (advantage + steps(f["value"])).reshape(-1)
    advantage = advantage.reshape(-1)
    if not config.normalize_advantage_per_mini_batch:
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    flat = {name: steps(x).reshape(N * T, *x.shape[2:]) for name, x in f.items() if name != "metrics"}
    params = tree.map(lambda x: x.clone().requires_grad_(), state.params)
    leaves = tree.leaves(params)
    critic = tree.leaves(params["critic"])
    actor = [x for x in leaves if not any(x is y for y in critic)]
    optimizer = make_optimizer(leaves)
    _, k_plan = rng.split(state.key, 2)
    sums: dict[str, float] = {}
    for epoch in range(config.n_epochs):
        plan = minibatch_indices(rng.fold_in(k_plan, epoch), N * T, num_minibatches=config.num_mini_batches)
        for index, mask in zip(plan.index, plan.mask, strict=True):
            i = index[mask]
            dist = policy(initial_action_std=1.0, distribution="normal").apply(params, flat["obs"][i])
            normal = Independent(Normal(dist.mean, torch.exp(dist.log_std)), 1)
            old = Independent(Normal(flat["action_mean"][i], flat["action_std"][i]), 1)
            value = policy(initial_action_std=1.0, distribution="normal").value(params, flat["obs"][i])
            a = advantage[i]
            if config.normalize_advantage_per_mini_batch:
                a = (a - a.mean()) / (a.std() + 1e-8)
            ratio = torch.exp(normal.log_prob(flat["action"][i]) - flat["sample_log_prob"][i])
            surrogate = -torch.minimum(ratio * a, ratio.clamp(1 - config.clip_coef, 1 + config.clip_coef) * a).mean()
            error = (value - returns[i]) ** 2
            if config.use_clipped_value_loss:
                near = flat["value"][i] + (value - flat["value"][i]).clamp(-config.clip_coef, config.clip_coef)
                error = torch.maximum(error, (near - returns[i]) ** 2)
            bound = ((dist.mean - 1).clamp(min=0) ** 2).mean() + ((dist.mean + 1).clamp(max=0) ** 2).mean()
            entropy = normal.entropy().mean()
            loss = surrogate + config.vf_coef * error.mean() + config.action_bound_coef * bound - config.ent_coef * entropy
            optimizer.zero_grad()
            loss.backward()
            norm = torch.sqrt(sum((x.grad**2).sum() for x in leaves))
            found = {"loss": loss, "actor_loss": surrogate, "value_loss": error.mean(), "action_bound_loss": bound, "entropy": entropy, "grad_norm": norm}
            found |= {"kl": kl_divergence(old, normal).mean(), "clip_fraction": ((ratio - 1).abs() > config.clip_coef).double().mean()}
            for name, x in found.items():
                sums[name] = sums.get(name, 0.0) + float(x.detach()) * len(i) / (N * T * config.n_epochs)
            for group in (actor, critic):
                torch.nn.utils.clip_grad_norm_(group, math.inf if config.max_grad_norm is None else config.max_grad_norm)
            optimizer.step()
    spread = 1 - float((returns - flat["value"]).var() / returns.var())
    return {"params": tree.detach(params), "metrics": {**sums, "explained_variance": spread}}


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"max_grad_norm": None, "optimizer": "sgd"},
    "clipped": {"max_grad_norm": 0.05, "use_clipped_value_loss": True, "clip_coef": 0.05, "num_mini_batches": 5, "action_bound_coef": 0.3, "ent_coef": 0.1},
    "by-minibatch": {"normalize_advantage_per_mini_batch": True, "vf_coef": 1.0, "gamma": 0.9, "gae_lambda": 0.8},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_an_update_is_that_of_plain_pytorch(name):
    options = {"learning_rate": 0.05, **VARIANTS[name]}
    algo = algorithm(**options)
    own = {k: v for k, v in options.items() if k not in ("optimizer", "learning_rate")}
    config = PpoConfig(**{"buffer_size": T, "n_epochs": 2, "num_mini_batches": 3, **own})
    kind = torch.optim.SGD if options.get("optimizer") == "sgd" else torch.optim.Adam
    state, rollout = begin(algo)
    expected = plain_update(state, rollout, config, lambda leaves: kind(leaves, lr=0.05))
    new = algo.update(state, rollout)
    assert_trees_close(new.params, expected["params"], ops=10_000)
    for metric, value in expected["metrics"].items():
        assert float(new.metrics[metric]) == pytest.approx(value, rel=1e-9, abs=1e-12), metric
    if name == "clipped":
        assert 0 < expected["metrics"]["clip_fraction"] < 1
        assert expected["metrics"]["action_bound_loss"] > 0


CAPTURES: dict[str, dict[str, Any]] = {
    "adaptive": {"schedule": "adaptive", "desired_kl": 0.01, "early_stop_kl": 0.05, "learning_rate": 0.02, "max_grad_norm": 0.1, "normalize": True},
    "scaled": {"normalize_rewards": True, "normalize_values": True, "clip_actions_to_space": True, "use_clipped_value_loss": True, "decay": 8},
}


@pytest.mark.parametrize("name", CAPTURES)
def test_captured_updates_equal_eager_ones_and_make_no_graph_after_the_first(name):
    fast, slow = algorithm(compile_mode=CAPTURED, **CAPTURES[name]), algorithm(**CAPTURES[name])
    state = slow.init(key(0))
    graphs = 0
    for i in range(3):
        (ours, our_rollout), (state, rollout) = fast.collect(state), slow.collect(state)
        assert_trees_close((ours, opened(our_rollout)), (state, opened(rollout)), ops=1_000)
        before = copy_of((state, opened(rollout)))
        new = slow.update(state, rollout)
        assert_trees_close(fast.update(state, rollout), new, ops=100_000)
        assert_trees_equal(fast.update(state, rollout), fast.update(state, rollout))
        assert_trees_equal((state, opened(rollout)), before)
        if i == 0:
            graphs = compiler.graph_count()
        # Every number that may change does, and no graph is made for it.
        off = lambda name, x: x if name in ("maximum_learning_rate", "gamma") or not bool(torch.isfinite(x)) else x * 0.9
        state = new._replace(hyper={name: off(name, x) for name, x in new.hyper.items()})
    assert compiler.graph_count() == graphs


def test_a_state_repeats_its_bits_and_is_left_alone():
    algo = algorithm(normalize=True, normalize_rewards=True)
    state = algo.init(key(0))
    before = copy_of(state)
    collected, rollout = algo.collect(state)
    assert_trees_equal(state, before)
    again, same = algo.collect(state)
    assert_trees_equal((again, opened(same)), (collected, opened(rollout)))
    kept = copy_of((collected, opened(rollout)))
    first, second = algo.update(collected, rollout), algo.update(collected, rollout)
    assert_trees_equal(second, first)
    assert_trees_equal((collected, opened(rollout)), kept)
    assert not torch.equal(collected.key, state.key)
    assert not torch.equal(first.key, collected.key)
    assert set(first.metrics) == set(state.metrics)
    tree.check_same(first._replace(metrics={}), state._replace(metrics={}), "state")


def test_an_update_stays_on_its_device(device):
    vec, pol = make_vec_env(cartpole(), 4, device), actor_critic(4, spaces.Discrete(2), actor=NET, critic=NET)
    algo = make_ppo(vec, pol, adam(), PpoConfig(buffer_size=4, n_epochs=1, compile_mode="eager"))
    state, rollout = algo.collect(algo.init(key(0)))
    new = algo.update(state, rollout)
    assert {x.device.type for x in tree.leaves((new, opened(rollout)))} == {device.type}
    assert {x.dtype for x in tree.floating((new.params, new.hyper, new.metrics))} == {torch.float32}


def test_hyper_parameters_are_read_from_the_state():
    algo = algorithm()
    state, rollout = begin(algo)
    base = algo.update(state, rollout)
    for name in state.hyper:
        other = algo.update(state._replace(hyper={**state.hyper, name: state.hyper[name] * 0.5 + 0.01}), rollout)
        same = all(torch.equal(a, b) for a, b in zip(tree.leaves(other.params), tree.leaves(base.params), strict=True))
        assert not same, name


def test_a_rate_of_a_schedule_is_the_one_used_and_reported():
    algo = algorithm(decay=4, optimizer="sgd", learning_rate=1e-3, n_epochs=1, num_mini_batches=1, max_grad_norm=None)
    state, rates = algo.init(key(0)), []
    for _ in range(4):
        state = algo.update(*algo.collect(state))
        rates.append(float(state.metrics["learning_rate"]))
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4], rel=1e-12)
    assert float(state.hyper["optimizer.learning_rate"]) == 1e-3


# -- adaptive rate and early stop ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "desired", "direction"), [(0.05, 1e-6, -1), (1e-3, 10.0, 1), (0.01, 1e-3, 0)])
def test_the_adaptive_rate_follows_the_kl_within_its_bounds(start, desired, direction):
    bounds = {"minimum_learning_rate": 2e-3 if direction < 0 else 5e-4, "maximum_learning_rate": 0.06}
    algo = algorithm(schedule="adaptive", desired_kl=desired, learning_rate=start, n_epochs=12, **bounds)
    state, rollout = begin(algo)
    new = algo.update(state, rollout)
    rate = float(new.hyper["optimizer.learning_rate"])
    assert float(new.metrics["learning_rate"]) == rate
    if direction:
        assert rate == pytest.approx(2e-3 if direction < 0 else 0.06)
    low, high = float(state.hyper["minimum_learning_rate"]), float(state.hyper["maximum_learning_rate"])
    assert low <= rate <= high


@pytest.mark.parametrize("first", [True, False])
def test_the_kl_before_the_first_step_is_rounding_and_decides_nothing(first):
    number = lambda x: torch.tensor(x, dtype=F64)
    step = minibatch_step(lambda p, mini, hyper: (p.sum(), {"loss": p.sum(), "kl": number(1.0)}), sgd(), adaptive=True, early_stop=True)
    hyper = {"desired_kl": 1e-3, "minimum_learning_rate": 1e-5, "maximum_learning_rate": 1.0, "early_stop_kl": 0.1, "max_grad_norm": math.inf}
    consts = {"hyper": {name: number(x) for name, x in hyper.items()}}
    flag = torch.tensor(True)
    carry = {"params": torch.ones(3, dtype=F64), "opt_state": sgd().init(torch.ones(3, dtype=F64)), "rate": number(0.3), "ok": flag, "stopped": ~flag}
    count = torch.tensor(2)
    part = {"mini": {"valid": torch.tensor([True, True])}, "counted": count, "count": count}
    new, metrics = step(consts, carry, {"parts": (part,), "rest": {"count": count, "first": torch.tensor(first)}})
    assert (bool(new["stopped"]), bool(metrics["stepped"]), bool(new["ok"])) == (not first, first, True)
    assert float(new["rate"]) == 0.3
    assert torch.equal(new["params"], torch.full((3,), 0.7 if first else 1.0, dtype=F64))


def test_an_adaptive_rate_goes_on_from_the_state():
    algo = algorithm(schedule="adaptive", desired_kl=0.01, n_epochs=1, num_mini_batches=1)
    state, rollout = begin(algo)
    state = state._replace(hyper={**state.hyper, "optimizer.learning_rate": torch.tensor(1.9753e-4, dtype=F64)})
    assert float(algo.update(state, rollout).metrics["learning_rate"]) == 1.9753e-4


def test_an_early_stop_makes_the_rest_do_nothing():
    whole = {"num_mini_batches": 1, "learning_rate": 0.05}
    one, stopped = algorithm(n_epochs=1, **whole), algorithm(n_epochs=5, early_stop_kl=1e-9, **whole)
    state, rollout = begin(one)
    first = one.update(state, rollout)
    state, rollout = begin(stopped)
    second = stopped.update(state, rollout)
    assert_trees_close((second.params, second.opt_state), (first.params, first.opt_state), ops=100)
    assert (float(first.metrics["steps"]), float(second.metrics["steps"])) == (1.0, 1.0)
    assert float(second.metrics["skipped_update"]) == 0.0
    free = algorithm(n_epochs=5, early_stop_kl=1e9, **whole)
    assert float(free.update(*begin(free)).metrics["steps"]) == 5.0


# -- what is not finite ----------------------------------------------------------------------------------------------------------------------------------


@functools.cache
def sick_algorithm(**faults):
    """The toy in which every row is sick at its second step."""
    env = toy()
    numbers = {f"{name}_fault": torch.tensor(value, dtype=F64) for name, value in faults.items()}
    env = dataclasses.replace(env, default_params=env.default_params._replace(fault_step=torch.tensor(1), **numbers))
    vec = make_vec_env(env, N)
    normalizer = running_normalizer(2)
    return make_ppo(
        vec,
        policy(initial_action_std=1.0, distribution="normal"),
        adam(),
        PpoConfig(buffer_size=T, n_epochs=2, num_mini_batches=3, compile_mode="eager", schedule="adaptive", desired_kl=1e-4, normalize_rewards=True),
        normalizer=normalizer,
        critic_normalizer=normalizer,
        dtype=F64,
    )


def test_a_nan_reward_skips_the_update_and_training_goes_on():
    algo = sick_algorithm(reward=math.nan)
    state, rollout = algo.collect(algo.init(key(0)))
    assert bool(torch.isnan(rollout["reward"]).any())
    assert all(bool(torch.isfinite(x).all()) for x in tree.floating(state.env_state))
    new = algo.update(state, rollout)
    for name in KEPT:
        assert_trees_equal(getattr(new, name), getattr(state, name))
    assert_trees_equal(new.extra["reward_stats"], state.extra["reward_stats"])
    assert bool(torch.isfinite(new.extra["reward_returns"]).all())
    assert float(new.metrics["skipped_update"]) == 1.0
    counts = {name: int(x) for name, x in new.counters.items()}
    assert (counts["updates"], counts["successful_updates"], counts["skipped_updates"], counts["env_steps"]) == (1, 0, 1, N * T)
    assert counts["nonfinite_rows"] == int(rollout["metrics", "nonfinite"].sum()) > 0
    # The same state with a rollout that is whole: the next update counts.
    whole = changed(rollout, reward=torch.nan_to_num(rollout["reward"]))
    after = algo.update(new, whole)
    assert float(after.metrics["skipped_update"]) == 0.0
    assert not torch.equal(after.params["log_std"], new.params["log_std"])


def test_a_state_that_is_not_finite_leaves_out_its_step_alone():
    algo = sick_algorithm(state=math.inf)
    state, rollout = algo.collect(algo.init(key(0)))
    bad = ~rollout["valid"][:, :-1]
    assert bool(bad.any())
    assert torch.equal(bad, steps(rollout["metrics", "nonfinite"]))
    new = algo.update(state, rollout)
    assert float(new.metrics["skipped_update"]) == 0.0
    assert all(bool(torch.isfinite(x).all()) for x in tree.floating((new.params, new.opt_state)))
    assert float(new.norm_state.count) == N * T - int(bad.sum())
    # Whatever stands in the step that is left out reaches nothing.
    for value in (math.nan, 1e30):
        spoiled = {name: torch.where(bad.any(-1, keepdim=True) & ~rollout["valid"], value, rollout[name]) for name in ("sample_log_prob", "final_value")}
        obs = torch.where(~rollout["valid"].unsqueeze(-1) & (torch.arange(T + 1)[:, None] < T), value, rollout["obs"])
        assert_trees_equal(algo.update(state, changed(rollout, obs=obs, **spoiled)).params, new.params)


@pytest.mark.parametrize("field", ["sample_log_prob", "value", "obs", "reward"])
def test_a_minibatch_that_is_not_finite_skips_the_whole_update(field):
    algo = algorithm(normalize=True, n_epochs=1)
    state, rollout = begin(algo)
    # Whichever of the minibatches it is, the first or the last.
    for t in range(T):
        x = rollout[field].clone()
        x[2, t] = math.nan
        new = algo.update(state, changed(rollout, **{field: x}))
        for name in KEPT:
            assert_trees_equal(getattr(new, name), getattr(state, name))
        assert int(new.counters["skipped_updates"]) == 1


# -- statistics ------------------------------------------------------------------------------------------------------------------------------------------


def test_rewards_are_scaled_by_the_deviation_of_their_returns():
    algo = algorithm(normalize_rewards=True, gamma=0.9)
    bare = algorithm(gamma=0.9)
    state = algo.init(key(0))
    running, seen = torch.zeros(N, dtype=F64), []
    for _ in range(2):
        state, rollout = algo.collect(state)
        for t in range(T):
            running = running * 0.9 + rollout["reward"][:, t]
            seen.append(running.clone())
            running = torch.where(rollout["done"][:, t], 0.0, running)
        new = algo.update(state, rollout)
        everything = torch.cat(seen)
        torch.testing.assert_close(variance(new.extra["reward_stats"])[0], everything.var(correction=0))
        torch.testing.assert_close(new.extra["reward_returns"], running)
        scaled = changed(rollout, reward=(rollout["reward"] / everything.std(correction=0)).clamp(-10, 10))
        extra = {name: x for name, x in state.extra.items() if not name.startswith("reward")}
        assert_trees_close(new.params, bare.update(state._replace(extra=extra), scaled).params, ops=10_000)
        state = new


def test_a_normalized_critic_values_in_units_of_the_return():
    """Targets are centred and scaled, recorded values are not."""
    algo = algorithm(normalize_values=True)
    state = algo.init(key(0))
    new = algo.update(*algo.collect(state))
    mean, std = new.extra["value_stats"].mean[0], torch.sqrt(variance(new.extra["value_stats"])[0])
    assert float(mean) != 0
    _, rollout = algo.collect(new)
    expected = policy(initial_action_std=1.0, distribution="normal").value(new.params, rollout["obs"]) * std + mean
    torch.testing.assert_close(rollout["value"], expected)
    assert float(new.metrics["value_loss"]) < 5  # of targets with variance 1


def test_the_values_clip_is_in_those_units_too():
    algo = algorithm(normalize_values=True, use_clipped_value_loss=True, clip_coef=0.01, n_epochs=1, num_mini_batches=1, learning_rate=0.0)
    state = algo.init(key(0))
    moved, rollout = algo.collect(state)
    new = algo.update(moved, rollout)
    mean, std = new.extra["value_stats"].mean[0], torch.sqrt(variance(new.extra["value_stats"])[0])
    # The first values were recorded in units of 1: the critic's own numbers.
    value = steps(rollout["value"])
    f = {name: steps(x).movedim(0, 1) for name, x in opened(rollout).items() if name != "metrics"}
    options = {"gamma": 0.99, "gae_lambda": 0.95, "final_value": f["final_value"]}
    returns = compute_gae(f["reward"], rollout["value"].movedim(0, 1), f["terminated"], f["truncated"], **options).returns.movedim(0, 1)
    target, old = (returns - mean) / std, (value - mean) / std
    near = old + (value - old).clamp(-0.01, 0.01)
    assert float(new.metrics["value_loss"]) == pytest.approx(float(torch.maximum((value - target) ** 2, (near - target) ** 2).mean()))


class GroupState(NamedTuple):
    near: Tensor
    far: Tensor


def grouped_env() -> Env:
    """Two entries of an observation, of different width and scale."""

    def reset(k: Tensor, env_params: Tensor) -> GroupState:
        return GroupState(near=rng.normal(k, (2,), dtype=F64), far=5.0 + 3.0 * rng.normal(rng.fold_in(k, 1), (3,), dtype=F64))

    def step(state: GroupState, action: Tensor, env_params: Tensor) -> tuple[GroupState, Outcome]:
        new = GroupState(near=0.5 * state.near + action, far=state.far)
        return new, Outcome(reward=-new.near.square().sum() + state.far.sum(), terminated=torch.zeros((), dtype=torch.bool), metrics={})

    entry = lambda n: spaces.Box(-math.inf, math.inf, (n,))
    return Env(
        spec=EnvSpec(name="grouped", max_episode_steps=4, dt=1.0, differentiable=True),
        observation_space=spaces.Dict({"far": entry(3), "near": entry(2)}),
        action_space=BOX,
        default_params=torch.zeros((), dtype=F64),
        reset=reset,
        observe=lambda state, env_params: {"near": state.near, "far": state.far},
        step=step,
    )


def test_the_critic_may_see_more_than_the_actor_and_has_statistics_of_its_own():
    vec = make_vec_env(grouped_env(), 3)
    options: dict[str, Any] = {"actor": NET, "critic": NET, "obs_groups": ("near",), "critic_obs_groups": ("near", "far"), "critic_obs_dim": 5}
    pol = actor_critic(2, BOX, actor_obs_normalization=True, critic_obs_normalization=True, **options)
    own, other = empirical_normalizer(2), empirical_normalizer(5)
    config = PpoConfig(buffer_size=5, n_epochs=1, num_mini_batches=2, compile_mode="eager")
    algo = make_ppo(vec, pol, adam(), config, normalizer=own, critic_normalizer=other, dtype=F64)
    start = algo.init(key(0))
    state = start
    for i in range(2):
        before = state
        state, rollout = algo.collect(state)
        assert rollout["obs"].shape == (3, 6, 2)
        assert rollout["critic_obs"].shape == (3, 6, 5)
        assert torch.equal(rollout["critic_obs"][..., :2], rollout["obs"])
        # Values and scores are those under the statistics that the rollout was played with.
        value = pol.value(state.params, other.apply(before.extra["critic_norm_state"], rollout["critic_obs"]))
        torch.testing.assert_close(rollout["value"], value)
        state = algo.update(state, rollout)
        assert float(state.norm_state.count) == float(state.extra["critic_norm_state"].count) == 15 * (i + 1)
    seen = rollout["critic_obs"][:, :-1, 2:].reshape(-1, 3)
    assert float((state.extra["critic_norm_state"].mean[2:] - seen.mean(0)).abs().max()) < 3
    assert float(state.metrics["ratio_error"]) <= 1e-6
    with pytest.raises(ValueError, match="cannot share a normalizer"):
        make_ppo(vec, pol, adam(), config, normalizer=own, critic_normalizer=own)
    for missing in ({"critic_normalizer": other}, {"normalizer": own}):
        with pytest.raises(ValueError, match="_obs_normalization: pass"):
            make_ppo(vec, pol, adam(), config, **missing)
    built = build_algo("ppo", {"n_epochs": 1, "num_mini_batches": 1}, env=vec, policy=pol, trainer={"buffer_size": 3, "compile_mode": "eager"}, normalizer=own)
    assert built.init(key(0)).extra["critic_norm_state"].mean.shape == (5,)


# -- small batches ---------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "length", "options"), [(1, 1, {"batch_size": 64}), (5, 13, {"batch_size": 64}), (2, 2, {"num_mini_batches": 4})])
@pytest.mark.parametrize("by_minibatch", [True, False])
def test_minibatches_of_one_and_remainders_are_finite(n, length, options, by_minibatch):
    options = {"num_mini_batches": None, **options}
    algo = algorithm(n=n, buffer_size=length, n_epochs=2, normalize_advantage_per_mini_batch=by_minibatch, **options)
    state = algo.init(key(0))
    new = algo.update(*algo.collect(state))
    parts = options["num_mini_batches"] or -(-n * length // 64)
    assert float(new.metrics["steps"]) == 2 * parts
    assert float(new.metrics["skipped_update"]) == 0.0
    assert all(bool(torch.isfinite(x).all()) for x in tree.floating((new.params, new.opt_state)))


@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
def test_nothing_is_read_back_to_the_host(mode, monkeypatch):
    options = {"normalize": True, "early_stop_kl": 1.0} if mode == "eager" else CAPTURES["adaptive"]
    algo = algorithm(compile_mode=mode, **options)
    state = algo.update(*algo.collect(algo.init(key(0))))
    calls = []
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(Tensor, name, lambda self, *args, name=name: calls.append(name))
    collected, rollout = algo.collect(state)
    algo.update(collected, rollout)
    assert calls == []


# -- probes ----------------------------------------------------------------------------------------------------------------------------------------------

GAMMA = 0.5
LEARNING: dict[str, tuple[int, float]] = {  # updates, and the error that is left
    "probe_constant_reward": (8, 0.05),
    "probe_action_reward": (12, 0.05),
    "probe_observation_reward": (6, 0.05),
    "probe_matching_reward": (14, 0.05),
    "probe_delayed_reward": (12, 0.06),
    "probe_two_lengths": (12, 0.06),
    "probe_final_observation": (12, 0.06),
}


@pytest.mark.parametrize("name", LEARNING)
def test_a_probe_is_learned_to_its_solution(name):
    updates, error = LEARNING[name]
    vec = build_learning_env(name, num_envs=32)
    hidden = [8] if name in ("probe_delayed_reward", "probe_two_lengths") else []
    pol = actor_critic(1, vec.single_action_space, actor=mlp(1, 2, []), critic=mlp(1, 1, hidden, activation="tanh"))
    config = PpoConfig(buffer_size=8, n_epochs=15, num_mini_batches=1, gamma=GAMMA, gae_lambda=0.9, ent_coef=0.0, max_grad_norm=None, compile_mode="eager")
    algo = make_ppo(vec, pol, adam(), config, learning_rate=0.05)
    state = algo.init(key(0))
    for _ in range(updates):
        state = algo.update(*algo.collect(state))
    _, rollout = algo.collect(state)
    obs = rollout["obs"].reshape(-1, 1)
    solution = SOLUTIONS[name]
    wrong = pol.value(state.params, obs) - solution.value(obs, GAMMA)
    assert float(wrong.abs().max()) < error, wrong.unique()
    if solution.choice is not None:
        assert torch.equal(pol.distribution.mode(pol.apply(state.params, obs)), solution.choice(obs))
    assert float(state.metrics["episodes"]) > 0


# -- the edge --------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"buffer_size": 0}, "buffer_size"),
        ({"n_epochs": True}, "n_epochs"),
        ({"gamma": 1.1}, "gamma"),
        ({"gae_lambda": math.nan}, "gae_lambda"),
        ({"clip_coef": -0.1}, "clip_coef"),
        ({"action_bound_coef": -1.0}, "action_bound_coef"),
        ({"max_grad_norm": 0}, "max_grad_norm"),
        ({"early_stop_kl": -1}, "early_stop_kl"),
        ({"schedule": "Adaptive"}, "schedule"),
        ({"schedule": "adaptive"}, "desired_kl"),
        ({"desired_kl": 0.01}, "no effect"),
        ({"schedule": "adaptive", "desired_kl": 0.0}, "desired_kl"),
        ({"minimum_learning_rate": 0.0}, "minimum_learning_rate"),
        ({"minimum_learning_rate": 0.1}, "maximum_learning_rate"),
        ({"truncation_bootstrap": "none"}, "truncation_bootstrap"),
        ({"compile_mode": "fast"}, "compile mode"),
    ],
)
def test_a_config_refuses(options, text):
    with pytest.raises(ValueError, match=text):
        PpoConfig(**options)


def test_a_build_refuses_what_does_not_fit():
    vec, good, small = make_vec_env(toy(), N), policy(), PpoConfig(buffer_size=2, compile_mode="eager")
    with pytest.raises(ValueError, match="needs a policy with a critic.*'actor_only' has none"):
        make_ppo(vec, actor_only(2, 2, network=mlp(2, 2, [])), adam(), small)
    with pytest.raises(TypeError, match="rows of an environment"):
        make_ppo(toy(), good, adam(), small)
    with pytest.raises(ValueError, match="continuous actions of shape \\[2\\], but the action space"):
        make_ppo(make_vec_env(cartpole(), 2), actor_critic(4, 2, actor=NET, critic=NET), adam(), small)
    with pytest.raises(ValueError, match="3 observation features"):
        make_ppo(vec, actor_critic(3, BOX, actor=NET, critic=NET), adam(), small)
    with pytest.raises(ValueError, match="at most the number of transitions, 8, got 9"):
        make_ppo(vec, good, adam(), PpoConfig(buffer_size=2, num_mini_batches=9))
    with pytest.raises(ValueError, match="sets the learning rate itself"):
        make_ppo(vec, good, adam(), PpoConfig(schedule="adaptive", desired_kl=0.01), schedule=linear_schedule(3))
    with pytest.raises(ValueError, match="learning_rate"):
        make_ppo(vec, good, adam(), small, learning_rate=-1.0)
    choices = actor_critic(4, spaces.Discrete(2), actor=NET, critic=NET)
    with pytest.raises(ValueError, match="action_bound_coef"):
        make_ppo(make_vec_env(cartpole(), 2), choices, adam(), PpoConfig(buffer_size=2, action_bound_coef=0.1))


def test_an_update_refuses_a_rollout_that_lacks_fields():
    algo = algorithm()
    state, rollout = begin(algo)
    with pytest.raises(ValueError, match="no action, final_value"):
        algo.update(state, rollout.exclude("action", "final_value"))
    with pytest.raises(ValueError, match="T of at least 1"):
        algo.update(state, rollout[:, :1])
    old = algorithm(truncation_bootstrap="pre_step")
    assert float(old.update(state, rollout.exclude("final_value")).metrics["skipped_update"]) == 0.0


def test_the_registry_builds_from_a_run_files_blocks():
    trainer = {"buffer_size": 3, "clip_actions_to_space": True, "compile_mode": "eager", "normalize_observations": True, "segment_length": 16}
    cfg = {"optimizer": {"name": "sgd", "learning_rate": 0.1}, "lr_scheduler": {"name": "linear"}, "num_mini_batches": 1, "n_epochs": 1, "batch_size": 7}
    normalizer = running_normalizer(2)
    algo = build_algo("PPO", cfg, env=make_vec_env(toy(), N), policy=policy(), trainer=trainer, normalizer=normalizer, total_updates=2, dtype=F64)
    state = algo.init(key(0))
    assert "critic_norm_state" not in state.extra  # both see the same and share their statistics
    rates = []
    for _ in range(2):
        state, rollout = algo.collect(state)
        state = algo.update(state, rollout)
        rates.append(float(state.metrics["learning_rate"]))
    assert rollout.shape == (N, 4)
    assert rates == pytest.approx([0.1, 0.05])
    with pytest.raises(TypeError, match="takes no 'group_size'"):
        build_algo("ppo", {"group_size": 4}, env=make_vec_env(toy(), N), policy=policy())


def test_steps_that_only_reset_count_in_no_statistic_and_their_actions_nowhere():
    """Episodes of two steps under next-step autoreset: steps 2 and 5 of six are no transitions."""
    with scripted("next_step") as env:
        pol = actor_critic(1, env.single_action_space, actor=NET, critic=NET)
        config = PpoConfig(buffer_size=6, n_epochs=2, num_mini_batches=2, gamma=1.0, gae_lambda=1.0, normalize_rewards=True, compile_mode="eager")
        algo = make_ppo(env, pol, adam(), config, normalizer=running_normalizer(1), critic_normalizer=running_normalizer(1))
        state, rollout = algo.collect(algo.init(key(0)))
    valid = steps(rollout["valid"])
    assert valid.tolist() == [[True, True, False, True, True, False]]
    new = algo.update(state, rollout)
    assert float(new.extra["reward_stats"].count) == float(new.norm_state.count) == int(new.counters["env_steps"]) == 4
    assert (float(new.metrics["episode_reward_avg_100"]), float(new.metrics["episode_length_avg_100"]), int(new.metrics["episodes"])) == (2.0, 2.0, 2)
    for junk in (0, 1):
        action = torch.where(rollout["valid"], rollout["action"], junk)
        other = algo.update(state, changed(rollout, action=action))
        assert_trees_equal((other.params, other.opt_state, other.extra), (new.params, new.opt_state, new.extra))
        assert float(other.metrics["loss"]) == float(new.metrics["loss"])


def test_host_environments_are_played_too():
    gymnasium = pytest.importorskip("gymnasium")
    host = pytest.importorskip("frl.envs.host")
    step = gymnasium.vector.AutoresetMode.NEXT_STEP
    with host.HostEnv(gymnasium.make_vec("CartPole-v1", 3, vectorization_mode="sync", vector_kwargs={"autoreset_mode": step})) as env:
        pol = actor_critic(4, env.single_action_space, actor=NET, critic=NET)
        algo = make_ppo(env, pol, adam(), PpoConfig(buffer_size=40, n_epochs=1, num_mini_batches=2, compile_mode="eager"))
        state, rollout = algo.collect(algo.init(key(0)))
        holes = int((~steps(rollout["valid"])).sum())
        assert holes > 0
        new = algo.update(state, rollout)
    assert int(new.counters["env_steps"]) == 120 - holes
    assert float(new.metrics["skipped_update"]) == 0.0
    assert float(new.metrics["ratio_error"]) <= tolerance(torch.float32, 100)

"""GRPO: an update against plain PyTorch, groups that share their start, ties, the reference policy, skips and graphs that stay."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.distributions import Independent, Normal, kl_divergence

from frl import compile as compiler
from frl import rng, tree
from frl.algorithms.grpo import GrpoConfig, make_grpo
from frl.algorithms.minibatch import minibatch_indices
from frl.algorithms.registry import build_algo
from frl.critic_policies import actor_critic
from frl.envs.cartpole import cartpole
from frl.envs.registry import build_learning_env
from frl.envs.vector import make_vec_env
from frl.networks import mlp
from frl.normalizers import running_normalizer
from frl.optim import adam, linear_schedule, sgd
from frl.policies import actor_only
from frl.rng import key
from tests.strategies import assert_trees_close, assert_trees_equal, copy_of, draw, toy_env

F64 = torch.float64
CAPTURED = "aot_eager"
N, T, G = 8, 6, 4
POLICY = actor_only(2, 2, network=mlp(2, 2, hidden_sizes=[4], activation="tanh"), initial_log_std=-0.5)
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
def toy(fault=None):
    env = toy_env(life=(3, 9), max_episode_steps=5)
    if fault is None:
        return env
    name, value = fault
    broken = env.default_params._replace(fault_step=torch.tensor(1), **{f"{name}_fault": torch.tensor(value, dtype=F64)})
    return dataclasses.replace(env, default_params=broken)


@functools.cache
def algorithm(*, n=N, fault=None, optimizer="adam", normalize=False, decay=None, learning_rate=0.05, **config):
    """One algorithm for each set of options, so that graphs are shared by the tests."""
    config = {"buffer_size": T, "group_size": G, "n_epochs": 2, "batch_size": 20, "kl_coef": 0.1, "compile_mode": "eager", **config}
    return make_grpo(
        make_vec_env(toy(fault), n),
        POLICY,
        {"sgd": sgd(), "adam": adam()}[optimizer],
        GrpoConfig(**config),
        normalizer=running_normalizer(2) if normalize else None,
        schedule=None if decay is None else linear_schedule(decay),
        learning_rate=learning_rate,
        dtype=F64,
    )


def begin(algo, seed=0):
    """A state whose policy has left the reference, and its first rollout."""
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


# -- groups ----------------------------------------------------------------------------------------------------------------------------------------------


def test_rows_of_a_group_start_in_the_same_state_and_act_differently():
    algo = algorithm()
    state = algo.init(key(0))
    starts = []
    for _ in range(2):
        state, rollout = algo.collect(state)
        first = rollout["obs"][:, 0]
        for g in range(N // G):
            assert all(torch.equal(first[g * G], first[g * G + i]) for i in range(G))
        assert len(first.unique(dim=0)) == N // G
        assert len(rollout["action"][:, 0].unique(dim=0)) == N
        # A new start every time, for the episodes too.
        assert bool((rollout["metrics", "episode_length"][:, 0] == 1).all())
        starts.append(first)
        state = algo.update(state, rollout)
    assert not torch.equal(*starts)


def test_the_start_of_a_group_does_not_depend_on_how_many_there_are():
    small, large = algorithm(n=4), algorithm(n=8)
    a, b = small.collect(small.init(key(3)))[1], large.collect(large.init(key(3)))[1]
    assert torch.equal(a["obs"][:, 0], b["obs"][:4, 0])


def plain_advantages(f: dict[str, Any], gamma: float, group: int, first_only: bool) -> tuple[Tensor, Tensor]:
    """Advantages and mask ``[N, T]`` by loops."""
    rows, length = f["reward"].shape[0], f["reward"].shape[1] - 1
    returns, mask = torch.zeros(rows, length, dtype=F64), torch.ones(rows, length, dtype=torch.bool)
    for n in range(rows):
        later, ended = 0.0, False
        for t in reversed(range(length)):
            later = float(f["reward"][n, t]) + gamma * (0.0 if f["done"][n, t] else later)
            returns[n, t] = later
        for t in range(length):
            mask[n, t] = not (ended and first_only)
            ended = ended or bool(f["done"][n, t])
    advantage = torch.zeros_like(returns)
    for g in range(rows // group):
        for t in range(length):
            members = [n for n in range(g * group, (g + 1) * group) if mask[n, t]]
            if len(members) > 1:
                own = returns[members, t]
                advantage[members, t] = (own - own.mean()) / (own.std(correction=0) + 1e-8)
    return advantage, mask


@pytest.mark.parametrize("first_only", [True, False])
@pytest.mark.parametrize("estimator", ["exact", "k3"])
def test_an_update_is_that_of_plain_pytorch(estimator, first_only):
    algo = algorithm(kl_estimator=estimator, truncate_at_first_done=first_only, max_grad_norm=0.1, gamma=0.9, ent_coef=0.01)
    state, rollout = begin(algo)
    f = opened(rollout)
    advantage, mask = (x.reshape(-1) for x in plain_advantages(f, 0.9, G, first_only))
    assert bool(mask.all()) != first_only
    flat = {name: steps(x).reshape(N * T, *x.shape[2:]) for name, x in f.items() if name != "metrics"}
    params = tree.map(lambda x: x.clone().requires_grad_(), state.params)
    leaves, reference = tree.leaves(params), state.extra["reference"]["params"]
    optimizer = torch.optim.Adam(leaves, lr=0.05)
    gaussian = lambda p, i: Independent(Normal((d := POLICY.apply(p, flat["obs"][i])).mean, torch.exp(d.log_std)), 1)
    _, k_plan = rng.split(state.key, 2)
    sums = {"actor_loss": 0.0, "approx_ref_kl": 0.0, "entropy": 0.0, "loss": 0.0}
    total = 0
    for epoch in range(2):
        plan = minibatch_indices(rng.fold_in(k_plan, epoch), N * T, batch_size=20)
        for index, there in zip(plan.index, plan.mask, strict=True):
            i = index[there]
            i = i[mask[i]]
            now, old = gaussian(params, i), gaussian(reference, i)
            log_prob = now.log_prob(flat["action"][i])
            ratio = torch.exp(log_prob - flat["sample_log_prob"][i])
            actor = -torch.minimum(ratio * advantage[i], ratio.clamp(0.8, 1.2) * advantage[i]).mean()
            d = old.log_prob(flat["action"][i]) - log_prob
            kl = kl_divergence(now, old).mean() if estimator == "exact" else (torch.exp(d) - d - 1).mean()
            entropy = now.entropy().mean()
            loss = actor + 0.1 * kl - 0.01 * entropy
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(leaves, 0.1)
            optimizer.step()
            total += len(i)
            for name, x in {"actor_loss": actor, "approx_ref_kl": kl, "entropy": entropy, "loss": loss}.items():
                sums[name] += float(x.detach()) * len(i)
    new = algo.update(state, rollout)
    assert_trees_close(new.params, tree.detach(params), ops=10_000)
    for name, x in sums.items():
        assert float(new.metrics[name]) == pytest.approx(x / total, rel=1e-9, abs=1e-12), name


def test_golden_advantages_reach_the_update():
    """Only what the mask counts may change the parameters."""
    algo = algorithm(n=4, buffer_size=3, group_size=2, gamma=0.5, kl_coef=0.0, optimizer="sgd", n_epochs=1, batch_size=64, max_grad_norm=None)
    state, rollout = begin(algo)
    reward = torch.tensor([[1.0, 2, 4, 0], [0, 1, 0, 0], [3, 3, 3, 0], [1, 1, 1, 0]], dtype=F64)
    done = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 0]], dtype=torch.bool)
    rollout = changed(rollout, reward=reward, done=done, terminated=done, truncated=torch.zeros_like(done))
    golden = torch.tensor([[1.0, 1, 0], [-1, -1, 0], [1, 0, 0], [-1, 0, 0]], dtype=F64)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [1, 1, 1]], dtype=torch.bool)
    advantage, counted = plain_advantages(opened(rollout), 0.5, 2, True)
    torch.testing.assert_close(advantage, golden)
    assert torch.equal(counted, mask)

    def loss(params):
        dist = POLICY.apply(params, steps(rollout["obs"]))
        ratio = torch.exp(POLICY.distribution.log_prob(dist, steps(rollout["action"])) - steps(rollout["sample_log_prob"]))
        return -(ratio * advantage)[mask].mean()

    expected = tree.map(lambda p, g: p - 0.05 * g, state.params, torch.func.grad(loss)(state.params))
    assert_trees_close(algo.update(state, rollout).params, expected, ops=1_000)


# -- ties ------------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("noise", [0.0, 1.2e-7])
def test_tied_groups_give_no_policy_gradient(noise):
    """Rewards that are the group's index, to rounding: nobody in a group is better than another."""
    ids = (torch.arange(N) // G).to(F64)[:, None].expand(N, T + 1) + noise * draw(N, T + 1)
    options = {"optimizer": "sgd", "truncate_at_first_done": False}
    algo = algorithm(kl_coef=0.0, **options)
    state, rollout = begin(algo)
    rollout = changed(rollout, reward=ids, **{name: torch.zeros(N, T + 1, dtype=torch.bool) for name in ("done", "terminated", "truncated")})
    new = algo.update(state, rollout)
    assert_trees_equal(new.params, state.params)
    assert (float(new.metrics["actor_loss"]), float(new.metrics["grad_norm"]), float(new.metrics["tied_fraction"])) == (0.0, 0.0, 1.0)
    # The KL term pulls all the same, towards the reference.
    pulled = algorithm(kl_coef=0.1, **options)
    towards = pulled.update(pulled.init(key(0))._replace(params=state.params, key=state.key), rollout)
    assert float(towards.metrics["actor_loss"]) == 0.0
    assert float(towards.metrics["grad_norm"]) > 0.0
    later = pulled.update(towards, rollout)
    assert float(later.metrics["approx_ref_kl"]) < float(towards.metrics["approx_ref_kl"])


def test_a_tied_group_leaves_the_others_as_they_are():
    algo = algorithm(kl_coef=0.0, optimizer="sgd", n_epochs=1, batch_size=N * T, max_grad_norm=None)
    state, rollout = begin(algo)
    flat = changed(rollout, reward=torch.where(torch.arange(N)[:, None] < G, 2.0, rollout["reward"]))
    full, half = algo.update(state, rollout), algo.update(state, flat)
    expected, mask = plain_advantages(opened(flat), 0.99, G, True)
    assert float(expected[:G].abs().max()) > 0 or float(half.metrics["tied_fraction"]) > 0
    assert float(half.metrics["tied_fraction"]) > float(full.metrics["tied_fraction"])
    assert not torch.equal(half.params["log_std"], state.params["log_std"])


# -- the reference ---------------------------------------------------------------------------------------------------------------------------------------


def test_the_reference_stays_as_it_began():
    algo = algorithm(normalize=True)
    state = algo.init(key(0))
    start = copy_of(state.extra["reference"])
    assert_trees_equal(start, {"params": state.params, "norm_state": state.norm_state})
    for _ in range(2):
        state = algo.update(*algo.collect(state))
    assert_trees_equal(state.extra["reference"], start)
    assert float(state.norm_state.count) > 0
    assert not torch.equal(state.params["log_std"], start["params"]["log_std"])
    assert "reference" not in algorithm(kl_coef=0.0).init(key(0)).extra


def test_the_divergence_of_the_reference_from_itself_is_zero():
    for estimator in ("exact", "k3"):
        algo = algorithm(kl_estimator=estimator, learning_rate=0.0)
        new = algo.update(*algo.collect(algo.init(key(0))))
        assert float(new.metrics["approx_ref_kl"]) == pytest.approx(0.0, abs=1e-12)


def test_the_reference_keeps_the_statistics_of_its_time():
    algo = algorithm(normalize=True, learning_rate=0.0)
    state = algo.init(key(0))
    state, rollout = algo.collect(algo.update(*algo.collect(state)))
    new = algo.update(state, rollout)
    normalizer, (_, mask) = running_normalizer(2), plain_advantages(opened(rollout), 0.99, G, True)
    obs, reference = steps(rollout["obs"]), state.extra["reference"]
    now, then = (POLICY.apply(state.params, normalizer.apply(stats, obs)) for stats in (state.norm_state, reference["norm_state"]))
    assert float(new.metrics["approx_ref_kl"]) == pytest.approx(float(POLICY.distribution.kl(now, then)[mask].mean()), rel=1e-9)
    assert float(new.metrics["approx_ref_kl"]) > 1e-6


# -- states, skips, graphs -------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"normalize": True, "decay": 8, "max_grad_norm": 0.1}, {"kl_estimator": "k3", "truncate_at_first_done": False}])
def test_captured_updates_equal_eager_ones_and_make_no_graph_after_the_first(options):
    fast, slow = algorithm(compile_mode=CAPTURED, **options), algorithm(**options)
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
        state = new._replace(hyper={name: x if bool(torch.isinf(x)) else x * 0.9 for name, x in new.hyper.items()})
    assert compiler.graph_count() == graphs


def test_hyper_parameters_are_read_from_the_state():
    algo = algorithm(ent_coef=0.01)
    state, rollout = begin(algo)
    base = algo.update(state, rollout)
    assert set(state.hyper) == {"optimizer.learning_rate", "gamma", "clip_coef", "ent_coef", "kl_coef", "max_grad_norm"}
    for name in state.hyper:
        other = algo.update(state._replace(hyper={**state.hyper, name: state.hyper[name] * 0.5 + 0.001}), rollout)
        same = all(torch.equal(a, b) for a, b in zip(tree.leaves(other.params), tree.leaves(base.params), strict=True))
        assert not same, name


def test_a_state_repeats_its_bits_and_its_shape():
    algo = algorithm(normalize=True)
    state = algo.init(key(0))
    again, rollout = algo.collect(state)
    assert_trees_equal(algo.collect(state)[0], again)
    new = algo.update(again, rollout)
    assert set(new.metrics) == set(state.metrics)
    tree.check_same(new._replace(metrics={}), state._replace(metrics={}), "state")
    assert int(new.counters["env_steps"]) == N * T
    long = algorithm(buffer_size=12)
    played = long.update(*long.collect(long.init(key(0))))
    assert int(played.metrics["episodes"]) == N  # the first of each row
    every = algorithm(buffer_size=12, truncate_at_first_done=False)
    assert int(every.update(*every.collect(every.init(key(0)))).metrics["episodes"]) > N


def test_a_nan_reward_skips_the_update_and_training_goes_on():
    algo = algorithm(fault=("reward", math.nan), normalize=True)
    state, rollout = algo.collect(algo.init(key(0)))
    assert bool(torch.isnan(rollout["reward"]).any())
    assert all(bool(torch.isfinite(x).all()) for x in tree.floating(state.env_state))
    new = algo.update(state, rollout)
    for name in KEPT:
        assert_trees_equal(getattr(new, name), getattr(state, name))
    assert float(new.metrics["skipped_update"]) == 1.0
    assert int(new.counters["nonfinite_rows"]) > 0
    after = algo.update(new, changed(rollout, reward=torch.nan_to_num(rollout["reward"])))
    assert float(after.metrics["skipped_update"]) == 0.0
    assert not torch.equal(after.params["log_std"], new.params["log_std"])


def test_a_state_that_is_not_finite_leaves_out_its_step_alone():
    algo = algorithm(fault=("state", math.inf), truncate_at_first_done=False)
    state, rollout = algo.collect(algo.init(key(0)))
    assert not bool(rollout["valid"][:, :-1].all())
    new = algo.update(state, rollout)
    assert float(new.metrics["skipped_update"]) == 0.0
    assert all(bool(torch.isfinite(x).all()) for x in tree.floating((new.params, new.opt_state)))
    spoiled = changed(rollout, sample_log_prob=torch.where(rollout["valid"], rollout["sample_log_prob"], math.nan))
    assert_trees_equal(algo.update(state, spoiled).params, new.params)


# -- learning --------------------------------------------------------------------------------------------------------------------------------------------


def test_a_choice_is_learned_without_a_critic():
    vec = build_learning_env("probe_matching_reward", num_envs=32)
    pol = actor_critic(1, vec.single_action_space, actor=mlp(1, 2, []), critic=mlp(1, 1, []))
    config = GrpoConfig(buffer_size=1, group_size=8, n_epochs=5, batch_size=64, kl_coef=0.0, max_grad_norm=None, compile_mode="eager")
    algo = make_grpo(vec, pol, adam(), config, learning_rate=0.1)
    state = algo.init(key(0))
    critic = copy_of(state.params["critic"])
    for _ in range(12):
        state = algo.update(*algo.collect(state))
    probability = torch.softmax(pol.apply(state.params, torch.tensor([[-1.0], [1.0]])).logits, -1)
    assert float(probability[0, 0]) > 0.95
    assert float(probability[1, 1]) > 0.95
    assert_trees_equal(state.params["critic"], critic)


# -- the edge --------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"group_size": 1}, "group_size must be an integer of at least 2, got 1"),
        ({"group_size": 2.0}, "group_size"),
        ({"kl_coef": -0.1}, "kl_coef"),
        ({"kl_estimator": "k2"}, "kl_estimator"),
        ({"eps": math.inf}, "eps"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"n_epochs": 0}, "n_epochs"),
    ],
)
def test_a_config_refuses(options, text):
    with pytest.raises(ValueError, match=text):
        GrpoConfig(**options)


def test_a_build_refuses_what_does_not_fit():
    small = GrpoConfig(buffer_size=2, compile_mode="eager")
    with pytest.raises(ValueError, match="10 rows and group_size 4"):
        make_grpo(make_vec_env(toy(), 10), POLICY, adam(), small)
    with pytest.raises(ValueError, match="continuous actions of shape"):
        make_grpo(make_vec_env(cartpole(), 4), actor_only(4, 2, network=mlp(4, 2, [])), adam(), small)
    with pytest.raises(TypeError, match="rows of an environment"):
        make_grpo(toy(), POLICY, adam(), small)
    pol = actor_critic(2, spaces.Box(-1.0, 1.0, (2,)), actor=NET, critic=NET, actor_obs_normalization=True)
    with pytest.raises(ValueError, match="actor_obs_normalization"):
        make_grpo(make_vec_env(toy(), 4), pol, adam(), small)
    algo = algorithm()
    state, rollout = begin(algo)
    with pytest.raises(ValueError, match="6 rows and group_size 4"):
        algo.update(state, rollout[:6])
    with pytest.raises(ValueError, match="no sample_log_prob"):
        algo.update(state, rollout.exclude("sample_log_prob"))


def test_the_registry_builds_from_a_run_files_blocks():
    cfg = {"optimizer": {"name": "sgd"}, "group_size": 2, "kl_estimator": "k3", "batch_size": 5, "reset_every_rollout": True, "n_epochs": 1}
    options = {"env": make_vec_env(toy(), 4), "policy": POLICY, "trainer": {"buffer_size": 3, "compile_mode": "eager", "segment_length": 16}, "dtype": F64}
    algo = build_algo("grpo", cfg, **options)
    state, rollout = algo.collect(algo.init(key(0)))
    assert rollout.shape == (4, 4)
    assert float(algo.update(state, rollout).metrics["steps"]) == 3.0
    with pytest.raises(ValueError, match="reset_every_rollout"):
        build_algo("grpo", {**cfg, "reset_every_rollout": False}, **options)
    with pytest.raises(TypeError, match="takes no 'gae_lambda'"):
        build_algo("grpo", {"gae_lambda": 0.9}, **options)


@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
@pytest.mark.parametrize("estimator", ["exact", "k3"])
def test_nothing_is_read_back_to_the_host(mode, estimator, monkeypatch):
    algo = algorithm(compile_mode=mode, normalize=mode == "eager", kl_estimator=estimator)
    state = algo.update(*algo.collect(algo.init(key(0))))
    calls = []
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(Tensor, name, lambda self, *args, name=name: calls.append(name))
    collected, rollout = algo.collect(state)
    algo.update(collected, rollout)
    assert calls == []


@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
def test_an_actor_alone_for_discrete_actions(mode):
    """The update is that of an actor-critic with the same actor: the critic is never read."""
    env = make_vec_env(cartpole(), 8)
    alone = actor_only(4, env.single_action_space, network=mlp(4, 2, [4], activation="tanh"))
    with_critic = actor_critic(4, env.single_action_space, actor=mlp(4, 2, [4], activation="tanh"), critic=mlp(4, 1, []))
    config = GrpoConfig(buffer_size=12, group_size=4, n_epochs=2, batch_size=32, compile_mode=mode)
    states = []
    for policy in (alone, with_critic):
        algo = make_grpo(env, policy, sgd(), config, learning_rate=0.5)
        state = algo.init(key(0))
        actor = alone.init(key(3))["actor"]
        params = {**state.params, "actor": actor}
        extra = {**state.extra, "reference": {**state.extra["reference"], "params": params}}
        states.append(algo.update(*algo.collect(state._replace(params=params, extra=extra))))
    assert set(states[0].params) == {"actor"}
    assert_trees_close(states[0].params["actor"], states[1].params["actor"], ops=1000)
    assert float(states[0].metrics["skipped_update"]) == 0.0
    assert float(states[0].metrics["grad_norm"]) > 0

"""Populations: a member is its solo run, members do not see each other, and what population-based training does to them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, hessian, jacrev, vmap

import frl
from frl import compile as compiler
from frl import rng, tree
from frl import scan as scans
from frl.algorithms.apg import ApgConfig, make_apg
from frl.algorithms.grpo import GrpoConfig, make_grpo
from frl.algorithms.ppo import PpoConfig, make_ppo
from frl.algorithms.shac import ShacConfig, make_shac
from frl.envs.double_integrator import double_integrator
from frl.envs.registry import build_learning_env
from frl.envs.schedule import DifferentiableRolloutSpec
from frl.envs.vector import make_vec_env
from frl.native import library
from frl.normalizers import running_normalizer
from frl.optim import adam
from frl.policies import build_policy
from frl.types import Algorithm, TrainState
from frl.warm_up import eager_first_update
from tests.strategies import assert_trees_close

NETWORK = {"type": "mlp", "network_cfg": {"hidden_sizes": [8], "activation": "tanh", "orthogonal_init": [1.0, 0.1]}}
F64 = torch.float64
RATES = torch.tensor([1e-3, 3e-3, 1e-2], dtype=F64)
SIZE = 3


@functools.cache
def build(name: str, mode: str = "eager", dtype: torch.dtype = F64) -> Algorithm:
    env_name = {"apg": "point_mass", "complete": "point_mass", "ppo": "cartpole", "grpo": "pendulum", "shac": "pendulum"}[name]
    env = build_learning_env(env_name, num_envs=4, dtype=dtype)
    critic = {"critic": NETWORK} if name in ("ppo", "shac") else {}
    kind = "actor_critic" if critic else "actor_only"
    policy = build_policy({"name": kind, "actor": NETWORK, **critic}, env.single_observation_space, env.single_action_space)
    normalizer = running_normalizer(policy.obs_dim, initial_count=1e-4)
    given = {"normalizer": normalizer, "dtype": dtype, "learning_rate": 3e-3}
    if name in ("apg", "complete"):
        parts = {"rollout_mode": "complete", "gradient_accumulation_steps": 2} if name == "complete" else {}
        return make_apg(env, policy, adam(), ApgConfig(segment_length=4, action_adjoint_max_norm=0.05, compile_mode=mode, **parts), **given)
    if name == "ppo":
        config = PpoConfig(buffer_size=8, n_epochs=2, num_mini_batches=2, normalize_rewards=True, normalize_values=True, compile_mode=mode)
        return make_ppo(env, policy, adam(), config, critic_normalizer=normalizer, **given)
    if name == "grpo":
        return make_grpo(env, policy, adam(), GrpoConfig(buffer_size=8, n_epochs=2, batch_size=16, group_size=2, compile_mode=mode), **given)
    config = ShacConfig(segment_length=4, n_epochs=2, num_mini_batches=2, action_adjoint_max_norm=0.05, compile_mode=mode)
    return make_shac(env, policy, adam(), config, critic_normalizer=normalizer, **given)


def first(name: str, *, mode: str = "eager", dtype: torch.dtype = F64, size: int = SIZE) -> tuple[Algorithm, TrainState]:
    many = frl.population(build(name, mode, dtype), size)
    return many, frl.with_hyper(many.init(rng.split(rng.key(1), size)), {"optimizer.learning_rate": RATES[:size].to(dtype)})


def advance(algorithm: Algorithm, state: TrainState, updates: int = 1) -> TrainState:
    for _ in range(updates):
        state, rollout = algorithm.collect(state)
        state = algorithm.update(state, rollout)
    return state


def same(a: Any, b: Any) -> bool:
    return all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def assert_close(got: TrainState, want: TrainState, bound: float) -> None:
    tree.check_same(got, want)
    for (name, x), (_, y) in zip(tree.items(got), tree.items(want), strict=True):
        torch.testing.assert_close(x, y, rtol=bound, atol=bound, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")


ALGORITHMS = pytest.mark.parametrize("name", ["apg", "complete", "ppo", "grpo", "shac"])


# ---- a member is its solo run ----


@ALGORITHMS
def test_members_equal_their_solo_runs(name):
    many, state = first(name)
    solo = [frl.select_members(state, i) for i in range(SIZE)]
    for i, key in enumerate(rng.split(rng.key(1), SIZE)):
        fresh = build(name).init(key)
        assert same(fresh._replace(hyper=solo[i].hyper), solo[i])
        assert solo[i].hyper["optimizer.learning_rate"] == RATES[i]
    state = advance(many, state, 3)
    for i in range(SIZE):
        assert_close(frl.select_members(state, i), advance(build(name), solo[i], 3), 1e-11)
    moved = [frl.select_members(state.params, i) for i in range(SIZE)]
    assert not same(moved[0], moved[1])
    assert int(state.counters["successful_updates"].sum()) == 3 * SIZE


def test_members_equal_their_solo_runs_after_fifty_updates():
    many, state = first("apg", size=2)
    solo = frl.select_members(state, 1)
    state = advance(many, state, 50)
    assert_close(frl.select_members(state, 1), advance(build("apg"), solo, 50), 1e-6)


def test_a_single_precision_member_equals_its_solo_run():
    many, state = first("apg", dtype=torch.float32)
    solo = [frl.select_members(state, i) for i in range(SIZE)]
    state = advance(many, state)
    for i in range(SIZE):
        assert_close(frl.select_members(state, i), advance(build("apg", dtype=torch.float32), solo[i]), 1e-5)


@pytest.mark.slow
def test_a_captured_population_equals_an_eager_one():
    (captured, state), (plain, _) = first("apg", mode="aot_eager", size=2), first("apg", size=2)
    got = advance(captured, state, 2)
    assert_close(got, advance(plain, state, 2), 1e-11)
    before = compiler.graph_count()
    advance(captured, got)
    assert compiler.graph_count() == before


def test_an_update_in_chunks_is_the_update():
    whole, state = first("ppo")
    state, rollout = whole.collect(state)
    assert rollout.batch_size == (SIZE, 4, 9)
    in_parts = frl.population(build("ppo"), SIZE, chunk=2).update(state, rollout)
    assert_close(in_parts, whole.update(state, rollout), 1e-12)


def test_a_scheduled_rollout_is_that_of_the_solo_run():
    inner = double_integrator()

    def prepare(index: int):
        return DifferentiableRolloutSpec(num_steps=2 + index), inner.default_params._replace(mass=torch.tensor(1.0 + index))

    env = make_vec_env(dataclasses.replace(inner, prepare_differentiable_rollout=prepare), 2)
    policy = frl.actor_only(2, 1, network=NETWORK)
    one = make_apg(env, policy, adam(), ApgConfig(rollout_mode="complete", compile_mode="eager"))
    many = frl.population(one, 2)
    start = many.init(rng.key(5))
    state = advance(many, start, 2)
    assert state.counters["rollouts"].tolist() == [2, 2]
    assert state.counters["env_steps"].tolist() == [2 * (2 + 3)] * 2
    assert_close(frl.select_members(state, 1), advance(one, frl.select_members(start, 1), 2), 1e-5)


def test_what_an_algorithm_reads_of_its_counters_is_there_to_read():
    one, called = build("apg"), []

    def warm(kind: str) -> Algorithm:
        return one._replace(update=lambda state, rollout: called.append(kind) or one.update(state, rollout))

    many = frl.population(eager_first_update(warm("compiled"), warm("eager")), 2)
    state = advance(many, many.init(rng.key(3)), 2)
    assert called == ["eager", "compiled"]
    assert state.counters["updates"].tolist() == [2, 2]
    older = advance(many, state._replace(counters={**state.counters, "updates": torch.tensor([5, 9])}))
    assert older.counters["updates"].tolist() == [6, 10]


# ---- members do not see each other ----


@settings(max_examples=6)
@given(name=st.sampled_from(["apg", "ppo"]), other=st.integers(0, SIZE - 1), seed=st.integers(0, 99), rate=st.floats(1e-4, 1e-1))
def test_changing_a_member_changes_no_other(name, other, seed, rate):
    many, state = first(name)
    rates = RATES.clone()
    rates[other] = rate
    swapped = tree.map(lambda x, y: torch.cat([x[:other], y[None], x[other + 1 :]]), state, build(name).init(rng.key(1000 + seed)))
    changed = advance(many, frl.with_hyper(swapped, {"optimizer.learning_rate": rates}))
    plain = advance(many, state)
    for i in range(SIZE):
        assert same(frl.select_members(changed, i), frl.select_members(plain, i)) == (i != other)


@settings(max_examples=6)
@given(name=st.sampled_from(["apg", "ppo"]), order=st.permutations(range(SIZE)))
def test_permuting_members_permutes_results(name, order):
    many, state = first(name)
    assert_close(advance(many, frl.select_members(state, order)), frl.select_members(advance(many, state), order), 1e-12)


@settings(max_examples=4)
@given(name=st.sampled_from(["apg", "ppo", "grpo", "shac"]), seed=st.integers(0, 2**32))
def test_a_population_of_one_is_the_solo_run(name, seed):
    one = build(name)
    many = frl.population(one, 1)
    key = rng.key(seed)
    assert_close(frl.select_members(advance(many, many.init(key[None])), 0), advance(one, one.init(key)), 1e-12)


@pytest.mark.parametrize("name", ["apg", "ppo"])
def test_a_member_that_is_not_finite_is_skipped_alone(name):
    many, state = first(name)
    broken = tree.map(lambda x: torch.cat([x[:1], torch.full_like(x[1:2], torch.nan), x[2:]]), state.params)
    state, rollout = many.collect(state)
    after = many.update(state._replace(params=broken), rollout)
    assert after.counters["skipped_updates"].tolist() == [0, 1, 0]
    assert after.metrics["skipped_update"].tolist() == [0, 1, 0]
    kept = ("params", "opt_state", "norm_state", "hyper")
    assert all(same(tree.index(getattr(after, part), 1), tree.index(getattr(state._replace(params=broken), part), 1)) for part in kept)
    good = many.update(state, rollout)
    for i in (0, 2):
        assert same(frl.select_members(after, i), frl.select_members(good, i))


# ---- what population-based training does ----


def test_a_copied_member_has_learned_what_its_parent_has_and_goes_its_own_way():
    many, state = first("ppo")
    state = advance(many, state, 2)
    copied = frl.copy_members(state, [0, 2, 2])
    for part in ("params", "opt_state", "norm_state", "hyper"):
        assert same(tree.index(getattr(copied, part), 1), tree.index(getattr(state, part), 2))
    assert same(copied.extra["value_stats"], tree.index(state.extra["value_stats"], torch.tensor([0, 2, 2])))
    for part in ("env_state", "key", "counters"):
        assert same(getattr(copied, part), getattr(state, part))
    assert same(copied.extra["reward_returns"], state.extra["reward_returns"])
    assert same(frl.copy_members(state, range(SIZE)), state)
    later = advance(many, copied)
    assert not same(tree.index(later.params, 1), tree.index(later.params, 2))


def test_perturbed_hyper_parameters_are_multiples_and_only_of_the_chosen():
    _, state = first("ppo")
    chosen = torch.tensor([True, False, True])
    names = ["optimizer.learning_rate", "clip_coef"]
    seen = [frl.perturb_hyper(state, rng.key(seed), names, factors=(0.5, 2.0), members=chosen) for seed in range(8)]
    for new in seen:
        for name, value in new.hyper.items():
            ratio = (value / state.hyper[name]).tolist()
            assert all(r in ((0.5, 2.0) if name in names and chosen[i] else (1.0,)) for i, r in enumerate(ratio) if state.hyper[name][i] != 0)
    drawn = {tuple((new.hyper[name] / state.hyper[name]).tolist()) for new in seen for name in names}
    assert len(drawn) == 4


def test_what_does_not_fit_is_refused():
    many, state = first("apg")
    with pytest.raises(ValueError, match="no hyper-parameter 'learning_rate'"):
        frl.with_hyper(state, {"learning_rate": 1.0})
    with pytest.raises(ValueError, match=r"one for each of 3 members, got shape \[2\]"):
        frl.with_hyper(state, {"gamma": [0.9, 0.8]})
    with pytest.raises(ValueError, match="no hyper-parameter 'x'"):
        frl.perturb_hyper(state, rng.key(0), ["x"])
    with pytest.raises(ValueError, match="parents must be 3"):
        frl.copy_members(state, [0, 1])
    with pytest.raises(ValueError, match="size must be a positive integer"):
        frl.population(build("apg"), 0)
    with pytest.raises(ValueError, match="chunk must be"):
        frl.population(build("apg"), 2, chunk=0)
    with pytest.raises(ValueError, match=r"keys \[3, 2\]"):
        many.init(rng.split(rng.key(0), 2))
    with pytest.raises(ValueError, match="not one of 2 members"):
        frl.population(build("apg"), 2).collect(state)


# ---- members of a native loop ----

native_only = pytest.mark.skipif(not library.has_products(), reason="this build of torch offers no matrix products to C++")


def step(params, carry, x):
    h = torch.tanh(carry @ params["w"] + x + params["b"])
    return h, {"sum": h.sum(-1), "carry": carry}


def loss(params, carry, xs, mode, memory="save"):
    carry, y = scans.scan(step, params, carry, xs, mode=mode, memory=memory)
    return y["sum"].square().mean() + 0.1 * y["carry"].sum() + carry.mean()


def problem():
    keys = rng.split(rng.key(4), 4)
    return {"w": 0.3 * rng.normal(keys[0], (3, 4, 4)), "b": rng.normal(keys[1], (3, 4))}, rng.normal(keys[2], (3, 5, 4)), rng.normal(keys[3], (3, 7, 5, 4))


TRANSFORMS = {
    "gradients of members": lambda f, p, c, x: vmap(grad(f, argnums=(0, 1, 2)))(p, c, x),
    "values of members": lambda f, p, c, x: vmap(f)(p, c, x),
    "gradient of a sum over members": lambda f, p, c, x: grad(lambda p: vmap(f)(p, c, x).sum())(p),
    "jacobian of members": lambda f, p, c, x: jacrev(lambda p: vmap(f)(p, c, x))(p),
    "members that share their start": lambda f, p, c, x: vmap(grad(lambda p: f(p, c[0], x[0])))(p),
    "second derivatives of members": lambda f, p, c, x: vmap(
        jacrev(jacrev(lambda b: f({"w": p["w"][0], "b": b}, c[0], x[0])))
        if f.keywords["mode"] != "eager"
        else hessian(lambda b: f({"w": p["w"][0], "b": b}, c[0], x[0]))
    )(p["b"]),
    "gradient of members' gradients": lambda f, p, c, x: grad(lambda c: vmap(grad(lambda p: f(p, c, x[0])))(p)["w"].square().sum())(c[0]),
    "members of members": lambda f, p, c, x: vmap(lambda c: vmap(f)(p, c, x))(torch.stack([c, c + 1])),
}


@native_only
@pytest.mark.parametrize(("name", "threads"), [*((name, 1) for name in TRANSFORMS), ("gradients of members", 2)])
def test_members_of_a_native_loop_equal_the_eager_loop(name, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        got, want = (TRANSFORMS[name](functools.partial(loss, mode=mode), *problem()) for mode in ("inductor", "eager"))
    finally:
        torch.set_num_threads(before)
    assert_trees_close(got, want, ops=1000)


@native_only
@pytest.mark.parametrize("memory", ["save", "recompute"])
def test_a_member_of_a_native_loop_is_the_loop_of_that_member_alone(memory):
    params, carry, xs = problem()
    one = grad(functools.partial(loss, mode="inductor", memory=memory), argnums=(0, 1, 2))
    together = vmap(one)(params, carry, xs)
    for i in range(3):
        alone = one(tree.index(params, i), carry[i], xs[i])
        assert all(torch.equal(x[i], y) for x, y in zip(tree.leaves(together), tree.leaves(alone), strict=True))


@native_only
def test_a_mapped_compiled_function_is_the_function_for_each_member():
    draw = compiler.jit(lambda key, n: (rng.split(key, 3), rng.normal(key, (n, 3)), key.cumsum(0)))
    keys = rng.split(rng.key(3), 4)
    alone = [draw(key, 5) for key in keys]
    graphs = compiler.graph_count()
    together = vmap(lambda key: draw(key, 5))(keys)
    nested = vmap(vmap(lambda key: draw(key, 5)))(torch.stack([keys, keys]))
    if torch.get_num_threads() == 1:
        assert compiler.graph_count() == graphs  # the code of one member is that of all
    for i, result in enumerate(alone):
        for x, y, z in zip(result, together, nested, strict=True):
            assert torch.equal(x, y[i])
            assert torch.equal(x, z[1, i])


def test_a_mapped_captured_function_is_the_function_for_each_member():
    fn = compiler.jit(lambda x, y: {"a": torch.sin(x) @ y, "b": x.sum()}, mode="aot_eager")
    x, y = rng.normal(rng.key(0), (3, 2, 4)), rng.normal(rng.key(1), (4, 2))
    got = vmap(fn, in_dims=(0, None))(x, y)
    assert_trees_close(got, tree.stack([fn.eager(row, y) for row in x]), ops=20)
    assert_trees_close(vmap(grad(lambda x: fn(x, y)["a"].sum()))(x), vmap(grad(lambda x: fn.eager(x, y)["a"].sum()))(x), ops=20)

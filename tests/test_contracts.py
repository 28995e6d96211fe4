"""Every registered environment, policy, optimizer, schedule and algorithm keeps the same promises."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from frl import compile as compiler
from frl import rng, tree
from frl.algorithms import registry as algorithms
from frl.envs.check import check_env
from frl.envs.env import Env
from frl.envs.registry import build_learning_env, get_learning_env_factory, get_registered_learning_env_names
from frl.envs.vector import RESERVED_METRICS, VecEnv, make_vec_env
from frl.normalizers import running_normalizer
from frl.optim import (
    LRSchedulerCfg,
    OptimizerCfg,
    apply_updates,
    bind_scheduler_horizon,
    build_lr_scheduler,
    build_optimizer,
    get_registered_lr_scheduler_names,
    get_registered_optimizer_names,
)
from frl.policies import Policy, build_policy, get_policy_class, get_registered_policy_names
from frl.types import Algorithm, Optimizer, TrainState
from tests.tolerances import tolerance

F32, F64 = torch.float32, torch.float64


def own(names: list[str], get: Callable[[str], Any]) -> list[str]:
    """Names of this package, without those that other test files register."""
    return [name for name in names if get(name).__module__.startswith("frl.")]


def cast(values: Any, dtype: torch.dtype) -> Any:
    return tree.map(lambda x: x.to(dtype) if x.is_floating_point() else x, values)


def copied(values: Any) -> Any:
    return tree.map(torch.clone, values)


def same(a: Any, b: Any) -> bool:
    """The same structure, dtypes, shapes and bits."""
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    return tree.structure(a) == tree.structure(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and x.detach().contiguous().numpy().tobytes() == y.detach().contiguous().numpy().tobytes() for x, y in pairs
    )


def close(a: Any, b: Any, ops: int) -> None:
    assert tree.structure(a) == tree.structure(b)
    for (name, x), (_, y) in zip(tree.items(a), tree.items(b), strict=True):
        assert x.dtype == y.dtype, name
        bound = tolerance(x.dtype, ops) if x.is_floating_point() else 0.0
        torch.testing.assert_close(x, y, rtol=bound, atol=bound, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")


# ---- environments ----

ENVS = own(get_registered_learning_env_names(), get_learning_env_factory)
CHOICES = {"double_integrator": {"dimensions": 2}}
CONSTANT_STARTS = {"probe_constant_reward", "probe_action_reward", "probe_delayed_reward"}


def taken(name: str, **options: Any) -> dict[str, Any]:
    """The options that the factory of ``name`` takes."""
    parameters = inspect.signature(get_learning_env_factory(name)).parameters
    return {key: value for key, value in options.items() if key in parameters}


# Both kinds of actions where an environment offers them.
VARIANTS_OF_ENVS = [(name, options) for name in ENVS for options in ({}, *([{"continuous": True}] if taken(name, continuous=True) else []))]
every_env = pytest.mark.parametrize(
    ("name", "options"), VARIANTS_OF_ENVS, ids=[f"{name}{'-continuous' if options else ''}" for name, options in VARIANTS_OF_ENVS]
)


def make_env(name: str, options: dict[str, Any], **more: Any) -> Env:
    env = get_learning_env_factory(name)(**{**CHOICES.get(name, {}), **options, **taken(name, **more)})
    assert isinstance(env, Env)
    return env


def rows_of(env: Env, count: int, seed: int = 0, dtype: torch.dtype = F32) -> tuple[VecEnv, Any, Any]:
    vec = make_vec_env(env, count)
    env_params = cast(vec.default_params, dtype)
    return vec, vec.reset(vec.row_keys(rng.key(seed)), env_params), env_params


def drawn_actions(env: Env, steps: int, count: int, dtype: torch.dtype = F32) -> Tensor:
    """``[steps, count, ...]``. Boxes are left now and then. Row ``i`` does not depend on the number of rows."""
    keys = rng.fold_in(rng.key(99), torch.arange(count))
    if isinstance(env.action_space, spaces.Discrete):
        return rng.randint(keys, (steps,), 0, int(env.action_space.n)).mT
    assert isinstance(env.action_space, spaces.Box)
    return 1.5 * rng.normal(keys, (steps, *env.action_space.shape), dtype=dtype).movedim(0, 1)


def play(vec: VecEnv, state: Any, env_params: Any, actions: Tensor) -> tuple[Any, list[Any]]:
    steps = []
    for action in actions:
        state, step = vec.step(state, action, env_params)
        steps.append(step)
    return state, steps


def test_there_are_environments():
    assert {"point_mass", "double_integrator", "pendulum"} <= set(ENVS)


@every_env
def test_env_tells_its_facts(name: str, options: dict[str, Any]):
    env = make_env(name, options)
    assert env.spec.name == name
    assert env.spec.dt > 0
    assert all(x.ndim == 0 and x.is_floating_point() for x in tree.leaves(env.default_params))
    assert not env.spec.differentiable or isinstance(env.action_space, spaces.Box)
    with pytest.raises(TypeError, match="no_such_key"):
        build_learning_env(name, no_such_key=1)
    if taken(name, max_episode_steps=7):
        assert make_env(name, options, max_episode_steps=7).spec.max_episode_steps == 7
        for bad in (0, -1, 2.5, True, math.nan):
            with pytest.raises(ValueError, match="max_episode_steps"):
                make_env(name, options, max_episode_steps=bad)


@every_env
@pytest.mark.parametrize("dtype", [F32, F64])
def test_env_stays_in_its_spaces(name: str, options: dict[str, Any], dtype: torch.dtype):
    env = make_env(name, options, dtype=dtype, max_episode_steps=5)
    vec, state, env_params = rows_of(env, 6, dtype=dtype)
    seen = [vec.observe(state, env_params)]
    for step in play(vec, state, env_params, drawn_actions(env, 12, 6, dtype))[1]:
        seen += [step.obs, step.final_obs]
    space = env.observation_space
    assert isinstance(space, spaces.Box)
    for obs in seen:
        assert obs.shape == (6, *space.shape)
        assert obs.dtype == dtype == torch.from_numpy(np.zeros(0, space.dtype)).dtype
        assert all(space.contains(row) for row in obs.numpy())


@every_env
def test_env_is_pure_and_deterministic(name: str, options: dict[str, Any]):
    env = make_env(name, options)
    key, action = rng.key(3), drawn_actions(env, 1, 1)[0, 0]
    arguments = (key, env.default_params, action)
    before = copied(arguments)
    state = env.reset(key, env.default_params)
    kept = copied(state)
    stepped, outcome = env.step(state, action, env.default_params)
    obs = env.observe(state, env.default_params)
    assert same(arguments, before)
    assert same(state, kept)
    assert same(env.reset(key, env.default_params), state)
    assert same(env.step(state, action, env.default_params), (stepped, outcome))
    assert same(env.observe(state, env.default_params), obs)
    others = [env.reset(rng.key(seed), env.default_params) for seed in range(16)]
    assert all(same(other, state) for other in others) == (name in CONSTANT_STARTS)
    assert not {x.data_ptr() for x in tree.leaves(env.default_params)} & {x.data_ptr() for x in tree.leaves(state)}


@every_env
def test_env_outcomes_have_one_shape(name: str, options: dict[str, Any]):
    env = make_env(name, options)
    state = env.reset(rng.key(0), env.default_params)
    names = None
    for action in drawn_actions(env, 4, 1)[:, 0]:
        new, outcome = env.step(state, action, env.default_params)
        tree.check_same(new, state, "state")
        assert outcome.reward.shape == outcome.terminated.shape == ()
        assert outcome.terminated.dtype == torch.bool
        assert all(x.shape == () for x in outcome.metrics.values())
        assert "success" not in outcome.metrics or outcome.metrics["success"].dtype == torch.bool
        assert not set(outcome.metrics) & set(RESERVED_METRICS)
        assert names in (None, list(outcome.metrics))
        state, names = new, list(outcome.metrics)


@every_env
def test_env_follows_the_dtype_of_its_parameters(name: str, options: dict[str, Any]):
    for built in (F32, F64):
        env = make_env(name, options, dtype=built)
        for dtype in (F32, F64):
            vec, start, env_params = rows_of(env, 2, dtype=dtype)
            played = play(vec, start, env_params, drawn_actions(env, 2, 2, dtype))
            assert {x.dtype for x in tree.floating((start, played))} == {dtype}


@every_env
def test_env_in_float32_is_a_rounding_of_float64(name: str, options: dict[str, Any]):
    env = make_env(name, options)
    results = []
    for dtype in (F32, F64):
        vec, _, env_params = rows_of(env, 4, dtype=dtype)
        state, actions = cast(rows_of(env, 4)[1], dtype), drawn_actions(env, 3, 4)
        actions = actions.to(dtype) if actions.is_floating_point() else actions
        results.append(torch.stack([step.reward for step in play(vec, state, env_params, actions)[1]]))
    torch.testing.assert_close(results[0].to(F64), results[1], rtol=tolerance(F32, 256), atol=tolerance(F32, 256))


@every_env
@settings(max_examples=5)
@given(order=st.permutations(range(5)), few=st.integers(1, 4))
def test_env_rows_know_nothing_of_each_other(name: str, options: dict[str, Any], order: list[int], few: int):
    env = make_env(name, options, max_episode_steps=2)
    vec, state, env_params = rows_of(env, 5)
    actions = drawn_actions(env, 3, 5)
    all_rows = play(vec, state, env_params, actions)
    # In another order.
    perm = torch.tensor(order)
    moved = play(vec, tree.index(state, perm), env_params, actions[:, perm])
    assert same(moved, tree.index(all_rows, perm))
    # Fewer of them.
    less, start, _ = rows_of(env, few)
    assert same(start, tree.index(state, slice(0, few)))
    assert same(play(less, start, env_params, actions[:, :few]), tree.index(all_rows, slice(0, few)))
    # One with other contents, not finite even.
    spoiled = tree.map(lambda x: torch.cat((x[:4], torch.full_like(x[4:], math.nan))) if x.is_floating_point() else x, state)
    assert same(tree.index(play(vec, spoiled, env_params, actions), slice(0, 4)), tree.index(all_rows, slice(0, 4)))


@every_env
def test_env_parameters_may_differ_by_row(name: str, options: dict[str, Any]):
    env = make_env(name, options)
    vec, state, env_params = rows_of(env, 3)
    actions = drawn_actions(env, 2, 3)
    shared = play(vec, state, env_params, actions)
    by_row = tree.map(lambda x: x.expand(3).clone(), env_params)
    assert same(vec.reset(vec.row_keys(rng.key(0)), by_row), state)
    assert same(play(vec, state, by_row, actions), shared)
    for i in range(len(tree.leaves(by_row))):
        leaves, structure = tree.flatten(by_row)
        other = tree.unflatten(structure, [x * torch.tensor([1.0, 1.0, 1.1]) if j == i else x for j, x in enumerate(leaves)])
        assert same(tree.index(play(vec, state, other, actions), slice(0, 2)), tree.index(shared, slice(0, 2)))


@every_env
def test_env_layout_with_rows_last_is_the_same(name: str, options: dict[str, Any]):
    env = make_env(name, options, max_episode_steps=2)
    vec, state, env_params = rows_of(env, 4)
    actions = drawn_actions(env, 3, 4)
    expected = play(vec, state, env_params, actions)
    last, steps = tree.map(lambda x: x.movedim(0, -1), state), []
    for action in actions:
        last, step = vec.step(last, action.movedim(0, -1), env_params, rows=-1)
        steps.append(tree.map(lambda x: x.movedim(-1, 0), step))
    assert same((tree.map(lambda x: x.movedim(-1, 0), last), steps), expected)


@every_env
def test_env_gradient_is_the_derivative(name: str, options: dict[str, Any]):
    env = make_env(name, options)
    if not env.spec.differentiable:
        pytest.skip("promises no gradient")
    report = check_env(env, num_envs=32, num_steps=4)
    assert report.passed, report.text()
    assert report.compared_rows >= 24


@every_env
def test_env_gradients_are_finite(name: str, options: dict[str, Any]):
    env = make_env(name, options)
    vec, state, env_params = rows_of(env, 4, dtype=F64)
    actions = drawn_actions(env, 4, 4, F64)

    def total(start: Any, env_params: Any, actions: Tensor) -> Tensor:
        return torch.stack([step.reward for step in play(vec, state._replace(env=start), env_params, actions)[1]]).sum()

    wanted = (0, 1, 2) if actions.is_floating_point() else (0, 1)
    gradients = torch.func.grad(total, argnums=wanted)(state.env, env_params, actions)
    assert all(bool(torch.isfinite(x).all()) for x in tree.leaves(gradients))
    if env.spec.differentiable:
        assert bool((gradients[2] != 0).any())


@every_env
def test_env_compiled_equals_eager(name: str, options: dict[str, Any]):
    env = make_env(name, options, max_episode_steps=2)
    vec, state, env_params = rows_of(env, 3)
    actions = drawn_actions(env, 3, 3)
    begin = compiler.jit(lambda keys, env_params: vec.reset(keys, env_params), mode="aot_eager")
    # With fresh states at hand, as in a compiled rollout: drawing them is what takes long to trace, and is traced above.
    step = compiler.jit(lambda state, action, env_params, fresh: vec.step(state, action, env_params, fresh=fresh), mode="aot_eager")
    close(begin(vec.row_keys(rng.key(0)), env_params), state, ops=32)
    graphs = compiler.graph_count()
    for action in actions:
        expected = vec.step(state, action, env_params)
        fresh = tree.index(vec.draw_resets(state, 1, env_params), 0)
        close(step(state, action, env_params, fresh), expected, ops=32)
        state = expected[0]
    assert compiler.graph_count() == graphs + 1


@every_env
def test_env_is_traced_without_a_break(name: str, options: dict[str, Any]):
    env = make_env(name, options)
    _, state, env_params = rows_of(env, 3)
    action = drawn_actions(env, 1, 3)[0]

    def step(env_state: Any, action: Tensor, env_params: Any) -> Any:
        env_state, outcome = env.step(env_state, action, env_params)
        return env_state, outcome, env.observe(env_state, env_params)

    rows = torch.func.vmap(step, in_dims=(0, 0, None))
    torch.compiler.reset()  # every environment is another function of the same code
    compiled = torch.compile(rows, backend="aot_eager", fullgraph=True)
    close(compiled(state.env, action, env_params), rows(state.env, action, env_params), ops=32)


# ---- policies ----

POLICIES = own(get_registered_policy_names(), get_policy_class)
OBS, ACTIONS = 5, 2
NETWORK = {"type": "mlp", "network_cfg": {"hidden_sizes": [6], "activation": "tanh"}}
VARIANTS = [{}, {"distribution": "tanh_normal"}, {"state_dependent_std": True}, {"initial_log_std": -1.0, "log_std_range": [-2.0, 1.0]}]
every_policy = pytest.mark.parametrize(("name", "variant"), [(name, variant) for name in POLICIES for variant in VARIANTS], ids=str)


def make_policy(name: str, variant: dict[str, Any]) -> Policy:
    accepted = inspect.signature(get_policy_class(name)).parameters
    block = {"name": name, **{key: NETWORK for key in ("actor", "critic") if key in accepted and (key == "actor" or name != "actor_only")}}
    if not set(variant) <= set(accepted):
        pytest.skip(f"{name} does not take {', '.join(variant)}")
    return build_policy({**block, **variant}, spaces.Box(-np.inf, np.inf, (OBS,)), spaces.Box(-2.0, 1.0, (ACTIONS,)))


def dist(policy: Policy, params: Any, obs: Tensor) -> Any:
    """Distribution parameters, whatever else the policy gives."""
    out = policy.apply(params, obs)
    return out[0] if isinstance(out, tuple) and not hasattr(out, "_fields") else out


def test_there_are_policies():
    assert "actor_only" in POLICIES


@every_policy
def test_policy_starts_from_its_key(name: str, variant: dict[str, Any]):
    policy = make_policy(name, variant)
    assert (policy.name, policy.obs_dim, policy.action_dim) == (name, OBS, ACTIONS)
    for dtype in (F32, F64):
        params = policy.init(rng.key(1), dtype=dtype)
        assert {x.dtype for x in tree.leaves(params)} == {dtype}
        assert same(params, policy.init(rng.key(1), dtype=dtype))
        assert not same(params, policy.init(rng.key(2), dtype=dtype))


@every_policy
def test_policy_noise_is_data(name: str, variant: dict[str, Any]):
    policy = make_policy(name, variant)
    noise = policy.noise(rng.key(0), 20, 3)
    assert noise.shape == (20, 3, ACTIONS)
    assert noise.dtype == F32
    assert policy.noise(rng.key(0), 20, 3, dtype=F64).dtype == F64
    assert same(noise, policy.noise(rng.key(0), 20, 3))
    assert not same(noise, policy.noise(rng.key(1), 20, 3))
    # Neither more rows nor more steps change what the others draw.
    assert same(noise[:7, :2].clone(), policy.noise(rng.key(0), 7, 2))
    assert noise.unique().numel() == noise.numel()


@every_policy
@pytest.mark.parametrize("dtype", [F32, F64])
def test_policy_takes_any_leading_dimensions(name: str, variant: dict[str, Any], dtype: torch.dtype):
    policy = make_policy(name, variant)
    params = policy.init(rng.key(1), dtype=dtype)
    obs = rng.normal(rng.key(2), (2, 3, OBS), dtype=dtype)
    noise = rng.normal(rng.key(3), (2, 3, ACTIONS), dtype=dtype)
    arguments = (params, obs, noise)
    before = copied(arguments)

    def everything(obs: Tensor, noise: Tensor) -> dict[str, Any]:
        given = dist(policy, params, obs)
        sample = policy.sample(given, noise)
        d = policy.distribution
        return {
            "mode": d.mode(given),
            "action": sample.action,
            "log_prob": d.log_prob(given, sample),
            "entropy": d.entropy(given),
            "params": policy.apply(params, obs),
        }

    whole = everything(obs, noise)
    assert same(arguments, before)
    assert whole["mode"].shape == whole["action"].shape == (2, 3, ACTIONS)
    assert whole["log_prob"].shape == whole["entropy"].shape == (2, 3)
    assert {x.dtype for x in tree.leaves(whole)} == {dtype}
    assert all(bool(torch.isfinite(x).all()) for x in tree.leaves(whole))
    for i in range(2):
        close(everything(obs[i], noise[i]), tree.index(whole, i), ops=64)
        for j in range(3):
            close(everything(obs[i, j], noise[i, j]), tree.index(whole, (i, j)), ops=64)
    close(torch.func.vmap(everything)(obs, noise), whole, ops=64)


@every_policy
def test_policy_samples_what_it_scores(name: str, variant: dict[str, Any]):
    policy = make_policy(name, variant)
    given = dist(policy, policy.init(rng.key(1), dtype=F64), rng.normal(rng.key(2), (OBS,), dtype=F64))
    d, count = policy.distribution, 20_000
    noise = rng.normal(rng.key(3), (count, ACTIONS), dtype=F64)
    given = tree.map(lambda x: x.expand(count, *x.shape), given)
    sample = policy.sample(given, noise)
    score = d.log_prob(given, sample)
    # -E[log p] is the entropy, and E[p'/p] is 1 for any other density p', here that of a distribution with its mean moved.
    assert abs(float(-score.mean() - d.entropy(given)[0])) < 4 * float(score.std()) / count**0.5
    other = given._replace(mean=given.mean + 0.3)
    ratio = torch.exp(d.log_prob(other, sample) - score)
    assert abs(float(ratio.mean()) - 1) < 4 * float(ratio.std()) / count**0.5
    assert float(d.kl(given, given).abs().max()) == 0.0
    assert abs(float(d.kl(given, other)[0] - (score - d.log_prob(other, sample)).mean())) < 4 * float((score - d.log_prob(other, sample)).std()) / count**0.5


@every_policy
def test_policy_actions_are_reparameterised(name: str, variant: dict[str, Any]):
    policy = make_policy(name, variant)
    params = policy.init(rng.key(1), dtype=F64)
    obs, noise = rng.normal(rng.key(2), (4, OBS), dtype=F64), rng.normal(rng.key(3), (4, ACTIONS), dtype=F64)
    weights = rng.normal(rng.key(4), (4, ACTIONS), dtype=F64)

    def weighted(params: Any) -> Tensor:
        return (policy.sample(dist(policy, params, obs), noise).action * weights).sum()

    gradient = torch.func.grad(weighted)(params)
    direction = tree.map(lambda x: rng.normal(rng.key(x.numel()), x.shape, dtype=F64), params)
    step = 1e-5
    ahead, behind = (weighted(tree.map(lambda x, d, s=s: x + s * step * d, params, direction)) for s in (1, -1))
    expected = (ahead - behind) / (2 * step)
    found = sum((g * d).sum() for g, d in zip(tree.leaves(gradient), tree.leaves(direction), strict=True))
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    assert float(expected) != 0.0


@every_policy
def test_policy_members_of_a_population(name: str, variant: dict[str, Any]):
    policy = make_policy(name, variant)
    members = [policy.init(rng.key(i)) for i in range(3)]
    obs = rng.normal(rng.key(9), (4, OBS))
    together = torch.func.vmap(policy.apply, in_dims=(0, None))(tree.stack(members), obs)
    close(together, tree.stack([policy.apply(member, obs) for member in members]), ops=64)
    close(torch.func.vmap(policy.init)(torch.stack([rng.key(i) for i in range(3)])), tree.stack(members), ops=64)


# ---- optimizers ----

OPTIMIZERS = [
    (name, kwargs)
    for name in get_registered_optimizer_names()
    for kwargs in ({}, *({"sgd": [{"momentum": 0.9}], "rmsprop": [{"momentum": 0.5, "centered": True}], "adam": [{"amsgrad": True}]}.get(name, [])))
]
every_optimizer = pytest.mark.parametrize(("name", "kwargs"), OPTIMIZERS, ids=str)


def make_optimizer(name: str, kwargs: dict[str, Any]) -> Optimizer:
    return build_optimizer(OptimizerCfg(name=name, learning_rate=0.02, kwargs=kwargs))


def weights(seed: int, dtype: torch.dtype = F32) -> Any:
    """A tree with nodes of several kinds and leaves of several ranks."""
    keys = rng.split(rng.key(seed), 3)
    draw = lambda i, shape: rng.normal(keys[i], shape, dtype=dtype)
    return {"layers": [{"w": draw(0, (2, 3)), "b": draw(1, (3,))}, ()], "scale": draw(2, ())}


def hyper(rate: float, dtype: torch.dtype = F32) -> dict[str, Tensor]:
    return {"learning_rate": torch.tensor(rate, dtype=dtype)}


def descend(optimizer: Optimizer, params: Any, steps: int, rate: Any, gradient: Callable[[Any], Any] = lambda params: params) -> tuple[Any, Any]:
    state = optimizer.init(params)
    for _ in range(steps):
        updates, state = optimizer.update(gradient(params), state, params, rate)
        params = apply_updates(params, updates)
    return params, state


def test_there_are_optimizers():
    assert {"adam", "adamw", "rmsprop", "sgd"} <= {name for name, _ in OPTIMIZERS}


@every_optimizer
@pytest.mark.parametrize("dtype", [F32, F64])
def test_optimizer_is_pure(name: str, kwargs: dict[str, Any], dtype: torch.dtype):
    optimizer, params, rate = make_optimizer(name, kwargs), weights(0, dtype), hyper(0.1, dtype)
    state = descend(optimizer, params, 2, rate)[1]
    arguments = (weights(1, dtype), state, params, rate)
    before = copied(arguments)
    updates, new = optimizer.update(*arguments)
    assert same(arguments, before)
    assert same(optimizer.update(*arguments), (updates, new))
    tree.check_same(updates, params, "updates")
    tree.check_same(new, optimizer.init(params), "state")
    assert tree.structure(updates) == tree.structure(params)
    assert {x.dtype for x in tree.floating((updates, new))} <= {dtype}


@every_optimizer
def test_optimizer_descends_a_quadratic(name: str, kwargs: dict[str, Any]):
    optimizer, scale = make_optimizer(name, kwargs), weights(1, F64)

    def loss(params: Any) -> Tensor:
        parts = zip(tree.leaves(params), tree.leaves(scale), strict=True)
        return torch.stack([((1 + s.square()) * x.square()).sum() for x, s in parts]).sum()

    start = weights(0, F64)
    end, _ = descend(optimizer, start, 150, hyper(0.02, F64), torch.func.grad(loss))
    assert float(loss(end)) < 0.1 * float(loss(start))


@every_optimizer
@pytest.mark.parametrize("dtype", [F32, F64])
def test_optimizer_stands_zero_and_huge_gradients(name: str, kwargs: dict[str, Any], dtype: torch.dtype):
    optimizer, params = make_optimizer(name, kwargs), weights(0, dtype)
    zero, huge = (tree.map(lambda x, v=v: torch.full_like(x, v), params) for v in (0.0, 1e18))
    end, state = descend(optimizer, params, 3, hyper(0.1, dtype), lambda params: zero)
    assert all(bool(torch.isfinite(x).all()) for x in tree.leaves((end, state)))
    if name != "adamw":  # its decay does not need a gradient
        assert same(end, params)
    end, state = descend(optimizer, params, 3, hyper(1e-20, dtype), lambda params: huge)
    assert all(bool(torch.isfinite(x).all()) for x in tree.leaves((end, state)))


@every_optimizer
def test_optimizer_with_rate_zero_moves_nothing(name: str, kwargs: dict[str, Any]):
    params = weights(0)
    assert same(descend(make_optimizer(name, kwargs), params, 3, hyper(0.0))[0], params)


@every_optimizer
def test_optimizer_takes_the_configured_rate_by_default(name: str, kwargs: dict[str, Any]):
    optimizer, params = make_optimizer(name, kwargs), weights(0, F64)
    close(descend(optimizer, params, 3, {})[0], descend(optimizer, params, 3, hyper(0.02, F64))[0], ops=32)


@every_optimizer
def test_optimizer_maps_over_members(name: str, kwargs: dict[str, Any]):
    optimizer = make_optimizer(name, kwargs)
    rates = torch.tensor([0.1, 0.01, 0.0], dtype=F64)
    members = [weights(i, F64) for i in range(3)]

    def run(params: Any, rate: Tensor) -> Any:
        return descend(optimizer, params, 3, {"learning_rate": rate})

    together = torch.func.vmap(run)(tree.stack(members), rates)
    close(together, tree.stack([run(member, rate) for member, rate in zip(members, rates, strict=True)]), ops=32)


@every_optimizer
def test_optimizer_makes_one_graph_for_every_rate(name: str, kwargs: dict[str, Any]):
    optimizer, params = make_optimizer(name, kwargs), weights(0)
    state, graphs = optimizer.init(params), compiler.graph_count()
    update = compiler.jit(lambda grads, state, params, rate: optimizer.update(grads, state, params, rate), mode="aot_eager")
    for i, rate in enumerate((0.1, 0.05, 0.0)):
        arguments = (weights(10 + i), state, params, hyper(rate))
        updates, state = update(*arguments)
        close((updates, state), optimizer.update(*arguments), ops=32)
    assert compiler.graph_count() == graphs + 1


# ---- schedules ----

SCHEDULES = get_registered_lr_scheduler_names()
REQUIRED = {"step": {"step_size": 4}, "exponential": {"gamma": 0.9}}
every_schedule = pytest.mark.parametrize("name", SCHEDULES)


def make_schedule(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    return build_lr_scheduler(bind_scheduler_horizon(LRSchedulerCfg(name=name, kwargs=REQUIRED.get(name, {})), 10))


def test_there_are_schedules():
    assert {"cosine", "exponential", "linear", "step"} <= set(SCHEDULES)


@every_schedule
@pytest.mark.parametrize("dtype", [F32, F64])
def test_schedule_is_a_function_of_the_step(name: str, dtype: torch.dtype):
    schedule, base = make_schedule(name), torch.tensor(0.3, dtype=dtype)
    steps = torch.arange(25)
    rates = torch.stack([schedule(base, step) for step in steps])
    assert rates.shape == (25,)
    assert rates.dtype == dtype
    assert float(rates[0]) == float(base)
    assert bool((rates >= 0).all())
    assert bool((rates[1:] <= rates[:-1]).all())
    assert float(rates[10]) < float(base)
    assert same(torch.stack([schedule(base, step) for step in steps.flip(0)]).flip(0), rates)
    close(torch.func.vmap(schedule, in_dims=(None, 0))(base, steps), rates, ops=16)
    assert bool(torch.isfinite(schedule(base, torch.tensor(10**12))))
    assert float(schedule(torch.zeros((), dtype=dtype), torch.tensor(3))) == 0.0
    assert int(steps.sum()) == 300
    assert float(base) == float(torch.tensor(0.3, dtype=dtype))


# ---- algorithms ----

REGISTERED = own(algorithms.get_registered_algo_names(), algorithms._REGISTRY.get)
ADAM = {"optimizer": {"name": "adam", "learning_rate": 0.01}, "lr_scheduler": {"name": "linear"}}
# Name of a case, which begins with the algorithm's: what a run file says in ``trainer``, ``algorithm.cfg`` and ``policy``.
KNOWN: dict[str, dict[str, dict[str, Any]]] = {
    "apg-segmented": {"trainer": {"rollout_mode": "segmented", "segment_length": 3, "update_horizon": 6, "stagger_episodes": True}},
    "apg-complete": {
        "trainer": {"rollout_mode": "complete", "segment_length": 4, "gradient_accumulation_steps": 2, "action_adjoint_max_norm": 0.1},
        "policy": {"distribution": "tanh_normal"},
    },
    "ppo": {
        "trainer": {"buffer_size": 4, "stagger_episodes": True},
        "cfg": {"n_epochs": 2, "num_mini_batches": 2},
        "policy": {"name": "actor_critic", "critic": NETWORK},
    },
    "grpo": {"trainer": {"buffer_size": 4}, "cfg": {"n_epochs": 2, "batch_size": 4, "group_size": 2}},
    "shac": {
        "trainer": {"segment_length": 3, "update_horizon": 6},
        "cfg": {"n_epochs": 2, "num_mini_batches": 2},
        "policy": {"name": "actor_critic", "critic": NETWORK},
    },
    "shac-soft": {
        "trainer": {"segment_length": 4, "action_adjoint_max_norm": 0.1, "stagger_episodes": True},
        "cfg": {"n_epochs": 1, "learn_temperature": True, "ent_coef": 0.1, "critic_optimizer": {"name": "sgd", "learning_rate": 0.01}},
        "policy": {"name": "actor_critic", "critic": NETWORK, "distribution": "tanh_normal", "state_dependent_std": True},
    },
}
ALGORITHMS = {case: blocks for case, blocks in KNOWN.items() if case.split("-")[0] in REGISTERED}
every_algorithm = pytest.mark.parametrize("case", ALGORITHMS)
every_differentiating_algorithm = pytest.mark.parametrize("case", [case for case in ALGORITHMS if case.startswith(("apg", "shac"))])
_built: dict[tuple[str, str, torch.dtype], Algorithm] = {}


def algorithm(case: str, mode: str, dtype: torch.dtype = F32) -> Algorithm:
    """Built once for each set of arguments: compiled code is reused by the tests below."""
    if (case, mode, dtype) not in _built:
        blocks = ALGORITHMS[case]
        env = make_vec_env(make_env("point_mass", {"max_episode_steps": 5, "success_threshold": 0.3}, dtype=dtype), 2)
        policy = build_policy({"name": "actor_only", "actor": NETWORK, **blocks.get("policy", {})}, env.single_observation_space, env.single_action_space)
        trainer = {**blocks["trainer"], "compile_mode": mode}
        normalizer = running_normalizer(policy.obs_dim, initial_count=1e-4)
        options = {"env": env, "policy": policy, "trainer": trainer, "normalizer": normalizer, "total_updates": 8, "dtype": dtype}
        _built[case, mode, dtype] = algorithms.build_algo(case.split("-")[0], {**ADAM, **blocks.get("cfg", {})}, **options)
    return _built[case, mode, dtype]


def opened(rollout: Any) -> Any:
    """A recorded TensorDict as nested dicts."""
    return rollout.to_dict() if hasattr(rollout, "to_dict") else rollout


def advance(algo: Algorithm, state: TrainState, updates: int) -> list[TrainState]:
    states = [state]
    for _ in range(updates):
        state, rollout = algo.collect(state)
        state = algo.update(state, rollout)
        states.append(state)
    return states


def test_every_algorithm_is_tested():
    missing = set(REGISTERED) - {case.split("-")[0] for case in ALGORITHMS}
    assert not missing, f"add a case for {', '.join(missing)} to KNOWN"
    assert "apg" in REGISTERED


@pytest.mark.parametrize("name", ["apg", "ppo", "shac"])
def test_training_rows_may_be_staggered(name: str):
    env = make_vec_env(make_env("point_mass", {"max_episode_steps": 50}), 16)
    kind = {"name": "actor_only"} if name == "apg" else {"name": "actor_critic", "critic": NETWORK}
    policy = build_policy({"actor": NETWORK, **kind}, env.single_observation_space, env.single_action_space)
    trainer = {"segment_length": 2, "buffer_size": 2, "compile_mode": "eager"}

    def first(env: VecEnv, **options: bool) -> TrainState:
        return algorithms.build_algo(name, {"num_mini_batches": 2} if name != "apg" else {}, env=env, policy=policy, trainer={**trainer, **options}).init(
            rng.key(1)
        )

    plain, staggered = first(env), first(env, stagger_episodes=True)
    assert same(staggered, plain._replace(env_state=env.stagger(plain.env_state)))
    assert len(set(staggered.env_state.elapsed.tolist())) > 4
    assert set(plain.env_state.elapsed.tolist()) == {0}
    with pytest.raises(ValueError, match="stagger_episodes needs a time limit"):
        first(make_vec_env(make_env("point_mass", {"max_episode_steps": None}), 2), stagger_episodes=True)


@every_algorithm
@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
def test_algorithm_leaves_its_arguments_and_repeats_its_bits(case: str, mode: str):
    algo, key = algorithm(case, mode), rng.key(5)
    start = algo.init(key)
    assert same(algo.init(rng.key(5)), start)
    assert torch.equal(key, rng.key(5))
    assert not same(algo.init(rng.key(6)).params, start.params)
    state = start
    for _ in range(2):
        before = copied(state)
        collected, rollout = algo.collect(state)
        assert same(state, before)
        again, same_rollout = algo.collect(state)
        assert same((again, opened(same_rollout)), (collected, opened(rollout)))
        kept = copied((collected, opened(rollout)))
        new = algo.update(collected, rollout)
        assert same((collected, opened(rollout)), kept)
        assert same(algo.update(collected, rollout), new)
        assert not same(new.params, collected.params)
        # What collect draws is new every time.
        assert not torch.equal(collected.key, state.key)
        state = new


@every_algorithm
@pytest.mark.parametrize("dtype", [F32, F64])
def test_algorithm_states_have_one_shape(case: str, dtype: torch.dtype):
    algo = algorithm(case, "eager", dtype)
    start, *states = advance(algo, algo.init(rng.key(0)), 3)
    for state in states:
        tree.check_same(state._replace(metrics={}), start._replace(metrics={}), "state")
        assert list(state.metrics) == list(states[0].metrics)
    for state in (start, *states):
        assert all(isinstance(x, Tensor) for x in tree.leaves(state))
        assert all(x.shape == () for x in (*state.metrics.values(), *state.hyper.values(), *state.counters.values()))
        assert {x.dtype for x in state.hyper.values()} == {dtype}
        assert {x.dtype for x in state.counters.values()} == {torch.int64}
        assert {x.dtype for x in tree.floating((state.params, state.opt_state, state.env_state, state.metrics))} == {dtype}
    assert {"loss", "grad_norm", "learning_rate", "skipped_update"} <= set(states[0].metrics)
    assert [int(state.counters["updates"]) for state in states] == [1, 2, 3]
    steps = int(states[0].counters["env_steps"])
    assert steps > 0
    assert [int(state.counters["env_steps"]) for state in states] == [steps, 2 * steps, 3 * steps]


@every_differentiating_algorithm
def test_algorithm_metrics_of_a_fresh_state_have_the_same_names(case: str):
    algo = algorithm(case, "eager")
    start, state = advance(algo, algo.init(rng.key(0)), 1)
    assert set(start.metrics) == set(state.metrics)


@every_algorithm
def test_algorithm_compiled_equals_eager(case: str):
    compiled, eager = algorithm(case, "aot_eager"), algorithm(case, "eager")
    start = eager.init(rng.key(0))
    assert same(compiled.init(rng.key(0)), start)
    # From the same inputs: a difference in a rounding grows through a rollout, not between two of them.
    state = start
    for _ in range(2):
        (ours, our_rollout), (state, rollout) = compiled.collect(state), eager.collect(state)
        close((ours, opened(our_rollout)), (state, opened(rollout)), ops=64)
        close(compiled.update(state, rollout), eager.update(state, rollout), ops=4096)
        state = eager.update(state, rollout)


@every_algorithm
def test_algorithm_makes_no_graph_after_the_second_update(case: str):
    algo = algorithm(case, "aot_eager")
    state = advance(algo, algo.init(rng.key(1)), 2)[-1]
    graphs = compiler.graph_count()
    assert graphs > 0
    for i in range(4):
        changed = {name: value * (1.0 - 0.1 * i) if bool(torch.isfinite(value)) else value for name, value in state.hyper.items()}
        state = advance(algo, state._replace(hyper=changed), 1)[-1]
    assert compiler.graph_count() == graphs


@every_algorithm
@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
def test_algorithm_obeys_its_hyper_parameters(case: str, mode: str):
    algo = algorithm(case, mode)
    state, rollout = algo.collect(algo.init(rng.key(0)))
    rates = [name for name in state.hyper if name.endswith("optimizer.learning_rate")]
    zero = {**state.hyper, **{name: torch.zeros_like(state.hyper[name]) for name in rates}}
    still = algo.update(state._replace(hyper=zero), rollout)
    assert same(still.params, state.params)
    assert float(still.metrics["learning_rate"]) == 0.0
    assert same(still.hyper, zero)


@every_differentiating_algorithm
@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
def test_algorithm_has_a_gate_for_excessive_gradients(case: str, mode: str):
    algo = algorithm(case, mode)
    state, rollout = algo.collect(algo.init(rng.key(0)))
    moved = algo.update(state, rollout)
    gate = {**state.hyper, "max_grad_norm_before_clip": moved.metrics["grad_norm"] / 2}
    gated = algo.update(state._replace(hyper=gate), rollout)
    assert same((gated.params, gated.opt_state, gated.norm_state), (state.params, state.opt_state, state.norm_state))
    assert (float(gated.metrics["skipped_update"]), float(gated.metrics["skipped_excessive_gradient"])) == (1.0, 1.0)
    assert (int(gated.counters["updates"]), int(gated.counters["successful_updates"]), int(gated.counters["skipped_updates"])) == (1, 0, 1)


@every_differentiating_algorithm
@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
def test_algorithm_skips_what_is_not_finite(case: str, mode: str):
    algo = algorithm(case, mode)
    state, rollout = algo.collect(advance(algo, algo.init(rng.key(0)), 1)[-1])
    spoil = lambda part: part._replace(noise=part.noise.index_put((torch.tensor(1), torch.tensor(0), torch.tensor(0)), torch.tensor(math.nan)))
    bad = spoil(rollout) if hasattr(rollout, "noise") else (spoil(rollout[0]), *rollout[1:])
    new = algo.update(state, bad)
    for name in ("params", "opt_state", "norm_state", "hyper"):
        assert same(getattr(new, name), getattr(state, name)), name
    assert float(new.metrics["skipped_update"]) == 1.0
    assert int(new.counters["skipped_updates"]) == 1
    assert int(new.counters["successful_updates"]) == int(state.counters["successful_updates"])
    assert int(new.counters["updates"]) == int(state.counters["updates"]) + 1
    assert all(bool(torch.isfinite(x).all()) for x in tree.floating(new.env_state))
    # And it goes on, at the rate that the skipped update had.
    after = advance(algo, new, 1)[-1]
    assert float(after.metrics["skipped_update"]) == 0.0
    assert float(after.metrics["learning_rate"]) == float(new.metrics["learning_rate"])

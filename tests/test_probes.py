"""Probe environments: their stated solutions solve the Bellman equation, and the faults that they are for do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from frl import rng, tree
from frl.envs import probes
from frl.envs.check import check_env
from frl.envs.probes import LIMIT, LONG, SHORT, SOLUTIONS, TARGET, ProbeState
from frl.envs.registry import build_learning_env, get_registered_learning_env_names
from frl.envs.vector import make_vec_env
from frl.evaluate import make_evaluator
from frl.policies import build_policy
from tests.tolerances import tolerance

FLOAT64 = torch.float64
NAMES = list(SOLUTIONS)
ACTING = ["probe_action_reward", "probe_matching_reward"]
GAMMAS = [0.5, 0.9, 0.99]
EVERY = pytest.mark.parametrize("name", NAMES)


def _play(
    name: str, act: Callable[[Tensor, Tensor], Tensor], steps: int = 16, rows: int = 8, dtype: torch.dtype = FLOAT64, device: Any = "cpu", **cfg: Any
) -> dict:
    """``act(obs [N, 1], key) -> action``; every field is ``[T, N, ...]``."""
    vec = make_vec_env(getattr(probes, name)(dtype=dtype, **cfg), rows, device)
    key = rng.key(5, device=device)
    state = vec.reset(vec.row_keys(key), vec.default_params)
    obs, records = vec.observe(state, vec.default_params), []
    for t in range(steps):
        state, step = vec.step(state, act(obs, rng.fold_in(key, 1000 + t)), vec.default_params)
        records.append({**step._asdict(), "obs": obs, "next_obs": step.obs})
        obs = step.obs
    return tree.stack(records)


def _random(obs: Tensor, key: Tensor) -> Tensor:
    return rng.randint(key, obs.shape[:-1], 0, 2)


def _best(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    choice = SOLUTIONS[name].choice
    return _random if choice is None else lambda obs, key: choice(obs)


def _backup(played: dict, value: Callable[[Tensor], Tensor], gamma: float) -> Tensor:
    return played["reward"] + gamma * torch.where(played["terminated"], 0.0, value(played["final_obs"]))


# ---- the solutions ----


@EVERY
@pytest.mark.parametrize("gamma", GAMMAS)
def test_the_value_solves_the_bellman_equation_in_every_step(name, gamma, device):
    played = _play(name, _best(name), device=device)
    value = lambda obs: SOLUTIONS[name].value(obs, gamma)
    torch.testing.assert_close(value(played["obs"]), _backup(played, value, gamma), rtol=tolerance(FLOAT64, 16), atol=tolerance(FLOAT64, 16))


@EVERY
def test_no_choice_is_better_and_where_actions_matter_the_other_is_worse(name):
    gamma = 0.9
    value = lambda obs: SOLUTIONS[name].value(obs, gamma)
    gain = {}
    for choice in (0, 1):
        played = _play(name, lambda obs, key, c=choice: torch.full(obs.shape[:-1], c))
        gain[choice] = _backup(played, value, gamma) - value(played["obs"])
        assert (gain[choice] <= 1e-12).all()
    assert ((gain[0] + gain[1]).abs().max() > 0.5) == (name in ACTING)
    assert (SOLUTIONS[name].choice is not None) == (name in ACTING)


@EVERY
@pytest.mark.parametrize("continuous", [False, True])
def test_the_mean_return_of_complete_episodes(name, continuous):
    solution = SOLUTIONS[name]
    act = _best(name)
    if continuous:
        target = solution.target
        act = (lambda obs, key: torch.zeros_like(obs)) if target is None else lambda obs, key: target(obs)
    rows = 2000
    played = _play(name, act, steps=LONG + 1, rows=rows, continuous=continuous)
    done = played["terminated"] | played["truncated"]
    first = done & (done.cumsum(0) == 1)
    assert first.any(0).all()
    returns = played["metrics"]["episode_return"].mT[first.mT]
    spread = returns.std().item()
    assert abs(returns.mean().item() - solution.episode_return) <= 5 * spread / math.sqrt(rows) + 1e-12


@EVERY
def test_continuous_and_discrete_actions_have_the_same_optimum(name):
    target = SOLUTIONS[name].target
    gamma = 0.9
    value = lambda obs: SOLUTIONS[name].value(obs, gamma)
    act = (lambda obs, key: rng.normal(key, tuple(obs.shape), dtype=obs.dtype)) if target is None else lambda obs, key: target(obs)
    played = _play(name, act, continuous=True)
    torch.testing.assert_close(value(played["obs"]), _backup(played, value, gamma), rtol=1e-12, atol=1e-12)
    if target is not None:
        off = _play(name, lambda obs, key: target(obs) + 0.3, continuous=True)
        torch.testing.assert_close(off["reward"], played["reward"] - 0.09, rtol=0, atol=1e-12)


# ---- the faults ----


def _fixed_point(played: dict, gamma: float, bootstrap: str) -> dict[float, float]:
    """Tabular value of each observation under a way to treat a time limit, by repeated averaging of one-step targets."""
    obs = played["obs"][..., 0]
    states = obs.unique()
    ahead = {"final": played["final_obs"], "before": played["obs"], "reset": played["next_obs"], "none": played["final_obs"]}[bootstrap][..., 0]
    source = torch.where(played["truncated"], ahead, played["final_obs"][..., 0])
    end = played["terminated"] | (played["truncated"] if bootstrap == "none" else torch.zeros_like(played["terminated"]))
    table = torch.zeros_like(states)
    for _ in range(250):
        target = played["reward"] + gamma * torch.where(end, 0.0, table[torch.searchsorted(states, source.contiguous())])
        table = torch.stack([target[obs == s].mean() for s in states])
    return dict(zip(states.tolist(), table.tolist(), strict=True))


@pytest.fixture(scope="module")
def phases():
    return _play("probe_final_observation", _random, steps=40, rows=100)


@pytest.mark.parametrize("bootstrap", ["final", "before", "reset", "none"])
def test_only_the_final_observation_gives_the_value(phases, bootstrap):
    gamma, played = 0.9, phases
    found = _fixed_point(played, gamma, bootstrap)
    share = (played["next_obs"][..., 0] == 1).double().mean().item()
    mean = share / (1 - gamma)  # after a reset: m = P(1) + gamma m
    expected = {
        "final": {0.0: gamma / (1 - gamma**2), 1.0: 1 / (1 - gamma**2)},
        "before": {0.0: 0.0, 1.0: 1 / (1 - gamma)},
        "reset": {0.0: gamma * mean, 1.0: 1 + gamma * mean},
        "none": {0.0: 0.0, 1.0: 1.0},
    }[bootstrap]
    for obs, value in expected.items():
        assert found[obs] == pytest.approx(value, rel=0.03 if bootstrap == "reset" else 1e-9)
    right = SOLUTIONS["probe_final_observation"].value(torch.tensor([[0.0], [1.0]], dtype=FLOAT64), gamma)
    error = max(abs(found[float(i)] - right[i].item()) for i in range(2))
    assert error < 1e-9 if bootstrap == "final" else error > 0.2


def test_a_time_limit_taken_for_an_end_lowers_the_constant_value():
    gamma = 0.9
    played = _play("probe_constant_reward", _random)
    right = SOLUTIONS["probe_constant_reward"].value(torch.ones(1, dtype=FLOAT64), gamma).item()
    assert right == pytest.approx(10.0)
    assert _fixed_point(played, gamma, "final")[1.0] == pytest.approx(right, rel=1e-9)
    assert _fixed_point(played, gamma, "none")[1.0] == pytest.approx(1 / (1 - gamma * (1 - 1 / LIMIT)), rel=1e-9)
    assert played["truncated"].double().mean() == 1 / LIMIT
    assert not played["terminated"].any()


def test_episodes_that_finish_first_are_short():
    env = build_learning_env("probe_two_lengths", num_envs=200)
    net = {"type": "mlp", "network_cfg": {"hidden_sizes": []}}
    policy = build_policy({"name": "actor_critic", "actor": net, "critic": net}, env.single_observation_space, env.single_action_space)
    params = policy.init(rng.key(0))
    fair, first = (
        make_evaluator(env, policy, mode=mode, compile_mode="eager", chunk=7)(params, num_episodes=200, seed=1) for mode in ("per_env_quota", "first_n")
    )
    for result in (fair, first):
        assert set(np.unique(result.lengths)) <= {SHORT, LONG}
        assert np.array_equal(result.returns, result.lengths)
    expected = SOLUTIONS["probe_two_lengths"].episode_return
    assert abs(fair.metrics["eval/avg_reward"] - expected) < 5 * (LONG - SHORT) / 2 / math.sqrt(200)
    assert first.metrics["eval/avg_reward"] < expected - 0.5


# ---- the environments ----


def test_every_probe_is_registered_and_solved():
    registered = [name for name in get_registered_learning_env_names() if name.startswith("probe_")]
    assert sorted(NAMES) == registered
    for name in NAMES:
        assert build_learning_env(name, num_envs=2).env.spec.name == name


@EVERY
@pytest.mark.parametrize("continuous", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, FLOAT64])
def test_shapes_dtypes_and_spaces(name, continuous, dtype, device):
    act = (lambda obs, key: rng.uniform(key, tuple(obs.shape), dtype=dtype)) if continuous else _random
    played = _play(name, act, dtype=dtype, continuous=continuous, device=device)
    env = getattr(probes, name)(dtype=dtype, continuous=continuous)
    for field in ("obs", "final_obs", "next_obs"):
        assert played[field].shape == (16, 8, 1)
        assert played[field].dtype == dtype
        for obs in played[field].flatten(0, 1).cpu().numpy():
            assert env.observation_space.contains(obs)
    assert played["reward"].dtype == dtype
    assert played["reward"].shape == (16, 8)
    assert isinstance(env.action_space, spaces.Box if continuous else spaces.Discrete)
    done = played["terminated"] | played["truncated"]
    assert done.any()
    assert not (played["terminated"] & played["truncated"]).any(), "a probe ends in one way only"


@EVERY
def test_rows_last_equal_rows_first_and_do_not_depend_on_each_other(name):
    few, many = (make_vec_env(getattr(probes, name)(), n) for n in (3, 6))
    states = [vec.reset(vec.row_keys(rng.key(0)), vec.default_params) for vec in (few, many)]
    last = tree.map(lambda x: x.movedim(0, -1), states[1])
    for t in range(8):
        action = rng.randint(rng.key(t), (6,), 0, 2)
        (states[0], a), (states[1], b) = (vec.step(s, action[: vec.num_envs], vec.default_params) for vec, s in zip((few, many), states, strict=True))
        last, c = many.step(last, action, many.default_params, rows=-1)
        for x, y, z in zip(tree.leaves((states[0], a)), tree.leaves((states[1], b)), tree.leaves((last, c)), strict=True):
            assert torch.equal(x, y[:3])
            assert torch.equal(y, z.movedim(-1, 0))


def test_compiled_equals_eager():
    env = probes.probe_two_lengths()
    step = torch.func.vmap(env.step, in_dims=(0, 0, None))
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    state, action = ProbeState(number=torch.tensor([1.0, 2.0, 6.0])), torch.zeros(3, dtype=torch.int64)
    for _ in range(3):
        got, expected = compiled(state, action, env.default_params), step(state, action, env.default_params)
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(got), tree.leaves(expected), strict=True))
        state = expected[0]
    assert expected[1].terminated.tolist() == [True, True, False]


def test_coins_are_fair():
    for name, high in (("probe_observation_reward", 1), ("probe_two_lengths", LONG), ("probe_final_observation", 1)):
        env = getattr(probes, name)()
        number = torch.func.vmap(env.reset, in_dims=(0, None))(rng.split(rng.key(0), 10000), env.default_params).number
        assert len(number.unique()) == 2
        assert abs((number == high).float().mean().item() - 0.5) < 0.025


def test_rewards_scale_and_may_differ_by_row():
    vec = make_vec_env(probes.probe_constant_reward(reward=-2.0), 3)
    state = vec.reset(vec.row_keys(rng.key(0)), vec.default_params)
    action = torch.zeros(3, dtype=torch.int64)
    assert vec.step(state, action, vec.default_params)[1].reward.tolist() == [-2.0] * 3
    params = vec.default_params._replace(reward=torch.tensor([1.0, 2.0, 3.0]))
    assert vec.step(state, action, params)[1].reward.tolist() == [1.0, 2.0, 3.0]


def test_lengths_can_be_chosen():
    played = _play("probe_delayed_reward", _random, length=5, steps=10)
    assert torch.equal(played["terminated"], (torch.arange(1, 11) % 5 == 0)[:, None].expand(10, 8))
    assert torch.equal(played["reward"], played["terminated"].to(FLOAT64))
    torch.testing.assert_close(played["obs"][:5, 0, 0], torch.arange(5, dtype=FLOAT64) / 5)
    played = _play("probe_two_lengths", _random, short=1, long=3, steps=30)
    assert set(played["metrics"]["episode_length"][played["terminated"]].tolist()) == {1, 3}
    assert _play("probe_constant_reward", _random, max_episode_steps=7, steps=14)["truncated"].sum() == 16


@pytest.mark.parametrize("name", ACTING)
def test_the_gradient_of_continuous_probes_is_right(name):
    env = getattr(probes, name)(continuous=True)
    assert env.spec.differentiable
    report = check_env(env, num_envs=8, num_steps=3)
    assert report.passed, report.text()
    state = env.reset(rng.key(0), env.default_params)
    slope = torch.func.grad(lambda a: env.step(state, a, env.default_params)[1].reward)(TARGET * state.number.reshape(1))
    assert slope == 0
    assert not getattr(probes, name)().spec.differentiable


@pytest.mark.parametrize(
    ("name", "kwargs", "text"),
    [
        ("probe_constant_reward", {"max_episode_steps": 0}, "max_episode_steps"),
        ("probe_constant_reward", {"max_episode_steps": None}, "max_episode_steps"),
        ("probe_action_reward", {"reward": math.nan}, "reward"),
        ("probe_action_reward", {"continuous": 1}, "continuous"),
        ("probe_matching_reward", {"dtype": torch.int64}, "dtype"),
        ("probe_delayed_reward", {"length": 0}, "length"),
        ("probe_two_lengths", {"short": 3, "long": 3}, "short must be below long"),
        ("probe_two_lengths", {"long": 2.5}, "long"),
    ],
)
def test_bad_arguments_are_refused(name, kwargs, text):
    with pytest.raises(ValueError, match=text):
        getattr(probes, name)(**kwargs)


@pytest.mark.parametrize("continuous", [False, True])
def test_an_action_of_another_shape_is_refused(continuous):
    env = probes.probe_action_reward(continuous=continuous)
    state = env.reset(rng.key(0), env.default_params)
    with pytest.raises(ValueError, match="action of one row must have shape"):
        env.step(state, torch.zeros(() if continuous else (1,)), env.default_params)

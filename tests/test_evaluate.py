"""Evaluation: exact counts without a bias towards short episodes, bounded runs, frozen statistics, the action of the trained policy."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from frl import compile as compiler
from frl import rng, tree
from frl.envs.env import Env, EnvSpec
from frl.envs.vector import VecEnv, make_vec_env
from frl.evaluate import EvaluationResult, evaluate_episodes, make_evaluator
from frl.normalizers import running_normalizer
from frl.policies import Policy, actor_only
from frl.rollout import make_unroll
from frl.types import Outcome
from tests.tolerances import tolerance


class ClockParams(NamedTuple):
    """What an episode is, each ``[]`` or by row ``[N]``."""

    length: Tensor  # steps until it terminates
    per_step: Tensor  # reward of every step
    final: Tensor  # reward added at the last one
    luck: Tensor  # weight of a number drawn at the reset, added at the last step


class ClockState(NamedTuple):
    time: Tensor  # [] steps played
    luck: Tensor  # [] drawn at the reset
    features: Tensor  # [3] drawn at the reset


def clock(
    length: float = 3.0,
    *,
    per_step: float = 0.0,
    final: float = 0.0,
    luck: float = 0.0,
    max_episode_steps: int | None = None,
    success: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Env:
    """An episode of known length and return; the observation is drawn at the reset, the action comes back as a metric."""

    def reset(key: Tensor, env_params: ClockParams) -> ClockState:
        draw = rng.uniform(key, (4,), dtype=env_params.length.dtype)
        return ClockState(time=torch.zeros_like(env_params.length), luck=draw[0], features=100.0 * draw[1:])

    def observe(env_state: ClockState, env_params: ClockParams) -> Tensor:
        return env_state.features

    def step(env_state: ClockState, action: Tensor, env_params: ClockParams) -> tuple[ClockState, Outcome]:
        p = env_params
        time = env_state.time + 1
        over = time >= p.length
        reward = p.per_step + torch.where(over, p.final + p.luck * env_state.luck, 0.0)
        metrics = {"action": action[0], **{f"feature_{i}": env_state.features[i] for i in range(3)}}
        if success:
            metrics["success"] = over & (p.final > 0)
        return env_state._replace(time=time), Outcome(reward=reward, terminated=over, metrics=metrics)

    values = {"length": length, "per_step": per_step, "final": final, "luck": luck}
    return Env(
        spec=EnvSpec(name="clock", max_episode_steps=max_episode_steps, dt=1.0, differentiable=True),
        observation_space=spaces.Box(0.0, 100.0, (3,)),
        action_space=spaces.Box(-0.5, 0.5, (1,)),
        default_params=ClockParams(**{name: torch.tensor(value, dtype=dtype) for name, value in values.items()}),
        reset=reset,
        observe=observe,
        step=step,
    )


def tiny_policy(**options: Any) -> Policy:
    return actor_only(3, 1, network={"type": "mlp", "network_cfg": {"hidden_sizes": [4], "activation": "tanh"}}, **options)


POLICY = tiny_policy()
PARAMS = POLICY.init(rng.key(0))
NEVER = math.inf


def by_row(env: Env, **values: Any) -> ClockParams:
    """The env's parameters with some of them different in each row."""
    return env.default_params._replace(**{name: torch.as_tensor(value, dtype=torch.float32) for name, value in values.items()})


def play(env: VecEnv, num_episodes: Any, *, seed: Any = 0, env_params: Any = None, on_step: Any = None, **options: Any) -> EvaluationResult:
    evaluate = make_evaluator(env, POLICY, compile_mode="eager", **options)
    return evaluate(PARAMS, num_episodes=num_episodes, seed=seed, env_params=env_params, on_step=on_step)


# ---- which episodes count ----


def test_short_episodes_are_not_over_represented():
    env = make_vec_env(clock(max_episode_steps=20), 2)
    result = play(env, 4, env_params=by_row(env.env, length=[1, 9], final=[0, 10]))
    assert result.metrics["eval/avg_reward"] == 5.0
    assert result.metrics["eval/avg_length"] == 5.0
    assert result.metrics["eval/success_rate"] == 0.5
    assert np.bincount(result.rows).tolist() == [2, 2]
    assert sorted(zip(result.rows.tolist(), result.lengths.tolist(), result.returns.tolist(), strict=True)) == [(0, 1, 0.0)] * 2 + [(1, 9, 10.0)] * 2


def test_first_n_takes_the_first_to_finish_in_row_order():
    env = make_vec_env(clock(per_step=1.0, max_episode_steps=20), 3)
    result = play(env, 4, env_params=by_row(env.env, length=[1, 2, 3]), mode="first_n")
    assert result.metrics["eval/avg_reward"] == 1.25
    assert result.metrics["eval/avg_length"] == 1.25
    assert result.metrics["eval/success_rate"] == 0.0
    two = make_vec_env(clock(max_episode_steps=20), 2)
    result = play(two, 4, env_params=by_row(two.env, length=[1, 9], final=[0, 10]), mode="first_n")
    assert (result.metrics["eval/avg_reward"], result.metrics["eval/avg_length"], np.bincount(result.rows).tolist()) == (0.0, 1.0, [4])


@pytest.mark.parametrize(("episodes", "rows"), [(3, 8), (10, 4), (1, 1), (7, 3)])
def test_exactly_the_number_asked_for(episodes: int, rows: int):
    env = make_vec_env(clock(luck=1.0, max_episode_steps=20), rows)
    lengths = 1.0 + torch.arange(rows)
    result = play(env, episodes, env_params=by_row(env.env, length=lengths))
    assert result.episodes == len(result.returns) == len(result.lengths) == len(result.truncated) == episodes
    assert result.metrics["eval/episodes"] == episodes
    assert result.unfinished == result.metrics["eval/unfinished"] == 0
    quota = np.bincount(result.rows, minlength=rows)
    assert quota.max() - quota.min() <= 1
    assert quota.sum() == episodes
    again = play(env, episodes, env_params=by_row(env.env, length=lengths))
    assert np.array_equal(result.returns, again.returns)
    other = play(env, episodes, env_params=by_row(env.env, length=lengths), seed=1)
    assert not np.array_equal(np.sort(result.returns), np.sort(other.returns))


def expected_episodes(lengths: list[int], episodes: int, limit: int, mode: str) -> list[tuple[int, int]]:
    """``(row, length)`` of the episodes that count, played step by step."""
    rows = len(lengths)
    quota = [episodes // rows + (row < episodes % rows) for row in range(rows)]
    found: list[tuple[int, int]] = []
    ages, finished = [0] * rows, [0] * rows
    while len(found) < episodes:
        for row in range(rows):
            ages[row] += 1
            if ages[row] == min(lengths[row], limit):
                wanted = finished[row] < quota[row] if mode == "per_env_quota" else len(found) < episodes
                if wanted:
                    found.append((row, ages[row]))
                ages[row], finished[row] = 0, finished[row] + 1
    return found


@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    episodes=st.integers(1, 9),
    limit=st.integers(1, 8),
    chunk=st.integers(1, 9),
    mode=st.sampled_from(["per_env_quota", "first_n"]),
)
def test_equals_a_loop_over_steps(lengths: list[int], episodes: int, limit: int, chunk: int, mode: str):
    env = make_vec_env(clock(per_step=1.0, final=100.0, max_episode_steps=limit), len(lengths))
    result = play(env, episodes, env_params=by_row(env.env, length=lengths), chunk=chunk, mode=mode)
    expected = expected_episodes(lengths, episodes, limit, mode)
    assert list(zip(result.rows.tolist(), result.lengths.tolist(), strict=True)) == expected
    returns = [length + 100.0 * (length == lengths[row]) for row, length in expected]
    assert result.returns.tolist() == returns
    assert result.truncated.tolist() == [length < lengths[row] for row, length in expected]


def test_a_row_plays_the_same_episodes_whatever_the_number_of_rows():
    few = play(make_vec_env(clock(luck=1.0, max_episode_steps=9), 2), 4)
    many = play(make_vec_env(clock(luck=1.0, max_episode_steps=9), 5), 10)
    for row in range(2):
        assert np.array_equal(few.returns[few.rows == row], many.returns[many.rows == row])


def test_a_key_may_stand_for_the_seed():
    env = make_vec_env(clock(luck=1.0, max_episode_steps=9), 2)
    result, again = play(env, 4, seed=rng.key(3)), play(env, 4, seed=rng.key(3))
    assert np.array_equal(result.returns, again.returns)


def test_episodes_of_an_evaluation_are_not_those_of_training_with_the_same_seed():
    env = make_vec_env(clock(luck=1.0, max_episode_steps=9), 3)
    trained = env.reset(env.row_keys(rng.key(5)), env.default_params).env.luck
    split = [env.reset(env.row_keys(key), env.default_params).env.luck for key in rng.split(rng.key(5), 3)]
    played = play(env, 3, seed=5)
    for luck in (trained, *split):
        assert not np.array_equal(played.returns, luck.numpy().astype(np.float64))


# ---- an end ----


def test_a_time_limit_ends_episodes_and_is_called_truncation():
    env = make_vec_env(clock(NEVER, per_step=1.0, max_episode_steps=50), 2)
    result = play(env, 3)
    assert result.returns.tolist() == [50.0] * 3
    assert result.lengths.tolist() == [50] * 3
    assert result.truncated.tolist() == [True] * 3


def test_termination_at_the_limit_is_not_truncation():
    result = play(make_vec_env(clock(4, max_episode_steps=4), 2), 2)
    assert result.truncated.tolist() == [False, False]


def test_an_environment_without_any_limit_is_refused():
    with pytest.raises(ValueError, match="no time limit.*max_steps"):
        make_evaluator(make_vec_env(clock(NEVER), 2), POLICY, compile_mode="eager")
    with pytest.raises(ValueError, match="max_steps"):
        evaluate_episodes(policy=POLICY, params=PARAMS, env=make_vec_env(clock(NEVER), 2), num_episodes=3, compile_mode="eager")


@pytest.mark.parametrize("chunk", [1, 7, 50])
def test_the_cap_bounds_the_run_and_is_reported(chunk: int):
    steps: list[Any] = []
    result = play(make_vec_env(clock(NEVER, per_step=1.0), 2), 3, max_steps=20, chunk=chunk, on_step=steps.append)
    assert len(steps) == 20
    assert result.episodes == 0
    assert result.unfinished == result.metrics["eval/unfinished"] == 3
    assert result.metrics["eval/episodes"] == 0
    for name in ("eval/avg_reward", "eval/avg_length", "eval/success_rate"):
        assert math.isnan(result.metrics[name])


@pytest.mark.parametrize("chunk", [1, 4, 50])
def test_the_cap_keeps_what_was_finished(chunk: int):
    result = play(make_vec_env(clock(4, final=2.0), 2), 6, max_steps=9, chunk=chunk)
    assert (result.episodes, result.unfinished) == (4, 2)
    assert result.metrics["eval/avg_reward"] == 2.0


def untouchable() -> VecEnv:
    """Playing a single step of it is an error."""

    def never(*_: Any) -> Any:
        raise AssertionError("the environment was played")

    return make_vec_env(dataclasses.replace(clock(max_episode_steps=9), reset=never, step=never), 2)


@pytest.mark.parametrize("bad", [0, -1, 2.7, math.nan, True, "3", None])
def test_bad_counts_are_refused_before_any_step(bad: Any):
    for call in (
        lambda: play(untouchable(), bad),
        lambda: evaluate_episodes(policy=POLICY, params=PARAMS, env=untouchable(), num_episodes=bad, compile_mode="eager"),
    ):
        with pytest.raises((TypeError, ValueError), match="num_episodes"):
            call()


@pytest.mark.parametrize("bad", [0, -5, math.inf, 2.5, True])
def test_bad_caps_are_refused_before_any_step(bad: Any):
    with pytest.raises((TypeError, ValueError), match="max_steps"):
        play(untouchable(), 2, max_steps=bad)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="first_n"):
        play(untouchable(), 2, mode="first")


# ---- the policy as it was trained ----


def bits(state: Any) -> list[Tensor]:
    return [x.clone() for x in tree.leaves(state)]


def test_statistics_never_move():
    normalizer = running_normalizer(3)
    state = normalizer.update(normalizer.init(), torch.tensor([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]]))
    assert (float(state.count), state.mean.tolist()) == (2.0, [2.0, 3.0, 4.0])
    env = make_vec_env(clock(max_episode_steps=9), 8)
    before, params = bits(state), bits(PARAMS)
    make_evaluator(env, POLICY, normalizer, compile_mode="eager")(PARAMS, state, num_episodes=8)
    evaluate_episodes(policy=POLICY, params=PARAMS, env=env, num_episodes=8, normalizer=normalizer, norm_state=state, compile_mode="eager")
    unroll = make_unroll(env, POLICY, normalizer, mode="eager")
    unroll(PARAMS, state, env.reset(env.row_keys(rng.key(0)), env.default_params), env.default_params, torch.zeros(4, 8, 1))
    normalizer.apply(state, torch.full((8, 3), 100.0))
    normalizer.apply(normalizer.prepare(state, torch.float32), torch.full((8, 3), 100.0))
    assert all(torch.equal(a, b) for a, b in zip(before, bits(state), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(params, bits(PARAMS), strict=True))


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("distribution", ["normal", "tanh_normal"])
def test_the_action_is_the_trained_policys_mode_on_normalised_observations(distribution: str, clip: bool):
    bounds = {"action_low": [-0.5], "action_high": [0.5]} if distribution == "tanh_normal" else {}
    policy = tiny_policy(distribution=distribution, **bounds)
    params = tree.map(lambda x: 3.0 * x, policy.init(rng.key(1)))
    normalizer = running_normalizer(3)
    state = normalizer.update(normalizer.init(), 50.0 + 20.0 * rng.normal(rng.key(2), (64, 3)))
    env = make_vec_env(clock(1, max_episode_steps=9), 6)
    evaluate = make_evaluator(env, policy, normalizer, clip_actions=clip, compile_mode="eager", chunk=1)
    result = evaluate(params, state, num_episodes=6, seed=4)
    obs = torch.from_numpy(np.stack([result.values[f"feature_{i}"] for i in range(3)], axis=-1))
    mode = policy.distribution.mode(policy.apply(params, normalizer.apply(state, obs)))[:, 0]
    expected = mode.clamp(-0.5, 0.5) if clip else mode
    torch.testing.assert_close(torch.from_numpy(result.values["action"]), expected, rtol=1e-6, atol=1e-6)
    raw = policy.distribution.mode(policy.apply(params, obs))[:, 0]
    assert (expected - raw).abs().max() > 1e-2
    # And what a rollout of training does with the mode, from the same states.
    starts = env.reset(env.row_keys(rng.key(0)), env.default_params)
    starts = starts._replace(env=starts.env._replace(features=obs))
    unroll = make_unroll(env, policy, normalizer, deterministic=True, clip_actions=clip, mode="eager")
    _, trajectory = unroll(params, state, starts, env.default_params, torch.zeros(1, 6, 1))
    assert result.values["action"].tolist() == trajectory.metrics["action"][0].tolist()


def test_sampled_actions_follow_the_seed():
    env = make_vec_env(clock(2, max_episode_steps=9), 3)
    options = {"deterministic": False, "chunk": 2}
    one, same, other, mode = play(env, 6, **options), play(env, 6, **options), play(env, 6, seed=1, **options), play(env, 6, chunk=2)
    assert np.array_equal(one.values["action"], same.values["action"])
    assert not np.array_equal(one.values["action"], other.values["action"])
    assert not np.array_equal(one.values["action"], mode.values["action"])
    assert len(set(one.values["action"].tolist())) == 6


# ---- what is reported ----


def test_metrics_are_means_of_the_episodes():
    result = play(make_vec_env(clock(2, final=1.0, luck=1.0, max_episode_steps=9), 3), 7)
    n, std = 7, float(np.std(result.returns, ddof=1))
    assert result.metrics["eval/avg_reward"] == pytest.approx(result.returns.mean(), rel=tolerance(torch.float64, n))
    assert result.metrics["eval/std_reward"] == pytest.approx(std, rel=tolerance(torch.float64, n))
    assert result.metrics["eval/ci95_reward"] == pytest.approx(1.96 * std / math.sqrt(n), rel=tolerance(torch.float64, n))
    assert result.metrics["eval/success_rate"] == 1.0
    assert result.success is not None
    assert result.success.tolist() == [True] * 7
    assert result.metrics["eval/metrics/feature_0"] == pytest.approx(result.values["feature_0"].mean(), rel=tolerance(torch.float32, n))
    named = {name.removeprefix("eval/metrics/") for name in result.metrics if name.startswith("eval/metrics/")}
    assert named == {"action", "feature_0", "feature_1", "feature_2"}
    assert all(isinstance(value, float) for value in result.metrics.values())


def test_without_success_the_rate_is_nan_and_one_episode_has_no_spread():
    result = play(make_vec_env(clock(2, success=False, max_episode_steps=9), 1), 1)
    assert result.success is None
    assert math.isnan(result.metrics["eval/success_rate"])
    assert math.isnan(result.metrics["eval/std_reward"])
    assert math.isnan(result.metrics["eval/ci95_reward"])
    assert result.metrics["eval/avg_length"] == 2.0


def test_on_step_sees_every_vector_step():
    steps: list[dict[str, Any]] = []
    env = make_vec_env(clock(per_step=1.0, max_episode_steps=20), 2)
    play(env, 2, env_params=by_row(env.env, length=[1, 3]), on_step=steps.append, chunk=3)
    assert [step["done"].tolist() for step in steps] == [[True, False], [True, False], [True, True]]
    assert [step["episode_length"].tolist() for step in steps] == [[1, 1], [1, 2], [1, 3]]


def test_returns_are_summed_in_the_environments_dtype():
    env = make_vec_env(clock(9, per_step=0.1, max_episode_steps=9, dtype=torch.float64), 2)
    policy_params = POLICY.init(rng.key(0), dtype=torch.float64)
    result = make_evaluator(env, POLICY, compile_mode="eager", dtype=torch.float64)(policy_params, num_episodes=2)
    assert result.returns.tolist() == pytest.approx([0.9, 0.9], rel=tolerance(torch.float64, 9))


def test_both_doors_give_the_same_episodes():
    env = make_vec_env(clock(luck=1.0, max_episode_steps=9), 2)
    first = evaluate_episodes(policy=POLICY, params=PARAMS, env=env, num_episodes=4, seed=7, compile_mode="eager")
    second = evaluate_episodes(policy=POLICY, params=PARAMS, env=env, num_episodes=4, seed=7, compile_mode="eager")
    assert np.array_equal(first.returns, play(env, 4, seed=7).returns)
    assert np.array_equal(first.returns, second.returns)


def test_compiled_equals_eager_and_compiles_once():
    env = make_vec_env(clock(luck=1.0, per_step=0.5, max_episode_steps=5), 3)
    evaluate = make_evaluator(env, POLICY, compile_mode="aot_eager")
    none = compiler.graph_count()
    first = evaluate(PARAMS, num_episodes=4)
    graphs = compiler.graph_count()
    compiled = evaluate(PARAMS, num_episodes=7, seed=1)
    assert compiler.graph_count() == graphs > 0
    for result, seed, count in ((first, 0, 4), (compiled, 1, 7)):
        eager = play(env, count, seed=seed)
        assert result.returns.tolist() == eager.returns.tolist()
        np.testing.assert_allclose(result.values["action"], eager.values["action"], rtol=tolerance(torch.float32, 16), atol=tolerance(torch.float32, 16))
    # One row after three: graphs of its own, as many, and none after its first evaluation or for the three rows.
    single = make_evaluator(make_vec_env(env.env, 1), POLICY, compile_mode="aot_eager")
    single(PARAMS, num_episodes=2)
    assert compiler.graph_count() - graphs <= graphs - none
    both = compiler.graph_count()
    single(PARAMS, num_episodes=3, seed=1)
    evaluate(PARAMS, num_episodes=2)
    assert compiler.graph_count() == both

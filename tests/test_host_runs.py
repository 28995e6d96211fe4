"""Runs on host environments: evaluation, training by run file, resume, and what is refused."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import frl
from frl import rng, tree
from frl.algorithms.grpo import GrpoConfig, make_grpo
from frl.algorithms.play import check_fit
from frl.algorithms.ppo import PpoConfig, make_ppo
from frl.algorithms.registry import is_differentiable, register_algo
from frl.build import RunParts, build_run
from frl.config import ConfigError, parse_run_config
from frl.envs.gymnasium_env import gymnasium_env
from frl.envs.host import HostEnv
from frl.envs.registry import build_learning_env, register_learning_env
from frl.evaluate import evaluate_episodes, make_evaluator
from frl.networks import mlp
from frl.optim import adam
from frl.policies import actor_only, build_policy
from frl.run import train_from_config
from tests.host_envs import MODES, Scripted, declared, scripted
from tests.tolerances import tolerance

NET = {"type": "mlp", "network_cfg": {"hidden_sizes": [4], "activation": "tanh"}}


def policy_for(env: Any, name: str = "actor_only", **block: Any) -> tuple[Any, Any]:
    critic = {"critic": NET} if name == "actor_critic" else {}
    policy = build_policy({"name": name, "actor": NET, **critic, **block}, env.single_observation_space, env.single_action_space)
    return policy, policy.init(rng.key(0))


def lengths_env(lengths: list[int], mode: str = "same_step", **kwargs: Any) -> HostEnv:
    """Row i plays episodes of ``lengths[i]`` steps, reward 1 each."""
    makers = [lambda n=n: Scripted(lengths=(n,), **kwargs) for n in lengths]
    return HostEnv(SyncVectorEnv(makers, autoreset_mode=getattr(AutoresetMode, mode.upper())))


def evaluated(env: HostEnv, episodes: int, **options: Any) -> Any:
    policy, params = policy_for(env)
    options = {"max_steps": 1000, "compile_mode": "eager", **options}
    return make_evaluator(env, policy, **options)(params, num_episodes=episodes, seed=3)


# ---- evaluation ----


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("chunk", [1, 3, 50])
def test_every_row_plays_its_quota(mode, chunk):
    env = lengths_env([1, 9, 4], mode)
    result = evaluated(env, 7, chunk=chunk)
    assert np.bincount(result.rows).tolist() == [3, 2, 2]
    assert sorted(zip(result.rows.tolist(), result.lengths.tolist(), strict=True)) == [(0, 1)] * 3 + [(1, 9)] * 2 + [(2, 4)] * 2
    assert np.array_equal(result.returns, result.lengths)
    assert result.metrics["eval/avg_reward"] == pytest.approx(29 / 7)
    assert (result.unfinished, result.episodes) == (0, 7)
    assert result.success is not None
    assert result.success.tolist() == (result.lengths % 2 == 0).tolist()
    # The environment's own numbers are there; what the library adds for itself is not.
    assert set(result.values) == {"t"}
    assert np.array_equal(result.values["t"], result.lengths)


@pytest.mark.parametrize("mode", MODES)
def test_first_n_takes_the_first_to_finish(mode):
    result = evaluated(lengths_env([1, 9], mode), 4, mode="first_n")
    assert result.rows.tolist() == [0] * 4


@pytest.mark.parametrize("mode", MODES)
def test_the_step_cap_cuts_episodes_off_and_says_so(mode):
    result = evaluated(lengths_env([2, 10**6], mode), 4, max_steps=20)
    assert (result.episodes, result.unfinished) == (2, 2)
    assert result.rows.tolist() == [0, 0]
    nothing = evaluated(lengths_env([10**6], mode), 1, max_steps=5)
    assert (nothing.episodes, nothing.unfinished) == (0, 1)
    assert math.isnan(nothing.metrics["eval/avg_reward"])
    env = lengths_env([2], mode)
    with pytest.raises(ValueError, match="no time limit.*pass max_steps"):
        make_evaluator(env, policy_for(env)[0])


@pytest.mark.parametrize("mode", MODES)
def test_the_time_limit_of_the_environment_bounds_an_evaluation(mode):
    """Episodes that only the time limit ends: all of them are finished, whatever the mode spends on resets."""
    with gymnasium_env("Pendulum-v1", 2, autoreset=mode, max_episode_steps=6) as env:
        policy, params = policy_for(env)
        evaluate = make_evaluator(env, policy, compile_mode="eager", chunk=4)
        result = evaluate(params, num_episodes=7, seed=1)
        assert (result.unfinished, result.lengths.tolist()) == (0, [6] * 7)
        assert result.truncated.all()
        assert np.array_equal(evaluate(params, num_episodes=7, seed=1).returns, result.returns)
        assert not np.array_equal(evaluate(params, num_episodes=7, seed=2).returns, result.returns)


def test_episodes_are_the_same_in_every_mode():
    found = []
    for mode in MODES:
        with gymnasium_env("CartPole-v1", 3, autoreset=mode) as env:
            policy, params = policy_for(env)
            found.append(evaluate_episodes(policy=policy, params=params, env=env, num_episodes=8, seed=4, compile_mode="eager"))
    for other in found[1:]:
        order = lambda r: sorted(zip(r.rows.tolist(), r.lengths.tolist(), strict=True))
        assert order(other) == order(found[0])


def test_a_metric_that_comes_late_is_nan_in_earlier_episodes():
    class Late(Scripted):
        def step(self, action):
            *rest, _ = super().step(action)
            return *rest, {"metrics": {"late": 2.0}, "success": True} if self.episode > 0 else {}

    env = HostEnv(SyncVectorEnv([lambda: Late(lengths=(3,))], autoreset_mode=AutoresetMode.SAME_STEP))
    result = evaluated(env, 2, chunk=3)
    assert np.isnan(result.values["late"]).tolist() == [True, False]
    assert result.values["late"][1] == 2.0
    assert result.success is not None
    assert result.success.tolist() == [False, True]


def test_what_on_step_sees():
    seen: list[dict] = []
    env = lengths_env([2, 3])
    policy, params = policy_for(env)
    make_evaluator(env, policy, compile_mode="eager", max_steps=50, chunk=2)(params, num_episodes=2, on_step=seen.append)
    assert [x["done"].tolist() for x in seen[:3]] == [[False, False], [True, False], [False, True]]
    assert seen[1]["episode_return"].tolist() == [2, 2]


def test_evaluation_leaves_parameters_and_statistics_alone():
    env = gymnasium_env("Pendulum-v1", 2, max_episode_steps=5)
    policy, params = policy_for(env)
    normalizer = frl.running_normalizer(3)
    norm_state = normalizer.update(normalizer.init(), torch.randn(20, 3, generator=torch.Generator().manual_seed(0)))
    before = tree.map(torch.clone, (params, norm_state))
    make_evaluator(env, policy, normalizer, compile_mode="eager")(params, norm_state, num_episodes=3)
    for a, b in zip(tree.leaves(before), tree.leaves((params, norm_state)), strict=True):
        assert torch.equal(a, b)


def balancing() -> tuple[Any, Any]:
    """A policy for CartPole that keeps the pole up: push to where it falls, corrected for place and speed."""
    policy = actor_only(4, spaces.Discrete(2), network=mlp(4, 2, []))
    params = policy.init(rng.key(0))
    push = torch.tensor([0.05, 0.1, 1.0, 0.5])
    layer = {"weight": torch.stack([-push, push]), "bias": torch.zeros(2)}
    assert tree.map(lambda x: x.shape, params["actor"]["layers"][0]) == tree.map(lambda x: x.shape, layer)
    return policy, {"actor": {**params["actor"], "layers": [layer]}}


def test_a_policy_for_a_functional_environment_plays_gymnasiums():
    policy, params = balancing()
    for env in (build_learning_env("cartpole", num_envs=4), gymnasium_env("CartPole-v1", 4)):
        result = make_evaluator(env, policy, compile_mode="eager")(params, num_episodes=6)
        assert result.lengths.tolist() == [500] * 6, env
    worse = {"actor": {**params["actor"], "layers": [tree.map(lambda x: -x, params["actor"]["layers"][0])]}}
    means = [
        make_evaluator(env, policy, compile_mode="eager")(worse, num_episodes=40).metrics["eval/avg_length"]
        for env in (build_learning_env("cartpole", num_envs=4), gymnasium_env("CartPole-v1", 4))
    ]
    assert means[0] == pytest.approx(means[1], abs=0.5)


# ---- which policies fit ----


def test_a_policy_that_does_not_fit_is_refused():
    wants = lambda n, start=0: actor_only(4, spaces.Discrete(n, start=start), network=mlp(4, n, []))
    cartpole = gymnasium_env("CartPole-v1", 2)
    check_fit(cartpole, wants(2), "evaluation")
    for policy, text in (
        (wants(3), r"chooses actions from \[0\] to \[2\], but the action space of 'gymnasium:CartPole-v1' is Discrete\(2\)"),
        (wants(2, 1), r"from \[1\] to \[2\]"),
        (actor_only(4, 1, network=mlp(4, 1, [])), r"continuous actions of shape \[1\], but the action space of 'gymnasium:CartPole-v1' is Discrete"),
        (
            actor_only(3, spaces.Discrete(2), network=mlp(3, 2, [])),
            "the policy has 3 observation features, but the observations of 'gymnasium:CartPole-v1' have 4",
        ),
        (actor_only(4, spaces.MultiDiscrete([2]), network=mlp(4, 2, [])), r"discrete actions of shape \[1\]"),
    ):
        with pytest.raises(ValueError, match=text):
            make_evaluator(cartpole, policy)
    several = scripted(action_space=spaces.MultiDiscrete([2, 3], start=[0, 5]))
    check_fit(several, policy_for(several)[0], "evaluation")
    for other in (spaces.MultiDiscrete([3, 2], start=[0, 5]), spaces.MultiDiscrete([2, 3])):
        with pytest.raises(ValueError, match=r"to \[1, 7\], but|to \[2, 6\], but|to \[1, 2\], but"):
            check_fit(several, actor_only(1, other, network=mlp(1, 5, [])), "evaluation")
    named = declared(spaces.Dict(a=spaces.Box(-1, 1, (2,)), b=spaces.Box(-1, 1, (3,))))
    grouped, _ = policy_for(named, obs_groups={"actor": ["b"]})
    check_fit(named, grouped, "evaluation")
    with pytest.raises(ValueError, match="does not fit the observations of 'Declared|does not fit the observations of 'SyncVectorEnv"):
        check_fit(declared(spaces.Dict(a=spaces.Box(-1, 1, (2,)))), grouped, "evaluation")
    with pytest.raises(ValueError, match="does not fit the observations of 'gymnasium:CartPole-v1'.*need a Dict observation space"):
        check_fit(cartpole, grouped, "evaluation")
    with pytest.raises(TypeError, match="evaluation needs rows of an environment"):
        check_fit(gymnasium.make("CartPole-v1"), wants(2), "evaluation")


# ---- training ----


def test_groups_start_alike_or_are_refused():
    env = gymnasium_env("CartPole-v1", 4)
    policy, _ = policy_for(env)
    algo = make_grpo(env, policy, adam(), GrpoConfig(buffer_size=12, group_size=2, n_epochs=1, batch_size=24, compile_mode="eager"))
    state, rollout = algo.collect(algo.init(rng.key(0)))
    first = rollout["obs"][:, 0]
    assert torch.equal(first[0], first[1])
    assert torch.equal(first[2], first[3])
    assert not torch.equal(first[0], first[2])
    assert not torch.equal(rollout["obs"][0], rollout["obs"][1])
    new = algo.update(state, rollout)
    assert float(new.metrics["skipped_update"]) == 0.0
    again, other = algo.collect(new)
    assert not torch.equal(other["obs"][0, 0], first[0])
    deaf = lambda: Scripted(lengths=(5,))  # counts its episodes, whatever the seed
    makers = [deaf, deaf, deaf, lambda: Scripted(lengths=(5,), nan_at=(9, 1))]
    rows = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    rows.envs[3].episode = 4
    algo = make_grpo(HostEnv(rows), policy_for(scripted())[0], adam(), GrpoConfig(buffer_size=3, group_size=2, compile_mode="eager"))
    with pytest.raises(RuntimeError, match=r"rows with equal keys did not begin equally .row 3.: its reset does not honour the seed"):
        algo.init(rng.key(0))
    whole = gymnasium_env("CartPole-v1", 4, vectorization="vector_entry_point")
    with pytest.raises(ValueError, match="cannot be seeded row by row"):
        make_grpo(whole, policy, adam(), GrpoConfig(group_size=2, compile_mode="eager"))


@pytest.mark.parametrize("mode", MODES)
def test_rollouts_of_an_algorithm_are_the_same_in_every_mode(mode):
    """Recorded through ``collect``: holes are marked, and what is valid is what the other modes record."""
    env = gymnasium_env("CartPole-v1", 2, autoreset=mode, max_episode_steps=5)
    policy, _ = policy_for(env, "actor_critic")
    algo = make_ppo(env, policy, adam(), PpoConfig(buffer_size=13, n_epochs=1, num_mini_batches=2, compile_mode="eager"))
    state, rollout = algo.collect(algo.init(rng.key(0)))
    valid = rollout["valid"][:, :-1]
    assert (~valid).sum() == (2 * 2 if mode == "next_step" else 0)
    cut = rollout["truncated"][:, :-1]
    assert cut[:, 4].all()
    # Where an episode was cut, the value is that of the observation before the reset, and no other.
    want = policy.value(state.params, rollout["obs"][:, 5])
    same = torch.isclose(rollout["final_value"][:, 4], want, rtol=0, atol=tolerance(torch.float32, 100))
    assert same.all() == (mode == "next_step")
    new = algo.update(state, rollout)
    assert int(new.counters["env_steps"]) == int(valid.sum())
    assert float(new.metrics["ratio_error"]) <= tolerance(torch.float32, 100)
    assert float(new.metrics["episode_length_avg_100"]) == 5.0


RUN: dict[str, Any] = {
    "trainer": {
        "exp_name": "host",
        "learning_env": {"name": "gymnasium:CartPole-v1", "cfg": {"max_episode_steps": 20}},
        "seed": 3,
        "num_envs": 2,
        "buffer_size": 8,
        "iterations": 2,
        "enable_eval": True,
        "eval_freq": 16,
        "num_eval_envs": 2,
        "num_eval_episodes": 2,
        "final_eval_episodes": 3,
        "compile_mode": "eager",
    },
    "policy": {"name": "actor_critic", "actor": NET, "critic": NET},
    "algorithm": {"name": "ppo", "cfg": {"n_epochs": 1, "num_mini_batches": 2, "normalize_rewards": True}},
}


def run_config(**changes: Any) -> Any:
    blocks = json.loads(json.dumps(RUN))
    for path, value in changes.items():
        block = blocks
        *parts, last = path.split("__")
        for part in parts:
            block = block[part]
        block[last] = value
    return parse_run_config(blocks)


@pytest.fixture
def closed(monkeypatch):
    """Names of the host environments that were closed."""
    names: list[str] = []
    original = HostEnv.close

    def close(self):
        if not self._closed:
            names.append(self.spec.name)
        original(self)

    monkeypatch.setattr(HostEnv, "close", close)
    return names


@pytest.mark.parametrize("mode", MODES)
def test_a_run_trains_evaluates_and_closes(mode, tmp_path, closed):
    cfg = {"max_episode_steps": 20, "autoreset": mode}
    config = run_config(trainer__learning_env={"name": "gymnasium:CartPole-v1", "cfg": cfg}, trainer__output_dir=str(tmp_path))
    summary = train_from_config(config)
    assert (summary["num_updates"], summary["skipped_updates"]) == (2, 0)
    assert summary["global_step"] == 32 if mode != "next_step" else 24 <= summary["global_step"] <= 32
    assert summary["last_eval_metrics"]["eval/episodes"] == 3
    assert summary["last_eval_metrics"]["eval/avg_length"] <= 20
    assert len(summary["eval_history"]) >= 1
    assert closed == ["gymnasium:CartPole-v1"] * 2


def test_a_run_repeats_bit_for_bit(tmp_path):
    one, two = (train_from_config(run_config(trainer__output_dir=str(tmp_path / name))) for name in "ab")
    for name in ("train_history", "last_eval_metrics"):
        drop = lambda x: [{k: v for k, v in r.items() if k != "charts/SPS"} for r in x] if isinstance(x, list) else x
        assert str(drop(one[name])) == str(drop(two[name]))
    other = train_from_config(run_config(trainer__output_dir=str(tmp_path / "c"), trainer__seed=4))
    assert other["last_train_metrics"]["train/loss"] != one["last_train_metrics"]["train/loss"]


def test_a_resumed_run_begins_new_episodes_and_says_so(tmp_path):
    first = train_from_config(run_config(trainer__output_dir=str(tmp_path)))
    with pytest.warns(RuntimeWarning, match="'?gymnasium:CartPole-v1'? keeps its state to itself: its rows begin new episodes"):
        second = train_from_config(run_config(trainer__output_dir=str(tmp_path), trainer__iterations=4), resume="latest", run=first["run_directory"])
    assert (second["num_updates"], second["global_step"]) == (4, 64)
    assert [x["num_updates"] for x in second["train_history"]] == [1, 2, 3, 4]


def test_what_a_resumed_state_begins_with():
    parts = build_run(run_config())
    try:
        state = parts.algorithm.init(rng.key(0))
        for _ in range(2):
            state, rollout = parts.algorithm.collect(state)
            state = parts.algorithm.update(state, rollout)
        before = tree.map(torch.clone, state.env_state)
        assert bool(state.extra["reward_returns"].any())
        with pytest.warns(RuntimeWarning, match="keeps its state to itself"):
            new = parts.resumed(state)
        assert torch.equal(new.env_state, parts.env.obs)
        assert not torch.equal(new.env_state, before)
        assert not new.extra["reward_returns"].any()
        assert not torch.equal(new.key, state.key)
        kept = ("params", "opt_state", "norm_state", "hyper", "counters")
        for a, b in zip(*(tree.leaves([getattr(s, name) for name in kept]) for s in (state, new)), strict=True):
            assert torch.equal(a, b)
        # Other episodes than those that the run began with.
        assert not torch.equal(new.env_state, parts.algorithm.init(rng.key(0)).env_state)
    finally:
        parts.close()
    functional = build_run(run_config(trainer__learning_env="cartpole"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert functional.resumed(state) is state


def test_float64_and_dict_observations_train():
    class Named(gymnasium.Env):
        observation_space = spaces.Dict(
            pose=spaces.Box(-np.inf, np.inf, (2,), dtype=np.float64), level=spaces.Discrete(3), count=spaces.Box(0, 255, (1,), np.uint8)
        )
        action_space = spaces.MultiDiscrete([2, 3], start=[1, -1])

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.t = 0
            return self._obs(), {}

        def step(self, action):
            assert self.action_space.contains(action)
            self.t += 1
            return self._obs(), float(action[0] == 1), False, self.t == 5, {}

        def _obs(self):
            pose = 1e8 + self.np_random.normal(size=2)
            return {"pose": pose, "level": self.t % 3, "count": np.array([self.t], dtype=np.uint8)}

    register_learning_env(
        "named_of_the_run_tests", lambda *, num_envs: SyncVectorEnv([Named] * num_envs, autoreset_mode=AutoresetMode.SAME_STEP), override=True
    )
    groups = {"actor": ["level", "pose"], "critic": ["pose", "count"]}
    for dtype in ("float32", "float64"):
        config = run_config(
            trainer__learning_env="named_of_the_run_tests",
            trainer__dtype=dtype,
            trainer__normalize_observations=True,
            trainer__max_eval_steps=100,
            policy__obs_groups=groups,
        )
        parts = build_run(config)
        want = getattr(torch, dtype)
        assert (parts.env.num_envs, parts.policy.obs_dim, parts.policy.critic_obs_dim) == (2, 5, 3)
        state, rollout = parts.algorithm.collect(parts.algorithm.init(rng.key(0)))
        assert {rollout[name].dtype for name in ("reward", "value", "sample_log_prob", "final_value")} == {want}
        assert rollout["obs"].dtype == torch.float64  # for the statistics: 1e8 and a few
        new = parts.algorithm.update(state, rollout)
        assert float(new.metrics["skipped_update"]) == 0.0
        assert {x.dtype for x in tree.floating(new.params)} == {want}
        assert (rollout["obs"][..., 3:] - 1e8).abs().max() < 10
        assert (rollout["obs"][..., 3:] % 1 != 0).any()
        parts.close()


# ---- what is refused ----


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"trainer__learning_env": "gymnasium:CartPoel-v1"}, r"trainer.learning_env.name: unknown gymnasium environment 'CartPoel-v1'.*Did you mean"),
        ({"trainer__learning_env": {"name": "gymnasium:CartPole-v1", "cfg": {"seed": 1}}}, "trainer.learning_env.cfg: takes no 'seed'; set trainer.seed"),
        ({"trainer__learning_env": {"name": "gymnasium:CartPole-v1", "cfg": {"num_envs": 3}}}, "takes no 'num_envs'; set trainer.num_envs"),
        (
            {"trainer__learning_env": {"name": "gymnasium:CartPole-v1", "cfg": {"gravity": 3}}},
            "learning_env.cfg: .*unexpected keyword argument 'gravity'",
        ),
        ({"trainer__learning_env": {"name": "gymnasium:CartPole-v1", "cfg": {"autoreset": "no"}}}, "autoreset must be one of"),
        ({"trainer__learning_env": "gymnasium:Blackjack-v1"}, "observations of Tuple have no encoding"),
        ({"policy__distribution": "tanh_normal"}, "policy: .*does not fit the action space"),
    ],
)
def test_a_run_file_that_cannot_be_is_refused(changes, text, closed):
    with pytest.raises(ConfigError, match=text):
        build_run(run_config(**changes))


def test_what_was_opened_is_closed_when_the_build_fails(closed):
    with pytest.raises(ConfigError, match="policy"):
        build_run(run_config(policy__distribution="tanh_normal"))
    assert closed == ["gymnasium:CartPole-v1"] * 2


def test_differentiating_through_a_host_environment_is_refused(closed):
    blocks = json.loads(json.dumps(RUN))
    for key in ("buffer_size",):
        del blocks["trainer"][key]
    blocks["trainer"] |= {"learning_env": "gymnasium:Pendulum-v1", "segment_length": 4, "eval_freq": 8}
    blocks["policy"] = {"name": "actor_only", "actor": NET}
    blocks["algorithm"] = {"name": "apg"}
    with pytest.raises(ConfigError, match="'gymnasium:Pendulum-v1' is a host environment, through which algorithm 'apg' cannot differentiate.*ppo or grpo"):
        build_run(parse_run_config(blocks))
    assert closed == ["gymnasium:Pendulum-v1"]
    assert is_differentiable("APG")
    assert not is_differentiable("ppo")
    assert not is_differentiable("grpo")
    with pytest.raises(ValueError, match="unknown algorithm"):
        is_differentiable("none such")
    register_algo("own_of_the_run_tests", lambda *args, **kwargs: None, override=True, differentiable=True)
    assert is_differentiable("own_of_the_run_tests")
    with pytest.raises(ValueError, match="already registered"):
        register_algo("APG", lambda *args, **kwargs: None)
    assert is_differentiable("apg")


def test_an_environment_of_no_kind_is_refused():
    register_learning_env("nothing_of_the_run_tests", lambda: object(), override=True)
    with pytest.raises(ConfigError, match="'nothing_of_the_run_tests' made a object, which is neither a functional nor a host environment"):
        build_run(run_config(trainer__learning_env="nothing_of_the_run_tests"))


def test_a_functional_environment_takes_the_dtype_of_the_run():
    parts = build_run(run_config(trainer__learning_env="cartpole", trainer__dtype="float64"))
    assert isinstance(parts, RunParts)
    assert {x.dtype for x in tree.floating(parts.env.default_params)} == {torch.float64}
    parts.close()  # nothing to do
    assert parts.env.spec is parts.env.env.spec

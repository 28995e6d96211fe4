from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from frl import rng, tree
from frl.advantages import compute_gae
from frl.algorithms.apg import make_apg
from frl.algorithms.episodes import episode_metrics, track
from frl.algorithms.episodes import init as empty_window
from frl.envs.cartpole import CartPoleState, cartpole
from frl.envs.gymnasium_env import gymnasium_env
from frl.envs.host import HostEnv
from frl.envs.host_rollout import FIELDS, host_rollout, make_host_unroll
from frl.envs.pendulum import PendulumState, pendulum
from frl.envs.registry import build_learning_env, register_learning_env
from frl.envs.vector import make_vec_env
from frl.normalizers import running_normalizer, variance
from frl.optim import adam
from frl.policies import build_policy
from frl.rollout import FIELDS as ROLLOUT_FIELDS
from frl.rollout import make_unroll
from tests.host_envs import MODES, Scripted, declared, scripted
from tests.tolerances import tolerance

NET = {"type": "mlp", "network_cfg": {"hidden_sizes": [8]}}


def play(env: HostEnv, steps: int, act: Callable[[Any], Tensor] | None = None) -> tuple[Any, list]:
    """First observation and time steps of a fixed or a given behaviour."""
    obs = first = env.obs
    out = []
    for _ in range(steps):
        out.append(env.step(torch.zeros(env.num_envs, dtype=torch.int64, device=env.device) if act is None else act(obs)))
        obs = out[-1].obs
    return first, out


def column(steps: list, name: str) -> Tensor:
    return torch.stack([getattr(s, name) if hasattr(s, name) else s.metrics[name] for s in steps])


def policy_for(env: Any, **block: Any) -> tuple[Any, Any]:
    policy = build_policy({"name": "actor_critic", "actor": NET, "critic": NET, **block}, env.single_observation_space, env.single_action_space)
    return policy, policy.init(rng.key(0))


# ---- autoreset modes (phantom transitions) ----


def test_next_step_masks_the_steps_that_only_reset(device):
    env = scripted("next_step", device=device)
    first, steps = play(env, 6)
    valid, reward = column(steps, "valid"), column(steps, "reward")
    assert valid[:, 0].tolist() == [True, True, False, True, True, False]
    assert reward[:, 0].tolist() == [1, 1, 0, 1, 1, 0]
    terminated, truncated = column(steps, "terminated"), column(steps, "truncated")
    value, final_value = torch.zeros(7, 1, device=device), torch.zeros(6, 1, device=device)
    gae = compute_gae(reward, value, terminated, truncated, gamma=1.0, gae_lambda=1.0, final_value=final_value, valid=valid)
    assert gae.advantage[valid].tolist() == [2, 1, 2, 1]
    assert gae.advantage[~valid].tolist() == [0, 0]
    done = terminated | truncated
    assert column(steps, "episode_return")[done].tolist() == [2, 2]
    assert column(steps, "episode_length")[done].tolist() == [2, 2]
    assert int(valid.sum()) == 4
    # The observation at a done is the final one; the new episode's comes with the masked step.
    assert [float(s.obs) for s in steps] == [1, 2, 100, 101, 102, 200]
    assert float(first) == 0


@pytest.mark.parametrize("mode", ["same_step", "disabled"])
def test_modes_that_reset_within_the_step_have_no_phantoms(mode, device):
    _, steps = play(scripted(mode, device=device), 6)
    assert column(steps, "valid").all()
    done = column(steps, "terminated")
    assert done[:, 0].tolist() == [False, True] * 3
    assert column(steps, "episode_return")[done].tolist() == [2, 2, 2]
    assert [float(s.obs) for s in steps] == [1, 100, 101, 200, 201, 300]
    assert [float(s.final_obs) for s in steps] == [1, 2, 101, 102, 201, 202]


def test_an_action_in_a_masked_step_changes_nothing():
    def run(masked_action: int) -> tuple:
        policy, params = policy_for(env := scripted("next_step", rows=2, lengths=(3, 2)))
        noise = policy.noise(rng.key(5), 9, 2)
        valid = host_rollout(scripted("next_step", rows=2, lengths=(3, 2)), policy, params, noise=noise).metrics["valid"]
        push = torch.where(valid.unsqueeze(-1), 0.0, 1e6) * torch.tensor([1.0 - masked_action, masked_action])
        got = host_rollout(env, policy, params, noise=noise + push)
        assert (got.raw[~valid] == masked_action).all()
        value = policy.value(params, torch.cat([got.obs, env.obs[None]])).detach()
        return got, compute_gae(got.reward, value, got.terminated, got.truncated, gamma=0.9, gae_lambda=0.9, final_value=value[1:], valid=valid)

    (a, gae_a), (b, gae_b) = run(0), run(1)
    assert torch.equal(gae_a.advantage, gae_b.advantage)
    valid = a.metrics["valid"]
    assert torch.equal(a.action[valid], b.action[valid])
    assert torch.equal(a.obs, b.obs)


def transitions(env: HostEnv, steps: int) -> list[list[tuple]]:
    """Valid transitions by row, under a behaviour that depends on the row's own observation alone."""
    act = lambda obs: (torch.sin(1e3 * obs.sum(-1)) > 0).to(torch.int64)
    obs, played = play(env, steps, act)
    rows: list[list[tuple]] = [[] for _ in range(env.num_envs)]
    for s in played:
        for i in range(env.num_envs):
            if s.metrics["valid"][i]:
                numbers = (s.reward, s.terminated, s.truncated, s.metrics["episode_return"], s.metrics["episode_length"])
                rows[i].append((*obs[i].tolist(), *s.final_obs[i].tolist(), *(float(x[i]) for x in numbers)))
        obs = s.obs
    env.close()
    return rows


@settings(max_examples=5)
@given(seed=st.integers(0, 2**31), limit=st.integers(1, 30))
def test_all_modes_give_the_same_transitions(seed, limit):
    made = [transitions(gymnasium_env("CartPole-v1", 3, autoreset=mode, seed=seed, max_episode_steps=limit), 40) for mode in MODES]
    assert made[0] == made[2]
    for row, other in zip(made[0], made[1], strict=True):
        assert len(other) < len(row) == 40
        assert other == row[: len(other)]
        assert len(other) >= 20


@pytest.mark.parametrize("mode", MODES)
def test_processes_give_what_one_process_gives(mode):
    made = [transitions(gymnasium_env("CartPole-v1", 2, autoreset=mode, vectorization=how, seed=3, max_episode_steps=11), 25) for how in ("sync", "async")]
    assert made[0] == made[1]


def test_the_environments_own_vector_version():
    env = gymnasium_env("CartPole-v1", 3, vectorization="vector_entry_point", max_episode_steps=4)
    assert env.autoreset == "next_step"
    _, steps = play(env, 10)
    assert column(steps, "valid")[:, 0].tolist() == [True] * 4 + [False] + [True] * 4 + [False]
    assert column(steps, "truncated")[:, 0].tolist() == [False] * 3 + [True] + [False] * 4 + [True, False]
    with pytest.raises(ValueError, match="'next_step', got autoreset='same_step'"):
        gymnasium_env("CartPole-v1", 3, vectorization="vector_entry_point", autoreset="same_step")


def test_an_environment_says_its_mode():
    silent = Fake()
    silent.metadata = {}
    with pytest.raises(ValueError, match="does not say.*pass autoreset="):
        HostEnv(silent)
    assert HostEnv(silent, autoreset="next_step").autoreset == "next_step"
    with pytest.raises(ValueError, match="'same_step', got autoreset='disabled'"):
        HostEnv(Fake(), autoreset="disabled")
    with pytest.raises(ValueError, match="autoreset must be one of same_step, next_step, disabled, got 'no'"):
        HostEnv(Fake(), autoreset="no")


# ---- final observations ----


@pytest.mark.parametrize("mode", MODES)
def test_truncation_bootstraps_from_the_final_observation(mode, device):
    """V(o) = o: 100 e + t. The step from 0 to 1 is truncated and the next episode begins at 100."""
    env = scripted(mode, device=device, lengths=(1,), ends="truncated")
    first, steps = play(env, 1)
    assert steps[0].truncated.all()
    assert not steps[0].terminated.any()
    value = lambda obs: torch.where(obs == 0, 7.0, torch.where(obs == 1, 2.0, obs))[..., 0]
    values = torch.stack([value(first), value(steps[-1].obs)])
    gae = compute_gae(
        torch.zeros(1, 1, device=device),
        values,
        column(steps, "terminated"),
        column(steps, "truncated"),
        gamma=0.9,
        gae_lambda=0.8,
        final_value=value(column(steps, "final_obs")),
        valid=column(steps, "valid"),
    )
    torch.testing.assert_close(gae.advantage, torch.full((1, 1), -5.2, device=device), rtol=tolerance(torch.float32), atol=0)


class Fake(VectorEnv):
    """Two rows that reset within the step; row 1 alone ends, every second step. Says what it is told to say of the final observation."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
    single_observation_space = spaces.Box(-100.0, 100.0, (2,), dtype=np.float32)
    single_action_space = spaces.Discrete(2)
    num_envs = 2

    def __init__(self, ends="truncated", say=lambda obs, done: {}):
        self.ends, self.say, self.t = ends, say, 0
        self.buffer = np.zeros((2, 2), dtype=np.float32)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        self.buffer[:] = 0
        return self.buffer, {}

    def step(self, actions):
        self.t += 1
        self.buffer += 1
        done = np.array([False, self.t % 2 == 0])
        info = self.say(self.buffer.copy(), done)
        self.buffer[done] = 0
        flags = {"terminated": done & False, "truncated": done & False, self.ends: done}
        return self.buffer, np.ones(2), flags["terminated"], flags["truncated"], info


def objects(obs: np.ndarray, done: np.ndarray) -> dict:
    return {"final_obs": np.array([x if d else None for x, d in zip(obs, done, strict=True)], dtype=object)} if done.any() else {}


def test_a_missing_final_observation_is_refused():
    env = HostEnv(Fake())
    env.reset()
    env.step(torch.zeros(2, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="Fake truncated row 1 and did not tell.*missing_final_obs='pre_step'"):
        env.step(torch.zeros(2, dtype=torch.int64))


def test_a_missing_final_observation_is_replaced_after_one_warning():
    env = HostEnv(Fake(), missing_final_obs="pre_step")
    env.reset()
    env.step(torch.zeros(2, dtype=torch.int64))
    with pytest.warns(RuntimeWarning, match="observation before the step stands in"):
        step = env.step(torch.zeros(2, dtype=torch.int64))
    assert step.final_obs.tolist() == [[2, 2], [1, 1]]
    assert step.obs.tolist() == [[2, 2], [0, 0]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        play(env, 4)
    with pytest.raises(ValueError, match="missing_final_obs must be one of refuse, pre_step, got 'reset'"):
        HostEnv(Fake(), missing_final_obs="reset")


def test_a_terminated_row_needs_none():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, steps = play(HostEnv(Fake(ends="terminated")), 6)
    assert int(column(steps, "terminated").sum()) == 3


@pytest.mark.parametrize(
    "say",
    [
        objects,
        lambda obs, done: {"final_obs": [x if d else None for x, d in zip(obs, done, strict=True)]},
        lambda obs, done: {"final_observation": obs},
        lambda obs, done: {"final_obs": np.where(done[:, None], obs, np.nan).astype(np.float32), "_final_obs": done},
    ],
    ids=["objects", "list", "full", "masked"],
)
def test_final_observations_in_every_form(say):
    env = HostEnv(Fake(say=say))
    env.reset()
    env.step(torch.zeros(2, dtype=torch.int64))
    step = env.step(torch.zeros(2, dtype=torch.int64))
    assert step.final_obs.tolist() == [[2, 2], [2, 2]]
    assert step.obs.tolist() == [[2, 2], [0, 0]]


def test_results_are_not_views_of_a_buffer_that_the_environment_writes_again():
    env = HostEnv(Fake(say=objects))
    first = env.reset()
    steps = [env.step(torch.zeros(2, dtype=torch.int64)) for _ in range(3)]
    assert first.tolist() == [[0, 0], [0, 0]]
    assert column(steps, "obs")[:, 0, 0].tolist() == [1, 2, 3]


# ---- resets ----


@pytest.mark.parametrize("mode", MODES)
def test_a_row_that_is_not_finite_ends_is_counted_and_starts_anew(mode):
    env = HostEnv(
        SyncVectorEnv([lambda: Scripted(lengths=(9,), nan_at=(0, 2)), lambda: Scripted(lengths=(9,))], autoreset_mode=getattr(AutoresetMode, mode.upper()))
    )
    _, steps = play(env, 4)
    assert column(steps, "nonfinite").tolist() == [[False, False], [True, False], [False, False], [False, False]]
    assert torch.equal(column(steps, "terminated"), column(steps, "nonfinite"))
    assert column(steps, "obs")[:, 0, 0].tolist() == [1, 100, 101, 102]
    assert column(steps, "obs")[:, 1, 0].tolist() == [1, 2, 3, 4]
    assert column(steps, "episode_return")[2:].tolist() == [[1, 3], [2, 4]]
    assert column(steps, "episode_length").tolist() == [[1, 1], [2, 2], [1, 3], [2, 4]]
    assert column(steps, "valid").all()


def test_disabled_needs_partial_resets():
    class Deaf(Fake):
        metadata = {"autoreset_mode": AutoresetMode.DISABLED}

    with pytest.raises(RuntimeError, match="reset rows that it was not asked to .row 0.*reset_mask"):
        play(HostEnv(Deaf()), 2)


@pytest.mark.parametrize("mode", MODES)
def test_statistics_start_over_with_every_reset(mode):
    env = scripted(mode, lengths=(2, 5))
    play(env, 1)
    assert env.step(torch.zeros(1, dtype=torch.int64)).metrics["episode_length"].tolist() == [2]  # done
    env.reset()
    steps = play(env, 2)[1]
    assert column(steps, "valid").all()
    assert column(steps, "episode_length")[:, 0].tolist() == [1, 2]
    assert column(steps, "episode_return")[:, 0].tolist() == [1, 2]


def test_seeds_are_honoured():
    raw = gymnasium.make_vec("Pendulum-v1", num_envs=3, vectorization_mode="sync")
    want, _ = raw.reset(seed=11)
    env = gymnasium_env("Pendulum-v1", 3, seed=11)
    assert env.obs.tolist() == want.tolist()
    second = env.reset()
    assert second.tolist() != want.tolist()
    assert env.reset(seed=11).tolist() == want.tolist()
    assert env.reset().tolist() == second.tolist()
    for bad in (True, 1.5, "1"):
        with pytest.raises(TypeError, match="seed must be an integer"):
            env.reset(seed=bad)
    with pytest.raises(ValueError, match="seed must be at least 0"):
        gymnasium_env("Pendulum-v1", 1, seed=-1)


def test_rows_seeded_from_a_key_do_not_depend_on_their_number():
    key = rng.key(4)
    few, many = (gymnasium_env("Pendulum-v1", n).reset(key) for n in (2, 5))
    assert few.tolist() == many[:2].tolist()
    assert len({tuple(row) for row in many.tolist()}) == 5
    # Rows with equal keys start equally; the call is that of a functional environment.
    env = gymnasium_env("Pendulum-v1", 4)
    pairs = env.reset(env.row_keys(key)[[0, 0, 1, 1]], env.default_params)
    assert pairs.tolist() == many[[0, 0, 1, 1]].tolist()
    with pytest.raises(ValueError, match=r"a key \[2\] or keys \[4, 2\], got shape \[3, 2\]"):
        env.reset(env.row_keys(key)[:3])
    assert gymnasium_env("Pendulum-v1", 2).reset(rng.key(5)).tolist() != few.tolist()
    assert gymnasium_env("CartPole-v1", 2, vectorization="vector_entry_point").reset(key).shape == (2, 4)


def test_order_of_calls():
    env = scripted()
    with pytest.raises(RuntimeError, match="reset comes before the first step"):
        env.step(torch.zeros(1, dtype=torch.int64))
    with env:
        env.reset()
    env.close()
    for call in (env.reset, lambda: env.step(torch.zeros(1, dtype=torch.int64))):
        with pytest.raises(RuntimeError, match="is closed"):
            call()


# ---- actions ----


@pytest.mark.parametrize(("n", "start"), [(3, -1), (2, 10), (1, 2)])
def test_discrete_start_offsets(n, start):
    env = scripted(rows=4, lengths=(5,), action_space=spaces.Discrete(n, start=start))
    policy, params = policy_for(env)
    got = host_rollout(env, policy, params, key=rng.key(1), num_steps=30)
    received = {int(a) for inner in env.env.envs for a in inner.received}
    assert received == set(range(start, start + n))
    assert set(got.raw.flatten().tolist()) == set(range(n))
    assert torch.equal(got.action, got.raw + start)
    dist = policy.apply(params, got.obs)
    torch.testing.assert_close(policy.distribution.log_prob(dist, got.raw), got.log_prob, rtol=0, atol=tolerance(torch.float32, 100))
    with pytest.raises(ValueError, match=f"outside Discrete.*from {start + n} to {start + n}"):
        env.step(torch.full((4,), start + n))


def test_other_discrete_actions():
    env = scripted(rows=3, action_space=spaces.MultiDiscrete([2, 3], start=[5, -1]))
    policy, params = policy_for(env)
    host_rollout(env, policy, tree.map(torch.zeros_like, params), key=rng.key(1), num_steps=40)
    assert {tuple(int(x) for x in a) for inner in env.env.envs for a in inner.received} == {(i, j) for i in (5, 6) for j in (-1, 0, 1)}
    env = scripted(rows=3, action_space=spaces.MultiBinary(2))
    policy, params = policy_for(env)
    host_rollout(env, policy, tree.map(torch.zeros_like, params), key=rng.key(1), num_steps=40)
    assert {tuple(int(x) for x in a) for inner in env.env.envs for a in inner.received} == {(i, j) for i in (0, 1) for j in (0, 1)}
    with pytest.raises(TypeError, match="must be integers, got torch.float32"):
        env.step(torch.zeros(3, 2))
    with pytest.raises(ValueError, match=r"shape \[3, 2\], got torch.Size\(\[3\]\)"):
        env.step(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(TypeError, match="actions of Dict have no form"):
        scripted(action_space=spaces.Dict(a=spaces.Discrete(2)))


BOX = spaces.Box(np.array([0, -math.pi / 4], dtype=np.float32), np.array([5, math.pi / 4], dtype=np.float32))


def test_actions_are_clipped_to_the_box_and_scored_as_sampled():
    env = scripted(rows=4, action_space=BOX)
    policy, params = policy_for(env, initial_action_std=3.0)
    noise = policy.noise(rng.key(2), 20, 4)
    free = host_rollout(env, policy, params, noise=noise)
    received = np.array([inner.received for inner in env.env.envs]).transpose(1, 0, 2)
    np.testing.assert_array_equal(received, np.clip(free.action.numpy(), BOX.low, BOX.high))
    assert (free.action < torch.as_tensor(BOX.low)).any()
    clipped = host_rollout(scripted(rows=4, action_space=BOX), policy, params, noise=noise, clip_actions=True)
    np.testing.assert_array_equal(clipped.action.numpy(), received)
    assert torch.equal(clipped.raw, free.raw)
    assert torch.equal(clipped.log_prob, free.log_prob)


def test_squashed_actions_fill_an_asymmetric_box():
    env = scripted(rows=8, action_space=BOX)
    policy, params = policy_for(env, distribution="tanh_normal", initial_action_std=5.0)
    got = host_rollout(env, policy, params, key=rng.key(2), num_steps=30)
    low, high = torch.as_tensor(BOX.low), torch.as_tensor(BOX.high)
    assert ((got.action >= low) & (got.action <= high)).all()
    assert (got.action.flatten(0, 1).amin(0) < low + 0.01).all()
    assert (got.action.flatten(0, 1).amax(0) > high - 0.01).all()
    received = np.array([inner.received for inner in env.env.envs]).transpose(1, 0, 2)
    np.testing.assert_array_equal(received, got.action.numpy())


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-math.inf, math.inf, (2,)),
        spaces.Box(0.0, math.inf, (1,)),
        spaces.Box(np.array([-1, -np.inf], dtype=np.float32), np.array([1, np.inf], dtype=np.float32)),
        spaces.Box(-3.4e38, 3.4e38, (1,)),
        spaces.Box(-1.0, 1.0, (2, 3)),
        spaces.Box(-1.0, 1.0, (2,), dtype=np.float64),
    ],
    ids=str,
)
def test_boxes_without_bounds_or_of_other_shapes(space):
    env = scripted(rows=2, action_space=space)
    assert env.single_action_space.shape == (math.prod(space.shape),)
    policy, params = policy_for(env)
    got = host_rollout(env, policy, params, key=rng.key(3), num_steps=12)
    assert torch.isfinite(got.log_prob).all()
    received = np.array([inner.received for inner in env.env.envs]).transpose(1, 0, *range(2, 2 + len(space.shape)))
    want = np.clip(got.action.numpy().reshape(received.shape), space.low, space.high)
    np.testing.assert_allclose(received, want, rtol=0, atol=0)


# ---- observations ----


def test_float64_observations_keep_their_digits_for_the_statistics():
    values = [np.array([1e8]), np.array([1e8 + 1])]
    env = declared(spaces.Box(-np.inf, np.inf, (1,), dtype=np.float64), values)
    normalizer = running_normalizer(1)
    policy, params = policy_for(env)
    got = host_rollout(env, policy, params, normalizer.init(), key=rng.key(0), num_steps=8, normalizer=normalizer)
    assert got.obs.dtype == torch.float64
    state = normalizer.update(normalizer.init(), got.obs)
    assert float(state.mean) == 1e8 + 0.5
    assert float(variance(state)) == 0.25
    got = host_rollout(env, policy, params, state, key=rng.key(0), num_steps=8, normalizer=normalizer)
    assert got.log_prob.dtype == got.reward.dtype == torch.float32
    view = normalizer.prepare(state, torch.float32)
    x = normalizer.apply(view, got.obs).to(torch.float32)
    assert x.unique().tolist() == [-1, 1]
    assert torch.equal(policy.distribution.log_prob(policy.apply(params, x), got.raw), got.log_prob)
    # Without a normalizer the policy sees, and the rollout holds, its own dtype.
    assert host_rollout(env, policy, params, key=rng.key(0), num_steps=2).obs.dtype == torch.float32


@pytest.mark.parametrize(
    ("space", "value", "want", "dtype"),
    [
        (spaces.Box(0, 255, (2,), dtype=np.uint8), np.array([3, 250], dtype=np.uint8), [3, 250], torch.float32),
        (spaces.Box(-5, 5, (2, 2), dtype=np.int64), np.array([[1, -2], [3, 4]]), [1, -2, 3, 4], torch.float64),
        (spaces.Box(0, 2**32 - 1, (1,), dtype=np.uint32), np.array([2**32 - 1], dtype=np.uint32), [2**32 - 1], torch.float64),
        (spaces.Box(-1, 1, (), dtype=np.float32), np.float32(0.5), [0.5], torch.float32),
        (spaces.Box(-1, 1, (1,), dtype=np.float32), np.array([0.1]), [float(np.float32(0.1))], torch.float32),
        (spaces.Discrete(3, start=-1), 1, [0, 0, 1], torch.float32),
        (spaces.MultiDiscrete([2, 3], start=[0, 5]), np.array([1, 6]), [0, 1, 0, 1, 0], torch.float32),
        (spaces.MultiBinary(3), np.array([1, 0, 1], dtype=np.int8), [1, 0, 1], torch.float32),
    ],
    ids=["uint8", "int64", "uint32", "number", "declared float32", "discrete", "multi-discrete", "multi-binary"],
)
@pytest.mark.filterwarnings("ignore:.*precision lowered")
def test_observations_become_numbers(space, value, want, dtype):
    env = declared(space, [value])
    obs = env.reset()
    assert obs.dtype == dtype
    assert obs.tolist() == [want, want]
    assert env.single_observation_space.shape == (len(want),)
    assert env.single_observation_space.contains(obs[0].numpy())
    policy, params = policy_for(env)
    normalizer = running_normalizer(policy.obs_dim)
    got = host_rollout(env, policy, params, normalizer.init(), key=rng.key(0), num_steps=3, normalizer=normalizer)
    assert normalizer.apply(normalizer.init(), got.obs).is_floating_point()
    assert got.log_prob.dtype == torch.float32


def test_dict_observations_in_any_order():
    parts = {"b": spaces.Box(-1.0, 1.0, (2,)), "a": spaces.Discrete(3), "c": spaces.Dict(z=spaces.MultiBinary(2), y=spaces.Box(-1.0, 1.0, (1,)))}
    results = []
    for names in ("bac", "cab"):
        env = declared(spaces.Dict({name: parts[name] for name in names}), rows=3)
        policy, params = policy_for(env, obs_groups={"actor": ["c.y", "a"]})
        env.reset(seed=1)
        got = host_rollout(env, policy, params, key=rng.key(0), num_steps=5)
        assert policy.obs_dim == 4
        assert {name: tuple(x.shape) for name, x in tree.items(got.obs)} == {"a": (5, 3, 3), "b": (5, 3, 2), "c.y": (5, 3, 1), "c.z": (5, 3, 2)}
        results.append((policy.obs_groups, env.single_observation_space["c"].shape, policy, params))
        x = torch.cat([got.obs["c"]["y"], got.obs["a"]], -1)
        scored = policy.distribution.log_prob(policy.apply(params, x), got.raw)
        torch.testing.assert_close(scored, got.log_prob, rtol=0, atol=tolerance(torch.float32, 100))
    ended = declared_dict_that_ends()
    _, steps = play(ended, 2)
    assert steps[1].truncated.all()
    assert steps[1].final_obs["t"].tolist() == [[2.0]]
    assert steps[1].obs["t"].tolist() == [[0.0]]


def declared_dict_that_ends() -> HostEnv:
    class Ends(Scripted):
        observation_space = spaces.Dict(t=spaces.Box(-1.0, 9.0, (1,)), s=spaces.Discrete(4))

        def _obs(self):
            return {"s": self.t, "t": np.array([self.t], dtype=np.float32)}

    return HostEnv(SyncVectorEnv([lambda: Ends(ends="truncated")], autoreset_mode=AutoresetMode.SAME_STEP))


def test_spaces_without_an_encoding_are_refused():
    with pytest.raises(TypeError, match="observations of Text have no encoding"):
        declared(spaces.Text(3), ["abc"])
    with pytest.raises(TypeError, match="wraps a gymnasium.vector environment"):
        HostEnv(gymnasium.make("CartPole-v1"))
    with pytest.raises(ValueError, match="dtype must be torch.float32 or torch.float64"):
        HostEnv(Fake(), dtype=torch.float16)


def test_float64_runs_end_to_end():
    env = gymnasium_env("Pendulum-v1", 2, seed=0, dtype=torch.float64)
    policy, _ = policy_for(env)
    params = policy.init(rng.key(0), dtype=torch.float64)
    got = host_rollout(env, policy, params, key=rng.key(0), num_steps=4)
    assert {x.dtype for x in tree.floating(got)} == {torch.float64}


# ---- metrics ----


@pytest.mark.parametrize("mode", MODES)
def test_metrics_are_those_before_the_reset(mode):
    _, steps = play(scripted(mode, rows=2, lengths=(3,)), 3)
    assert column(steps, "success").tolist() == [[False] * 2, [True] * 2, [False] * 2]
    assert column(steps, "t").tolist() == [[1, 1], [2, 2], [3, 3]]
    assert column(steps, "success").dtype == torch.bool


def test_metrics_that_come_late_are_nan_before():
    class Late(Scripted):
        def step(self, action):
            *rest, _ = super().step(action)
            return *rest, {"metrics": {"late": 2.0, "vector": np.zeros(3)}, "is_success": True, "text": "x"} if self.t == 2 else {}

    env = HostEnv(SyncVectorEnv([lambda: Late(lengths=(4,)), lambda: Late(lengths=(2,))], autoreset_mode=AutoresetMode.SAME_STEP))
    policy, params = policy_for(env)
    got = host_rollout(env, policy, params, key=rng.key(0), num_steps=4)
    assert set(got.metrics) == {"late", "success", "episode_return", "episode_length", "nonfinite", "valid"}
    assert torch.nan_to_num(got.metrics["late"], nan=-1).tolist() == [[-1, -1], [2, 2], [-1, -1], [-1, 2]]
    assert got.metrics["success"].tolist() == [[False, False], [True, True], [False, False], [False, True]]


def test_a_reserved_metric_name_is_refused():
    class Clash(Scripted):
        def step(self, action):
            *rest, _ = super().step(action)
            return *rest, {"metrics": {"valid": 1.0}}

    env = HostEnv(SyncVectorEnv([Clash], autoreset_mode=AutoresetMode.SAME_STEP))
    env.reset()
    with pytest.raises(ValueError, match="metric name 'valid'"):
        env.step(torch.zeros(1, dtype=torch.int64))


def test_finished_episodes_enter_the_window_once():
    for mode, episodes in (("same_step", 3), ("next_step", 2)):
        env = scripted(mode, rows=2)
        policy, params = policy_for(env)
        got = host_rollout(env, policy, params, key=rng.key(0), num_steps=6)
        window, sums = track(empty_window(torch.float32, torch.device("cpu")), got, complete=False)
        metrics = episode_metrics(window, sums)
        assert int(metrics["episodes"]) == 2 * episodes
        assert float(metrics["episode_reward_avg_100"]) == float(metrics["episode_length_avg_100"]) == 2


# ---- objects with the stateful protocol ----


class Stateful:
    """Torch tensors in and out, rows reset within the step, one buffer used again and again."""

    def __init__(self, num_envs=3, device="cpu", final=True, named=False):
        self.num_envs, self.device, self.final, self.named = num_envs, torch.device(device), final, named
        box = spaces.Box(-100.0, 100.0, (2,))
        self.single_observation_space = spaces.Dict(x=box) if named else box
        self.single_action_space = spaces.Box(-1.0, 1.0, (2,))
        self.buffer = torch.zeros(num_envs, 2, device=self.device)
        self.seeds: list = []
        self.closed = 0

    def _obs(self):
        return TensorDict({"x": self.buffer}, batch_size=[self.num_envs]) if self.named else self.buffer

    def reset(self, *, seed=None, options=None):
        self.seeds.append(seed)
        self.buffer.zero_()
        self.t = 0
        return self._obs(), {}

    def step(self, action):
        assert isinstance(action, Tensor)
        self.buffer += action
        self.t += 1
        before = self.buffer.clone()
        cut = torch.arange(self.num_envs, device=self.device) == self.t % 2
        ended = torch.zeros_like(cut)
        info = {"success": cut, "metrics": {"distance": before.norm(dim=-1), "pair": before}}
        if self.final:
            info["final_obs"] = TensorDict({"x": before}, batch_size=[self.num_envs]) if self.named else before
        self.buffer[cut] = 0
        return self._obs(), before[:, 0], ended, cut, info

    def close(self):
        self.closed += 1


@pytest.mark.parametrize("named", [False, True])
def test_an_object_with_the_stateful_protocol(named, device):
    inner = Stateful(device=device, named=named)
    env = HostEnv(inner, device=device)
    assert env.autoreset == "same_step"
    assert env.spec.name == "Stateful"
    policy, params = policy_for(env)
    params = tree.map(lambda x: x.to(device), params)
    got = host_rollout(env, policy, params, key=rng.key(0, device), num_steps=4)
    obs, final = (got.obs["x"], got.final_obs["x"]) if named else (got.obs, got.final_obs)
    torch.testing.assert_close(final, obs + got.action.clamp(-1, 1))
    assert got.truncated[:, :2].tolist() == [[False, True], [True, False]] * 2
    assert set(got.metrics) == {"distance", "success", "episode_return", "episode_length", "nonfinite", "valid"}
    torch.testing.assert_close(got.metrics["distance"], final.norm(dim=-1))
    assert torch.equal(obs[1:], torch.where(got.truncated[:-1, :, None], 0.0, final[:-1]))
    env.reset(7)
    env.reset(rng.key(9))
    assert inner.seeds[:2] == [None, 7]
    assert isinstance(inner.seeds[2], int)
    env.close()
    env.close()
    assert inner.closed == 1


def test_an_object_without_final_observations():
    with pytest.raises(RuntimeError, match="Stateful truncated row 1 and did not tell"):
        play(HostEnv(Stateful(final=False)), 3, lambda obs: torch.ones(3, 2))
    env = HostEnv(Stateful(final=False), missing_final_obs="pre_step")
    with pytest.warns(RuntimeWarning, match="stands in"):
        _, steps = play(env, 3, lambda obs: torch.ones(3, 2))
    assert steps[1].final_obs.tolist() == [[1, 1], [1, 1], [2, 2]]  # row 0 is cut, row 1 began anew, row 2 goes on


# ---- rollouts ----


def test_the_trajectory_has_the_form_of_a_functional_one():
    assert FIELDS == ROLLOUT_FIELDS
    host, functional = gymnasium_env("CartPole-v1", 3, seed=0), build_learning_env("cartpole", num_envs=3)
    policy, params = policy_for(host)
    noise = policy.noise(rng.key(0), 5, 3)
    state = functional.reset(functional.row_keys(rng.key(0)), functional.default_params)
    _, want = make_unroll(functional, policy, mode="eager")(params, (), state, functional.default_params, noise)
    obs, got = make_host_unroll(host, policy, mode="eager")(params, (), host.obs, host.default_params, noise)
    for name in got._fields:
        if name != "metrics":
            a, b = getattr(got, name), getattr(want, name)
            assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device), name
    assert set(want.metrics) - {"success"} | {"valid"} == set(got.metrics)
    assert torch.equal(host.observe(obs, host.default_params), host.obs)
    assert torch.equal(obs, got.final_obs[-1])
    bare = host_rollout(host, policy, params, noise=noise, record=())
    assert [name for name, x in zip(bare._fields, bare, strict=True) if isinstance(x, Tensor)] == ["reward", "terminated", "truncated", "alive"]


def test_compiled_rollout_equals_eager():
    rolled = []
    for mode in ("aot_eager", "eager"):
        env = gymnasium_env("Pendulum-v1", 3, seed=2, max_episode_steps=4)
        policy, params = policy_for(env)
        normalizer = running_normalizer(3)
        norm_state = normalizer.update(normalizer.init(), torch.randn(50, 3, generator=torch.Generator().manual_seed(0)))
        before = tree.map(torch.clone, (params, norm_state))
        unroll = make_host_unroll(env, policy, normalizer, mode=mode)
        noise = policy.noise(rng.key(1), 10, 3)
        _, a = unroll(params, norm_state, (), (), noise[:5])
        _, b = unroll(params, norm_state, (), (), noise[5:])
        for x, y in zip(tree.leaves(before), tree.leaves((params, norm_state)), strict=True):
            assert torch.equal(x, y)
        rolled.append((a, b))
    for x, y in zip(tree.leaves(rolled[0]), tree.leaves(rolled[1]), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance(torch.float32, 1000), atol=tolerance(torch.float32, 1000), check_dtype=True)
    a, b = rolled[1]
    # The second rollout goes on where the first one stopped.
    assert a.truncated[3].all()
    assert a.metrics["episode_length"][4].tolist() == [1, 1, 1]
    assert b.metrics["episode_length"][0].tolist() == [2, 2, 2]
    assert torch.equal(a.alive, torch.tensor([True] * 4 + [False])[:, None].expand(5, 3))
    scored = policy.distribution.log_prob(policy.apply(params, normalizer.apply(norm_state, a.obs)), a.raw)
    torch.testing.assert_close(scored, a.log_prob, rtol=0, atol=tolerance(torch.float32, 100))


def test_deterministic_actions_are_the_mode():
    env = gymnasium_env("Pendulum-v1", 2, seed=2)
    policy, params = policy_for(env)
    got = host_rollout(env, policy, params, noise=torch.zeros(3, 2, 1), deterministic=True)
    torch.testing.assert_close(got.action, policy.distribution.mode(policy.apply(params, got.obs)), rtol=0, atol=tolerance(torch.float32, 100))
    assert got.raw == got.log_prob == ()


def test_differentiation_is_refused():
    env = gymnasium_env("Pendulum-v1", 2, seed=2)
    policy, params = policy_for(env)
    noise = policy.noise(rng.key(1), 2, 2)
    unroll = make_host_unroll(env, policy, mode="eager")
    with pytest.raises(TypeError, match="cannot be differentiated or mapped through"):
        torch.func.grad(lambda p: unroll(p, (), (), (), noise)[1].reward.sum())(params)
    with pytest.raises(TypeError, match="cannot be differentiated or mapped through"):
        torch.func.vmap(lambda p: unroll(p, (), (), (), noise)[1].reward)(tree.stack([params, params]))
    learning = tree.map(lambda x: x.requires_grad_(), params)
    assert not unroll(learning, (), (), (), noise)[1].log_prob.requires_grad
    with pytest.raises(TypeError, match="needs a functional one.*got HostEnv"):
        make_apg(env, policy, adam())  # pyright: ignore[reportArgumentType]


def test_bad_arguments_of_a_rollout():
    env = scripted(rows=2)
    policy, params = policy_for(env)
    with pytest.raises(ValueError, match="unknown trajectory field 'actions'"):
        make_host_unroll(env, policy, record=("actions",))
    with pytest.raises(TypeError, match="needs an action space with bounds"):
        make_host_unroll(env, policy, clip_actions=True)
    with pytest.raises(ValueError, match=r"noise must be \[T, 2, noise_dim\]"):
        host_rollout(env, policy, params, noise=torch.zeros(4, 3, 2))
    for wrong in ({}, {"key": rng.key(0)}, {"num_steps": 3}, {"noise": torch.zeros(1, 2, 2), "key": rng.key(0), "num_steps": 1}):
        with pytest.raises(ValueError, match="either noise, or key and num_steps"):
            host_rollout(env, policy, params, **wrong)


# ---- functional twins ----


def compare(env: HostEnv, functional: Any, state: Any, actions: Tensor, ops: int) -> None:
    """Step both with the same actions to the end of the functional one's first episode."""
    eps = tolerance(torch.float32, ops)
    params = functional.default_params
    alive = torch.ones(env.num_envs, dtype=torch.bool)
    for action in actions:
        got = env.step(action)
        state, want = functional.step(state, action, params)
        torch.testing.assert_close(got.final_obs[alive], want.final_obs[alive], rtol=eps, atol=eps)
        torch.testing.assert_close(got.reward[alive], want.reward[alive], rtol=eps, atol=10 * eps)
        assert torch.equal(got.terminated[alive], want.terminated[alive])
        assert torch.equal(got.truncated[alive], want.truncated[alive])
        assert torch.equal(got.metrics["episode_length"][alive], want.metrics["episode_length"][alive])
        alive = alive & ~(want.terminated | want.truncated)
    assert not alive.all()


def test_cartpole_is_gymnasiums():
    env = gymnasium_env("CartPole-v1", 4, seed=0, max_episode_steps=30)
    functional = make_vec_env(cartpole(max_episode_steps=30), 4)
    assert env.single_action_space == functional.single_action_space
    assert env.single_observation_space.shape == functional.single_observation_space.shape
    assert env.spec.max_episode_steps == 30
    state = functional.reset(functional.row_keys(rng.key(0)), functional.default_params)
    x = env.reset(seed=0)
    state = state._replace(env=CartPoleState(x=x[:, 0], x_dot=x[:, 1], theta=x[:, 2], theta_dot=x[:, 3]))
    steps = torch.arange(35)[:, None]
    compare(env, functional, state, torch.cat([steps % 2, steps % 2, steps * 0, (steps // 3) % 2], -1), 10_000)


def test_pendulum_is_gymnasiums():
    env = gymnasium_env("Pendulum-v1", 3, seed=1, max_episode_steps=25)
    functional = make_vec_env(pendulum(max_episode_steps=25), 3)
    state = functional.reset(functional.row_keys(rng.key(0)), functional.default_params)
    env.reset()
    inner = torch.as_tensor(np.array([e.unwrapped.state for e in env.env.envs]), dtype=torch.float32)
    state = state._replace(env=PendulumState(angle=inner[:, 0], angular_velocity=inner[:, 1]))
    actions = 3 * torch.sin(torch.arange(25.0)[:, None, None] + torch.arange(3.0)[None, :, None])
    compare(env, functional, state, actions, 100_000)


# ---- by name ----


def test_the_registry_builds_gymnasium_environments():
    env = build_learning_env("gymnasium:CartPole-v1", num_envs=2, device="cpu", autoreset="next_step", seed=3, max_episode_steps=7)
    assert isinstance(env, HostEnv)
    assert (env.spec.name, env.spec.max_episode_steps, env.spec.differentiable) == ("gymnasium:CartPole-v1", 7, False)
    assert (env.num_envs, env.autoreset, env.device) == (2, "next_step", torch.device("cpu"))
    assert env.obs.tolist() == gymnasium_env("CartPole-v1", 2, seed=3).obs.tolist()
    assert build_learning_env("Gymnasium:MountainCar-v0").spec.max_episode_steps == 200
    assert build_learning_env("gymnasium:gymnasium.envs:Pendulum-v1", g=1.0).env.envs[0].unwrapped.g == 1.0
    with pytest.raises(ValueError, match="unknown gymnasium environment 'CartPoel-v1'.*"):
        build_learning_env("gymnasium:CartPoel-v1")
    with pytest.raises(ValueError, match="unknown gymnasium environment ''"):
        build_learning_env("gymnasium:")
    for bad in (0, True, 1.0):
        with pytest.raises(ValueError, match="num_envs must be a positive integer"):
            build_learning_env("gymnasium:CartPole-v1", num_envs=bad)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="vectorization must be one of sync, async, vector_entry_point, got 'threads'"):
        build_learning_env("gymnasium:CartPole-v1", vectorization="threads")
    with pytest.raises(ValueError, match="autoreset must be one of"):
        build_learning_env("gymnasium:CartPole-v1", autoreset="later")


def test_what_a_registered_factory_makes_is_wrapped():
    register_learning_env("stateful_of_the_host_tests", lambda *, num_envs, device: Stateful(num_envs, device), override=True)
    env = build_learning_env("stateful_of_the_host_tests", num_envs=2)
    assert isinstance(env, HostEnv)
    assert (env.spec.name, env.num_envs) == ("stateful_of_the_host_tests", 2)
    register_learning_env("host_of_the_host_tests", lambda *, num_envs: gymnasium_env("CartPole-v1", num_envs), override=True)
    assert isinstance(build_learning_env("host_of_the_host_tests", num_envs=2).env, SyncVectorEnv)


class Threads(Scripted):
    def _obs(self):
        return np.array([torch.get_num_threads() if os.environ.get("OMP_NUM_THREADS") == "1" else -1], dtype=np.float32)


def test_workers_use_one_thread_and_the_caller_keeps_its_own(monkeypatch):
    gymnasium.register("ThreadsOfTheHostTests-v0", Threads)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with gymnasium_env("ThreadsOfTheHostTests-v0", 2, vectorization="async", vector_kwargs={"context": "fork"}) as env:
            assert env.obs.tolist() == [[1], [1]]
        assert torch.get_num_threads() == 2
        assert os.environ["OMP_NUM_THREADS"] == "3"
        gymnasium_env("ThreadsOfTheHostTests-v0", 1).close()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
        del gymnasium.registry["ThreadsOfTheHostTests-v0"]

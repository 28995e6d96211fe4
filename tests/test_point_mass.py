"""PointMass: golden step, reset laws, gradients, rows, dtypes and validation."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.func import grad, vmap

from frl import rng, tree
from frl.envs.point_mass import PointMassState, point_mass
from tests.tolerances import tolerance

SEEDS = st.integers(0, 2**32 - 1)


def rows(env, seed, n, params=None, device="cpu"):
    keys = rng.split(rng.key(seed).to(device), n)
    return vmap(env.reset, in_dims=(0, None))(keys, env.default_params if params is None else params)


def step_rows(env, state, action, params=None):
    return vmap(env.step, in_dims=(0, 0, None))(state, action, env.default_params if params is None else params)


def golden_state(dtype=torch.float32, device="cpu"):
    def t(x):
        return torch.tensor(x, dtype=dtype, device=device)

    return PointMassState(
        position=t([[0.1, -0.2], [0.5, 0.5]]),
        velocity=t([[0.3, 0.0], [0.0, -0.4]]),
        goal=t([[0.2, -0.1], [0.5, 0.495]]),
        last_action=t([[0.5, -0.5], [0.0, 0.0]]),
        obstacles=t([[[0.12, -0.2], [0.9, 0.9]], [[-0.5, 0.0], [0.0, -0.5]]]),
        radii=t([[0.1, 0.1], [0.12, 0.15]]),
        path_length=t([0.0, 0.0]),
        collisions=t([0.0, 0.0]),
    ), t([[1.5, -0.25], [0.1, 0.2]])


def one(state):
    return tree.index(state, 0)


@pytest.mark.parametrize("detach", [False, True])
def test_golden_step(device, detach):
    env = point_mass(success_bonus=5.0, detach_last_action=detach)
    params = tree.map(lambda x: x.to(device), env.default_params)
    state, action = golden_state(device=device)

    def total(a):
        new_state, outcome = step_rows(env, state, a, params)
        return outcome.reward.sum(), (new_state, outcome)

    gradient, (new, outcome) = grad(total, has_aux=True)(action)

    def close(got, want):
        torch.testing.assert_close(got.cpu(), torch.tensor(want), atol=2e-6, rtol=0)

    close(outcome.reward, [-0.142512, 5.497808])
    assert outcome.terminated.tolist() == outcome.metrics["success"].tolist() == [False, True]
    close(new.position, [[0.105972, -0.200347], [0.500139, 0.494167]])
    close(new.velocity[0], [0.358333, -0.020833])
    close(new.last_action[0], [1.0, -0.25])
    close(outcome.metrics["final_distance"], [0.137517, 0.000845])
    close(outcome.metrics["path_length"], [0.005982, 0.005835])
    close(outcome.metrics["collision_count"], [1.0, 0.0])
    close(gradient, [[0.0, 0.001171], [-0.000481, 0.001785]])


@given(seed=SEEDS, half=st.floats(0.1, 10.0))
def test_reset_ranges_and_clearance(seed, half):
    env = point_mass(workspace_half=half, obstacle_min_goal_distance=0.25 * half)
    s = rows(env, seed, 32)
    slack = half * (1 + tolerance(torch.float32))
    assert s.goal.abs().max() <= 0.7 * slack
    assert s.position.abs().max() <= 0.6 * slack
    assert s.obstacles.abs().max() <= 0.8 * slack
    assert s.radii.min() >= 0.08 * (1 - tolerance(torch.float32))
    assert s.radii.max() <= 0.15 * (1 + tolerance(torch.float32))
    clear = (s.obstacles - s.goal[:, None]).norm(dim=-1) > 0.25 * half * (1 - tolerance(torch.float32))
    fallback = (s.obstacles == -0.5 * s.goal[:, None]).all(-1)
    assert (clear | fallback).all()
    for zero in (s.velocity, s.last_action, s.path_length, s.collisions):
        assert not zero.any()


@given(seed=SEEDS, clearance=st.sampled_from([0.25, 0.7, 1.1]))
def test_obstacles_are_the_first_valid_candidates(seed, clearance):
    env = point_mass(obstacle_min_goal_distance=clearance, obstacle_candidates=3, dtype=torch.float64)
    key = rng.key(seed)
    state = env.reset(key, env.default_params)
    u = rng.uniform(key, (12,), dtype=torch.float64).tolist()
    goal = [0.7 * (2 * x - 1) for x in u[0:2]]
    proposals = [[0.8 * (2 * x - 1) for x in u[6 + 2 * c : 8 + 2 * c]] for c in range(3)]
    want = [p for p in proposals if math.dist(p, goal) > clearance][:2]
    want += [[-0.5 * g for g in goal]] * (2 - len(want))
    torch.testing.assert_close(state.obstacles, torch.tensor(want, dtype=torch.float64), atol=tolerance(torch.float64), rtol=0)


def test_obstacles_fall_back_when_no_candidate_is_valid():
    s = rows(point_mass(obstacle_min_goal_distance=10.0), 3, 16)
    assert torch.equal(s.obstacles, (-0.5 * s.goal)[:, None].expand(16, 2, 2))


def test_reset_distribution_is_uniform():
    s = rows(point_mass(), 0, 20000)
    for x, half in ((s.goal, 0.7), (s.position, 0.6)):
        assert abs(x.mean().item()) < 0.01
        assert abs(x.var().item() - half**2 / 3) < 0.01
    assert abs(s.radii.mean().item() - 0.115) < 1e-3


@given(seed=SEEDS, n=st.integers(1, 9), data=st.data())
def test_rows_are_independent_and_equivariant(seed, n, data):
    env = point_mass()
    state = rows(env, seed, n)
    action = rng.uniform(rng.key(seed), (n, 2), low=-1.5, high=1.5)
    full = step_rows(env, *step_rows(env, state, action)[:1], action)
    i = data.draw(st.integers(0, n - 1))
    alone = tree.map(lambda x: x[i : i + 1], state)
    single = step_rows(env, *step_rows(env, alone, action[i : i + 1])[:1], action[i : i + 1])
    order = torch.tensor(data.draw(st.permutations(range(n))))
    permuted = step_rows(env, *step_rows(env, tree.index(state, order), action[order])[:1], action[order])
    for whole, part, moved in zip(tree.leaves(full), tree.leaves(single), tree.leaves(permuted), strict=True):
        assert torch.equal(whole[i : i + 1], part)
        assert torch.equal(whole[order], moved)


def test_reset_of_a_row_does_not_depend_on_the_others():
    env = point_mass()
    for few, many in zip(tree.leaves(rows(env, 5, 3)), tree.leaves(rows(env, 5, 50)), strict=True):
        assert torch.equal(few, many[:3])


@given(seed=SEEDS)
def test_gradient_is_the_derivative(seed):
    env = point_mass(dtype=torch.float64)
    p = env.default_params
    u = rng.uniform(rng.key(seed), (12,), low=-1.0, high=1.0, dtype=torch.float64)
    state = one(golden_state(torch.float64)[0])._replace(
        position=0.3 * u[0:2], velocity=u[2:4], goal=0.3 * u[4:6], last_action=u[6:8], obstacles=(0.3 * u[8:12]).reshape(2, 2)
    )

    def two_steps(x):
        s, first = env.step(state._replace(position=x[:2], velocity=x[2:4]), x[4:6], p)
        s, second = env.step(s, x[6:8], p)
        return first.reward + 0.9 * second.reward + env.observe(s, p)[:8].sum()

    x = torch.cat((state.position, state.velocity, 0.9 * u[:4].flip(0)))
    state_1, _ = env.step(state, x[4:6], p)
    state_2, _ = env.step(state_1, x[6:8], p)
    for s in (state_1, state_2):  # away from the goal and from the rims and centres of obstacles
        reach = (s.position - s.obstacles).norm(dim=-1)
        assume((s.position - s.goal).norm() > 1e-2 and reach.min() > 1e-2 and (reach - s.radii).abs().min() > 1e-3)
    h = 1e-5
    central = torch.stack([(two_steps(x + h * e) - two_steps(x - h * e)) / (2 * h) for e in torch.eye(8, dtype=x.dtype)])
    torch.testing.assert_close(grad(two_steps)(x), central, atol=1e-7, rtol=1e-6)


def test_gradient_at_the_goal_is_finite():
    env = point_mass()
    state, _ = golden_state()
    state = state._replace(position=torch.zeros(2, 2), velocity=torch.zeros(2, 2), goal=torch.tensor([[0.0, 0.0], [-0.3, -0.4]]), last_action=torch.zeros(2, 2))
    state = state._replace(obstacles=torch.zeros(2, 2, 2))

    def total(position):
        return step_rows(env, state._replace(position=position), torch.zeros(2, 2))[1].reward.sum()

    gradient = grad(total)(state.position)
    torch.testing.assert_close(gradient, -torch.tensor([[0.0, 0.0], [0.6, 0.8]]), atol=1e-6, rtol=0)


def test_last_action_gradient_and_its_option():
    state, action = golden_state()

    def remembered(env):
        def total(a):
            new, _ = env.step(one(state), a, env.default_params)
            return env.observe(new, env.default_params)[6:8].sum()

        return grad(total)(torch.tensor([0.25, 1.5]))

    assert remembered(point_mass()).tolist() == [1.0, 0.0]
    assert remembered(point_mass(detach_last_action=True)).tolist() == [0.0, 0.0]


def test_walls_and_saturated_actions_pass_no_gradient_and_keep_the_velocity():
    env = point_mass()
    state = one(golden_state()[0])._replace(position=torch.tensor([0.99, 0.0]), velocity=torch.tensor([2.0, 0.0]))

    def final(a):
        new, _ = env.step(state, a, env.default_params)
        return new.position.sum(), new

    gradient, new = grad(final, has_aux=True)(torch.tensor([0.5, 0.5]))
    assert new.position[0] == 1.0
    assert new.velocity[0] > 1.8
    assert gradient[0] == 0.0
    assert gradient[1] > 0.0
    assert grad(final, has_aux=True)(torch.tensor([0.5, -1.01]))[0].tolist() == [0.0, 0.0]


def test_metrics_accumulate_and_carry_no_gradient():
    env = point_mass()
    state = one(golden_state()[0])._replace(velocity=torch.tensor([0.0, 0.0]))
    positions = [state.position]

    def play(a):
        s, outcome = state, None
        for _ in range(3):
            s, outcome = env.step(s, a, env.default_params)
            positions.append(s.position)
        return outcome.metrics

    metrics = play(torch.tensor([1.0, 0.3]))
    length = sum((b - a).norm() for a, b in zip(positions, positions[1:], strict=False))
    torch.testing.assert_close(metrics["path_length"], length)
    assert metrics["collision_count"] == 3.0
    for name in ("final_distance", "path_length", "collision_count"):
        assert not grad(lambda a, name=name: play(a)[name])(torch.tensor([1.0, 0.3])).any()


def test_parameters_are_differentiable_and_may_differ_by_row():
    env = point_mass(success_bonus=2.0, dtype=torch.float64)
    state, action = golden_state(torch.float64)

    def total(values):
        return step_rows(env, state, action, type(env.default_params)(*values))[1].reward.sum()

    values, h = torch.stack(list(env.default_params)), 1e-6
    central = torch.stack([(total(values + h * e) - total(values - h * e)) / (2 * h) for e in torch.eye(10, dtype=torch.float64)])
    gradient = grad(total)(values)
    torch.testing.assert_close(gradient, central, atol=1e-8, rtol=1e-7)
    assert gradient[:4].ne(0).all(), "mass, force, damping and dt all matter"
    assert gradient[5] == 1.0, "one row takes the bonus"

    by_row = tree.map(lambda x: torch.stack((x, 1.1 * x)), env.default_params)
    both = vmap(env.step)(state, action, by_row)
    for i in range(2):
        alone = env.step(tree.index(state, i), action[i], tree.index(by_row, i))
        for got, want in zip(tree.leaves(both), tree.leaves(alone), strict=True):
            torch.testing.assert_close(got[i], want, atol=0, rtol=tolerance(torch.float64, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dtype_follows_and_shapes_match_the_spaces(dtype):
    env = point_mass(dtype=dtype)
    state = env.reset(rng.key(1), env.default_params)
    new, outcome = env.step(state, torch.zeros(2, dtype=dtype), env.default_params)
    tree.check_same(new, state, "state")
    assert {x.dtype for x in tree.leaves(new)} == {dtype}
    assert outcome.reward.dtype == dtype
    assert outcome.reward.shape == outcome.terminated.shape == ()
    obs = env.observe(new, env.default_params)
    assert env.observation_space.contains(obs.numpy())
    assert torch.equal(obs, torch.cat([x.flatten() for x in new[:6]]))
    assert env.action_space.contains(torch.ones(2, dtype=dtype).numpy())


def test_step_leaves_its_arguments_alone():
    env = point_mass()
    state, action = golden_state()
    before = tree.map(torch.clone, (state, action, env.default_params))
    step_rows(env, state, action)
    for a, b in zip(tree.leaves(before), tree.leaves((state, action, env.default_params)), strict=True):
        assert torch.equal(a, b)


def test_compiled_with_rows_last_equals_eager():
    env = point_mass(success_bonus=1.0)
    keys = rng.split(rng.key(2), 8)
    action = rng.uniform(rng.key(3), (8, 2), low=-1.2, high=1.2)

    def value_and_grad(keys, action, dim):
        def total(a):
            state = vmap(env.reset, in_dims=(0, None), out_dims=dim)(keys, env.default_params)
            for _ in range(2):
                state, outcome = vmap(env.step, in_dims=(dim, dim, None), out_dims=dim)(state, a, env.default_params)
            return outcome.reward.sum(), (state, outcome.reward)

        return grad(total, has_aux=True)(action)

    gradient, (state, reward) = value_and_grad(keys, action, 0)
    compiled = torch.compile(lambda k, a: value_and_grad(k, a, -1), backend="aot_eager", fullgraph=True)
    got_gradient, (got_state, got_reward) = compiled(keys, action.T.contiguous())
    close = {"atol": tolerance(torch.float32, 4), "rtol": tolerance(torch.float32, 4)}
    torch.testing.assert_close(got_gradient, gradient.T, **close)
    torch.testing.assert_close(got_reward, reward, **close)
    for got, want in zip(tree.leaves(got_state), tree.leaves(state), strict=True):
        torch.testing.assert_close(got, want.movedim(0, -1), **close)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("max_episode_steps", v) for v in (0, -1, True, 2.5)],
        *[("obstacle_candidates", v) for v in (0, True)],
        *[(n, v) for n in ("mass", "force_scale", "dt", "success_threshold", "workspace_half") for v in (0.0, -1.0, math.nan, math.inf, True, "1")],
        *[(n, v) for n in ("linear_damping", "success_bonus", "obstacle_min_goal_distance") for v in (-1e-9, math.nan, True, None)],
        *[("obstacle_radius_range", v) for v in ((0.1,), (0.0, 0.1), (0.2, 0.1), (0.1, math.inf), (True, 2), 0.1, "ab")],
        ("detach_last_action", 1),
        ("dtype", torch.int64),
    ],
)
def test_arguments_are_checked(name, value):
    with pytest.raises(ValueError, match=name):
        point_mass(**{name: value})


def test_action_of_a_wrong_shape_is_refused():
    env = point_mass()
    with pytest.raises(ValueError, match=r"shape \(2,\), got \(1,\)"):
        env.step(env.reset(rng.key(0), env.default_params), torch.zeros(1), env.default_params)


def test_spec():
    env = point_mass(max_episode_steps=7, dt=0.1)
    assert (env.spec.name, env.spec.max_episode_steps, env.spec.dt, env.spec.differentiable) == ("point_mass", 7, 0.1, True)
    assert point_mass(max_episode_steps=None).spec.max_episode_steps is None

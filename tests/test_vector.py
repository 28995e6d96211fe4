"""Rows: independence bit for bit, resets, the time limit, layouts, statistics and sick rows."""

# The stubs of torch.func know neither argnums nor has_aux, and wrong arguments are passed on purpose.
# pyright: reportCallIssue=false, reportAssignmentType=false, reportArgumentType=false, reportUnusedExpression=false

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, vmap

from frl import rng, tree
from frl.envs.double_integrator import double_integrator
from frl.envs.pendulum import pendulum
from frl.envs.point_mass import point_mass
from frl.envs.vector import RESERVED_METRICS, VecState, make_vec_env
from frl.types import Outcome
from tests.strategies import QUICK, SEEDS, ToyParams, assert_trees_close, assert_trees_equal, copy_of, draw, toy_env

ENVS = {
    "toy": lambda: toy_env(life=(2, 5)),
    "toy, limited": lambda: toy_env(life=(2, 9), max_episode_steps=3),
    "point_mass": lambda: point_mass(max_episode_steps=4, success_threshold=0.3),
    "double_integrator": lambda: double_integrator(dimensions=2, max_episode_steps=3, dtype=torch.float64),
    "pendulum": lambda: pendulum(max_episode_steps=3),
}


def begin(env, n, seed=0):
    vec = make_vec_env(env, n)
    return vec, vec.reset(vec.row_keys(rng.key(seed)), vec.default_params)


def actions(env, length, n, seed=0):
    """Row-wise draws, so that a row's actions do not depend on n."""
    size, dtype = env.action_space.shape[0], tree.floating(env.default_params)[0].dtype
    keys = rng.fold_in(rng.key(seed), torch.arange(n))
    return vmap(lambda key: rng.normal(key, (length, size), dtype=dtype))(keys).transpose(0, 1)


def play(vec, state, acts, params=None, **options):
    params = vec.default_params if params is None else params
    steps = []
    for action in acts:
        state, step = vec.step(state, action, params, **options)
        steps.append(step)
    return state, tree.stack(steps)


@pytest.mark.parametrize("name", ENVS)
def test_shapes_and_dtypes_stay(name):
    vec, state = begin(ENVS[name](), 3)
    before = copy_of(state)
    new, step = vec.step(state, actions(vec.env, 1, 3)[0], vec.default_params)
    assert_trees_equal(state, before)
    tree.check_same(new, state)
    assert step.reward.shape == step.terminated.shape == step.truncated.shape == (3,)
    assert step.terminated.dtype == step.truncated.dtype == torch.bool
    assert_trees_equal(tree.map(torch.zeros_like, step.obs), tree.map(torch.zeros_like, step.final_obs))
    assert tree.leaves(step.obs)[0].shape == (3, *vec.single_observation_space.shape)
    assert all(x.shape == (3,) for x in step.metrics.values())
    assert set(RESERVED_METRICS) <= set(step.metrics)


@pytest.mark.parametrize("name", ENVS)
@QUICK
@given(seed=SEEDS, n=st.integers(1, 6))
def test_a_row_does_not_depend_on_how_many_there_are(name, seed, n):
    env = ENVS[name]()
    few, a = begin(env, n, seed)
    many, b = begin(env, 7, seed)
    acts = actions(env, 6, 7, seed)
    a, steps_a = play(few, a, acts[:, :n])
    b, steps_b = play(many, b, acts)
    assert_trees_equal(a, tree.map(lambda x: x[:n], b))
    assert_trees_equal(steps_a, tree.map(lambda x: x[:, :n], steps_b))


@QUICK
@given(seed=SEEDS, order=st.permutations(range(5)))
def test_a_row_does_not_depend_on_the_others(seed, order):
    """Permuting rows permutes results, and changing the other rows' actions changes nothing."""
    vec, state = begin(toy_env(life=(2, 5)), 5, seed)
    acts, order = actions(vec.env, 8, 5, seed), torch.tensor(order)
    end, steps = play(vec, state, acts)
    end_p, steps_p = play(vec, tree.index(state, order), acts[:, order])
    assert_trees_equal(end_p, tree.index(end, order))
    assert_trees_equal(steps_p, tree.map(lambda x: x[:, order], steps))
    other = acts.clone()
    other[:, 1:] = math.nan
    _, alone = play(vec, state, other)
    assert_trees_equal(tree.map(lambda x: x[:, 0], alone), tree.map(lambda x: x[:, 0], steps))


@pytest.mark.parametrize("name", ENVS)
@QUICK
@given(seed=SEEDS)
def test_the_layout_with_rows_last_gives_the_same_bits(name, seed):
    vec, state = begin(ENVS[name](), 3, seed)
    acts = actions(vec.env, 5, 3, seed)
    end, steps = play(vec, state, acts)
    last = tree.map(lambda x: x.movedim(0, -1), state)
    end_last, steps_last = play(vec, last, acts.movedim(1, -1), rows=-1)
    assert_trees_equal(tree.map(lambda x: x.movedim(-1, 0), end_last), end)
    assert_trees_equal(tree.map(lambda x: x.movedim(-1, 1), steps_last), steps)
    assert_trees_equal(tree.map(lambda x: x.movedim(-1, 0), vec.observe(last, vec.default_params, rows=-1)), vec.observe(state, vec.default_params))


@pytest.mark.parametrize("rows", [0, -1])
@QUICK
@given(seed=SEEDS, length=st.integers(1, 9))
def test_resets_drawn_in_a_block_are_those_that_the_step_draws(rows, seed, length):
    vec, state = begin(toy_env(life=(1, 4)), 3, seed)
    acts = actions(vec.env, length, 3, seed)
    end, steps = play(vec, state, acts)
    fresh = vec.draw_resets(state, length, vec.default_params)
    assert all(x.shape[:2] == (length, 3) for x in tree.leaves(fresh))
    if rows == -1:
        state, fresh, acts = tree.map(lambda x: x.movedim(0, -1), state), tree.map(lambda x: x.movedim(1, -1), fresh), acts.movedim(1, -1)
    drawn = []
    for t in range(length):
        state, step = vec.step(state, acts[t], vec.default_params, fresh=tree.index(fresh, t), rows=rows)
        drawn.append(step)
    if rows == -1:
        state, drawn = tree.map(lambda x: x.movedim(-1, 0), state), [tree.map(lambda x: x.movedim(-1, 0), step) for step in drawn]
    assert_trees_equal(state, end)
    assert_trees_equal(tree.stack(drawn), steps)


def test_every_episode_of_every_row_starts_differently():
    """64 rows, 12 episodes each: all starts distinct, uniform within 4 standard errors; the same key gives the same ones."""
    vec, state = begin(toy_env(life=(1, 2)), 64)
    starts = [state.env.x]
    for action in actions(vec.env, 12, 64):
        state, step = vec.step(state, action, vec.default_params)
        assert bool(step.terminated.all())
        starts.append(state.env.x)
    values = torch.stack(starts).reshape(-1, 2)
    assert len({tuple(v) for v in values.tolist()}) == len(values)
    assert float(values.mean(0).abs().max()) < 4 / math.sqrt(3 * len(values))
    assert float((values.square().mean(0) - 1 / 3).abs().max()) < 4 * math.sqrt(4 / 45 / len(values))
    assert_trees_equal(begin(toy_env(life=(1, 2)), 64)[1], begin(toy_env(life=(1, 2)), 64)[1])
    assert not torch.equal(begin(toy_env(), 4, seed=1)[1].env.x, begin(toy_env(), 4, seed=2)[1].env.x)


@QUICK
@given(seed=SEEDS, limit=st.integers(1, 5))
def test_flags_and_statistics_against_a_loop_over_rows(seed, limit):
    """Both flags, the time limit, the observation before and after a reset, returns and lengths: row by row in plain Python."""
    env = toy_env(life=(2, 6), max_episode_steps=limit)
    vec, state = begin(env, 4, seed)
    acts = actions(env, 12, 4, seed)
    for i in range(4):
        row, key, resets, total, length = tree.index(state.env, i), state.key[i], 0, 0.0, 0
        live = state
        for t in range(12):
            live, step = vec.step(live, acts[t], vec.default_params)
            row, outcome = env.step(row, acts[t, i], env.default_params)
            total, length, resets = total + float(outcome.reward), length + 1, resets + 1
            done = bool(outcome.terminated) or length >= limit
            assert bool(step.terminated[i]) == bool(outcome.terminated)
            assert bool(step.truncated[i]) == (length >= limit)
            assert torch.equal(step.final_obs[i], row.x)
            assert torch.equal(step.reward[i], outcome.reward)
            assert float(step.metrics["episode_return"][i]) == pytest.approx(total, rel=1e-12)
            assert int(step.metrics["episode_length"][i]) == length
            assert not bool(step.metrics["nonfinite"][i])
            assert torch.equal(step.metrics["distance"][i], outcome.metrics["distance"])
            if done:
                row, total, length = env.reset(rng.fold_in(key, resets), env.default_params), 0.0, 0
            assert torch.equal(step.obs[i], row.x)
            assert_trees_equal(tree.index(live.env, i), row)
            assert float(live.episode_return[i]) == pytest.approx(total, rel=1e-12)
            assert int(live.elapsed[i]) == length


def test_both_flags_can_be_up_in_one_step():
    vec, state = begin(toy_env(life=(3, 4), max_episode_steps=3), 2)
    _, steps = play(vec, state, actions(vec.env, 3, 2))
    assert steps.terminated.tolist() == steps.truncated.tolist() == [[False] * 2, [False] * 2, [True] * 2]
    vec, state = begin(toy_env(life=(3, 4)), 2)
    assert not bool(play(vec, state, actions(vec.env, 9, 2))[1].truncated.any())


# -- parameters ------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, -1])
def test_parameters_may_differ_by_row(rows):
    env = toy_env(life=(2, 5))
    vec, state = begin(env, 3)
    gains = torch.tensor([0.5, 0.9, 1.3], dtype=torch.float64)
    mixed = env.default_params._replace(gain=gains)
    acts = actions(env, 7, 3)
    if rows == 0:
        _, steps = play(vec, state, acts, mixed)
    else:
        _, steps = play(vec, tree.map(lambda x: x.movedim(0, -1), state), acts.movedim(1, -1), vec.rows_last(mixed), rows=-1)
        steps = tree.map(lambda x: x.movedim(-1, 1), steps)
    for i in range(3):
        _, alone = play(vec, state, acts, env.default_params._replace(gain=gains[i]))
        assert_trees_equal(tree.map(lambda x, i=i: x[:, i], steps), tree.map(lambda x, i=i: x[:, i], alone))


def test_rows_last_moves_only_what_differs_by_row():
    vec, _ = begin(toy_env(), 3)
    params = ToyParams(gain=draw(3), push=draw(1)[0], fault_step=torch.tensor(0), reward_fault=draw(3, seed=1), state_fault=draw(1)[0])
    moved = vec.rows_last(params)
    assert_trees_equal(moved, params)  # 0-d leaves become [N] either way


def test_gradients_reach_parameters_state_and_action():
    vec, state = begin(toy_env(), 3)
    action = draw(3, 2)

    def total(x, a, gain):
        _, step = vec.step(state._replace(env=state.env._replace(x=x)), a, vec.default_params._replace(gain=gain))
        return step.reward.sum()

    x, gain = state.env.x, vec.default_params.gain
    gx, ga, gg = grad(total, argnums=(0, 1, 2))(x, action, gain)
    new = 0.9 * x + 0.5 * action
    assert_trees_close((gx, ga, gg), (-1.8 * new, -new - 0.2 * action, -2 * (new * x).sum()), ops=20)


def test_a_reset_cuts_the_gradient():
    vec, state = begin(toy_env(life=(1, 2)), 2)

    def later(a):
        new, _ = vec.step(state, a, vec.default_params)
        return vec.step(new, torch.zeros(2, 2, dtype=torch.float64), vec.default_params)[1].reward.sum()

    assert torch.equal(grad(later)(draw(2, 2)), torch.zeros(2, 2, dtype=torch.float64))


# -- sick rows -------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [0, -1])
@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["state", "reward"])
def test_a_row_that_is_not_finite_is_reset_and_reported(where, fault, rows):
    env = toy_env()
    vec, state = begin(env, 3)
    faults = torch.tensor([0.0, fault, 0.0], dtype=torch.float64)
    params = env.default_params._replace(fault_step=torch.tensor(2), **{f"{where}_fault": faults})
    acts = actions(env, 6, 3)
    _, healthy = play(vec, state, acts)
    if rows == 0:
        end, steps = play(vec, state, acts, params)
    else:
        end, steps = play(vec, tree.map(lambda x: x.movedim(0, -1), state), acts.movedim(1, -1), vec.rows_last(params), rows=-1)
        end, steps = tree.map(lambda x: x.movedim(-1, 0), end), tree.map(lambda x: x.movedim(-1, 1), steps)
    # Row 1 falls ill at its clock 2, hence at step 2 and, after the reset, at step 5.
    assert steps.metrics["nonfinite"].tolist() == [[False, t in (2, 5), False] for t in range(6)]
    assert torch.equal(steps.terminated, steps.metrics["nonfinite"])
    assert not bool(steps.truncated.any())
    assert bool(torch.isfinite(steps.obs).all())
    assert bool(tree.all_finite(end))
    assert_trees_equal(tree.map(lambda x: x[:, ::2], steps), tree.map(lambda x: x[:, ::2], healthy))
    assert torch.equal(steps.obs[2, 1], env.reset(rng.fold_in(state.key[1], 3), env.default_params).x)


def test_a_state_without_floating_leaves_is_finite():
    env = toy_env()

    def reset(key, params):
        return rng.randint(key, (), 0, 5)

    def step(n, action, params):
        return n + 1, Outcome(reward=n.to(torch.float32), terminated=n > 6, metrics={})

    counter = dataclasses.replace(env, reset=reset, step=step, observe=lambda n, params: n[None].to(torch.float32))
    vec, state = begin(counter, 3)
    state, step_ = vec.step(state, torch.zeros(3, 2), vec.default_params)
    assert not bool(step_.metrics["nonfinite"].any())


# -- refusals --------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RESERVED_METRICS)
def test_reserved_metric_names_are_refused(name):
    env = toy_env()

    def step(state, action, params):
        new, outcome = env.step(state, action, params)
        return new, outcome._replace(metrics={name: outcome.reward})

    def run():
        vec, state = begin(dataclasses.replace(env, step=step), 2)
        vec.step(state, torch.zeros(2, 2, dtype=torch.float64), vec.default_params)

    with pytest.raises(ValueError, match=f"toy.*{name}"):
        run()


def written(state, action, params):
    """A reward that is written into a tensor that knows nothing of rows."""
    new, outcome = toy_env().step(state, action, params)
    reward = torch.zeros(1, dtype=action.dtype)
    reward[0] += new.x[0].abs()
    return new, outcome._replace(reward=reward[0])


def filled(state, params):
    obs = torch.zeros_like(params.gain).repeat(2)
    obs[0], obs[1] = state.x[0], state.x[1]
    return obs


@pytest.mark.parametrize("change", [{"step": written}, {"observe": filled}], ids=lambda change: next(iter(change)))
def test_code_that_writes_into_tensors_is_refused_with_what_to_write_instead(change):
    vec, state = begin(toy_env(), 3)
    vec = dataclasses.replace(vec, env=dataclasses.replace(vec.env, **change))
    with pytest.raises(RuntimeError, match=r"environment 'toy' does not run under torch\.func\.vmap: .*build tensors with torch\.stack"):
        vec.step(state, actions(vec.env, 1, 3)[0], vec.default_params)


def test_an_error_of_the_environment_is_its_own():
    def stuck(*_):
        raise RuntimeError("the gripper is stuck")

    vec, state = begin(toy_env(), 3)
    vec = dataclasses.replace(vec, env=dataclasses.replace(vec.env, step=stuck))
    with pytest.raises(RuntimeError, match=r"^the gripper is stuck$"):
        vec.step(state, actions(vec.env, 1, 3)[0], vec.default_params)


@given(seed=SEEDS, limit=st.integers(1, 40))
@QUICK
def test_staggered_rows_are_at_any_time_of_an_episode_and_else_as_they_were(seed, limit):
    vec, plain = begin(toy_env(max_episode_steps=limit), 64, seed)
    state = vec.stagger(plain)
    assert_trees_equal(state._replace(elapsed=plain.elapsed), plain)
    assert state.elapsed.dtype == torch.int64
    assert bool(((state.elapsed >= 0) & (state.elapsed < limit)).all())
    # A row's time depends on its key alone.
    assert torch.equal(vec.stagger(tree.map(lambda x: x[5:9], plain)).elapsed, state.elapsed[5:9])


def test_staggered_times_are_uniform():
    limit, rows = 8, 8000
    vec, state = begin(toy_env(max_episode_steps=limit), rows)
    counts = torch.bincount(vec.stagger(state).elapsed, minlength=limit)
    # 6 standard deviations of a binomial count.
    assert float((counts - rows / limit).abs().max()) < 6 * math.sqrt(rows / limit * (1 - 1 / limit))


def test_a_staggered_row_is_reset_when_its_time_is_up():
    limit = 7
    env = toy_env(max_episode_steps=limit)
    vec, state = begin(env, 16)
    state = vec.stagger(state)
    left = limit - state.elapsed
    _, steps = play(vec, state, actions(env, 2 * limit, 16))
    for row, count in enumerate(left.tolist()):
        assert steps.truncated[:, row].nonzero().flatten().tolist() == [t for t in range(2 * limit) if t + 1 in (count, count + limit)]


def test_rows_without_a_time_limit_cannot_be_staggered():
    vec, state = begin(pendulum(max_episode_steps=None), 2)
    with pytest.raises(ValueError, match="'pendulum' cannot be staggered"):
        vec.stagger(state)


@pytest.mark.parametrize("count", [0, -3, True, 2.0, "2", None])
def test_a_wrong_number_of_rows_is_refused(count):
    with pytest.raises(ValueError, match="num_envs must be a positive integer"):
        make_vec_env(toy_env(), count)


def test_parameters_of_another_structure_are_refused():
    vec, state = begin(toy_env(), 2)
    with pytest.raises(ValueError, match="env_params of toy"):
        vec.reset(state.key, {"gain": torch.ones(())})


def test_state_is_a_named_tuple_of_tensors():
    _, state = begin(toy_env(), 2)
    assert isinstance(state, VecState)
    assert all(isinstance(x, torch.Tensor) and x.shape[0] == 2 for x in tree.leaves(state))
    assert state.steps.dtype == state.elapsed.dtype == torch.int64
    assert state.episode_return.dtype == torch.float64

"""The gradient check: right environments pass, each way of being wrong is named."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.func import vmap

from frl import rng
from frl.envs.check import check_env, space_dtype
from frl.envs.double_integrator import double_integrator
from frl.envs.env import Env, EnvSpec
from frl.envs.pendulum import pendulum
from frl.envs.point_mass import point_mass
from frl.envs.quadrotor import quadrotor
from frl.envs.registry import get_learning_env_factory, get_registered_learning_env_names
from frl.types import Outcome


class ToyState(NamedTuple):
    x: Tensor  # []
    mark: Tensor  # []


def toy(reward_fn, *, space=None, params=(), move=True):
    """One axis that the action pushes; ``reward_fn(x, mark, action)``."""

    def reset(key, env_params):
        u = rng.uniform(key, (2,), dtype=torch.float64)
        return ToyState(x=u[0], mark=u[1])

    def step(state, action, env_params):
        new = state._replace(x=state.x + action.sum()) if move else state
        reward = reward_fn(new.x, state.mark, action)
        return new, Outcome(reward=reward, terminated=torch.zeros_like(reward, dtype=torch.bool), metrics={})

    return Env(
        spec=EnvSpec(name="toy", max_episode_steps=None, dt=1.0, differentiable=True),
        observation_space=spaces.Box(-math.inf, math.inf, (1,)),
        action_space=spaces.Box(-1.0, 1.0, (1,)) if space is None else space,
        default_params=params,
        reset=reset,
        observe=lambda state, env_params: state.x[None],
        step=step,
    )


def with_reward(env, change):
    def step(state, action, env_params):
        new, outcome = env.step(state, action, env_params)
        return new, outcome._replace(reward=change(outcome.reward, new))

    return dataclasses.replace(env, step=step)


def with_state(env, change):
    def step(state, action, env_params):
        new, outcome = env.step(state, action, env_params)
        return change(new), outcome

    return dataclasses.replace(env, step=step)


def lowest_marks(count):
    """A limit below which ``count`` of the 64 rows have their mark, and which ones they are."""
    keys = rng.split(rng.split(rng.key(0), 2)[0], 64)
    marks = vmap(toy(None).reset, in_dims=(0, None))(keys, ()).mark
    limit = marks.sort().values[count - 1 : count + 1].mean()
    return limit, tuple((marks < limit).nonzero().flatten().tolist())


class Scaled(torch.autograd.Function):
    """The identity with a backward that is off by a factor."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, factor):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def differentiable():
    """One of every registered environment that promises gradients, and variants whose dynamics or reward take other paths."""
    yield from (point_mass(success_bonus=5.0), double_integrator(dimensions=2), quadrotor(action_delay=0), quadrotor(action_delay=3, initial_tilt=math.pi))
    for name in get_registered_learning_env_names():
        factory = get_learning_env_factory(name)
        if factory.__module__.startswith("frl."):
            options = {"continuous": True} if "continuous" in inspect.signature(factory).parameters else {}
            env = factory(**options)
            if env.spec.differentiable and not name.startswith("probe_"):
                yield env


SHIPPED = list(differentiable())


def test_every_task_with_a_gradient_is_checked():
    assert {env.spec.name for env in SHIPPED} >= {
        "point_mass",
        "double_integrator",
        "pendulum",
        "cartpole_swingup",
        "acrobot",
        "planar_reach",
        "quadrotor",
        "planar_hopper",
    }


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("env", SHIPPED, ids=lambda e: e.spec.name)
def test_shipped_environments_pass(env, seed):
    report = check_env(env, seed=seed)
    assert report.passed, report.text()
    assert report.worst_relative_error <= 1e-6
    assert report.zero_gradient_rows == report.nonfinite_rows == report.problems == ()
    assert report.compared_rows == report.rows - len(report.kink_rows) >= 61
    assert report.text().startswith(f"{env.spec.name}: passed, worst relative gradient error ")


@pytest.mark.parametrize("env", SHIPPED, ids=lambda e: e.spec.name)
def test_a_broken_copy_of_a_shipped_environment_is_named(env):
    def broken(name, change):
        def step(state, action, env_params):
            return env.step(state, change(action), env_params)

        return dataclasses.replace(env, spec=dataclasses.replace(env.spec, name=name), step=step)

    cut = check_env(broken("cut", torch.detach), num_envs=16, num_steps=3)
    assert not cut.passed
    assert cut.text().startswith("cut: FAILED")
    assert "the gradient is zero in every compared row; the differences are not: the graph is cut" in cut.text()
    wrong = check_env(broken("wrong", lambda action: Scaled.apply(action, 1.01)), num_envs=16, num_steps=3)
    assert not wrong.passed
    assert wrong.text().startswith("wrong: FAILED")
    assert "the gradient is wrong: relative error 9.9e-03" in wrong.text()


def test_report_is_deterministic_in_its_seed():
    assert check_env(pendulum(), seed=3) == check_env(pendulum(), seed=3)
    assert check_env(pendulum(), seed=3) != check_env(pendulum(), seed=4)


def test_detached_last_action_is_found_wrong():
    report = check_env(point_mass(detach_last_action=True))
    assert not report.passed
    assert "the gradient is wrong" in report.problems[0]
    assert report.worst_relative_error > 1e-3


@pytest.mark.parametrize("field", ["position", "velocity"])
def test_detached_dynamics_are_found_wrong(field):
    report = check_env(with_state(double_integrator(), lambda s: s._replace(**{field: getattr(s, field).detach()})))
    assert not report.passed
    assert "the gradient is wrong" in report.text()


def test_zero_gradient_of_a_cut_graph():
    report = check_env(toy(lambda x, mark, a: -x.detach().square()))
    assert not report.passed
    assert report.zero_gradient_rows == tuple(range(64))
    assert "zero in every compared row; the differences are not: the graph is cut" in report.text()


def test_zero_gradient_of_actions_without_effect():
    report = check_env(toy(lambda x, mark, a: mark.square(), move=False))
    assert not report.passed
    assert "actions do not change the return" in report.text()
    assert report.worst_relative_error == 0.0


@pytest.mark.parametrize("factor", [1.01, 1.0 + 1e-5, -1.0])
def test_wrong_backward(factor):
    broken = with_reward(double_integrator(), lambda reward, state: Scaled.apply(reward, factor))
    report = check_env(broken)
    assert not report.passed
    assert report.worst_relative_error == pytest.approx(abs(factor - 1.0), rel=0.02)
    assert check_env(with_reward(double_integrator(), lambda reward, state: Scaled.apply(reward, 1.0))).passed


def test_a_wrong_gradient_in_one_row_alone_is_found():
    limit, rows = lowest_marks(1)
    report = check_env(toy(lambda x, mark, a: torch.where(mark < limit, Scaled.apply(x.square(), 2.0), x.square())))
    assert not report.passed
    assert report.kink_rows == ()
    assert f"in row {rows[0]}, expected" in report.text()


def test_gradient_that_is_not_finite_behind_a_select():
    report = check_env(toy(lambda x, mark, a: torch.where(mark > 0.5, (mark - 0.5).clamp(min=0.0).mul(a[0].square()).sqrt(), x)))
    assert not report.passed
    assert "the gradient is not finite in rows" in report.text()
    assert 0 < len(report.nonfinite_rows) < 64


def test_return_that_is_not_finite():
    report = check_env(toy(lambda x, mark, a: torch.where(mark > 0.9, math.nan, x.square())))
    assert not report.passed
    assert "the return is not finite in rows" in report.text()
    assert report.compared_rows == 64 - len(report.nonfinite_rows) > 0


def test_rows_at_a_kink_are_named_and_left_out():
    def reward(x, mark, a):
        stairs = torch.floor(31416.0 * a.sum()) / 31416.0  # not in step with the stencil, which would see a straight line
        return x.square() + torch.where(mark < limit, stairs, 0.0)

    limit, want = lowest_marks(3)
    report = check_env(toy(reward))
    assert report.passed, report.text()
    assert report.kink_rows == want
    assert "3 rows at a kink, left out" in report.text()
    limit, want = lowest_marks(4)
    report = check_env(toy(reward))
    assert not report.passed
    assert report.kink_rows == want
    assert "4 of 64 rows are at a kink" in report.text()
    everywhere = check_env(toy(lambda x, mark, a: torch.floor(31416.0 * x)))
    assert not everywhere.passed
    assert everywhere.compared_rows == 0
    assert math.isnan(everywhere.worst_relative_error)
    assert "64 of 64 rows are at a kink" in everywhere.text()


def test_bends_at_the_drawn_actions_are_kinks():
    def bends(x, mark, a):  # slopes and curvatures that jump so often that every stencil meets a jump
        return (1e-4 * torch.remainder(x / 1e-4, 1.0) - 0.5e-4).abs()

    report = check_env(toy(bends))
    assert len(report.kink_rows) == 64


def test_writing_into_a_tensor_is_named():
    def step(state, action, env_params):
        obs = torch.zeros(3, dtype=torch.float64)
        obs[0] = state.x + action[0]
        return state, Outcome(reward=obs.sum(), terminated=torch.zeros((), dtype=torch.bool), metrics={})

    report = check_env(dataclasses.replace(toy(lambda x, mark, a: x), step=step))
    assert not report.passed
    assert "does not run under torch.func.vmap" in report.text()
    assert "torch.stack" in report.text()


def test_adding_twice_in_place_counts_twice():
    def reward(x, mark, a):
        total = torch.zeros_like(x)
        total += x.abs()
        total += x.abs()
        return total

    assert check_env(toy(reward), num_steps=1).passed


@pytest.mark.parametrize(
    "reward",
    [lambda x, mark, a: x if x > 0 else -x, lambda x, mark, a: x * torch.rand(()), lambda x, mark, a: x * x.item()],
    ids=["branch", "global generator", "item"],
)
def test_code_that_cannot_be_mapped_is_named(reward):
    report = check_env(toy(reward))
    assert not report.passed
    assert "does not run under torch.func.vmap" in report.text()


def test_breaks_of_the_contract_are_named():
    def changes_in_place(state, action, env_params):
        state.x.add_(action.sum())
        return state, Outcome(reward=state.x.square(), terminated=state.x > 2.0, metrics={})

    base = toy(lambda x, mark, a: x.square())
    broken = {
        "step changes its arguments in place": dataclasses.replace(base, step=changes_in_place),
        "x: got torch.float32, expected torch.float64": with_state(base, lambda s: s._replace(x=s.x.float())),
        "x: got shape (64, 1), expected (64,)": with_state(base, lambda s: s._replace(x=s.x[None])),
        "reward must follow its inputs' dtype torch.float64, got torch.float32": with_reward(base, lambda r, s: r.float()),
        "reward of one row must have shape (), got (1,)": with_reward(base, lambda r, s: r[None]),
        "observation must have the shape of its space (1,), got ()": dataclasses.replace(base, observe=lambda s, p: s.x),
        "terminated must be bool, got torch.float64": toy(lambda x, mark, a: x.square()),
        "metric 'far' of one row must have shape (), got (1,)": toy(lambda x, mark, a: x.square()),
    }

    def wrong(change):
        def step(state, action, env_params):
            new, outcome = base.step(state, action, env_params)
            return new, outcome._replace(**change(new))

        return dataclasses.replace(base, step=step)

    broken["terminated must be bool, got torch.float64"] = wrong(lambda s: {"terminated": s.x})
    broken["metric 'far' of one row must have shape (), got (1,)"] = wrong(lambda s: {"metrics": {"far": s.x[None]}})
    for message, env in broken.items():
        report = check_env(env, num_steps=2)
        assert not report.passed
        assert message in report.text()
    assert check_env(base, num_steps=2).passed


def test_actions_stay_inside_their_bounds():
    low, high = np.array([0.0, -np.inf, -np.inf, -1.0]), np.array([np.inf, 0.0, np.inf, 3.0])

    def reward(x, mark, a):
        inside = (a[0] > 0) & (a[1] < 0) & (a[3] > -1) & (a[3] < 3)
        return torch.where(inside, a.square().sum() + x, math.nan)

    report = check_env(toy(reward, space=spaces.Box(low, high, dtype=np.float64)))
    assert report.passed, report.text()


def test_narrow_bounds_are_probed_at_their_own_scale():
    space = spaces.Box(-1e-6, 1e-6, (1,), dtype=np.float64)
    report = check_env(toy(lambda x, mark, a: torch.sin(1e6 * a).sum() + 1e12 * a.square().sum(), space=space))
    assert report.passed, report.text()


def test_integer_state_and_dict_parameters():
    def reset(key, env_params):
        return {"x": rng.uniform(key, (2,), dtype=env_params["gain"].dtype), "count": torch.zeros((), dtype=torch.int64, device=key.device)}

    def step(state, action, env_params):
        x = state["x"] + env_params["gain"] * action
        outcome = Outcome(reward=-x.square().sum(), terminated=x[0] > 5, metrics={})
        return {"x": x, "count": state["count"] + 1}, outcome

    env = Env(
        spec=EnvSpec(name="dicts", max_episode_steps=5, dt=1.0, differentiable=True),
        observation_space=spaces.Box(-math.inf, math.inf, (2,)),
        action_space=spaces.Box(-1.0, 1.0, (2,)),
        default_params={"gain": torch.tensor(0.5)},
        reset=reset,
        observe=lambda state, env_params: state["x"],
        step=step,
    )
    assert check_env(env, num_envs=3).passed


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="Discrete"):
        check_env(toy(lambda x, mark, a: x, space=spaces.Discrete(3)))
    for name in ("num_envs", "num_steps"):
        for value in (0, True, 1.5):
            with pytest.raises(ValueError, match=name):
                check_env(pendulum(), **{name: value})
    for name in ("epsilon", "tolerance"):
        for value in (0.0, -1.0, math.nan, math.inf, True):
            with pytest.raises(ValueError, match=name):
                check_env(pendulum(), **{name: value})


def test_space_dtypes():
    assert space_dtype(torch.float64) is np.float64

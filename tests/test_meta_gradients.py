"""Derivatives of training itself: a validation objective through several updates, against central differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import frl
from frl import rng, tree
from frl.algorithms.apg import ApgConfig, make_apg
from frl.compile import cut
from frl.envs.registry import build_learning_env
from frl.optim import adam
from frl.policies import actor_only

F64 = torch.float64
NETWORK = {"type": "mlp", "network_cfg": {"hidden_sizes": [6], "activation": "tanh", "orthogonal_init": [1.0, 0.1]}}
MODES = {"segmented": {}, "two segments": {"update_horizon": 6}, "complete": {"rollout_mode": "complete", "gradient_accumulation_steps": 2}}


def problem(mode: str, options: dict[str, Any]) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    """A function of learning rate, adjoint limit, norm limit, a shift of the first biases and the training mass; and a point, after an update, so that no
    moment is zero."""
    env = build_learning_env("point_mass", num_envs=3, dtype=F64)
    policy = actor_only(14, 2, network=NETWORK)
    config = ApgConfig(segment_length=3, action_adjoint_max_norm=0.003, max_grad_norm=0.003, compile_mode=mode, **options)
    apg = make_apg(env, policy, adam(), config, dtype=F64, learning_rate=1e-2)
    judge = frl.make_unroll(env, policy, record=(), mode=mode)
    start, noise = env.reset(env.row_keys(rng.key(9)), env.default_params), policy.noise(rng.key(7), 4, 3, dtype=F64)
    first = apg.init(rng.key(1))
    first = apg.update(*apg.collect(first))

    def validation(rate: Tensor, limit: Tensor, norm: Tensor, shift: Tensor, mass: Tensor) -> Tensor:
        params = tree.map(torch.clone, first.params)
        params["actor"]["layers"][0]["bias"] = params["actor"]["layers"][0]["bias"] + shift
        hyper = {**first.hyper, "optimizer.learning_rate": rate, "action_adjoint_max_norm": limit, "max_grad_norm": norm}
        state = first._replace(params=params, hyper=hyper)
        for _ in range(2):
            state, rollout = apg.collect(state)
            parts = [rollout] if isinstance(rollout, frl.Rollout) else rollout
            state = apg.update(state, tuple(part._replace(env_params=part.env_params._replace(mass=mass)) for part in parts))
        _, played = judge(state.params, (), start, env.default_params, noise)
        return played.reward.sum()

    numbers = [torch.tensor(x, dtype=F64) for x in (1e-2, 0.003, 0.003, 1.0)]
    return validation, (*numbers[:3], torch.zeros(6, dtype=F64), numbers[3])


def central(fn: Callable[..., Tensor], point: tuple[Tensor, ...], which: int, h: float) -> Tensor:
    slopes = []
    for direction in torch.eye(point[which].numel(), dtype=F64).reshape(-1, *point[which].shape):
        ends = [fn(*point[:which], point[which] + sign * h * direction, *point[which + 1 :]) for sign in (1, -1)]
        slopes.append((ends[0] - ends[1]) / (2 * h))
    return torch.stack(slopes).reshape(point[which].shape)


@pytest.mark.parametrize("name", MODES)
def test_the_gradient_through_updates_is_that_of_central_differences(name):
    validation, point = problem("eager", MODES[name])
    grads = torch.func.grad(validation, argnums=tuple(range(5)))(*point)
    for which, (got, h) in enumerate(zip(grads, (1e-6, 1e-7, 1e-6, 1e-6, 1e-5), strict=True)):
        want = central(validation, point, which, h)
        assert want.abs().max() > 1e-6, f"nothing depends on argument {which}"
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-9, msg=lambda text, which=which: f"argument {which}: {text}")


def test_compiled_updates_have_the_gradient_of_eager_ones():
    validation, point = problem("aot_eager", {})
    eager, _ = problem("eager", {})
    got = torch.func.grad(validation, argnums=tuple(range(5)))(*point)
    torch.testing.assert_close(got, torch.func.grad(eager, argnums=tuple(range(5)))(*point), rtol=1e-9, atol=1e-12)


def test_cut_is_constant_for_the_innermost_gradient_alone():
    def slope(x: Tensor) -> Tensor:
        return torch.func.grad(lambda y: cut(y * y) * y * x)(x)  # x cut(y^2) = x^3

    x = torch.tensor(1.5, dtype=F64)
    torch.testing.assert_close(slope(x), x**3)
    torch.testing.assert_close(torch.func.grad(slope)(x), 3 * x**2)
    mapped = torch.func.vmap(torch.func.grad(slope))(torch.stack([x, 2 * x]))
    torch.testing.assert_close(mapped, 3 * torch.stack([x, 2 * x]) ** 2)
    inner = torch.func.grad(lambda y: torch.func.vmap(lambda z: cut(z * z) * z)(y).sum())(torch.stack([x, 2 * x]))
    torch.testing.assert_close(inner, torch.stack([x, 2 * x]) ** 2)
    leaf = x.clone().requires_grad_()
    assert not cut(leaf * 2).requires_grad

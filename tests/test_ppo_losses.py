from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap

from frl.advantages import compute_gae, group_advantages, normalize_advantage
from frl.distributions import NormalParams, diagonal_normal
from frl.losses import (
    action_bound_loss,
    adaptive_learning_rate,
    approx_kl,
    clip_fraction,
    clipped_surrogate_loss,
    gaussian_kl,
    grpo_loss,
    k3,
    ppo_loss,
    probability_ratio,
    value_loss,
)
from tests.tolerances import tolerance

INF, NAN = math.inf, math.nan


def f64(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def close(got: Tensor, want: Tensor, ops: int = 4, scale: float = 10.0) -> None:
    eps = tolerance(got.dtype, ops)
    torch.testing.assert_close(got, want, rtol=eps, atol=scale * eps, check_dtype=False)


def figures(dtype: torch.dtype = torch.float64, device: torch.device | str = "cpu", **changes: Any) -> dict[str, Any]:
    """One row of four steps, and the arguments of its loss."""
    of = lambda x: torch.tensor(x, dtype=dtype, device=device)
    none = torch.zeros(4, dtype=torch.bool, device=device)
    old_value = of([0.1, 0.5, 0.9, 0.2, 0.3])
    advantage, returns = compute_gae(of([1.0, 0.0, 2.0, -1.0]), old_value, none, (), gamma=0.9, gae_lambda=0.8)
    given = dict(
        log_prob=of([-1.0, -2.0, -0.5, -1.5]),
        old_log_prob=of([-1.1, -1.5, -0.9, -1.4]),
        advantage=normalize_advantage(advantage),
        value=of([0.3, 0.9, 1.4, -0.2]),
        old_value=old_value[:-1],
        returns=returns,
        entropy=of([1.25] * 4),
        action_mean=of([[1.5], [0.2], [-2.0], [0.0]]),
        clip_coef=0.2,
        vf_coef=0.5,
        ent_coef=0.01,
        action_bound_coef=0.1,
    )
    return {**given, **changes}


@st.composite
def samples(draw: st.DrawFn) -> dict[str, Tensor]:
    n = draw(st.integers(1, 8))
    floats = lambda low, high: f64(draw(st.lists(st.floats(low, high, allow_subnormal=False), min_size=n, max_size=n)))
    return dict(
        log_prob=floats(-3, 3), old_log_prob=floats(-3, 3), advantage=floats(-5, 5), value=floats(-5, 5), old_value=floats(-5, 5), returns=floats(-5, 5)
    )


# -- PPO -------------------------------------------------------------------------------------------------------------------------------------------


def test_reference_figures(device: torch.device) -> None:
    given = figures(device=device)
    like = lambda got, want: torch.testing.assert_close(got.cpu(), f64(want), rtol=0, atol=1e-6)
    raw = compute_gae(
        torch.tensor([1.0, 0.0, 2.0, -1.0], dtype=torch.float64),
        f64([0.1, 0.5, 0.9, 0.2, 0.3]),
        torch.zeros(4, dtype=torch.bool),
        (),
        gamma=0.9,
        gae_lambda=0.8,
    )
    like(raw.advantage, [1.889631, 0.749488, 0.6104, -0.93])
    like(given["returns"], [1.989631, 1.249488, 1.5104, -0.73])
    got = ppo_loss(**given)
    like(got.actor_loss, -0.0476567)
    like(got.value_loss, 0.8175212)
    like(got.action_bound_loss, 0.3125)
    like(got.entropy, 1.25)
    like(got.clip_fraction, 0.5)
    like(got.loss, -0.0476567 + 0.5 * 0.8175212 + 0.1 * 0.3125 - 0.01 * 1.25)
    like(ppo_loss(**given, clip_value_loss=True).value_loss, 0.9645300)
    mean, old_mean = given["action_mean"], f64([[1.0], [0.0], [-1.0], [0.5]]).to(device)
    kl = gaussian_kl(old_mean, torch.full_like(mean, 0.4), mean, torch.full_like(mean, 0.5)).mean()
    like(kl, 0.8131436)
    like(adaptive_learning_rate(torch.tensor(1e-3, dtype=torch.float64, device=device), kl, 0.01), 1e-3 / 1.5)


@given(samples(), st.sampled_from([0.05, 0.2, 0.5]))
def test_surrogate_equals_its_formula_and_is_flat_on_the_losing_side(case: dict[str, Tensor], clip: float) -> None:
    log_prob, old, advantage = case["log_prob"], case["old_log_prob"], case["advantage"]
    ratio = torch.exp(log_prob - old)
    want = [-min(r * a, min(max(r, 1 - clip), 1 + clip) * a) for r, a in zip(ratio.tolist(), advantage.tolist(), strict=True)]
    close(clipped_surrogate_loss(log_prob, old, advantage, clip), f64(want).mean(), 16, 1e3)
    slope = grad(clipped_surrogate_loss)(log_prob, old, advantage, clip)
    lost = ((advantage > 0) & (ratio > 1 + clip)) | ((advantage < 0) & (ratio < 1 - clip))
    assert slope[lost].eq(0).all()
    close(slope[~lost], (-ratio * advantage / len(ratio))[~lost], 16)
    inside = (ratio - 1).abs() <= clip
    assert clip_fraction(log_prob, old, clip).item() == (~inside).double().mean().item()


@given(samples(), st.sampled_from([0.1, 1.0]))
def test_value_losses_equal_their_formulas(case: dict[str, Tensor], clip: float) -> None:
    value, old, returns = case["value"], case["old_value"], case["returns"]
    close(value_loss(value, returns), ((value - returns) ** 2).mean(), 8, 1e3)
    got = value_loss(value, returns, old_value=old, clip_coef=clip)
    near = torch.minimum(torch.maximum(value, old - clip), old + clip)
    close(got, torch.maximum((value - returns) ** 2, (near - returns) ** 2).mean(), 8, 1e4)
    assert got >= value_loss(value, returns) - 1e-12


def test_clipped_value_loss_needs_the_old_values() -> None:
    with pytest.raises(ValueError, match="old_value"):
        value_loss(torch.zeros(2), torch.zeros(2), clip_coef=0.2)


def test_action_bound_loss() -> None:
    mean = f64([[1.5, 0.2], [-3.0, 0.9]])
    close(action_bound_loss(mean), f64((0.25 + 4.0) / 4))
    close(grad(action_bound_loss)(mean), f64([[0.25, 0.0], [-1.0, 0.0]]))
    close(action_bound_loss(mean, torch.tensor([True, False])), f64(0.25 / 2))


def test_first_minibatch_of_unchanged_parameters() -> None:
    """A raw sample outside the box is scored as it was drawn: ratio 1, no KL, nothing clipped."""
    distribution = diagonal_normal(1)
    params = NormalParams(mean=torch.zeros(3, 1), log_std=torch.full((1,), math.log(5.0)))
    raw = torch.tensor([[3.0], [-20.0], [0.5]])
    score = lambda: distribution.log_prob(params, raw)
    assert probability_ratio(score(), score()).tolist() == [1, 1, 1]
    assert approx_kl(score(), score()).item() == 0.0
    assert clip_fraction(score(), score(), 0.0).item() == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_far_ratios_stay_finite(dtype: torch.dtype, advantage: float) -> None:
    for gap in (100.0, -100.0, 1e4, -1e4):
        log_prob = torch.tensor([gap], dtype=dtype)
        loss = lambda x: clipped_surrogate_loss(x, torch.zeros_like(x), torch.full_like(x, advantage), 0.2)
        assert loss(log_prob).isfinite()
        assert grad(loss)(log_prob).isfinite().all()
    assert grad(lambda x: clipped_surrogate_loss(x, torch.zeros_like(x), torch.full_like(x, -1.0), 0.2))(torch.tensor([100.0])).item() > 1e8


def test_an_action_that_became_impossible_has_ratio_zero() -> None:
    assert probability_ratio(torch.tensor([-INF, 0.0]), torch.zeros(2)).tolist() == [0.0, 1.0]
    loss = lambda x: clipped_surrogate_loss(x, torch.zeros_like(x), torch.tensor([1.0, -1.0]), 0.2)
    close(loss(torch.tensor([-INF, 0.0])), torch.tensor(0.5))


@pytest.mark.parametrize("count", [1, 65])
def test_equal_advantages_and_single_samples_give_no_policy_gradient(count: int) -> None:
    given = figures(dtype=torch.float32)
    given = {name: x[:1].repeat(count, *[1] * (x.ndim - 1)) if isinstance(x, Tensor) else x for name, x in given.items()}
    given["advantage"] = normalize_advantage(torch.full((count,), 0.7))
    assert all(torch.isfinite(x) for x in ppo_loss(**given))
    assert grad(lambda x: ppo_loss(**{**given, "log_prob": x}).loss)(given["log_prob"]).eq(0).all()


@pytest.mark.parametrize("name", ["vf_coef", "ent_coef", "action_bound_coef"])
def test_coefficient_zero_switches_a_term_off(name: str) -> None:
    term, field = {"vf_coef": ("value", "value_loss"), "ent_coef": ("entropy", "entropy"), "action_bound_coef": ("action_mean", "action_bound_loss")}[name]
    sign = -1 if name == "ent_coef" else 1
    plain = figures(**{name: 0.0})
    for zero in (0.0, torch.tensor(0.0), f64(0.0)):
        bad = ppo_loss(**{**plain, term: torch.full_like(plain[term], INF), name: zero})
        assert not getattr(bad, field).isfinite()
        close(bad.loss, ppo_loss(**plain).loss)
    slope = lambda at: grad(lambda c: ppo_loss(**figures(**{name: c})).loss)(f64(at))
    for at in (0.0, 0.3):
        close(slope(at), sign * getattr(ppo_loss(**plain), field))


def test_gradients_by_central_differences() -> None:
    """With every hyper-parameter a tensor, away from the kinks."""
    given = figures(clip_coef=f64(0.21), vf_coef=f64(0.5), ent_coef=f64(0.01), action_bound_coef=f64(0.1))
    for name in ("log_prob", "value", "entropy", "action_mean", "advantage", "returns", "clip_coef", "vf_coef"):
        loss = lambda x: ppo_loss(**{**given, name: x}, clip_value_loss=True).loss  # noqa: B023
        slope, step = grad(loss)(given[name]).flatten(), 1e-6
        for i in range(slope.numel()):
            bump = torch.zeros(slope.numel(), dtype=torch.float64)
            bump[i] = step
            bump = bump.reshape(given[name].shape)
            by_difference = (loss(given[name] + bump) - loss(given[name] - bump)) / (2 * step)
            torch.testing.assert_close(slope[i], by_difference, rtol=1e-7, atol=1e-9)


def test_masked_samples_reach_neither_value_nor_gradient() -> None:
    given = figures()
    names = [name for name, x in given.items() if isinstance(x, Tensor)]
    valid = torch.tensor([True, False, True, True, False])

    def with_junk(x: Tensor, junk: float) -> Tensor:
        bad = torch.full_like(x[:1], junk)
        return torch.cat([x[:1], bad, x[2:], bad])

    for change in ({}, {"clip_value_loss": True}):
        small = {name: torch.cat([x[:1], x[2:]]) if isinstance(x, Tensor) else x for name, x in given.items()}
        want = ppo_loss(**small, **change)
        for junk in (0.0, 7.0, 1e30, NAN, INF, -INF):
            big = {name: with_junk(x, junk) if isinstance(x, Tensor) else x for name, x in given.items()}
            for got, expected in zip(ppo_loss(**big, **change, valid=valid), want, strict=True):
                close(got, expected)
            slopes = grad(lambda xs: ppo_loss(**{**big, **xs}, **change, valid=valid).loss)({name: big[name] for name in names})  # noqa: B023
            wanted = grad(lambda xs: ppo_loss(**{**small, **xs}, **change).loss)({name: small[name] for name in names})  # noqa: B023
            for name in names:
                close(slopes[name][valid], wanted[name])
                assert slopes[name][~valid].eq(0).all(), name
    log_prob, old = f64([-1.0, NAN, -2.0]), f64([-1.5, 0.0, -1.0])
    slope = grad(approx_kl)(log_prob, old, torch.tensor([True, False, True]))
    close(slope, torch.where(log_prob.isnan(), 0, torch.expm1(log_prob - old) / 2))
    nothing = ppo_loss(**figures(), valid=torch.zeros(4, dtype=torch.bool))
    assert [x.item() for x in nothing] == [0] * 7


def test_members_and_compiled_calls_equal_single_eager_ones() -> None:
    """A sweep over coefficients as one more dimension; changed numbers need no new graph."""
    given = figures()
    fixed = {name: x for name, x in given.items() if name not in ("clip_coef", "ent_coef")}
    valid, reference = torch.tensor([True, True, False, True]), f64([-1.2, -1.0, -3.0, -1.4])

    def total(log_prob: Tensor, clip: Tensor, ent: Tensor) -> Tensor:
        here = {**fixed, "log_prob": log_prob, "clip_coef": clip, "ent_coef": ent}
        ppo = ppo_loss(**here, clip_value_loss=True, valid=valid)
        same = {name: here[name] for name in ("log_prob", "old_log_prob", "advantage", "entropy", "clip_coef", "ent_coef")}
        grpo = grpo_loss(**same, kl=k3(log_prob, reference), kl_coef=ent, valid=valid)
        rate = adaptive_learning_rate(ent, ppo.approx_kl, clip)
        return torch.stack([*ppo, *grpo, rate])

    def both(log_prob: Tensor, clip: Tensor, ent: Tensor) -> tuple[Tensor, Tensor]:
        return total(log_prob, clip, ent), grad(lambda x: total(x, clip, ent).sum())(log_prob)

    clips, ents = f64([0.1, 0.2, 0.3]), f64([0.0, 0.01, 0.1])
    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    members = vmap(both, in_dims=(None, 0, 0))(given["log_prob"], clips, ents)
    for i in range(3):
        want = both(given["log_prob"], clips[i], ents[i])
        for got in (compiled(given["log_prob"], clips[i], ents[i]), [x[i] for x in members]):
            for a, b in zip(got, want, strict=True):
                close(a, b)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# -- divergences -----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_k3_figures(dtype: torch.dtype) -> None:
    ratio = torch.tensor([0.0, 0.1, -0.1, 100.0, -100.0, 1e4], dtype=dtype)
    got, slope = k3(torch.zeros_like(ratio), ratio), grad(lambda d: k3(torch.zeros_like(d), d).sum())(ratio)
    torch.testing.assert_close(got[:3], torch.tensor([0.0, 0.00517092, 0.00483742], dtype=dtype), rtol=2e-5, atol=0)
    assert got.isfinite().all()
    assert slope.isfinite().all()
    assert got[4] == 99.0
    assert slope[3] > 1e8
    close(slope[[0, 1, 2, 4]], torch.expm1(ratio[[0, 1, 2, 4]]), 4, 10)


@given(st.lists(st.floats(-60, 60, allow_subnormal=True, width=32), min_size=1, max_size=20), st.sampled_from([torch.float32, torch.float64]))
def test_k3_is_never_negative_and_equals_its_formula(values: list[float], dtype: torch.dtype) -> None:
    d = torch.tensor(values, dtype=dtype)
    got = k3(torch.zeros_like(d), d)
    assert (got >= 0).all()
    wide = d.double()
    inside = d <= 20
    close(got[inside], (torch.expm1(wide) - wide)[inside].to(dtype), 4)
    assert (got[~inside] <= (torch.exp(wide) - wide - 1)[~inside].to(dtype) * (1 + 1e-5)).all()


def test_k3_of_a_two_action_policy_gives_one_divergence_and_the_gradient_of_the_other() -> None:
    logit, reference = f64(math.log(4.0)), torch.log(f64([0.5, 0.5]))
    log_policy = lambda x: torch.stack([torch.nn.functional.logsigmoid(x), torch.nn.functional.logsigmoid(-x)])
    weight = torch.exp(log_policy(logit))
    torch.testing.assert_close((weight * k3(log_policy(logit), reference)).sum(), f64(0.192745), rtol=0, atol=1e-6)
    fixed = grad(lambda x: (weight * k3(log_policy(x), reference)).sum())(logit)
    torch.testing.assert_close(fixed, f64(0.3), rtol=0, atol=1e-6)
    weighed = grad(lambda x: (weight * probability_ratio(log_policy(x), log_policy(logit)) * k3(log_policy(x), reference)).sum())(logit)
    torch.testing.assert_close(weighed, f64(0.221807), rtol=0, atol=1e-6)
    other = (torch.exp(reference) * k3(reference, log_policy(logit))).sum()
    torch.testing.assert_close(other, f64(0.223144), rtol=0, atol=1e-6)


def test_exact_kl_of_equal_gaussians_is_zero_at_any_scale() -> None:
    for std in (0.2, 0.05, 0.02, 0.01, 1e-6, 0.0):
        mean, same = torch.tensor([[0.3, -0.7]]), torch.full((1, 2), std)
        assert gaussian_kl(mean, same, mean, same).item() == 0.0
    shifted = gaussian_kl(f64([[0.0]]), f64([[0.01]]), f64([[0.01]]), f64([[0.01]]))
    close(shifted, f64([0.5]))


def test_exact_kl_has_the_direction_old_to_new() -> None:
    normal = torch.distributions.Normal
    old, new = normal(f64([[0.3, -1.0]]), f64([[0.4, 2.0]])), normal(f64([[0.1, 0.5]]), f64([[0.9, 0.7]]))
    close(gaussian_kl(old.mean, old.stddev, new.mean, new.stddev), torch.distributions.kl_divergence(old, new).sum(-1), 8)
    params = [NormalParams(mean=p.mean, log_std=p.stddev.log()) for p in (old, new)]
    close(gaussian_kl(old.mean, old.stddev, new.mean, new.stddev), diagonal_normal(2).kl(*params), 8)


def test_approximate_kl_averages_to_the_exact_one() -> None:
    gen = torch.Generator().manual_seed(0)
    old, new = NormalParams(mean=f64([0.0]), log_std=f64([0.0])), NormalParams(mean=f64([0.2]), log_std=f64([0.1]))
    raw = torch.randn(200_000, 1, generator=gen, dtype=torch.float64)
    distribution = diagonal_normal(1)
    got = approx_kl(distribution.log_prob(new, raw), distribution.log_prob(old, raw))
    torch.testing.assert_close(got, distribution.kl(old, new), rtol=0.02, atol=0)
    assert (distribution.kl(old, new) - distribution.kl(new, old)).abs() > 0.05 * distribution.kl(old, new)


# -- learning rate ---------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kl", "factor"), [(0.0201, 1 / 1.5), (0.02, 1), (0.01, 1), (0.005, 1), (0.0049, 1.5), (0.0, 1), (-1e-9, 1), (NAN, 1), (INF, 1 / 1.5), (-INF, 1)]
)
def test_rate_rule(kl: float, factor: float) -> None:
    for desired in (0.01, f64(0.01)):
        close(adaptive_learning_rate(f64(1e-3), f64(kl), desired), f64(1e-3 * factor))
    assert adaptive_learning_rate(torch.tensor(1e-3), f64(kl), 0.01).dtype == torch.float32


def test_four_reductions() -> None:
    rate = torch.tensor(1e-3)
    for _ in range(4):
        rate = adaptive_learning_rate(rate, torch.tensor(1.0), 0.01)
    torch.testing.assert_close(rate, torch.tensor(1.9753e-4), rtol=1e-5, atol=0)


@given(st.lists(st.floats(0, 0.1) | st.sampled_from([NAN, INF, 0.0]), max_size=30), st.floats(1e-5, 1e-2))
def test_rate_stays_inside_its_bounds(kls: list[float], start: float) -> None:
    rate = f64(start)
    for kl in kls:
        new = adaptive_learning_rate(rate, f64(kl), 0.01, f64(1e-5), 1e-2)
        assert 1e-5 <= new <= 1e-2
        assert not (math.isnan(kl) and new != rate)
        rate = new


def test_each_bound_acts_in_its_own_branch() -> None:
    close(adaptive_learning_rate(f64(1.0), f64(1.0), 0.01), f64(1 / 1.5))
    close(adaptive_learning_rate(f64(1.0), f64(1e-4), 0.01), f64(1e-2))
    close(adaptive_learning_rate(f64([1e-5, 9e-3, 1e-3]), f64([1.0, 1e-4, 0.01]), 0.01), f64([1e-5, 1e-2, 1e-3]))


# -- GRPO ------------------------------------------------------------------------------------------------------------------------------------------


def grpo_case(**changes: Any) -> dict[str, Any]:
    given = figures()
    keep = ("log_prob", "old_log_prob", "advantage", "entropy", "clip_coef")
    return {**{name: given[name] for name in keep}, "valid": torch.tensor([True, True, False, True]), **changes}


def test_grpo_loss_equals_its_formula() -> None:
    reference = f64([-1.2, -1.0, NAN, -1.4])
    given = grpo_case(entropy=f64([1.0, 2.0, 3.0, 4.0]))
    got = grpo_loss(**given, kl=k3(given["log_prob"], reference), kl_coef=0.02, ent_coef=0.1)
    ratio, a = torch.exp(given["log_prob"] - given["old_log_prob"]), given["advantage"]
    actor = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)[[0, 1, 3]].sum() / 3
    d = (reference - given["log_prob"])[[0, 1, 3]]
    kl = (torch.exp(d) - d - 1).sum() / 3
    close(got.actor_loss, actor)
    close(got.approx_ref_kl, kl)
    close(got.entropy, f64(7 / 3))
    close(got.loss, actor + 0.02 * kl - 0.1 * 7 / 3)
    close(got.approx_kl, (ratio - 1 - torch.log(ratio))[[0, 1, 3]].mean())
    close(got.clip_fraction, f64(1 / 3))


def test_without_a_reference_policy_there_is_no_divergence() -> None:
    got = grpo_loss(**grpo_case())
    assert got.approx_ref_kl.item() == 0.0
    close(got.loss, got.actor_loss)


def test_a_far_reference_is_finite_in_value_and_gradient() -> None:
    log_prob = torch.zeros(4)
    loss = lambda x: grpo_loss(**{**grpo_case(), "log_prob": x}, kl=k3(x, torch.full_like(x, 100.0)), kl_coef=0.02).loss
    assert loss(log_prob).isfinite()
    assert grad(loss)(log_prob).isfinite().all()


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_a_tied_group_gives_no_policy_gradient_but_its_divergence_still_pulls(kl_coef: float) -> None:
    returns, mask = torch.tensor([[2.0, 2.0, 1.0, 3.0]]), torch.ones(1, 4, dtype=torch.bool)
    advantage = group_advantages(returns, mask, 2).advantage
    old, reference = torch.full((1, 4), -1.0), torch.full((1, 4), -1.5)
    loss = lambda x: (
        grpo_loss(log_prob=x, old_log_prob=old, advantage=advantage, entropy=x, clip_coef=0.2, kl=k3(x, reference), kl_coef=kl_coef, valid=mask).loss
    )
    slope = grad(loss)(old)
    pull = kl_coef * (1 - math.exp(-0.5)) / 4
    torch.testing.assert_close(slope[0], torch.tensor([pull, pull, pull + 0.25, pull - 0.25]), rtol=0, atol=1e-6)
    if kl_coef == 0:
        assert slope[0, :2].eq(0).all()

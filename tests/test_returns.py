from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, vmap

from frl.returns import alive_mask, complete_discounted_return, discounts, final_discount, segmented_discounted_return, td_lambda_returns
from tests.tolerances import tolerance

REWARD = [[1.0, 1.0], [2.0, 2.0], [4.0, 4.0]]
DONE = [[True, False], [False, False], [False, True]]


class Case(NamedTuple):
    reward: Tensor  # [T, N] float64
    done: Tensor  # [T, N]
    gamma: float
    initial: Tensor  # [N]


@st.composite
def cases(draw: st.DrawFn, max_steps: int = 12) -> Case:
    steps, rows = draw(st.integers(1, max_steps)), draw(st.integers(1, 3))
    numbers = st.floats(-10, 10, allow_subnormal=False)
    size = steps * rows
    reward = draw(st.lists(numbers, min_size=size, max_size=size))
    done = draw(st.lists(st.sampled_from([False, False, True]), min_size=size, max_size=size))
    initial = draw(st.lists(st.floats(0, 1), min_size=rows, max_size=rows))
    gamma = draw(st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]))
    shape = (steps, rows)
    return Case(torch.tensor(reward).double().reshape(shape), torch.tensor(done).reshape(shape), gamma, torch.tensor(initial).double())


def loop(case: Case, gamma: Tensor | float) -> tuple[list[Tensor], Tensor, list[Tensor], Tensor]:
    """Step by step: discounts, segmented return, alive masks, complete return. Powers are products."""
    discount, power, alive = case.initial, torch.ones_like(case.initial), torch.ones_like(case.initial, dtype=torch.bool)
    segmented, complete = torch.zeros_like(case.initial), torch.zeros_like(case.initial)
    all_discounts, all_alive = [], []
    for reward, done in zip(case.reward, case.done, strict=True):
        all_discounts.append(discount)
        all_alive.append(alive)
        segmented = segmented + discount * reward
        complete = complete + torch.where(alive, power * reward, 0)
        discount = torch.where(done, 1, discount * gamma)
        power, alive = power * gamma, alive & ~done
    return [*all_discounts, discount], segmented, all_alive, complete


def test_golden_vectors(device: torch.device) -> None:
    reward, done = torch.tensor(REWARD, device=device), torch.tensor(DONE, device=device)
    for gamma in (0.5, torch.tensor(0.5, device=device)):
        assert segmented_discounted_return(reward, done, gamma).tolist() == [5.0, 3.0]
        assert complete_discounted_return(reward, done, gamma).tolist() == [1.0, 3.0]
        assert discounts(done, gamma).tolist() == [[1.0, 1.0], [1.0, 0.5], [0.5, 0.25]]
        assert final_discount(done, gamma).tolist() == [0.25, 1.0]
    assert alive_mask(done).tolist() == [[True, True], [False, True], [False, True]]


@given(cases())
def test_closed_form_equals_the_loop(case: Case) -> None:
    want_discounts, want_segmented, want_alive, want_complete = loop(case, case.gamma)
    eps = tolerance(torch.float64, 12)
    close = lambda got, want: torch.testing.assert_close(got, want, rtol=eps, atol=100 * eps)
    close(discounts(case.done, case.gamma, case.initial), torch.stack(want_discounts[:-1]))
    close(final_discount(case.done, case.gamma, case.initial), want_discounts[-1])
    close(segmented_discounted_return(case.reward, case.done, case.gamma, discount=case.initial), want_segmented)
    close(complete_discounted_return(case.reward, case.done, case.gamma), want_complete)
    assert torch.equal(alive_mask(case.done), torch.stack(want_alive))


@given(cases(max_steps=6))
def test_gradients_equal_those_of_the_loop(case: Case) -> None:
    def closed(reward: Tensor, gamma: Tensor, initial: Tensor) -> Tensor:
        last = final_discount(case.done, gamma, initial)
        both = segmented_discounted_return(reward, case.done, gamma, discount=initial) + 3 * complete_discounted_return(reward, case.done, gamma)
        return (both + last).sin().sum()

    def looped(reward: Tensor, gamma: Tensor, initial: Tensor) -> Tensor:
        steps, segmented, _, complete = loop(case._replace(reward=reward, initial=initial), gamma)
        return (segmented + 3 * complete + steps[-1]).sin().sum()

    gamma = torch.tensor(case.gamma).double()
    inputs = (case.reward, gamma, case.initial)
    got, want = (grad(fn, argnums=(0, 1, 2))(*inputs) for fn in (closed, looped))
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-10)
    got, want = (grad(lambda g, fn=fn: grad(fn, argnums=1)(case.reward, g, case.initial))(gamma) for fn in (closed, looped))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-8)


def test_gradient_in_gamma_at_zero_and_one() -> None:
    reward, done = torch.tensor([[5.0], [3.0], [2.0], [7.0]]), torch.zeros(4, 1, dtype=torch.bool)
    for fn in (complete_discounted_return, segmented_discounted_return):
        slope = grad(lambda gamma, fn=fn: fn(reward, done, gamma).sum())
        assert slope(torch.tensor(0.0)).item() == 3.0
        assert slope(torch.tensor(1.0)).item() == 3 + 2 * 2 + 3 * 7
        assert grad(slope)(torch.tensor(0.0)).item() == 4.0


@given(cases(), st.sampled_from([math.nan, math.inf, 1e30]))
def test_complete_return_ignores_all_after_the_first_done(case: Case, poison: float) -> None:
    dead = ~alive_mask(case.done)
    poisoned = torch.where(dead, poison, case.reward)
    later = case.done ^ dead

    def value(reward: Tensor, done: Tensor) -> Tensor:
        return complete_discounted_return(reward, done, case.gamma)

    assert torch.equal(value(poisoned, later), value(case.reward, case.done))
    slope = grad(lambda r: value(r, case.done).sum())(poisoned)
    assert torch.equal(slope, grad(lambda r: value(r, case.done).sum())(case.reward))
    assert (slope[dead] == 0).all()


@given(cases())
def test_without_a_done_both_returns_agree(case: Case) -> None:
    done = torch.zeros_like(case.done)
    got = segmented_discounted_return(case.reward, done, case.gamma)
    eps = tolerance(torch.float64, 12)
    torch.testing.assert_close(got, complete_discounted_return(case.reward, done, case.gamma), rtol=eps, atol=100 * eps)


@given(cases(), st.integers(1, 11))
def test_segments_chain(case: Case, cut: int) -> None:
    total, discount = torch.zeros_like(case.initial), case.initial
    for reward, done in zip(case.reward.split(cut), case.done.split(cut), strict=True):
        total = total + segmented_discounted_return(reward, done, case.gamma, discount=discount)
        discount = final_discount(done, case.gamma, discount)
    want = segmented_discounted_return(case.reward, case.done, case.gamma, discount=case.initial)
    eps = tolerance(torch.float64, 12)
    torch.testing.assert_close(total, want, rtol=eps, atol=100 * eps)
    torch.testing.assert_close(discount, final_discount(case.done, case.gamma, case.initial), rtol=eps, atol=eps)


@given(cases())
def test_rows_are_independent(case: Case) -> None:
    eps = tolerance(torch.float64, 12)
    for fn in (complete_discounted_return, segmented_discounted_return):
        whole = fn(case.reward, case.done, case.gamma)
        single = vmap(lambda r, d, fn=fn: fn(r, d, case.gamma), in_dims=1)(case.reward, case.done)
        torch.testing.assert_close(single, whole, rtol=eps, atol=100 * eps)
        others = torch.full_like(case.reward[:, 1:], math.nan), ~case.done[:, 1:]
        reward, done = torch.cat([case.reward[:, :1], others[0]], 1), torch.cat([case.done[:, :1], others[1]], 1)
        assert torch.equal(fn(reward, done, case.gamma)[0], whole[0])


def test_population_of_gammas_and_trailing_dimensions(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    reward = torch.randn(9, 2, 3, generator=generator, dtype=torch.float64).to(device)
    done = (torch.rand(9, 2, 3, generator=generator) < 0.2).to(device)
    gammas = torch.tensor([0.0, 0.7, 1.0], dtype=torch.float64, device=device)
    for fn in (complete_discounted_return, segmented_discounted_return):
        got = vmap(fn, in_dims=(None, None, 0))(reward, done, gammas)
        want = torch.stack([fn(reward.flatten(1), done.flatten(1), gamma).reshape(2, 3) for gamma in gammas])
        torch.testing.assert_close(got, want, rtol=tolerance(torch.float64, 9), atol=1e-14)


def test_long_rollout_in_float32_keeps_its_precision(device: torch.device) -> None:
    reward = torch.rand(1000, 2, generator=torch.Generator().manual_seed(1)).to(device)
    done = torch.zeros(1000, 2, dtype=torch.bool, device=device)
    got = segmented_discounted_return(reward, done, 0.999)
    assert got.dtype == torch.float32
    exact = (0.999 ** torch.arange(1000, dtype=torch.float64, device=device)[:, None] * reward.double()).sum(0)
    # A float32 gamma is off by up to eps / 2, which the 1000th power magnifies.
    torch.testing.assert_close(got.double(), exact, rtol=1000 * torch.finfo(torch.float32).eps, atol=0)


def test_dtype_follows_the_tensors() -> None:
    done = torch.zeros(2, 1, dtype=torch.bool)
    double = torch.tensor(0.5, dtype=torch.float64)
    assert discounts(done, 0.5).dtype == torch.get_default_dtype()
    assert discounts(done, double).dtype == torch.float64
    assert discounts(done, 0.5, double.expand(1)).dtype == torch.float64
    assert final_discount(done, double, dtype=torch.float32).dtype == torch.float32
    assert segmented_discounted_return(torch.ones(2, 1), done, double, discount=double).dtype == torch.float32


def test_compiled_equals_eager_for_any_gamma() -> None:
    reward, done = torch.tensor(REWARD).double(), torch.tensor(DONE)

    def both(reward: Tensor, done: Tensor, gamma: Tensor, initial: Tensor) -> tuple[Tensor, Tensor]:
        segmented = segmented_discounted_return(reward, done, gamma, discount=initial)
        return (segmented + complete_discounted_return(reward, done, gamma)).sum(), final_discount(done, gamma, initial)

    def slope(*args: Tensor) -> tuple:
        return grad(both, argnums=(0, 2, 3), has_aux=True)(*args)

    compiled = torch.compile(slope, backend="aot_eager", fullgraph=True)
    args = (reward, done, reward.new_tensor(0.9), reward.new_tensor([1.0, 0.3]))
    torch.testing.assert_close(compiled(*args), slope(*args))
    with torch.compiler.set_stance("fail_on_recompile"):
        args = (2 * reward, ~done, reward.new_tensor(0.0), args[3])
        torch.testing.assert_close(compiled(*args), slope(*args))


@pytest.mark.parametrize("gamma", [-0.1, 1.5, 99, math.nan, math.inf, True, "0.9", None])
def test_bad_gamma_is_refused(gamma: object) -> None:
    reward, done = torch.tensor(REWARD), torch.tensor(DONE)
    for fn in (complete_discounted_return, segmented_discounted_return, lambda r, d, g: discounts(d, g), lambda r, d, g: final_discount(d, g)):
        with pytest.raises(ValueError, match="gamma"):
            fn(reward, done, gamma)


def test_bad_tensors_are_refused() -> None:
    reward, done = torch.tensor(REWARD), torch.tensor(DONE)
    for fn in (complete_discounted_return, segmented_discounted_return):
        with pytest.raises(ValueError, match="at least one step"):
            fn(reward[:0], done[:0], 0.5)
        with pytest.raises(ValueError, match="same shape"):
            fn(reward, done[:, :1], 0.5)
        with pytest.raises(ValueError, match="floating"):
            fn(reward.long(), done, 0.5)
        with pytest.raises(ValueError, match="bool"):
            fn(reward, done.long(), 0.5)
    for fn in (alive_mask, lambda d: discounts(d, 0.5), lambda d: final_discount(d, 0.5)):
        with pytest.raises(ValueError, match="at least one step"):
            fn(done[:0])


# -- TD(lambda) ------------------------------------------------------------------------------------------------------------------------------------------


class Targets(NamedTuple):
    reward: Tensor  # [T, N] float64
    value: Tensor  # [T, N] after each step
    terminated: Tensor  # [T, N]
    truncated: Tensor  # [T, N]
    gamma: float
    td_lambda: float

    def returns(self, **changes: object) -> Tensor:
        given = {**self._asdict(), **changes}
        value = given.pop("value")
        return td_lambda_returns(given.pop("reward"), value, given.pop("terminated"), given.pop("truncated"), **given)


@st.composite
def targets(draw: st.DrawFn) -> Targets:
    case = draw(cases())
    size, shape = case.reward.numel(), case.reward.shape
    value = torch.tensor(draw(st.lists(st.floats(-10, 10, allow_subnormal=False), min_size=size, max_size=size))).double().reshape(shape)
    truncated = torch.tensor(draw(st.lists(st.sampled_from([False, False, True]), min_size=size, max_size=size))).reshape(shape)
    return Targets(case.reward, value, case.done, truncated, case.gamma, draw(st.sampled_from([0.0, 0.3, 0.95, 1.0])))


def n_step_mean(case: Targets) -> Tensor:
    """The definition: ``(1 - lambda) sum_n lambda^(n-1) G^(n)`` with the rest of the weight on the longest, where ``G^(n)`` is the n-step return."""
    steps, rows = case.reward.shape
    out = torch.zeros_like(case.reward)
    for row in range(rows):
        for start in range(steps):
            total, weight, discount = 0.0, 1.0, 1.0
            for t in range(start, steps):
                total = total + discount * case.reward[t, row]
                discount *= case.gamma
                tail = 0.0 if case.terminated[t, row] else discount * case.value[t, row]
                last = bool(case.terminated[t, row] | case.truncated[t, row]) or t == steps - 1
                out[start, row] += (weight if last else weight * (1 - case.td_lambda)) * (total + tail)
                if last:
                    break
                weight *= case.td_lambda
    return out


@given(targets())
def test_td_lambda_is_the_weighted_mean_of_n_step_returns(case: Targets) -> None:
    torch.testing.assert_close(case.returns(), n_step_mean(case), rtol=tolerance(torch.float64, 1000), atol=tolerance(torch.float64, 1000))


@given(targets())
def test_td_lambda_at_zero_and_one(case: Targets) -> None:
    limit = tolerance(torch.float64, 100)
    after = torch.where(case.terminated, 0, case.value)
    torch.testing.assert_close(case.returns(td_lambda=0.0), case.reward + case.gamma * after, rtol=limit, atol=limit)
    # With lambda 1 the value counts where an episode or the segment ends, as one more reward.
    ends = case.truncated.clone()
    ends[-1] = True
    extended = case.reward + case.gamma * torch.where(ends, after, 0)
    done = case.terminated | case.truncated
    start = complete_discounted_return(extended, done, case.gamma)
    torch.testing.assert_close(case.returns(td_lambda=1.0)[0], start, rtol=limit, atol=10 * limit)


@given(targets(), st.sampled_from([math.nan, math.inf]))
def test_td_lambda_asks_for_no_value_after_a_termination(case: Targets, poison: float) -> None:
    poisoned = case.returns(value=torch.where(case.terminated, poison, case.value))
    assert torch.equal(poisoned, case.returns())
    slope = grad(lambda reward: case.returns(reward=reward, value=torch.where(case.terminated, poison, case.value)).sum())(case.reward)
    assert bool(torch.isfinite(slope).all())


@given(targets())
def test_the_returns_of_exact_values_are_these_values(case: Targets) -> None:
    """Where every step's reward makes the values consistent, lambda does not matter."""
    before = torch.cat([torch.zeros_like(case.value[:1]), case.value[:-1]])
    reward = before - case.gamma * torch.where(case.terminated, 0, case.value)
    torch.testing.assert_close(case.returns(reward=reward, truncated=torch.zeros_like(case.truncated)), before, rtol=1e-12, atol=1e-11)


def test_td_lambda_refuses_what_does_not_fit() -> None:
    reward, flag = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    for bad in ((reward, reward[:1], flag, flag), (reward, reward, flag[:1], flag), (reward, reward, flag, reward), (reward, flag, flag, flag)):
        with pytest.raises(ValueError, match="must"):
            td_lambda_returns(*bad, gamma=0.9, td_lambda=0.9)
    for name in ("gamma", "td_lambda"):
        with pytest.raises(ValueError, match=name):
            td_lambda_returns(reward, reward, flag, flag, **{"gamma": 0.9, "td_lambda": 0.9, name: 1.5})

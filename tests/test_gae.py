from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor
from torch.func import grad, vmap

from frl.advantages import compute_gae, compute_gae_rollout, explained_variance, group_advantages, normalize_advantage
from frl.returns import alive_mask, discounted_returns_to_go
from tests.tolerances import tolerance

NAN = math.nan


def f64(x: object) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def column(*x: float) -> Tensor:
    """One row, ``[T, 1]``."""
    return f64(x)[:, None]


def flags(*x: int) -> Tensor:
    return torch.tensor(x, dtype=torch.bool)[:, None]


def close(got: Tensor, want: Tensor, ops: int = 1, scale: float = 100.0) -> None:
    eps = tolerance(got.dtype, ops)
    torch.testing.assert_close(got, want, rtol=eps, atol=scale * eps, check_dtype=False)


class Case(NamedTuple):
    reward: Tensor  # [T, N] float64
    value: Tensor  # [T+1, N]
    terminated: Tensor  # [T, N]
    truncated: Tensor
    final_value: Tensor
    gamma: float
    gae_lambda: float


@st.composite
def cases(draw: st.DrawFn, max_steps: int = 13) -> Case:
    steps, rows = draw(st.integers(1, max_steps)), draw(st.integers(1, 3))
    floats = lambda length: f64(draw(st.lists(st.floats(-10, 10, allow_subnormal=False), min_size=length * rows, max_size=length * rows))).reshape(length, rows)
    marks = lambda: torch.tensor(draw(st.lists(st.sampled_from([False, False, False, True]), min_size=steps * rows, max_size=steps * rows))).reshape(
        steps, rows
    )
    factor = st.sampled_from([0.0, 0.5, 0.95, 1.0])
    return Case(floats(steps), floats(steps + 1), marks(), marks(), floats(steps), draw(factor), draw(factor))


def loop(case: Case, gamma: float | Tensor, gae_lambda: float | Tensor, valid: Tensor | None = None) -> Tensor:
    """Step by step, row by row."""
    steps, rows = case.reward.shape
    out = [[f64(0.0)] * rows for _ in range(steps)]
    for n in range(rows):
        later = f64(0.0)
        for t in reversed(range(steps)):
            if valid is not None and not valid[t, n]:
                later = f64(0.0)
                continue
            if case.terminated[t, n]:
                after, later = f64(0.0), f64(0.0)
            elif case.truncated[t, n]:
                after, later = case.final_value[t, n], f64(0.0)
            else:
                after = case.value[t + 1, n]
            later = case.reward[t, n] + gamma * after - case.value[t, n] + gamma * gae_lambda * later
            out[t][n] = later
    return torch.stack([torch.stack(row) for row in out])


def gae(case: Case, **changes: object) -> Tensor:
    given = {**case._asdict(), **changes}
    return compute_gae(given.pop("reward"), given.pop("value"), given.pop("terminated"), given.pop("truncated"), **given).advantage


# -- figures ---------------------------------------------------------------------------------------------------------------------------------------


REWARD = [[1.0, 2.0, 3.0, 4.0], [1.0, 0.0, -1.0, 0.5]]
VALUE = [[0.5, 1.0, 1.5, 2.0, 2.5], [0.0, 0.25, 0.5, 0.75, 1.0]]
TERMINATED = [[0, 1, 0, 0], [0, 0, 0, 0]]
TRUNCATED = [[0, 0, 0, 0], [0, 0, 1, 0]]
ADVANTAGE = [[2.12, 1.0, 6.36, 4.25], [0.82468, -0.556, -1.05, 0.65]]
RETURN = [[2.62, 2.0, 7.86, 6.25], [0.82468, -0.306, -0.55, 1.4]]


def rollout(**extra: Tensor) -> TensorDict:
    pad = lambda x: torch.cat([x, torch.full_like(x[:, :1], 1)], 1)
    fields = {"reward": torch.tensor(REWARD), "terminated": torch.tensor(TERMINATED).bool(), "truncated": torch.tensor(TRUNCATED).bool(), **extra}
    return TensorDict({"value": torch.tensor(VALUE), **{name: pad(x) for name, x in fields.items()}}, batch_size=[2, 5])


def test_reference_figures(device: torch.device) -> None:
    of = lambda x, dtype=torch.float64: torch.tensor(x, dtype=dtype, device=device).T.contiguous()
    reward, value, terminated, truncated = of(REWARD), of(VALUE), of(TERMINATED, torch.bool), of(TRUNCATED, torch.bool)
    advantage, returns = compute_gae(reward, value, terminated, truncated, gamma=0.9, gae_lambda=0.8, bootstrap="pre_step")
    close(advantage, of(ADVANTAGE))
    close(returns, of(RETURN))
    for final, want in ((0.0, -1.5), (10.0, 7.5)):
        corrected = compute_gae(reward, value, terminated, truncated, gamma=0.9, gae_lambda=0.8, final_value=torch.full_like(reward, final)).advantage
        close(corrected[:, 0], of(ADVANTAGE)[:, 0])
        close(corrected[2, 1], f64(want).to(device))


def test_both_flags_terminate_except_under_the_reference_rule() -> None:
    both = dict(gamma=0.5, gae_lambda=0.9, final_value=column(100))
    assert compute_gae(column(1), column(2, 7), flags(1), flags(1), **both).advantage.item() == -1.0
    assert compute_gae(column(1), column(2, 7), flags(1), flags(1), **both, bootstrap="pre_step").advantage.item() == 0.0
    assert compute_gae(column(1), column(2, 7), flags(1), flags(0), **both, bootstrap="pre_step").advantage.item() == -1.0


def test_time_limit_takes_the_final_value_and_cuts() -> None:
    got = compute_gae(column(1, 1, 1), column(1, 2, 5, 2), flags(0, 0, 0), flags(0, 1, 0), gamma=0.9, gae_lambda=0.5, final_value=column(NAN, 10, NAN))
    close(got.advantage, column(5.4, 8.0, -2.2))
    close(got.returns, column(6.4, 10.0, 2.8))


def test_bootstrap_is_counted_once() -> None:
    none = flags(0, 0, 0, 0)
    close(compute_gae(column(1, 2, 3, 4), column(1, 1, 1, 1, 8), none, (), gamma=0.5, gae_lambda=1).advantage, column(2.75, 4.5, 6, 7))


def test_flag_belongs_to_its_own_step() -> None:
    close(compute_gae(column(1, 1, 1), column(0, 4, 0, 2), flags(0, 1, 0), (), gamma=1.0, gae_lambda=1.0).advantage, column(2, -3, 3))


def test_neither_the_state_before_nor_the_reset_state_stands_for_the_final_one() -> None:
    close(compute_gae(column(0), column(7, 100), flags(0), flags(1), gamma=0.9, gae_lambda=0.95, final_value=column(2)).advantage, column(-5.2))


def test_reset_steps_of_next_step_autoreset_disappear() -> None:
    """Episodes of two steps with reward 1; rows 2 and 5 are the reset steps."""
    valid = flags(1, 1, 0, 1, 1, 0)
    play = lambda reward: compute_gae(reward, torch.zeros(7, 1).double(), flags(0, 1, 0, 0, 1, 0), (), gamma=1, gae_lambda=1, valid=valid)
    got = play(column(1, 1, 0, 1, 1, 0))
    assert got.advantage.squeeze(1).tolist() == [2, 1, 0, 2, 1, 0]
    for junk in (50.0, NAN):
        again = play(column(1, 1, junk, 1, 1, junk))
        assert torch.equal(again.advantage, got.advantage)
        assert torch.equal(again.returns, got.returns)


# -- laws ------------------------------------------------------------------------------------------------------------------------------------------


@given(cases(), st.data())
def test_equals_the_loop(case: Case, data: st.DataObject) -> None:
    close(gae(case), loop(case, case.gamma, case.gae_lambda), 13)
    shape = case.reward.shape
    valid = torch.tensor(data.draw(st.lists(st.booleans(), min_size=shape.numel(), max_size=shape.numel()))).reshape(shape)
    close(gae(case, valid=valid), loop(case, case.gamma, case.gae_lambda, valid), 13)
    returns = compute_gae(*case[:4], gamma=case.gamma, gae_lambda=case.gae_lambda, final_value=case.final_value).returns
    close(returns, gae(case) + case.value[:-1])


@given(cases(max_steps=6))
def test_gradients_equal_those_of_the_loop(case: Case) -> None:
    """At gamma or lambda 0 as well; weights make the steps' gradients differ."""
    weight = torch.arange(1.0, 1.0 + case.reward.numel(), dtype=torch.float64).reshape(case.reward.shape)

    def of(fn):
        def total(reward: Tensor, value: Tensor, final_value: Tensor, gamma: Tensor, gae_lambda: Tensor) -> Tensor:
            now = case._replace(reward=reward, value=value, final_value=final_value)
            return (weight * fn(now, gamma, gae_lambda)).sum()

        return grad(total, argnums=(0, 1, 2, 3, 4))(case.reward, case.value, case.final_value, f64(case.gamma), f64(case.gae_lambda))

    for got, want in zip(of(lambda c, g, lam: gae(c, gamma=g, gae_lambda=lam)), of(loop), strict=True):
        close(got, want, 36, scale=1e4)


@given(cases())
def test_lambda_0_is_the_one_step_error_and_1_the_return_minus_the_value(case: Case) -> None:
    done = case.terminated | case.truncated
    after = torch.where(case.terminated, 0, torch.where(case.truncated, case.final_value, case.value[1:]))
    assert torch.equal(gae(case, gae_lambda=0.0), case.reward + case.gamma * after - case.value[:-1])
    ends = done.clone()
    ends[-1] = True
    worth = discounted_returns_to_go(case.reward + torch.where(ends, case.gamma * after, 0), done, case.gamma)
    close(gae(case, gae_lambda=1.0), worth - case.value[:-1], 13, scale=1e3)


@given(cases(), st.sampled_from([1e6, math.inf, NAN]))
def test_what_follows_a_done_reaches_nothing_before_it(case: Case, junk: float) -> None:
    done = case.terminated | case.truncated
    later = ~alive_mask(done)
    value = torch.where(torch.cat([torch.zeros_like(done[:1]), ~alive_mask(done)[1:], (done | later)[-1:]]), junk, case.value)
    reward = torch.where(later, junk, case.reward)
    used = case.truncated & ~case.terminated
    final_value = torch.where(used & ~later, case.final_value, junk)

    def first(reward: Tensor, value: Tensor, final_value: Tensor, gamma: Tensor) -> Tensor:
        return torch.where(later, 0, gae(case, reward=reward, value=value, final_value=final_value, gamma=gamma))

    gamma = f64(case.gamma)
    assert torch.equal(first(reward, value, final_value, gamma), first(case.reward, case.value, case.final_value, gamma))
    slopes = lambda *args: grad(lambda *x: first(*x).sum(), argnums=(0, 1, 2))(*args, gamma)
    for got, want in zip(slopes(reward, value, final_value), slopes(case.reward, case.value, case.final_value), strict=True):
        assert torch.equal(got, want)


def test_junk_in_holes_leaves_every_gradient_finite() -> None:
    valid, junk = flags(1, 0, 1), column(1, NAN, 1)
    total = lambda r, v, f, g: compute_gae(r, v, flags(1, 0, 0), flags(0, 1, 1), gamma=g, gae_lambda=g, final_value=f, valid=valid).advantage.sum()
    slopes = grad(total, argnums=(0, 1, 2, 3))(junk, column(1, NAN, 2, NAN), junk, f64(0.9))
    for slope in slopes:
        assert torch.isfinite(slope).all()
    close(slopes[3], f64(1.0))


def test_junk_behind_a_done_leaves_the_gradient_of_the_discount_finite() -> None:
    """The last step is not finite and alone in its episode: the sums before it are cut, not multiplied by zero."""
    first = lambda g: compute_gae(column(1, 2, NAN), column(0, 4, 0, 0), flags(0, 1, 0), (), gamma=g, gae_lambda=g).advantage[0, 0]
    close(grad(first)(f64(0.5)), f64(4.0 + 2 * 0.5 * (2.0 - 4.0)))


def test_a_step_before_a_hole_bootstraps_from_the_value_there() -> None:
    got = compute_gae(column(1, 1, 1), column(0, 3, 0, 5), flags(0, 0, 0), (), gamma=1, gae_lambda=1, valid=flags(1, 0, 1)).advantage
    close(got, column(4, 0, 6))


def test_dtype_dimensions_and_members_with_their_own_numbers(device: torch.device) -> None:
    gen = torch.Generator().manual_seed(0)
    steps, shape = 37, (3, 2, 4)
    draw = lambda *lead: torch.randn(*lead, *shape, generator=gen, dtype=torch.float64)
    case = Case(draw(steps), draw(steps + 1), draw(steps) > 1.5, draw(steps) > 1.5, draw(steps), 0.9, 0.8)
    flat = case._replace(**{name: getattr(case, name).flatten(1) for name in case._fields[:5]})
    want = loop(flat, 0.9, 0.8).reshape(steps, *shape).to(device)
    case = Case(*[x.to(device) for x in case[:5]], 0.9, 0.8)
    close(gae(case), want, steps)
    narrow = gae(case._replace(reward=case.reward.float(), value=case.value.float(), final_value=case.final_value.float()))
    assert narrow.dtype == torch.float32
    close(narrow, want.float(), steps)
    assert gae(case._replace(reward=case.reward.float())).dtype == torch.float64
    gammas, lambdas = torch.tensor([0.9, 0.0, 1.0], dtype=torch.float64, device=device), torch.tensor([0.8, 1.0, 0.0], dtype=torch.float64, device=device)
    members = [x.movedim(1, 0) for x in case[:5]]
    got = vmap(lambda r, v, d, t, f, g, lam: compute_gae(r, v, d, t, gamma=g, gae_lambda=lam, final_value=f).advantage)(*members, gammas, lambdas)
    for i in range(3):
        one = Case(*[x[i] for x in members], float(gammas[i]), float(lambdas[i]))
        close(got[i], gae(one), steps)


def test_long_undiscounted_sums_stay_accurate() -> None:
    reward = torch.full((4096, 1), 0.1)
    value, none = torch.zeros(4097, 1), torch.zeros(4096, 1, dtype=torch.bool)
    got = compute_gae(reward, value, none, (), gamma=1.0, gae_lambda=1.0).advantage
    close(got, torch.full((), 0.1).double() * torch.arange(4096, 0, -1)[:, None].double(), 12)


def test_compiled_equals_eager() -> None:
    gen = torch.Generator().manual_seed(1)
    reward, value, final = (torch.randn(n, 4, generator=gen, dtype=torch.float64) for n in (11, 12, 11))
    ends = torch.rand(11, 4, generator=gen)
    valid = ends < 0.95

    def both(reward: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        advantage, returns = compute_gae(reward, value, ends > 0.9, ends < 0.1, gamma=gamma, gae_lambda=gamma, final_value=final, valid=valid)
        group = group_advantages(discounted_returns_to_go(reward, ends > 0.9, gamma), valid, 2)
        return normalize_advantage(advantage, valid), returns, *group

    def slope(reward: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        return grad(lambda r, g: sum(x.sum() for x in both(r, g)[:3]), argnums=(0, 1))(reward, gamma)

    run = torch.compile(lambda r, g: (both(r, g), slope(r, g)), backend="aot_eager", fullgraph=True)
    for gamma in (f64(0.9), f64(0.0)):
        values, slopes = run(reward, gamma)
        for got, want in zip((*values, *slopes), (*both(reward, gamma), *slope(reward, gamma)), strict=True):
            close(got, want, 11)


# -- recorded rollouts -----------------------------------------------------------------------------------------------------------------------------


def test_rollout_gets_new_fields_and_stays_as_it_was() -> None:
    given = rollout(final_value=torch.zeros(2, 4))
    before = given.clone()
    given.lock_()
    reference = compute_gae_rollout(given, 0.9, 0.8, bootstrap="pre_step")
    close(reference["advantage"], torch.tensor([[*row, 0.0] for row in ADVANTAGE]))
    close(reference["return"], torch.tensor([[*row, 0.0] for row in RETURN]))
    assert set(given.keys()) == set(before.keys())
    assert (given == before).all()
    assert reference["reward"].data_ptr() == given["reward"].data_ptr()
    core = compute_gae(
        *(before[name].T[:-1] if name != "value" else before[name].T for name in ("reward", "value", "terminated", "truncated")),
        gamma=0.9,
        gae_lambda=0.8,
        final_value=torch.zeros(4, 2),
    )
    assert torch.equal(compute_gae_rollout(given, 0.9, 0.8)["advantage"][:, :-1], core.advantage.T)
    stacked = torch.stack([before, before]).contiguous()
    assert torch.equal(compute_gae_rollout(stacked, 0.9, 0.8)["advantage"][1, :, :-1], core.advantage.T)


def test_rollout_masks_and_a_done_that_no_flag_explains() -> None:
    done = torch.tensor(TERMINATED).bool() | torch.tensor(TRUNCATED).bool()
    final = torch.full((2, 4), 3.0)
    plain = compute_gae_rollout(rollout(final_value=final), 0.9, 0.8)["advantage"]
    assert torch.equal(compute_gae_rollout(rollout(final_value=final, done=done), 0.9, 0.8)["advantage"], plain)
    extra = done.clone()
    extra[0, 3] = True
    got = compute_gae_rollout(rollout(final_value=final, done=extra), 0.9, 0.8)["advantage"]
    assert got[0, 3] == 4.0 - 2.0
    assert torch.equal(got[1], plain[1])
    valid = torch.ones(2, 4, dtype=torch.bool)
    valid[0, 2] = False
    assert compute_gae_rollout(rollout(final_value=final, valid=valid), 0.9, 0.8)["advantage"][0, 2] == 0.0


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: rollout(), "final_value"),
        (lambda: rollout(final_value=torch.zeros(2, 4)).exclude("value"), "value"),
        (lambda: rollout(final_value=torch.zeros(2, 4)).exclude("terminated"), "terminated"),
        (lambda: rollout(final_value=torch.zeros(2, 4)).set("value", torch.zeros(2, 5, 1)), "shape"),
        (lambda: rollout(final_value=torch.zeros(2, 4)).set("truncated", torch.zeros(2, 5)), "bool"),
        (lambda: rollout(final_value=torch.zeros(2, 4))[0], "batch size"),
        (lambda: rollout(final_value=torch.zeros(2, 4))[:, :1], "batch size"),
    ],
)
def test_bad_rollouts_are_refused(make, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        compute_gae_rollout(make(), 0.9, 0.8)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(reward=torch.zeros(0, 1)), "at least one step"),
        (dict(reward=torch.zeros(2, 1, dtype=torch.int64)), "reward must be floating"),
        (dict(value=torch.zeros(2, 1)), "one entry more"),
        (dict(value=torch.zeros(3, 1, dtype=torch.int64)), "value must be floating"),
        (dict(terminated=flags(0)), "terminated must have the shape"),
        (dict(terminated=torch.zeros(2, 1)), "terminated must be bool"),
        (dict(truncated=torch.zeros(2, 1, dtype=torch.int64)), "truncated must be bool"),
        (dict(final_value=torch.zeros(3, 1)), "final_value must have the shape"),
        (dict(final_value=()), "needs final_value"),
        (dict(valid=torch.ones(2)), "valid must have the shape"),
        (dict(gamma=99), "gamma"),
        (dict(gamma=-0.1), "gamma"),
        (dict(gamma=NAN), "gamma"),
        (dict(gae_lambda=1.5), "gae_lambda"),
        (dict(gae_lambda=True), "gae_lambda"),
        (dict(bootstrap="final"), "bootstrap"),
    ],
)
def test_bad_arguments_are_refused(change: dict, text: str) -> None:
    good = dict(
        reward=torch.zeros(2, 1),
        value=torch.zeros(3, 1),
        terminated=flags(0, 0),
        truncated=flags(0, 0),
        final_value=torch.zeros(2, 1),
        gamma=0.9,
        gae_lambda=0.9,
    )
    compute_gae(**good)
    with pytest.raises(ValueError, match=text):
        compute_gae(**{**good, **change})


# -- groups ----------------------------------------------------------------------------------------------------------------------------------------


def test_group_figures(device: torch.device) -> None:
    of = lambda x, dtype=torch.float64: torch.tensor(x, dtype=dtype, device=device).T
    reward = of([[1, 2, 4], [0, 1, 0], [3, 3, 3], [1, 1, 1]])
    done = of([[0, 1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 1]], torch.bool)
    togo, mask = discounted_returns_to_go(reward, done, 0.5), alive_mask(done)
    close(togo, of([[2, 2, 4], [0.5, 1, 0], [3, 4.5, 3], [1.75, 1.5, 1]]))
    assert mask.T.tolist() == [[True, True, False], [True, True, True], [True, False, False], [True, True, True]]
    got = group_advantages(togo, mask, 2)
    torch.testing.assert_close(got.advantage, of([[1, 1, 0], [-1, -1, 0], [1, 0, 0], [-1, 0, 0]]), rtol=0, atol=1e-7)
    assert got.tied_fraction.item() == 0.0


@given(cases())
def test_returns_to_go_equal_the_loop(case: Case) -> None:
    done = case.terminated | case.truncated
    later, want = torch.zeros_like(case.reward[0]), []
    for reward, end in zip(case.reward.flip(0), done.flip(0), strict=True):
        later = reward + torch.where(end, 0, case.gamma * later)
        want.append(later)
    close(discounted_returns_to_go(case.reward, done, case.gamma), torch.stack(want).flip(0), 13)
    junk = torch.where(alive_mask(done), case.reward, NAN)
    got = torch.where(alive_mask(done), discounted_returns_to_go(junk, done, case.gamma), 0)
    close(got, torch.where(alive_mask(done), torch.stack(want).flip(0), 0), 13)


@pytest.mark.parametrize("flat", [[2.0, 2.0, 2.0, 2.0], [1.0, 1.0 + 1.2e-7, 1.0, 1.0], [0.7, 0.7, 0.7, 0.7], [1e6, 1e6, 1e6, 1e6 + 0.0625]])
def test_tied_groups_are_exactly_zero_and_leave_others_alone(flat: list[float]) -> None:
    other = [1.0, 2.0, 3.0, 4.0]
    got = group_advantages(torch.tensor([flat + other]), torch.ones(1, 8, dtype=torch.bool), 4)
    assert got.advantage[0, :4].tolist() == [0, 0, 0, 0]
    assert torch.equal(got.advantage[:, 4:], group_advantages(torch.tensor([other]), torch.ones(1, 4, dtype=torch.bool), 4).advantage)
    close(got.advantage[0, 4:], (torch.tensor(other) - 2.5) / math.sqrt(1.25), 8, 1)
    assert got.tied_fraction.item() == 0.5
    assert grad(lambda x: group_advantages(x, torch.ones(1, 4, dtype=torch.bool), 4).advantage.sum())(torch.tensor([flat])).tolist() == [[0, 0, 0, 0]]


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_a_bad_return_counts_in_no_statistic(bad: float) -> None:
    on = torch.ones(1, 4, dtype=torch.bool)
    got = group_advantages(f64([[1.0, bad, 3.0, 5.0]]), on, 4).advantage[0]
    assert got[1] == 0.0
    close(got[[0, 2, 3]], (f64([1.0, 3.0, 5.0]) - 3.0) / math.sqrt(8 / 3), 8, 1e8)
    slopes = grad(lambda x: (group_advantages(x, on, 4).advantage * f64([1, 2, 3, 5])).sum())(f64([[1.0, bad, 3.0, 5.0]]))
    assert torch.isfinite(slopes).all()
    assert slopes[0, 1] == 0.0


def test_one_left_or_none_gives_zero() -> None:
    mask = torch.tensor([[True, False], [False, False]])
    got = group_advantages(f64([[3.0, NAN], [NAN, 1.0]]), mask, 2)
    assert got.advantage.tolist() == [[0, 0], [0, 0]]
    assert got.tied_fraction.item() == 0.0


def test_an_unequal_group_is_refused_or_masked() -> None:
    """Two members and one: by number they are no two groups of two, by mask the single one has nobody to be compared with."""
    reward = f64([[1.0, 3.0, 5.0]])
    with pytest.raises(ValueError, match="3 rows and group_size 2"):
        group_advantages(reward, torch.ones(1, 3, dtype=torch.bool), 2)
    mask = torch.tensor([[True, True, True, False]])
    got = group_advantages(torch.cat([reward, f64([[NAN]])], 1), mask, 2).advantage
    close(got, f64([[-1.0, 1.0, 0.0, 0.0]]), 8, 1e8)


def test_rows_of_a_group_are_neighbours() -> None:
    returns = torch.tensor([[0.0] * 4 + [1.0] * 4])
    assert group_advantages(returns, torch.ones(1, 8, dtype=torch.bool), 4).advantage.eq(0).all()


@st.composite
def groups(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    size, count, steps = draw(st.integers(2, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    values = draw(st.lists(st.integers(-8, 8), min_size=size * count * steps, max_size=size * count * steps))
    mask = draw(st.lists(st.sampled_from([True, True, False]), min_size=len(values), max_size=len(values)))
    return f64(values).reshape(steps, -1), torch.tensor(mask).reshape(steps, -1), size


@given(groups(), st.sampled_from([-64.0, 0.5, 300.0]))
def test_group_laws(case: tuple[Tensor, Tensor, int], shift: float) -> None:
    returns, mask, size = case
    got = group_advantages(returns, mask, size).advantage
    limit = tolerance(torch.float64, 100) * 400
    by_group = got.reshape(*returns.shape[:-1], -1, size)
    assert by_group.sum(-1).abs().max() <= limit
    torch.testing.assert_close(group_advantages(returns + shift, mask, size).advantage, got, rtol=limit, atol=limit)
    assert got[~mask].eq(0).all()
    power, counted = (by_group**2).sum(-1), mask.reshape(by_group.shape).sum(-1)
    close(power, torch.where(power > 0, counted, 0).double(), 1, 1e8)
    junk = torch.where(mask, returns, NAN)
    assert torch.equal(group_advantages(junk, mask, size).advantage, got)


@pytest.mark.parametrize(
    ("rows", "size", "eps", "text"),
    [
        (10, 4, 1e-8, "10 rows and group_size 4"),
        (8, 1, 1e-8, "group_size.*got 1"),
        (8, True, 1e-8, "group_size"),
        (8, 2.0, 1e-8, "group_size"),
        (8, 4, -1.0, "eps"),
    ],
)
def test_bad_groups_are_refused(rows: int, size: int, eps: float, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        group_advantages(torch.zeros(3, rows), torch.ones(3, rows, dtype=torch.bool), size, eps)


def test_bad_group_tensors_are_refused() -> None:
    for returns, mask in (
        (torch.zeros(3, 4), torch.ones(3, 4)),
        (torch.zeros(3, 4), torch.ones(4, dtype=torch.bool)),
        (torch.zeros(3, 4).long(), torch.ones(3, 4).bool()),
    ):
        with pytest.raises(ValueError, match="returns_to_go"):
            group_advantages(returns, mask, 2)


# -- scale of a batch ------------------------------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-100, 100, allow_subnormal=False), min_size=2, max_size=20, unique=True), st.data())
def test_normalized_advantages_equal_the_formula(values: list[float], data: st.DataObject) -> None:
    x = f64(values)
    if x.std() <= 1e-9:
        return
    close(normalize_advantage(x), (x - x.mean()) / (x.std() + 1e-8), 20, 1e3)
    mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))
    got = normalize_advantage(torch.where(mask, x, NAN), mask)
    assert got[~mask].eq(0).all()
    if mask.sum() >= 2:
        close(got[mask], normalize_advantage(x[mask]), 20, 1e3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 65, 4097])
def test_equal_advantages_and_single_ones_become_zero(dtype: torch.dtype, count: int) -> None:
    for level in (0.7, -1e-12, 0.0, 3e7):
        x = torch.full((count,), level, dtype=dtype)
        assert normalize_advantage(x).eq(0).all()
        assert grad(lambda y: normalize_advantage(y).sum())(x).eq(0).all()
    assert normalize_advantage(torch.full((3,), 2.0, dtype=dtype), torch.tensor([False, True, False])).tolist() == [0, 0, 0]
    assert normalize_advantage(torch.full((3,), NAN, dtype=dtype), torch.zeros(3, dtype=torch.bool)).tolist() == [0, 0, 0]


def test_small_advantages_are_scaled_and_a_nan_shows() -> None:
    x = f64([1e-6, 2e-6, 4e-6])
    close(normalize_advantage(x), (x - x.mean()) / (x.std() + 1e-8), 4)
    assert normalize_advantage(f64([1.0, NAN, 2.0])).isnan().all()


def test_explained_variance() -> None:
    returns = f64([1.0, 2.0, 4.0, -1.0])
    assert explained_variance(returns + 3, returns).item() == 1.0
    close(explained_variance(torch.zeros(4).double(), returns), f64(0.0))
    close(explained_variance(f64([1.0, 0.0, 2.0, 1.0]), returns), 1 - (returns - f64([1.0, 0.0, 2.0, 1.0])).var() / returns.var(), 8)
    assert explained_variance(-returns, returns).item() == -3.0
    mask = torch.tensor([True, True, True, False])
    close(explained_variance(f64([0.5, 1.0, 1.5, NAN]), torch.where(mask, returns, NAN), mask), 1 - f64([0.5, 1.0, 2.5]).var() / f64([1.0, 2.0, 4.0]).var(), 8)
    flat = torch.full((65,), 0.7)
    assert explained_variance(flat, flat).item() == 1.0
    assert explained_variance(torch.arange(65.0), flat).item() == 0.0
    assert explained_variance(returns, f64([1.0, NAN, 2.0, 0.0])).isnan()

"""Schedules against ``torch.optim.lr_scheduler``, and their names and horizons."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import grad, vmap

from frl.optim import (
    LRSchedulerCfg,
    Schedule,
    bind_scheduler_horizon,
    build_lr_scheduler,
    coerce_lr_scheduler_cfg,
    constant_schedule,
    cosine_schedule,
    exponential_schedule,
    get_registered_lr_scheduler_names,
    linear_schedule,
    register_lr_scheduler,
    scheduler_needs_horizon,
    step_schedule,
)
from tests.tolerances import tolerance

EACH: dict[str, Schedule] = {
    "constant": constant_schedule(),
    "linear": linear_schedule(10),
    "cosine": cosine_schedule(10, eta_min=1e-4),
    "step": step_schedule(3),
    "exponential": exponential_schedule(0.9),
}


def rates(schedule: Schedule, base: float, steps: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.stack([schedule(torch.tensor(base, dtype=dtype), torch.tensor(k)) for k in range(steps)])


def oracle(cls: Any, base: float, steps: int, **options: Any) -> Tensor:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=base)
    scheduler, seen = cls(optimizer, **options), []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scheduler.step()
    return torch.tensor(seen, dtype=torch.float64)


# ---- torch is the oracle ----
# torch multiplies factors together step by step where these are closed forms, so it is off by the rounding of up to 60 products; where a factor is a
# difference of nearly equal numbers (the end of linear and cosine) that error is relative to the base rate, not to the rate.


@given(base=st.floats(1e-6, 1.0), total=st.integers(1, 50), start=st.floats(0.05, 1.0), end=st.floats(0.0, 1.0))
def test_linear_equals_torch(base: float, total: int, start: float, end: float) -> None:
    expected = oracle(torch.optim.lr_scheduler.LinearLR, base, 60, total_iters=total, start_factor=start, end_factor=end)
    torch.testing.assert_close(rates(linear_schedule(total, start, end), base, 60), expected, rtol=1e-12, atol=1e-12 * base)


@given(base=st.floats(1e-6, 1.0), total=st.integers(1, 50), floor=st.floats(0.0, 0.1))
def test_cosine_equals_torch_up_to_the_horizon(base: float, total: int, floor: float) -> None:
    expected = oracle(torch.optim.lr_scheduler.CosineAnnealingLR, base, total + 1, T_max=total, eta_min=floor)
    torch.testing.assert_close(rates(cosine_schedule(total, floor), base, total + 1), expected, rtol=1e-12, atol=1e-12 * max(base, floor))


@given(base=st.floats(1e-6, 1.0), size=st.integers(1, 20), gamma=st.floats(0.05, 1.5))
def test_step_equals_torch(base: float, size: int, gamma: float) -> None:
    expected = oracle(torch.optim.lr_scheduler.StepLR, base, 60, step_size=size, gamma=gamma)
    torch.testing.assert_close(rates(step_schedule(size, gamma), base, 60), expected, rtol=1e-12, atol=0.0)


@given(base=st.floats(1e-6, 1.0), gamma=st.floats(0.05, 1.5))
def test_exponential_equals_torch(base: float, gamma: float) -> None:
    expected = oracle(torch.optim.lr_scheduler.ExponentialLR, base, 60, gamma=gamma)
    torch.testing.assert_close(rates(exponential_schedule(gamma), base, 60), expected, rtol=1e-12, atol=0.0)


# ---- figures and laws ----


def test_linear_by_hand() -> None:
    torch.testing.assert_close(rates(linear_schedule(4), 1e-3, 4), torch.tensor([1e-3, 7.5e-4, 5e-4, 2.5e-4], dtype=torch.float64))


def test_position_within_a_run_of_100() -> None:
    one, at = torch.tensor(1.0, dtype=torch.float64), torch.tensor(51)
    assert math.isclose(float(linear_schedule(100)(one, at)), 0.49, rel_tol=1e-12)
    assert math.isclose(float(cosine_schedule(100)(one, at)), 0.484295, rel_tol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(total=st.integers(1, 10_000), past=st.integers(0, 10**9), end=st.floats(0.0, 1.0))
def test_past_the_horizon_the_rate_stays_at_the_end(dtype: torch.dtype, total: int, past: int, end: float) -> None:
    base, step = torch.tensor(1e-3, dtype=dtype), torch.tensor(total + past)
    assert linear_schedule(total, 0.7, end)(base, step) == base * torch.tensor(end, dtype=dtype)
    assert cosine_schedule(total, end)(base, step) == torch.tensor(end, dtype=dtype)


@pytest.mark.parametrize("name", sorted(EACH))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_and_device_follow_the_base_rate(name: str, dtype: torch.dtype, device: torch.device) -> None:
    base, step = torch.tensor(1e-3, dtype=dtype, device=device), torch.tensor(7, device=device)
    got = EACH[name](base, step)
    assert (got.dtype, got.device, got.shape) == (dtype, base.device, ())
    expected = float(EACH[name](torch.tensor(1e-3, dtype=torch.float64), torch.tensor(7)))
    assert math.isclose(float(got), expected, rel_tol=tolerance(dtype, 4))


def test_long_runs_keep_their_digits_in_single_precision() -> None:
    step = torch.tensor(5000)
    for schedule in (exponential_schedule(0.999), step_schedule(1, 0.999)):
        single, double = (float(schedule(torch.tensor(1.0, dtype=dtype), step)) for dtype in (torch.float32, torch.float64))
        assert math.isclose(single, double, rel_tol=5 * tolerance(torch.float32))


@pytest.mark.parametrize("name", sorted(EACH))
def test_vmap_and_gradient(name: str) -> None:
    bases = torch.tensor([0.1, 1.0, 2.0], dtype=torch.float64)
    steps = torch.tensor([0, 4, 20])
    expected = torch.stack([EACH[name](b, k) for b, k in zip(bases, steps, strict=True)])
    assert torch.equal(vmap(EACH[name])(bases, steps), expected)
    slope = grad(EACH[name])(bases[1], steps[1])
    torch.testing.assert_close(slope, EACH[name](bases[1] + 1, steps[1]) - EACH[name](bases[1], steps[1]))


def test_compiled_equals_eager_and_a_new_step_does_not_recompile() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    def every(base: Tensor, step: Tensor) -> Tensor:
        return torch.stack([schedule(base, step) for schedule in EACH.values()])

    compiled = torch.compile(every, backend=counter, fullgraph=True)
    graphs = []
    for k in range(15):
        args = torch.tensor(0.1 + k, dtype=torch.float64), torch.tensor(k)
        torch.testing.assert_close(compiled(*args), every(*args), rtol=tolerance(torch.float64, 4), atol=0.0)
        graphs.append(counter.frame_count)
    assert graphs[-1] == graphs[0] > 0


# ---- options, names, horizons ----


@pytest.mark.parametrize(
    ("factory", "options", "named"),
    [
        *[(linear_schedule, {"total_iters": v}, "total_iters") for v in (0, -1, 2.5, True, "10", None, math.nan)],
        *[(linear_schedule, {"total_iters": 5, "start_factor": v}, "start_factor") for v in (0.0, 1.1, -1, math.nan, True)],
        *[(linear_schedule, {"total_iters": 5, "end_factor": v}, "end_factor") for v in (-0.1, 1.1, math.inf, "0")],
        *[(cosine_schedule, {"T_max": v}, "T_max") for v in (0, -5, 1.0, False)],
        *[(cosine_schedule, {"T_max": 5, "eta_min": v}, "eta_min") for v in (-1e-3, math.nan, math.inf, True)],
        *[(step_schedule, {"step_size": v}, "step_size") for v in (0, -5, 1.0, True)],
        *[(step_schedule, {"step_size": 5, "gamma": v}, "gamma") for v in (0, -0.1, math.nan, True)],
        *[(exponential_schedule, {"gamma": v}, "gamma") for v in (0.0, -0.1, math.inf, "0.9")],
    ],
)
def test_options_out_of_domain_are_refused(factory: Any, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        factory(**options)


def test_configuration_builds_what_it_names() -> None:
    assert get_registered_lr_scheduler_names() == ["cosine", "exponential", "linear", "step"]
    for cfg, expected in [
        (LRSchedulerCfg(), constant_schedule()),
        (LRSchedulerCfg("Linear", {"total_iters": 7}), linear_schedule(7, 1.0, 0.0)),
        (coerce_lr_scheduler_cfg({"name": "cosine", "kwargs": {"T_max": 7, "eta_min": 0.01}}), cosine_schedule(7, 0.01)),
        (coerce_lr_scheduler_cfg({"name": "step", "kwargs": {"step_size": 2}}), step_schedule(2)),
        (LRSchedulerCfg("exponential", {"gamma": 0.5}), exponential_schedule(0.5)),
    ]:
        assert torch.equal(rates(build_lr_scheduler(cfg), 0.1, 12), rates(expected, 0.1, 12))


def test_configuration_may_be_a_mapping_and_is_nothing_else() -> None:
    assert scheduler_needs_horizon({"name": "linear"})
    bound = bind_scheduler_horizon({"name": "linear"}, 4)
    assert float(build_lr_scheduler(bound)(torch.tensor(1.0), torch.tensor(1))) == 0.75
    for call in (scheduler_needs_horizon, build_lr_scheduler, lambda cfg: bind_scheduler_horizon(cfg, 4)):
        with pytest.raises(TypeError, match="lr_scheduler must be a mapping, LRSchedulerCfg or None, got str"):
            call("linear")


def test_configuration_is_checked_when_it_is_made() -> None:
    for args, pattern in [
        (("cosin",), "did you mean 'cosine'"),
        (("",), "known: cosine"),
        (("step",), "'step' needs step_size"),
        (("exponential", {}), "'exponential' needs gamma"),
        (("linear", {"total_iter": 5}), r"did you mean 'total_iters'\? \(allowed: end_factor"),
        (("linear", {"end_factor": 2.0}), "end_factor"),
        (("cosine", {"T_max": 0}), "T_max"),
        ((None, {"total_iters": 5}), "without a name"),
        (("linear", 5), "kwargs must be a mapping"),
    ]:
        with pytest.raises(ValueError, match=pattern):
            LRSchedulerCfg(*args)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="did you mean 'kwargs'"):
        coerce_lr_scheduler_cfg({"kwarg": {}})
    with pytest.raises(TypeError, match="lr_scheduler must be a mapping"):
        coerce_lr_scheduler_cfg("linear")  # pyright: ignore[reportArgumentType]
    assert coerce_lr_scheduler_cfg(None) == LRSchedulerCfg()
    with pytest.raises(ValueError, match="'linear' needs total_iters"):
        build_lr_scheduler(LRSchedulerCfg("linear"))


@pytest.mark.parametrize(("name", "key"), [("linear", "total_iters"), ("cosine", "T_max")])
@given(n=st.integers(1, 1000))
def test_horizon_is_bound_once(name: str, key: str, n: int) -> None:
    cfg = LRSchedulerCfg(name)
    assert scheduler_needs_horizon(cfg)
    bound = bind_scheduler_horizon(cfg, n)
    assert bound.kwargs == {key: n}
    assert cfg.kwargs == {}
    assert not scheduler_needs_horizon(bound)
    assert bind_scheduler_horizon(bound, n + 1) == bound
    assert build_lr_scheduler(bound)(torch.tensor(0.1), torch.tensor(n)) == 0


def test_schedules_without_a_horizon_come_back_as_they_are() -> None:
    for cfg in (LRSchedulerCfg(), LRSchedulerCfg("step", {"step_size": 5}), LRSchedulerCfg("exponential", {"gamma": 0.9})):
        assert not scheduler_needs_horizon(cfg)
        assert bind_scheduler_horizon(cfg, 10) is cfg
        for n in (0, -1, True, 2.0):
            with pytest.raises(ValueError, match="number of updates"):
                bind_scheduler_horizon(cfg, n)  # pyright: ignore[reportArgumentType]


def test_registering_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    from frl.optim import registry

    monkeypatch.setattr(registry._SCHEDULERS, "_table", dict(registry._SCHEDULERS._table))

    @register_lr_scheduler("warm", horizon="updates")
    def warm(updates: int, power: float = 1.0) -> Schedule:
        return lambda base, step: base * (step.to(base.dtype) / updates) ** power

    assert register_lr_scheduler("Flat", constant_schedule) is constant_schedule
    assert get_registered_lr_scheduler_names() == ["cosine", "exponential", "flat", "linear", "step", "warm"]
    cfg = bind_scheduler_horizon(LRSchedulerCfg("warm", {"power": 2.0}), 4)
    assert build_lr_scheduler(cfg)(torch.tensor(1.0), torch.tensor(2)) == 0.25
    with pytest.raises(ValueError, match="already registered"):
        register_lr_scheduler("step", warm)
    assert register_lr_scheduler("step", warm, override=True) is warm

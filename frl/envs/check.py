"""Checks of environments: the arguments of a factory, and the gradient of a finished environment.

:func:`check_env` asks the question on which analytic policy gradients stand or fall: is the gradient that flows through ``step`` the derivative of what
``step`` computes? It compares the two in float64 and names what it finds. It runs on the host and reads tensors; nothing in a rollout calls it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor
from torch.func import grad, vmap

from frl import rng, tree
from frl.envs.env import ADVICE, Env
from frl.validate import require_count, require_number

MAX_KINK_FRACTION = 0.05
ROWS_PER_BATCH = 65536  # perturbed rows that are played at once


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What :func:`check_env` found.

    Attributes:
        name: of the environment.
        passed: no problem was found.
        rows: number of environment rows that were played.
        compared_rows: rows whose gradient was compared: neither at a kink nor non-finite.
        worst_relative_error: largest ``|gradient - differences| / |gradient|`` over the compared rows; NaN if there is none.
        kink_rows: rows whose return is not smooth within the perturbation; they are left out of the comparison.
        zero_gradient_rows: compared rows whose gradient is exactly zero.
        nonfinite_rows: rows with a non-finite return, gradient or difference.
        problems: one sentence for each reason to fail.
    """

    name: str
    passed: bool
    rows: int
    compared_rows: int
    worst_relative_error: float
    kink_rows: tuple[int, ...] = ()
    zero_gradient_rows: tuple[int, ...] = ()
    nonfinite_rows: tuple[int, ...] = ()
    problems: tuple[str, ...] = ()

    def text(self) -> str:
        """The report in lines of text."""
        verdict = "passed" if self.passed else "FAILED"
        lines = [f"{self.name}: {verdict}, worst relative gradient error {self.worst_relative_error:.1e} over {self.compared_rows} of {self.rows} rows"]
        for what, rows in (("at a kink, left out", self.kink_rows), ("with zero gradient", self.zero_gradient_rows), ("not finite", self.nonfinite_rows)):
            if rows:
                lines.append(f"  {len(rows)} rows {what}: {_name_rows(rows)}")
        return "\n".join(lines + [f"  problem: {problem}" for problem in self.problems])


class Measurement(NamedTuple):
    """Gradient and differences of the return, row by row; ``D = T A``."""

    gradient: Tensor  # [N, D] from torch.func.grad
    estimate: Tensor  # [N, D] from differences
    disagreement: Tensor  # [N, D] between differences that agree where the return is smooth
    noise: Tensor  # [N] rounding error of a row's differences


def check_env(env: Env, *, num_envs: int = 64, num_steps: int = 8, seed: int = 0, epsilon: float | None = None, tolerance: float | None = None) -> CheckReport:
    """Compare the gradient of a short rollout's return with central differences, in float64.

    The return is the plain sum of ``num_steps`` rewards, through any termination; its gradient is taken with respect to every action. Differences use the
    returns ``f`` at ``+-epsilon`` and ``+-2 epsilon`` of each action coordinate, scaled to the half-width of its bounds::

        inner = (f(e) - f(-e)) / 2e,   outer = (f(2e) - f(-2e)) / 4e,   estimate = (4 inner - outer) / 3

    A row is at a kink if ``inner`` and ``outer``, or the one-sided slopes forwards and backwards, disagree by more than ``tolerance``: this looks at values
    only, so a wrong gradient cannot hide behind it. Errors are relative to the row's gradient norm, or to the norm that rounding can resolve if that is larger.

    Args:
        env: the environment; its default parameters are used, cast to float64.
        num_envs: rows ``N``.
        num_steps: steps ``T``.
        seed: of the start states and actions. Actions are uniform in the inner 80 % of their bounds, normal where unbounded.
        epsilon: perturbation, in half-widths of the action's bounds (in the action's own unit where unbounded); ``spec.gradient_scale`` when ``None``.
        tolerance: largest relative error that passes; ``spec.gradient_tolerance`` when ``None``.

    Returns:
        A report. It fails for a wrong, non-finite or everywhere-zero gradient, for more than 5 % of rows at a kink, for a break of the environment contract
        and for a ``step`` that does not run under ``torch.func.vmap``.

    Raises:
        ValueError: the action space is not a one-dimensional ``Box``, or an argument is outside its range.
    """
    require_count("num_envs", num_envs)
    require_count("num_steps", num_steps)
    epsilon = require_number("epsilon", env.spec.gradient_scale if epsilon is None else epsilon, above=0.0)
    tolerance = require_number("tolerance", env.spec.gradient_tolerance if tolerance is None else tolerance, above=0.0)
    space = env.action_space
    if not isinstance(space, spaces.Box) or len(space.shape) != 1:
        raise ValueError(f"check_env needs an action space Box of one dimension, got {space}")
    try:
        problems, found = _examine(env, space, num_envs, num_steps, seed, epsilon)
    except RuntimeError as error:  # what torch.func.vmap raises
        problems, found = [f"reset or step does not run under torch.func.vmap: {str(error).splitlines()[0]} ({ADVICE})"], None
    if found is None:
        return CheckReport(name=env.spec.name, passed=False, rows=num_envs, compared_rows=0, worst_relative_error=math.nan, problems=tuple(problems))
    return _judge(env.spec.name, found, tolerance)


def _examine(env: Env, space: spaces.Box, n: int, steps: int, seed: int, epsilon: float) -> tuple[list[str], Measurement | None]:
    leaves = [x for x in tree.leaves(env.default_params) if isinstance(x, Tensor)]
    device = leaves[0].device if leaves else torch.device("cpu")
    params = tree.map(_double, env.default_params)
    reset_key, action_key = rng.split(rng.key(seed, device), 2)
    state = tree.map(_double, vmap(env.reset, in_dims=(0, None))(rng.split(reset_key, n), params))
    offset, scale, z = _draw_actions(action_key, space, steps, n)
    step = vmap(env.step, in_dims=(0, 0, None))

    def rewards(z: Tensor) -> Tensor:  # [T, copies * N, A] -> [T, copies * N]
        copies = z.shape[1] // n
        current = tree.map(lambda x: x.repeat((copies,) + (1,) * (x.ndim - 1)), state)
        rows = []
        for t in range(steps):
            current, outcome = step(current, offset + scale * z[t], params)
            rows.append(outcome.reward)
        return torch.stack(rows)

    problems = _contract_problems(env, step, state, offset + scale * z[0], params)
    if problems:  # the rest would only repeat them, less clearly
        return problems, None
    gradient = grad(lambda z: rewards(z).sum())(z)
    return [], _difference(rewards, z, gradient, epsilon)


def _draw_actions(key: Tensor, space: spaces.Box, steps: int, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Actions as ``offset + scale z``: offset and scale ``[A]``, ``z`` ``[T, N, A]``."""
    low, high = (torch.as_tensor(np.asarray(bound, dtype=np.float64), device=key.device) for bound in (space.low, space.high))
    has_low, has_high = torch.isfinite(low), torch.isfinite(high)
    bounded = has_low & has_high
    offset = torch.where(bounded, 0.5 * (low + high), torch.where(has_low, low, torch.where(has_high, high, 0.0)))
    scale = torch.where(bounded, 0.5 * (high - low), 1.0)
    uniform_key, normal_key = rng.split(key, 2)
    shape = (steps, n, low.shape[0])
    uniform = rng.uniform(uniform_key, shape, low=-0.8, high=0.8, dtype=torch.float64)
    normal = rng.normal(normal_key, shape, dtype=torch.float64)
    one_sided = torch.where(has_low, 0.2 + normal.abs(), -0.2 - normal.abs())
    z = torch.where(bounded, uniform, torch.where(has_low | has_high, one_sided, normal))
    return offset, scale, z


def _difference(rewards: Callable[[Tensor], Tensor], z: Tensor, gradient: Tensor, epsilon: float) -> Measurement:
    steps, n, width = z.shape
    size = steps * width
    unit = torch.eye(size, dtype=z.dtype, device=z.device)
    shifts = (epsilon * torch.stack((unit, -unit, 2 * unit, -2 * unit))).reshape(4 * size, steps, 1, width)
    returns = []
    for part in shifts.split(max(1, ROWS_PER_BATCH // n)):
        shifted = (z + part).movedim(0, 1).reshape(steps, -1, width)
        returns.append(rewards(shifted).sum(0).reshape(-1, n))
    ahead, behind, far_ahead, far_behind = torch.cat(returns).reshape(4, size, n).mT
    here = rewards(z)  # [T, N]
    centre = here.sum(0)[:, None]
    inner = (ahead - behind) / (2 * epsilon)
    outer = (far_ahead - far_behind) / (4 * epsilon)
    forward = (4 * ahead - far_ahead - 3 * centre) / (2 * epsilon)
    backward = (3 * centre - 4 * behind + far_behind) / (2 * epsilon)
    return Measurement(
        gradient=gradient.movedim(1, 0).reshape(n, size),
        estimate=(4 * inner - outer) / 3,
        disagreement=torch.maximum((inner - outer).abs(), (forward - backward).abs()),
        noise=16 * torch.finfo(z.dtype).eps * here.abs().sum(0) / epsilon,
    )


def _judge(name: str, found: Measurement, tolerance: float) -> CheckReport:
    rows, problems = found.noise.shape[0], []
    bad_value = ~torch.isfinite(found.noise) | ~torch.isfinite(found.estimate).all(-1)
    bad_gradient = ~torch.isfinite(found.gradient).all(-1)
    bad = bad_value | bad_gradient
    floor = found.noise / tolerance
    estimate_norm = torch.linalg.vector_norm(found.estimate, dim=-1)
    gradient_norm = torch.linalg.vector_norm(found.gradient, dim=-1)
    kink = ~bad & (found.disagreement.amax(-1) > tolerance * torch.maximum(estimate_norm, floor))
    compared = ~bad & ~kink
    error = torch.linalg.vector_norm(found.gradient - found.estimate, dim=-1)
    size = torch.maximum(torch.maximum(gradient_norm, estimate_norm), floor)
    # A row without rewards has no size at all; its error is then zero as well.
    error = torch.where(compared, error / torch.where(size > 0, size, 1.0), -1.0)
    zero = compared & (gradient_norm == 0)
    count, worst_row = int(compared.sum()), int(error.argmax())
    worst = float(error[worst_row]) if count else math.nan
    zero_rows, kink_rows = _rows(zero), _rows(kink)
    if _rows(bad_value):
        problems.append(f"the return is not finite in rows {_name_rows(_rows(bad_value))}")
    if _rows(bad_gradient):
        problems.append(f"the gradient is not finite in rows {_name_rows(_rows(bad_gradient))} (a root or a quotient at 0, perhaps behind torch.where)")
    if count and len(zero_rows) == count:
        effect = "the differences are not: the graph is cut" if bool((estimate_norm[compared] > floor[compared]).any()) else "actions do not change the return"
        problems.append(f"the gradient is zero in every compared row; {effect}")
    elif count and worst > tolerance:
        problems.append(
            f"the gradient is wrong: relative error {worst:.1e} in row {worst_row}, expected at most {tolerance:.0e} (a detach, or a backward of its own?)"
        )
    if len(kink_rows) > MAX_KINK_FRACTION * rows:
        problems.append(f"{len(kink_rows)} of {rows} rows are at a kink or a jump, expected at most {MAX_KINK_FRACTION:.0%}")
    return CheckReport(
        name=name,
        passed=not problems,
        rows=rows,
        compared_rows=count,
        worst_relative_error=worst,
        kink_rows=kink_rows,
        zero_gradient_rows=zero_rows,
        nonfinite_rows=_rows(bad),
        problems=tuple(problems),
    )


def _contract_problems(env: Env, step: Callable, state: Any, action: Tensor, params: Any) -> list[str]:
    before = tree.map(torch.clone, (state, action, params))
    new_state, outcome = step(state, action, params)
    problems = []
    if not all(torch.equal(torch.nan_to_num(a), torch.nan_to_num(b)) for a, b in zip(tree.leaves(before), tree.leaves((state, action, params)), strict=True)):
        problems.append("step changes its arguments in place")
    try:
        tree.check_same(new_state, state, "the state after a step")
    except ValueError as error:
        problems.append(str(error))
    n = action.shape[0]
    parts = {"reward": outcome.reward, "terminated": outcome.terminated, **{f"metric {k!r}": v for k, v in outcome.metrics.items()}}
    problems += [f"{name} of one row must have shape (), got {tuple(x.shape[1:])}" for name, x in parts.items() if x.shape != (n,)]
    if outcome.reward.dtype != action.dtype:
        problems.append(f"reward must follow its inputs' dtype {action.dtype}, got {outcome.reward.dtype}")
    if outcome.terminated.dtype != torch.bool:
        problems.append(f"terminated must be bool, got {outcome.terminated.dtype}")
    obs = vmap(env.observe, in_dims=(0, None))(state, params)
    if isinstance(env.observation_space, spaces.Box) and obs.shape[1:] != env.observation_space.shape:
        problems.append(f"observation must have the shape of its space {env.observation_space.shape}, got {tuple(obs.shape[1:])}")
    return problems


def _double(x: Any) -> Any:
    return x.to(torch.float64) if isinstance(x, Tensor) and x.is_floating_point() else x


def _rows(mask: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in mask.nonzero())


def _name_rows(rows: Sequence[int]) -> str:
    return ", ".join(map(str, rows[:8])) + (", ..." if len(rows) > 8 else "")


def space_dtype(dtype: torch.dtype) -> type[np.floating]:
    """The numpy type of an environment's spaces; ``ValueError`` unless ``dtype`` is float32 or float64."""
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"dtype must be torch.float32 or torch.float64, got {dtype!r}")
    return np.float32 if dtype == torch.float32 else np.float64

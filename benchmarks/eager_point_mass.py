"""The other side of the comparison: PointMass and APG as a minimal loop of eager PyTorch, without any library.

What a careful user would write by hand: a batched environment that changes its own tensors, a generator for its resets (drawn only for the rows that finished),
``loss.backward()`` and the foreach Adam of ``torch.optim``. Nothing here imports ``frl``. :func:`golden` checks the step against recorded numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

GAMMA, LEARNING_RATE, MAX_GRAD_NORM = 0.99, 2.5e-4, 0.5
LOG_STD, LOG_STD_RANGE = -2.0, (-5.0, 2.0)
LAYERS = ((14, 64, 1.414), (64, 64, 1.414), (64, 2, 0.01))  # inputs, outputs, gain of the orthogonal initialisation


class PointMass:
    """N damped point masses that are pushed to a goal around two soft obstacles; rows that are done start again inside ``step``.

    Attributes:
        x, v, a: ``[N, 2]`` position, velocity, last action (carries no gradient).
        task: ``[N, 8]`` goal (2), obstacle centres (2x2), radii (2).
        t: ``[N]`` steps of the episode.
    """

    half, dt, damping, force = 1.0, 1 / 60, 5.0, 5.0
    threshold, radius, clearance, candidates = 0.03, (0.08, 0.15), 0.25, 8

    def __init__(self, num_envs: int, *, max_steps: int = 100, bonus: float = 0.0, seed: int = 0) -> None:
        self.num_envs, self.max_steps, self.bonus = num_envs, max_steps, bonus
        self.keep, self.gain = 1 - self.damping * self.dt, self.force * self.dt
        self.generator = torch.Generator().manual_seed(seed)
        self.v, self.a = torch.zeros(num_envs, 2), torch.zeros(num_envs, 2)
        self.t = torch.zeros(num_envs, dtype=torch.long)
        self.x, self.task = self.draw(torch.arange(num_envs))

    def draw(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Fresh positions and tasks for the rows with these indices."""
        m = rows.numel()
        u = torch.rand(m, 6 + 4 * self.candidates, generator=self.generator)
        goal = (2 * u[:, 0:2] - 1) * (0.7 * self.half)
        start = (2 * u[:, 2:4] - 1) * (0.6 * self.half)
        radii = self.radius[0] + (self.radius[1] - self.radius[0]) * u[:, 4:6]
        proposals = (2 * u[:, 6:].reshape(m, 2, self.candidates, 2) - 1) * (0.8 * self.half)
        valid = (proposals - goal[:, None, None]).norm(dim=-1) > self.clearance
        first = valid.to(torch.uint8).argmax(-1)
        centre = proposals.gather(2, first[:, :, None, None].expand(m, 2, 1, 2)).squeeze(2)
        centre = torch.where(valid.any(-1)[..., None], centre, -0.5 * goal[:, None])
        return start, torch.cat((goal, centre.reshape(m, 4), radii), -1)

    def observe(self) -> Tensor:
        """``[N, 14]``."""
        return torch.cat((self.x, self.v, self.task[:, :2], self.a, self.task[:, 2:]), -1)

    def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """One step: observation, reward, terminated, truncated."""
        a = action.clamp(-1.0, 1.0)
        v = self.v * self.keep + a * self.gain
        x = (self.x + v * self.dt).clamp(-self.half, self.half)
        t, task = self.t + 1, self.task
        distance = (x - task[:, :2]).norm(dim=-1)
        penetration = (task[:, 6:] - (x[:, None] - task[:, 2:6].reshape(-1, 2, 2)).norm(dim=-1)).clamp(min=0.0)
        terminated, truncated = distance < self.threshold, t >= self.max_steps
        reward = (
            0.5 * torch.exp(distance.square() * (-1 / (2 * 0.05**2)))
            - distance
            - 2.0 * penetration.square().sum(-1)
            - 0.01 * v.square().sum(-1)
            - 0.001 * (a - self.a).square().sum(-1)
        )
        if self.bonus:
            reward = reward + self.bonus * terminated
        last = a.detach()
        rows = (terminated | truncated).nonzero().squeeze(-1)
        if rows.numel():
            start, fresh = self.draw(rows)
            zero = torch.zeros_like(start)
            x, v, last = x.index_copy(0, rows, start), v.index_copy(0, rows, zero), last.index_copy(0, rows, zero)
            self.task, t = task.index_copy(0, rows, fresh), t.index_fill(0, rows, 0)
        self.x, self.v, self.a, self.t = x, v, last, t
        return self.observe(), reward, terminated, truncated

    def detach(self) -> Tensor:
        """Cut the state from the graph; the observation."""
        self.x, self.v, self.a = self.x.detach(), self.v.detach(), self.a.detach()
        return self.observe()


def replayed(case: Mapping[str, Any]) -> type[PointMass]:
    """A class of environments that begin where a case of :mod:`peers.case` does and whose rows start again from the states that it gives them."""
    given = {name: torch.from_numpy(case[name]) for name in ("x", "v", "a", "task", "t", "fresh_x", "fresh_task")}

    class Replayed(PointMass):
        clock = -1

        def __init__(self, num_envs: int) -> None:
            super().__init__(num_envs)
            self.x, self.v, self.a, self.task, self.t = (given[name] for name in ("x", "v", "a", "task", "t"))

        def draw(self, rows: Tensor) -> tuple[Tensor, Tensor]:
            return super().draw(rows) if self.clock < 0 else (given["fresh_x"][self.clock, rows], given["fresh_task"][self.clock, rows])

        def step(self, action: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            self.clock += 1
            return super().step(action)

    return Replayed


class ClipRows(torch.autograd.Function):
    """Identity whose backward scales every row of the gradient to at most ``limit`` and zeroes rows that are not finite."""

    @staticmethod
    def forward(ctx, x, limit):
        ctx.limit = limit
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        finite = torch.isfinite(gradient).all(-1, keepdim=True)
        gradient = torch.where(finite, gradient, 0.0)
        size = gradient.abs().amax(-1, keepdim=True).clamp_min(1e-12)
        norm = torch.linalg.vector_norm(gradient / size, dim=-1, keepdim=True).clamp_min(1.0)
        return gradient * (ctx.limit / size / norm).clamp_max(1.0), None


class EagerApg:
    """APG on an environment: policy 14-64-64-2, running observation statistics, adjoint clip, global-norm clip, Adam.

    Args:
        env: the environment; it goes on from where the last update left it.
        horizon: steps of one update.
        limit: row limit of the action adjoint.
        seed: of parameters and noise.
    """

    def __init__(self, env: PointMass, horizon: int, limit: float, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.env, self.horizon, self.limit = env, horizon, limit
        self.weights = [torch.nn.init.orthogonal_(torch.empty(o, i), gain).requires_grad_() for i, o, gain in LAYERS]
        self.biases = [torch.zeros(o, requires_grad=True) for _, o, _ in LAYERS]
        self.log_std = torch.full((2,), LOG_STD, requires_grad=True)
        self.parameters = [*self.weights, *self.biases, self.log_std]
        self.optimizer = torch.optim.Adam(self.parameters, lr=LEARNING_RATE, foreach=True)
        self.mean, self.var, self.count = torch.zeros(14), torch.ones(14), 1e-4

    def backward(self, noise: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Roll out under ``noise`` ``[T, N, 2]``, leave the globally clipped gradient in ``.grad``; observations and which of them count."""
        obs = self.env.detach()
        std = self.log_std.clamp(*LOG_STD_RANGE).exp()
        scale = 1 / (self.var.sqrt() + 1e-8)
        (w1, w2, w3), (b1, b2, b3) = self.weights, self.biases
        discount, total = torch.ones(self.env.num_envs), torch.zeros(())
        alive = torch.ones(self.env.num_envs, dtype=torch.bool)
        seen, counted = [], []
        for row in noise:
            hidden = torch.tanh(linear((obs - self.mean) * scale, w1, b1))
            hidden = torch.tanh(linear(hidden, w2, b2))
            action = torch.tanh(linear(hidden, w3, b3)) + std * row
            action = ClipRows.apply(action, self.limit)
            seen.append(obs.detach())
            counted.append(alive)
            obs, reward, terminated, truncated = self.env.step(action)
            total = total + discount * reward
            done = terminated | truncated
            discount = torch.where(done, 1.0, discount * GAMMA)
            alive = alive & ~done
        self.objective = total.mean()
        (-self.objective).backward()
        self.norm = torch.nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
        return seen, counted

    def gradients(self) -> list[Tensor]:
        """What :meth:`backward` left, in the order of ``parameters``."""
        return [x.grad for x in self.parameters if x.grad is not None]

    def update(self) -> None:
        """One complete update."""
        seen, counted = self.backward(torch.randn(self.horizon, self.env.num_envs, 2))
        if torch.isfinite(self.norm):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        obs = torch.stack(seen)[torch.stack(counted)]
        rows, total = obs.shape[0], self.count + obs.shape[0]
        delta, var = obs.mean(0) - self.mean, obs.var(0, unbiased=False)
        self.var = (self.var * self.count + var * rows + delta * delta * self.count * rows / total) / total
        self.mean, self.count = self.mean + delta * rows / total, total


def golden() -> None:
    """One step of two rows with recorded rewards, states and gradients: one row has a saturated action, the other reaches the goal."""
    env = PointMass(2, bonus=5.0)
    env.x = torch.tensor([[0.1, -0.2], [0.5, 0.5]])
    env.v = torch.tensor([[0.3, 0.0], [0.0, -0.4]])
    env.a = torch.tensor([[0.5, -0.5], [0.0, 0.0]])
    env.task = torch.tensor([[0.2, -0.1, 0.12, -0.2, 0.9, 0.9, 0.1, 0.1], [0.5, 0.495, -0.5, 0.0, 0.0, -0.5, 0.12, 0.15]])
    action = torch.tensor([[1.5, -0.25], [0.1, 0.2]], requires_grad=True)
    _, reward, terminated, _ = env.step(action)
    (gradient,) = torch.autograd.grad(reward.sum(), action)
    for got, expected in (
        (reward, [-0.142512, 5.497808]),
        (env.x[0], [0.105972, -0.200347]),
        (env.v[0], [0.358333, -0.020833]),
        (gradient, [[0.0, 0.001171], [-0.000481, 0.001785]]),
    ):
        torch.testing.assert_close(got.detach(), torch.tensor(expected), atol=2e-6, rtol=0)
    torch.testing.assert_close(terminated, torch.tensor([False, True]))


if __name__ == "__main__":
    golden()
    print("golden ok")

"""Environments that keep their state to themselves, for the tests of host environments."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from frl.envs.host import HostEnv

MODES = ("same_step", "next_step", "disabled")


class Scripted(gymnasium.Env):
    """Episodes of given lengths in turn; the observation is ``100 episode + steps``, the reward 1."""

    observation_space = spaces.Box(-1e4, 1e4, (1,), dtype=np.float32)

    def __init__(self, lengths=(2,), ends="terminated", action_space=None, nan_at=None):
        self.lengths, self.ends, self.nan_at = lengths, ends, nan_at
        self.action_space = action_space or spaces.Discrete(2)
        self.episode, self.received = -1, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action):
        assert self.action_space.contains(action), (action, self.action_space)
        self.received.append(action)
        self.t += 1
        done = self.t >= self.lengths[self.episode % len(self.lengths)]
        reward = math.nan if self.nan_at == (self.episode, self.t) else 1.0
        return (
            self._obs(),
            reward,
            done and self.ends == "terminated",
            done and self.ends == "truncated",
            {"success": self.t % 2 == 0, "metrics": {"t": self.t}},
        )

    def _obs(self):
        return np.array([100.0 * self.episode + self.t], dtype=np.float32)


class Declared(gymnasium.Env):
    """Observations of any space, from a list; actions of any space, recorded. One endless episode."""

    def __init__(self, observation_space, values=None, action_space=None):
        self.observation_space, self.action_space = observation_space, action_space or spaces.Discrete(2)
        self.values, self.t, self.received = values, 0, []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self._next(), {}

    def step(self, action):
        assert self.action_space.contains(action), (action, self.action_space)
        self.received.append(action)
        return self._next(), 0.0, False, False, {}

    def _next(self):
        self.t += 1
        return self.values[(self.t - 1) % len(self.values)] if self.values is not None else self.observation_space.sample()


def scripted(mode: str = "same_step", rows: int = 1, device: Any = "cpu", **kwargs: Any) -> HostEnv:
    env = SyncVectorEnv([lambda: Scripted(**kwargs)] * rows, autoreset_mode=getattr(AutoresetMode, mode.upper()))
    return HostEnv(env, device=device)


def declared(*args: Any, rows: int = 2, **kwargs: Any) -> HostEnv:
    return HostEnv(SyncVectorEnv([lambda: Declared(*args, **kwargs)] * rows, autoreset_mode=AutoresetMode.SAME_STEP))

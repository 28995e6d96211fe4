"""MuJoCo itself, by rows: many states stepped at once on threads, and the pullback of that step by central differences.

Everything here is numpy in float64 on the host. A state is the vector ``(qpos, qvel, act)`` of ``S = nq + nv + na`` numbers, all that MuJoCo integrates; a step
is a pure function of it and of the controls: the constraint solver starts cold at every call, so that no row remembers another or what came before.
:mod:`frl.envs.mujoco.operator` makes a differentiable function of tensors of it.
"""

from __future__ import annotations

import copy
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from frl.envs.check import require_count, require_number
from frl.envs.mujoco.engine import engine, rollout, warnings_to
from frl.envs.mujoco.tangent import Tangent

LARGEST = 1e10  # MuJoCo calls a simulation unstable when a position, velocity or acceleration exceeds it
MAX_DIRECTIONS = 512  # of a difference quotient: two simulations of every row for each
ROWS_PER_BATCH = 16384  # simulations that are in memory at once
PARTS_PER_THREAD = 4  # of a call's rows: what takes longer in one part is made up for by the next
INTEGRATORS = ("euler", "implicit", "implicitfast")

Read = Callable[[Any, Any], np.ndarray]

# Graphs name a simulator by a number. It lives as long as its environment does, which a graph's owner holds.
SIMULATORS: weakref.WeakValueDictionary[int, Simulator] = weakref.WeakValueDictionary()
_numbers = itertools.count()


class Simulator:
    """Steps rows of one model and pulls cotangents back through the step.

    Args:
        model: ``mujoco.MjModel``; it is copied, so later changes of it do nothing.
        frame_skip: MuJoCo steps of one call.
        read: ``(model, data) -> [R]``, numbers to read off ``mujoco.MjData`` after the step (positions of sites, contact forces, sensors). It must not change
            them nor keep them. Called from several threads.
        settle: evaluate the data at the new state (``mj_forward``) before they are read. Without it they are what ``mj_step`` leaves, which lags behind the
            state by the last part of a step, as gymnasium reads them.
        threads: of a call; torch's own number when ``None``.
        epsilon: step of the difference quotients, in the units of the state and the controls.
        centered: central differences; one-sided ones take half the time and are some 1e-6 off.
        gradient_integrator: ``"euler"``, ``"implicit"`` or ``"implicitfast"`` takes the differences of simulations with another integrator than the model's
            own: the gradient of a neighbouring simulator, a fourth of the time where the model asks for Runge-Kutta. ``None``: that of what is simulated.

    Attributes:
        model: the copy.
        nq, nv, na, nu: sizes of positions, velocities, activations and controls.
        size: ``S = nq + nv + na``.
        read_size: ``R``.
        dt: duration of a call [s].
        start: ``[S]``, the state in which the model is defined.
        handle: its number in :data:`SIMULATORS`.

    Raises:
        TypeError: ``model`` is no model.
        ValueError: a size or number is out of range, the model has state beyond ``(qpos, qvel, act)``, or more degrees of freedom than differences can serve.
    """

    def __init__(
        self,
        model: Any,
        frame_skip: int = 1,
        *,
        read: Read | None = None,
        settle: bool = True,
        threads: int | None = None,
        epsilon: float = 1e-7,
        centered: bool = True,
        gradient_integrator: str | None = None,
    ) -> None:
        mujoco = engine()
        if not isinstance(model, mujoco.MjModel):
            raise TypeError(f"expected a mujoco.MjModel, got {type(model).__name__}; frl.envs.mujoco.load_model reads files")
        self.frame_skip = require_count("frame_skip", frame_skip)
        self.threads = None if threads is None else require_count("threads", threads)
        self.epsilon = require_number("epsilon", epsilon, above=0.0, at_most=1e-2)
        self.centered = centered
        self.read, self.settle = read, settle
        self.nq, self.nv, self.na, self.nu = int(model.nq), int(model.nv), int(model.na), int(model.nu)
        self.size = self.nq + self.nv + self.na
        full = mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_FULLPHYSICS)
        if self.nv == 0:
            raise ValueError("the model has no joints, so it has no state to simulate")
        if full != 1 + self.size:
            raise ValueError(f"the model has {full - 1 - self.size} numbers of state beyond positions, velocities and activations (plugins or delays)")
        self.directions = 2 * self.nv + self.na + self.nu
        if self.directions > MAX_DIRECTIONS:
            raise ValueError(
                f"the model has {self.directions} velocities, positions, activations and controls to differentiate, at most {MAX_DIRECTIONS} are "
                "supported (every one takes two simulations of every row)"
            )
        self.tangent = Tangent(model)
        self.dt = float(model.opt.timestep) * self.frame_skip
        self.model = _own(model, sensors=read is not None)
        self._neighbour = self.model if gradient_integrator is None else _own(self.model, sensors=read is not None)
        if gradient_integrator is not None:
            if gradient_integrator not in INTEGRATORS:
                raise ValueError(f"gradient_integrator must be one of {', '.join(INTEGRATORS)} or None, got {gradient_integrator!r}")
            self._neighbour.opt.integrator = getattr(mujoco.mjtIntegrator, f"mjINT_{gradient_integrator.upper()}")
        limited = model.actuator_ctrllimited.astype(bool) & (not model.opt.disableflags & mujoco.mjtDisableBit.mjDSBL_CLAMPCTRL)
        self._low = np.where(limited, model.actuator_ctrlrange[:, 0], -np.inf)
        self._high = np.where(limited, model.actuator_ctrlrange[:, 1], np.inf)
        data = mujoco.MjData(self.model)
        self.start = np.concatenate((data.qpos, data.qvel, data.act))
        self.read_size = 0
        if read is not None:
            mujoco.mj_forward(self.model, data)
            self.read_size = self._read_off(self.model, data).size
        self._lock = threading.RLock()
        self._workers: _Workers | None = None
        self.handle = next(_numbers)
        SIMULATORS[self.handle] = self

    # -- forward -------------------------------------------------------------------------------------------------------------------------------

    def step(self, state: np.ndarray, ctrl: np.ndarray, frames: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """``state [B, S]``, ``ctrl [B, U]`` -> next state ``[B, S]`` and what was read ``[B, R]``.

        A row that is not finite or beyond 1e10, or at which MuJoCo warns (an acceleration beyond 1e10, a full buffer), comes out as NaN. ``frames``
        replaces ``frame_skip``; with 0 nothing moves and the data are read off the state as it is.
        """
        with self._lock, warnings_to(_nobody):
            return self._run(self.model, state, ctrl, self.frame_skip if frames is None else frames)

    def _run(self, model: Any, state: np.ndarray, ctrl: np.ndarray, frames: int) -> tuple[np.ndarray, np.ndarray]:
        good = _bounded(state, LARGEST) & _bounded(ctrl, LARGEST)
        # A row that is lost already must not reach the engine: collision routines index by what they are given.
        start = np.where(good[:, None], self.tangent.normalize(state), self.start) if self.tangent.quaternions or not good.all() else state
        ctrl = ctrl if good.all() else np.where(good[:, None], ctrl, 0.0)
        out = np.empty_like(start)
        seen = np.empty((len(start), self.read_size))
        for begin in range(0, len(start), ROWS_PER_BATCH):
            part = slice(begin, begin + ROWS_PER_BATCH)
            good[part] &= self._run_batch(model, start[part], ctrl[part], frames, out[part], seen[part])
        speed = slice(self.nq, self.nq + self.nv)
        # The second bound is the one for accelerations, of the last step too, whose warning a rollout does not tell.
        good &= _bounded(out, LARGEST) & _bounded(out[:, speed] - start[:, speed], LARGEST * model.opt.timestep)
        if not good.all():
            out[~good], seen[~good] = np.nan, np.nan
        return out, seen

    def _run_batch(self, model: Any, state: np.ndarray, ctrl: np.ndarray, frames: int, out: np.ndarray, seen: np.ndarray) -> np.ndarray:
        """Fills ``out`` and ``seen``; returns which rows got to the end."""
        workers = self._team()
        if self.read is None:
            if frames == 0:
                out[:] = state
                return np.ones(len(state), dtype=bool)
            end = workers.rollout(model, state, ctrl, frames)
            out[:] = end[:, 1:]
            # MuJoCo stops a row at its first warning; its clock tells.
            return np.abs(end[:, 0] / model.opt.timestep - frames) < 0.5

        good = np.ones(len(state), dtype=bool)

        def one(data: Any, row: int) -> None:
            self._load(model, data, state[row], ctrl[row])
            self._play(model, data, frames)
            good[row] = not data.warning.number.any()
            out[row, : self.nq], out[row, self.nq : self.nq + self.nv], out[row, self.nq + self.nv :] = data.qpos, data.qvel, data.act
            seen[row] = self._read_off(model, data)

        workers.each(one, len(state))
        return good

    def _load(self, model: Any, data: Any, state: np.ndarray, ctrl: np.ndarray) -> None:
        data.time = 0.0
        data.qpos[:], data.qvel[:], data.act[:] = state[: self.nq], state[self.nq : self.nq + self.nv], state[self.nq + self.nv :]
        data.ctrl[:] = ctrl
        data.qacc_warmstart[:] = 0.0
        data.warning.number[:] = 0

    def _play(self, model: Any, data: Any, frames: int) -> None:
        mujoco = engine()
        if frames:
            mujoco.mj_step(model, data, frames)
        # A Runge-Kutta step leaves the data of its last stage, close to the new state; those that stand in for it leave the state before.
        if self.settle or not frames or model is not self.model:
            mujoco.mj_forward(model, data)
        mujoco.mj_rnePostConstraint(model, data)

    def _read_off(self, model: Any, data: Any) -> np.ndarray:
        assert self.read is not None
        values = np.array(self.read(model, data), dtype=np.float64)
        if values.ndim != 1 or (self.read_size and values.size != self.read_size):
            expected = f"{self.read_size} numbers" if self.read_size else "a vector"
            raise ValueError(f"read must return {expected}, got an array of shape {values.shape}")
        return values

    # -- backward ------------------------------------------------------------------------------------------------------------------------------

    def pull_back(
        self, state: np.ndarray, ctrl: np.ndarray, next_cotangent: np.ndarray, read_cotangent: np.ndarray, frames: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Cotangents ``[K, B, S]`` and ``[K, B, R]`` of the results of :meth:`step` -> cotangents ``[K, B, S]`` of the state and ``[K, B, U]`` of the controls.

        Differences are taken over the whole call, once for all ``K``. Rows whose cotangents are all zero cost nothing; a row that the simulator gave up has
        the gradient zero, so that it does not spoil the gradients of the others.
        """
        frames = self.frame_skip if frames is None else frames
        cotangent = np.concatenate((next_cotangent, read_cotangent), axis=-1)
        asked = (cotangent != 0).any((0, 2))
        state_grad, ctrl_grad = np.zeros((len(cotangent), *state.shape)), np.zeros((len(cotangent), *ctrl.shape))
        if asked.any():
            rows = np.flatnonzero(asked)
            with self._lock, warnings_to(_nobody):
                alive = np.isfinite(np.concatenate(self._run(self.model, state[rows], ctrl[rows], frames), axis=1)).all(1)
                rows = rows[alive]
                each = max(1, ROWS_PER_BATCH // (2 * self.directions))
                for begin in range(0, len(rows), each):
                    part = rows[begin : begin + each]
                    state_grad[:, part], ctrl_grad[:, part] = self._difference(state[part], ctrl[part], cotangent[:, part], frames)
        return state_grad, ctrl_grad

    def _difference(self, state: np.ndarray, ctrl: np.ndarray, cotangent: np.ndarray, frames: int) -> tuple[np.ndarray, np.ndarray]:
        count, nq, nv = self.directions, self.nq, self.nv
        fixed = self.tangent.normalize(state)
        # Outside its limits a control does nothing; at a limit the derivative is the one from inside.
        inside = np.clip(ctrl, self._low, self._high)
        ends, widths = [], []
        for size in (self.epsilon, -self.epsilon if self.centered else 0.0):
            states = np.broadcast_to(fixed, (count, *fixed.shape)).copy()
            states[:nv, :, :nq] = self.tangent.perturb(fixed[:, :nq], size)
            for j in range(nv + self.na):
                states[nv + j, :, nq + j] += size
            ctrls = np.broadcast_to(inside, (count, *inside.shape)).copy()
            for j in range(self.nu):
                moved = np.clip(inside[:, j] + size, self._low[j], self._high[j])
                if not self.centered and size:  # turn back at the upper limit
                    moved = np.where(moved == inside[:, j], inside[:, j] - size, moved)
                ctrls[2 * nv + self.na + j, :, j] = moved
            ends.append((states, ctrls))
        widths = np.full((count, len(state)), self.epsilon * (2.0 if self.centered else 1.0))
        for j in range(self.nu):
            widths[2 * nv + self.na + j] = ends[0][1][2 * nv + self.na + j, :, j] - ends[1][1][2 * nv + self.na + j, :, j]
        if not self.centered:
            ends[1] = (fixed[None], inside[None])
        results = []
        for states, ctrls in ends:
            out = np.concatenate(self._run(self._neighbour, states.reshape(-1, self.size), ctrls.reshape(-1, self.nu), frames), axis=1)
            results.append(out.reshape(len(states), len(state), -1))
        slopes = (results[0] - results[1]) / widths[..., None]
        grads = np.einsum("jbs,kbs->kbj", slopes, cotangent)
        position = self.tangent.pull_back(state[:, :nq], grads[..., :nv])
        outside = ctrl != inside
        return np.concatenate((position, grads[..., nv : 2 * nv + self.na]), axis=-1), np.where(outside, 0.0, grads[..., 2 * nv + self.na :])

    def _team(self) -> _Workers:
        count = self.threads or torch.get_num_threads()
        if self._workers is None or self._workers.key != (os.getpid(), count):
            self._workers = _Workers(self.model, count)
        return self._workers


def _bounded(values: np.ndarray, bound: float) -> np.ndarray:
    """``[B]``: which rows of ``values [B, N]`` are finite and within ``+-bound``."""
    sizes = np.abs(values)
    if sizes.size == 0 or sizes.max() <= bound:  # all of them, mostly
        return np.ones(len(values), dtype=bool)
    return np.asarray((sizes <= bound).all(1))


def _nobody(message: str) -> None:
    """Rows that diverge are counted by whoever steps them."""


def _own(model: Any, *, sensors: bool) -> Any:
    """A copy of the model that does not start over by itself when it becomes unstable, and computes no sensors that nobody reads and no islands of one tree."""
    mujoco = engine()
    own = copy.copy(model)
    own.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_AUTORESET
    if not sensors:
        own.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_SENSOR
    if model.ntree <= 1:  # its constraints are one island, found anew at every step
        own.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_ISLAND
    return own


class _Workers:
    """Threads of one process, each with its ``MjData``. The caller is one of them: one that only waits has to be woken, on a core that another needs."""

    def __init__(self, model: Any, count: int) -> None:
        mujoco = engine()
        self.key = (os.getpid(), count)
        self.data = [mujoco.MjData(model) for _ in range(count)]
        self.engines = [rollout().Rollout(nthread=0) for _ in range(count)]
        self.inboxes: list[SimpleQueue] = [SimpleQueue() for _ in range(count - 1)]
        self.threads = [threading.Thread(target=_serve, args=(inbox,), name="frl-mujoco", daemon=True) for inbox in self.inboxes]
        for thread in self.threads:
            thread.start()
        weakref.finalize(self, _dismiss, self.inboxes)

    def rollout(self, model: Any, state: np.ndarray, ctrl: np.ndarray, frames: int) -> np.ndarray:
        """Time and state ``[B, 1 + S]`` after ``frames`` steps."""
        rows = len(state)
        initial = np.zeros((rows, 1 + state.shape[1]))
        initial[:, 1:] = state
        control = np.repeat(ctrl[:, None], frames, axis=1) if ctrl.shape[1] else None
        out, sensors = np.empty((rows, frames, initial.shape[1])), np.empty((rows, frames, model.nsensordata))

        def play(worker: int, part: slice) -> None:
            self.engines[worker].rollout(
                [model] * len(out[part]),
                [self.data[worker]],
                initial[part],
                None if control is None else control[part],
                nstep=frames,
                state=out[part],
                sensordata=sensors[part],
                skip_checks=True,
            )

        self._share(play, rows)
        return out[:, -1]

    def each(self, one: Callable[[Any, int], None], rows: int) -> None:
        """``one(data, row)`` for every row."""

        def play(worker: int, part: slice) -> None:
            for row in range(part.start, part.stop):
                one(self.data[worker], row)

        self._share(play, rows)

    def _share(self, play: Callable[[int, slice], None], rows: int) -> None:
        """``play(worker, part)`` for parts that cover all rows; a worker that has done one takes the next."""
        count = len(self.data)
        size = max(1, -(-rows // (PARTS_PER_THREAD * count))) if count > 1 else max(1, rows)
        parts = [slice(begin, min(begin + size, rows)) for begin in range(0, rows, size)]
        helpers = self.inboxes[: max(0, len(parts) - 1)]

        def work(worker: int) -> None:
            while parts:
                try:
                    part = parts.pop()
                except IndexError:  # another one was faster
                    return
                play(worker, part)

        ended: SimpleQueue = SimpleQueue()
        for number, inbox in enumerate(helpers):
            inbox.put((work, number, ended))
        try:
            work(count - 1)
        finally:  # the arrays are in use until all have ended
            failures = [ended.get() for _ in helpers]
        failure = next((failure for failure in failures if failure is not None), None)
        del failures
        try:
            if failure is not None:
                raise failure
        finally:
            del failure  # whose traceback holds this frame


def _serve(inbox: SimpleQueue) -> None:
    """A thread's life: jobs until there is none. It knows no one else, so that its owner can go."""
    while (job := inbox.get()) is not None:
        work, number, ended = job
        failure = None
        try:
            work(number)
        except BaseException as error:  # handed to the caller
            failure = error
        del job, work
        ended.put(failure)
        del ended, failure


def _dismiss(inboxes: list[SimpleQueue]) -> None:
    for inbox in inboxes:
        inbox.put(None)

"""Coordinates of a MuJoCo model's positions: plain numbers, and unit quaternions that are perturbed in their tangent space.

A free or ball joint has four position coordinates and three degrees of freedom, so ``nq`` exceeds ``nv``. What a step computes does not depend on the length
of a quaternion; its derivative with respect to the four numbers is therefore that of ``f(q / |q|)``, and lives in the tangent space of the sphere.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from frl.envs.mujoco.engine import engine

_SMALLEST = 1e-15  # MuJoCo takes a shorter quaternion for the identity


class Tangent:
    """Perturbs positions ``[B, nq]`` along the ``nv`` degrees of freedom of a model, and carries cotangents back.

    Args:
        model: ``mujoco.MjModel``.
    """

    def __init__(self, model: Any) -> None:
        mujoco = engine()
        free, ball = int(mujoco.mjtJoint.mjJNT_FREE), int(mujoco.mjtJoint.mjJNT_BALL)
        plain: list[tuple[int, int]] = []
        quaternions: list[tuple[int, int]] = []
        for kind, q, v in zip(model.jnt_type.tolist(), model.jnt_qposadr.tolist(), model.jnt_dofadr.tolist(), strict=True):
            if kind == free:
                plain += [(q + i, v + i) for i in range(3)]
                quaternions.append((q + 3, v + 3))
            elif kind == ball:
                quaternions.append((q, v))
            else:
                plain.append((q, v))
        self.nq, self.nv = int(model.nq), int(model.nv)
        self.plain_q = np.array([q for q, _ in plain], dtype=np.intp)
        self.plain_v = np.array([v for _, v in plain], dtype=np.intp)
        self.quaternions = quaternions

    def normalize(self, qpos: np.ndarray) -> np.ndarray:
        """``qpos [B, nq]`` with quaternions of length 1; the array itself where there are none."""
        if not self.quaternions:
            return qpos
        out = qpos.copy()
        for q, _ in self.quaternions:
            norm = np.linalg.norm(qpos[:, q : q + 4], axis=-1, keepdims=True)
            unit = qpos[:, q : q + 4] / np.where(norm < _SMALLEST, 1.0, norm)
            out[:, q : q + 4] = np.where(norm < _SMALLEST, (1.0, 0.0, 0.0, 0.0), unit)
        return out

    def perturb(self, qpos: np.ndarray, size: float) -> np.ndarray:
        """``[nv, B, nq]``: normalised positions moved by ``size`` along each degree of freedom."""
        out = np.broadcast_to(qpos, (self.nv, *qpos.shape)).copy()
        out[self.plain_v, :, self.plain_q] += size
        for q, v in self.quaternions:
            for axis in range(3):
                turn = np.zeros(4)
                turn[0], turn[1 + axis] = np.cos(size / 2), np.sin(size / 2)
                out[v + axis, :, q : q + 4] = _multiply(qpos[:, q : q + 4], turn)
        return out

    def pull_back(self, qpos: np.ndarray, cotangent: np.ndarray) -> np.ndarray:
        """Cotangents ``[..., B, nv]`` of the degrees of freedom at ``qpos [B, nq]`` (as given, not normalised) as cotangents ``[..., B, nq]`` of ``qpos``."""
        out = np.zeros((*cotangent.shape[:-1], self.nq))
        out[..., self.plain_q] = cotangent[..., self.plain_v]
        for q, v in self.quaternions:
            raw = qpos[:, q : q + 4]
            norm = np.linalg.norm(raw, axis=-1, keepdims=True)
            known = norm >= _SMALLEST
            length = np.where(known, norm, 1.0)
            turn = np.concatenate((np.zeros((*cotangent.shape[:-1], 1)), cotangent[..., v : v + 3]), axis=-1)
            # A turn by delta moves q by q * (0, delta) / 2; the columns of that map are orthogonal and of length 1/2.
            out[..., q : q + 4] = np.where(known, 2.0 * _multiply(raw / length, turn) / length, 0.0)
        return out


def _multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Product of quaternions ``[..., 4]``, scalar part first."""
    a0, a1, a2, a3 = np.moveaxis(a, -1, 0)
    b0, b1, b2, b3 = np.moveaxis(b, -1, 0)
    return np.stack(
        (
            a0 * b0 - a1 * b1 - a2 * b2 - a3 * b3,
            a0 * b1 + a1 * b0 + a2 * b3 - a3 * b2,
            a0 * b2 - a1 * b3 + a2 * b0 + a3 * b1,
            a0 * b3 + a1 * b2 - a2 * b1 + a3 * b0,
        ),
        axis=-1,
    )

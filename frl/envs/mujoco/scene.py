"""Pictures of a MuJoCo row: an image by MuJoCo's renderer where there is one, otherwise the outlines of its geoms in a plane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from frl.envs.mujoco.engine import engine
from frl.envs.mujoco.pixels import HEIGHT, WIDTH, Camera
from frl.envs.scene import Circle, Line, Picture, Polygon, Scene
from frl.types import PyTree

_AXES = {"xz": (0, 2), "xy": (0, 1)}
_MARGIN = 0.5  # around what moves [m]
_ROUND = 10  # corners of half a circle


def scene_of(model: Any, view: str) -> Callable[[PyTree, PyTree], Scene]:
    """The function ``scene(env_state, env_params) -> Scene`` of a model: :func:`image` where MuJoCo can render, :func:`outlines` otherwise.

    Args:
        model: ``mujoco.MjModel``.
        view: plane of the outlines, ``"xz"`` from the side or ``"xy"`` from above.
    """
    cameras: list[Camera | None] = []

    def scene(env_state: Any, env_params: PyTree) -> Scene:
        qpos = np.asarray(env_state.qpos.detach().cpu(), dtype=np.float64)
        if not cameras:
            try:
                cameras.append(Camera(model, view))
            except RuntimeError:
                cameras.append(None)
        return outlines(model, qpos, view) if cameras[0] is None else image(cameras[0], qpos)

    return scene


def image(camera: Camera, qpos: np.ndarray) -> Scene:
    """Positions ``[nq]`` as MuJoCo renders them."""
    corner = (WIDTH / HEIGHT, 1.0)
    return Scene(xlim=(0.0, corner[0]), ylim=(0.0, corner[1]), shapes=[Picture(pixels=camera(qpos), lower_left=(0.0, 0.0), upper_right=corner)])


def outlines(model: Any, qpos: np.ndarray, view: str) -> Scene:
    """Positions ``[nq]`` as projections: spheres, capsules, cylinders, boxes and ellipsoids as they are, meshes as the box around them, the ground as a line.

    A picture follows a root that is free to go anywhere: it stays in the middle, and marks on the ground, one for each metre, pass by.
    """
    mujoco = engine()
    data = mujoco.MjData(model)
    data.qpos[:] = qpos
    mujoco.mj_kinematics(model, data)
    axes = _AXES[view]
    origin = _followed(model, data)[list(axes)]
    shapes: list[Circle | Line | Polygon | Picture] = []
    seen: list[np.ndarray] = []
    ground: float | None = None
    for i in range(model.ngeom):
        if model.geom_type[i] == mujoco.mjtGeom.mjGEOM_PLANE:
            ground = float(data.geom_xpos[i, 2]) if view == "xz" and ground is None else ground
            continue
        points = _outline(model, data, i)[:, axes] - origin
        if model.body_weldid[model.geom_bodyid[i]]:
            seen.append(points)
        shapes.append(Polygon(points=_pairs(_hull(points)), color=_color(model, i)))
    near = np.concatenate(seen) if seen else np.zeros((1, 2))
    low, high = near.min(0) - _MARGIN, near.max(0) + _MARGIN
    if ground is not None and ground > low[1] - 1.0:
        low[1] = min(low[1], ground - 0.2)
        ends = np.array([low[0] - 5.0, high[0] + 5.0])
        shapes.insert(0, Line(points=_pairs([(x, ground) for x in ends]), color="gray"))
        marks = np.arange(np.ceil(ends[0] + origin[0]), np.floor(ends[1] + origin[0]) + 1) - origin[0]
        shapes[1:1] = [Line(points=_pairs([(x, ground), (x, ground - 0.08)]), color="gray", width=1.0) for x in marks]
    caption = f"x = {origin[0]:.2f} m" if origin.any() else ""
    return Scene(xlim=(float(low[0]), float(high[0])), ylim=(float(low[1]), float(high[1])), shapes=shapes, caption=caption)


def _followed(model: Any, data: Any) -> np.ndarray:
    """``[3]``: where the first root has gone that is free to go anywhere, 0 along the axes in which none is. Heights stay."""
    mujoco = engine()
    place = np.zeros(3)
    for j in range(model.njnt):
        q = model.jnt_qposadr[j]
        if model.jnt_type[j] == mujoco.mjtJoint.mjJNT_FREE:
            place[:2] = data.qpos[q : q + 2]
            break
        if model.jnt_type[j] == mujoco.mjtJoint.mjJNT_SLIDE and not model.jnt_limited[j] and model.body_parentid[model.jnt_bodyid[j]] == 0:
            place += model.jnt_axis[j] * (data.qpos[q] - model.qpos0[q])
    place[2] = 0.0
    return place


def _outline(model: Any, data: Any, i: int) -> np.ndarray:
    """Points ``[M, 3]`` whose hull in any plane is the projection of geom ``i`` (of the box around it for meshes and fields)."""
    mujoco = engine()
    kind, size = model.geom_type[i], model.geom_size[i]
    types = mujoco.mjtGeom
    polar, turns = np.linspace(0.0, np.pi, _ROUND + 1), np.linspace(0.0, 2 * np.pi, 2 * _ROUND, endpoint=False)
    ball = np.array([(np.sin(a) * np.cos(b), np.sin(a) * np.sin(b), np.cos(a)) for a in polar for b in turns])
    if kind == types.mjGEOM_SPHERE:
        local = ball * size[0]
    elif kind == types.mjGEOM_ELLIPSOID:
        local = ball * size
    elif kind == types.mjGEOM_CAPSULE:
        local = ball * size[0]
        local[:, 2] += np.where(ball[:, 2] >= 0, size[1], -size[1])
    elif kind == types.mjGEOM_CYLINDER:
        local = np.array([(size[0] * np.cos(b), size[0] * np.sin(b), z) for b in turns for z in (-size[1], size[1])])
    else:
        middle, half = model.geom_aabb[i, :3], model.geom_aabb[i, 3:]
        local = middle + half * np.array([(x, y, z) for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)])
    return data.geom_xpos[i] + local @ data.geom_xmat[i].reshape(3, 3).T


def _hull(points: np.ndarray) -> np.ndarray:
    """Corners of the convex hull of ``[M, 2]``, counter-clockwise.

    Source: Andrew, "Another efficient algorithm for convex hulls in two dimensions", 1979.
    """
    ordered = np.unique(points.round(9), axis=0)
    if len(ordered) < 3:
        return ordered

    def half(sequence: np.ndarray) -> list[np.ndarray]:
        chain: list[np.ndarray] = []
        for p in sequence:
            while len(chain) > 1:
                a, b = chain[-1] - chain[-2], p - chain[-2]
                if a[0] * b[1] - a[1] * b[0] > 0:
                    break
                chain.pop()
            chain.append(p)
        return chain[:-1]

    return np.array(half(ordered) + half(ordered[::-1]))


def _pairs(points: Any) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in points]


def _color(model: Any, i: int) -> str:
    material = model.geom_matid[i]
    rgba = model.mat_rgba[material] if material >= 0 and np.allclose(model.geom_rgba[i], (0.5, 0.5, 0.5, 1.0)) else model.geom_rgba[i]
    return "#" + "".join(f"{int(round(255 * float(np.clip(c, 0, 1)))):02x}" for c in rgba[:3])

"""Images of a MuJoCo model by MuJoCo's own renderer, without a window: EGL, or OSMesa, where the machine has one of them."""

from __future__ import annotations

import importlib
import os
from typing import Any

import numpy as np

from frl.envs.mujoco.engine import engine

WIDTH, HEIGHT = 480, 360
_BACKENDS = ("egl", "osmesa")


class Camera:
    """Looks at a model: through its first camera, or from the side at what moves.

    Args:
        model: ``mujoco.MjModel``.
        view: without a camera of the model's own, ``"xz"`` looks from the side and ``"xy"`` from above.

    Raises:
        RuntimeError: there is no renderer without a window on this machine.
    """

    def __init__(self, model: Any, view: str) -> None:
        mujoco = engine()
        self.model, self.data = model, mujoco.MjData(model)
        self._context = _offscreen()
        self._context.make_current()
        model.vis.global_.offwidth, model.vis.global_.offheight = max(WIDTH, model.vis.global_.offwidth), max(HEIGHT, model.vis.global_.offheight)
        self._renderer = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100.value)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN.value, self._renderer)
        self._scene, self._options, self._camera = mujoco.MjvScene(model, maxgeom=10000), mujoco.MjvOption(), mujoco.MjvCamera()
        for costly in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
            self._scene.flags[costly.value] = 0
        if model.ncam:
            self._camera.type, self._camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, 0
            return
        mujoco.mj_kinematics(model, self.data)
        parts = [i for i in range(model.ngeom) if model.body_weldid[model.geom_bodyid[i]]]
        root = self.data.xpos[model.geom_bodyid[parts[0]]] if parts else np.zeros(3)
        reach = np.linalg.norm(self.data.geom_xpos[parts] - root, axis=1) + model.geom_rbound[parts]
        self._camera.lookat[:], self._camera.distance = root, 2.6 * float(reach.max(initial=0.1))
        self._camera.azimuth, self._camera.elevation = 90.0, -15.0 if view == "xz" else -90.0

    def __call__(self, qpos: np.ndarray) -> np.ndarray:
        """The image of positions ``[nq]``: uint8 ``[HEIGHT, WIDTH, 3]``."""
        mujoco = engine()
        self.data.qpos[:] = qpos
        mujoco.mj_forward(self.model, self.data)
        self._context.make_current()
        every = mujoco.mjtCatBit.mjCAT_ALL.value
        mujoco.mjv_updateScene(self.model, self.data, self._options, mujoco.MjvPerturb(), self._camera, every, self._scene)
        mujoco.mjr_render(mujoco.MjrRect(0, 0, WIDTH, HEIGHT), self._scene, self._renderer)
        image = np.empty((HEIGHT, WIDTH, 3), dtype=np.uint8)
        mujoco.mjr_readPixels(image, None, mujoco.MjrRect(0, 0, WIDTH, HEIGHT), self._renderer)
        return image[::-1].copy()


def _offscreen() -> Any:
    chosen = os.environ.get("MUJOCO_GL", "").lower()
    reasons = []
    for backend in (chosen,) if chosen in _BACKENDS else _BACKENDS:
        try:
            return importlib.import_module(f"mujoco.{backend}").GLContext(WIDTH, HEIGHT)
        except Exception as error:  # libraries that are not there fail in many ways
            reasons.append(f"{backend}: {type(error).__name__} {error}")
    raise RuntimeError(f"no renderer without a window ({'; '.join(reasons)})")

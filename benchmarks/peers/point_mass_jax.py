"""PointMass in JAX: the dynamics of ``eager_point_mass.PointMass`` with free leading dimensions (rows, or ``vmap``)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

HALF, KEEP, GAIN, DT = 1.0, 1 - 5.0 / 60, 5.0 / 60, 1 / 60
THRESHOLD, MAX_STEPS, CLEARANCE, RADIUS, CANDIDATES = 0.03, 100, 0.25, (0.08, 0.15), 8


@jax.custom_jvp
def norm2(x):
    """2-norm over the last axis with slope 0 at 0, as in torch."""
    return jnp.sqrt((x * x).sum(-1))


@norm2.defjvp
def _norm2_jvp(primals, tangents):
    (x,), (dx,) = primals, tangents
    n = norm2(x)
    return n, (x * dx).sum(-1) / jnp.where(n > 0, n, 1.0)


def draw(key, shape=()):
    """Fresh episodes: position ``[..., 2]`` and task ``[..., 8]`` (goal, two centres, two radii)."""
    u = jax.random.uniform(key, (*shape, 6 + 4 * CANDIDATES))
    goal = (2 * u[..., 0:2] - 1) * (0.7 * HALF)
    start = (2 * u[..., 2:4] - 1) * (0.6 * HALF)
    radii = RADIUS[0] + (RADIUS[1] - RADIUS[0]) * u[..., 4:6]
    proposals = (2 * u[..., 6:].reshape(*shape, 2, CANDIDATES, 2) - 1) * (0.8 * HALF)
    valid = jnp.sqrt(((proposals - goal[..., None, None, :]) ** 2).sum(-1)) > CLEARANCE
    first = jnp.argmax(valid, -1)
    centre = jnp.take_along_axis(proposals, first[..., None, None], -2)[..., 0, :]
    centre = jnp.where(valid.any(-1)[..., None], centre, -0.5 * goal[..., None, :])
    return start, jnp.concatenate((goal, centre.reshape(*shape, 4), radii), -1)


def observe(x, v, last, task):
    """``[..., 14]``."""
    return jnp.concatenate((x, v, task[..., :2], last, task[..., 2:]), -1)


def clamp(x, low, high):
    """Clip whose slope at the bounds is 1, as in torch."""
    return jnp.where((x < low) | (x > high), jnp.clip(jax.lax.stop_gradient(x), low, high), x)


def move(x, v, last, task, action, bonus=0.0):
    """One step without starting again: position, velocity, action taken, reward, success."""
    a = clamp(action, -1.0, 1.0)
    v = v * KEEP + a * GAIN
    x = clamp(x + v * DT, -HALF, HALF)
    distance = norm2(x - task[..., :2])
    centres = task[..., 2:6].reshape(*task.shape[:-1], 2, 2)
    penetration = jnp.maximum(task[..., 6:] - norm2(x[..., None, :] - centres), 0.0)
    hit = distance < THRESHOLD
    reward = (
        0.5 * jnp.exp(distance * distance * (-1 / (2 * 0.05**2)))
        - distance
        - 2.0 * (penetration * penetration).sum(-1)
        - 0.01 * (v * v).sum(-1)
        - 0.001 * ((a - last) ** 2).sum(-1)
    )
    return x, v, a, reward + bonus * hit, hit


def golden():
    """The recorded step of ``eager_point_mass.golden``."""
    x = jnp.array([[0.1, -0.2], [0.5, 0.5]])
    v = jnp.array([[0.3, 0.0], [0.0, -0.4]])
    last = jnp.array([[0.5, -0.5], [0.0, 0.0]])
    task = jnp.array([[0.2, -0.1, 0.12, -0.2, 0.9, 0.9, 0.1, 0.1], [0.5, 0.495, -0.5, 0.0, 0.0, -0.5, 0.12, 0.15]])
    action = jnp.array([[1.5, -0.25], [0.1, 0.2]])
    x1, v1, _, reward, hit = move(x, v, last, task, action, 5.0)
    gradient = jax.grad(lambda a: move(x, v, last, task, a, 5.0)[3].sum())(action)
    near = {"atol": 2e-6, "rtol": 0}
    np.testing.assert_allclose(reward, [-0.142512, 5.497808], **near)
    np.testing.assert_allclose(x1[0], [0.105972, -0.200347], **near)
    np.testing.assert_allclose(v1[0], [0.358333, -0.020833], **near)
    np.testing.assert_allclose(gradient, [[0.0, 0.001171], [-0.000481, 0.001785]], **near)
    assert hit.tolist() == [False, True]

"""MuJoCo simulations as differentiable functions of tensors: the optional extra ``mujoco``.

:func:`mujoco_env` makes an environment of any MJCF model, ``mujoco:Hopper-v5`` and its kin are gymnasium's tasks, and :func:`simulate` is the step itself.
"""

from frl.envs.mujoco.env import MujocoState as MujocoState
from frl.envs.mujoco.env import mujoco_env as mujoco_env
from frl.envs.mujoco.model import load_model as load_model
from frl.envs.mujoco.operator import simulate as simulate
from frl.envs.mujoco.simulator import Simulator as Simulator

"""A trained policy with its normalizer as a program of ``torch.export``, run by a process that cannot import frl.

python benchmarks/examples/exported_policy.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import frl
from frl import rng
from frl.envs.double_integrator import double_integrator

ELSEWHERE = """
import sys
import torch
sys.modules["frl"] = None  # importing it is an error from here on
act = torch.export.load(sys.argv[1]).module()
torch.save(act(torch.load(sys.argv[2])), sys.argv[3])
"""


def export_and_run(folder: Path, updates: int = 3, *, mode: str = "eager") -> float:
    """Largest difference between the actions of both processes."""
    env, normalizer = frl.make_vec_env(double_integrator(), 8), frl.running_normalizer(2)
    policy = frl.actor_only(2, 1, network={"type": "mlp", "network_cfg": {"hidden_sizes": [16], "activation": "tanh"}})
    apg = frl.make_apg(env, policy, frl.adam(), frl.ApgConfig(segment_length=8, compile_mode=mode), normalizer=normalizer)
    state = apg.init(rng.key(0))
    for _ in range(updates):
        state = apg.update(*apg.collect(state))
    obs = torch.randn(5, 2)
    frl.export_policy(folder / "policy.pt2", policy, state.params, obs, normalizer=normalizer, norm_state=state.norm_state)
    torch.save(obs, folder / "obs.pt")
    subprocess.run([sys.executable, "-c", ELSEWHERE, *(str(folder / name) for name in ("policy.pt2", "obs.pt", "action.pt"))], check=True)
    here = frl.infer_policy_action(policy, state.params, obs, normalizer=normalizer, norm_state=state.norm_state)
    return float((torch.load(folder / "action.pt") - here).abs().max())


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        print(f"actions of the exported program differ by {export_and_run(Path(folder)):.1e}")

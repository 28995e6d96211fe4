"""An environment that chooses the difficulty, horizon and scale of each complete rollout from its index."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from frl import rng
from frl.algorithms.apg import ApgConfig, make_apg
from frl.compile import graph_count
from frl.envs.double_integrator import double_integrator
from frl.envs.schedule import DifferentiableRolloutSpec, stratified_rollout_value
from frl.envs.vector import make_vec_env
from frl.optim import adam
from frl.policies import actor_only

POLICY = actor_only(2, 1, network={"type": "mlp", "network_cfg": {"hidden_sizes": [4], "activation": "tanh"}})


def scheduled(mode: str, updates: int) -> list:
    inner = double_integrator()

    def prepare(index: int):
        steps = stratified_rollout_value(index, 17, 19)
        params = inner.default_params._replace(mass=torch.tensor(1.0 + index))
        return DifferentiableRolloutSpec(num_steps=steps, objective_scale=0.5, metadata={"steps": float(steps)}), params

    vec = make_vec_env(dataclasses.replace(inner, prepare_differentiable_rollout=prepare), 3)
    apg = make_apg(vec, POLICY, adam(), ApgConfig(rollout_mode="complete", gradient_accumulation_steps=2, compile_mode=mode))
    state, seen = apg.init(rng.key(3)), []
    for _ in range(updates):
        state, rollout = apg.collect(state)
        state = apg.update(state, rollout)
        seen.append((rollout, state, graph_count()))
    return seen


@pytest.mark.parametrize("mode", ["eager", "aot_eager"])
def test_each_rollout_has_the_horizon_parameters_and_scale_of_its_index(mode):
    seen = scheduled(mode, 3)
    rollouts = [part for parts, _, _ in seen for part in parts]
    assert [r.noise.shape[0] for r in rollouts] == [stratified_rollout_value(i, 17, 19) for i in range(6)]
    assert [float(r.env_params.mass) for r in rollouts] == [1.0 + i for i in range(6)]
    assert all(float(r.objective_scale) == 0.5 for r in rollouts)
    for k, (parts, state, _) in enumerate(seen):
        assert float(state.metrics["rollout_steps_mean"]) == pytest.approx(sum(float(p.metadata["steps"]) for p in parts) / 2)
        assert int(state.counters["rollouts"]) == 2 * (k + 1)
        assert float(state.metrics["skipped_update"]) == 0.0


def test_changing_horizons_compile_nothing_after_the_first_update():
    counts = [graphs for _, _, graphs in scheduled("aot_eager", 4)]
    assert counts[1:] == [counts[0]] * 3


def test_compiled_and_eager_agree():
    (_, a, _), (_, b, _) = scheduled("eager", 2)[-1], scheduled("aot_eager", 2)[-1]
    for name in a.params["actor"]["layers"][0]:
        torch.testing.assert_close(a.params["actor"]["layers"][0][name], b.params["actor"]["layers"][0][name], rtol=1e-5, atol=1e-7)

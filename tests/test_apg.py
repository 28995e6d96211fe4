"""APG: the gradient against differences and a plain loop, the objective's rules, accumulation, skips, schedules, and graphs that stay."""

# The stubs of torch.func know neither argnums nor has_aux, and wrong arguments are passed on purpose.
# pyright: reportCallIssue=false, reportAssignmentType=false, reportArgumentType=false, reportUnusedExpression=false, reportAttributeAccessIssue=false

from __future__ import annotations

import dataclasses
import functools
import math
import shutil
import warnings
from collections import deque

import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, vmap

from frl import compile as compiler
from frl import rng, tree
from frl.algorithms import episodes
from frl.algorithms.apg import ApgConfig, apg_gradient, make_apg
from frl.compile import graph_count
from frl.envs.double_integrator import double_integrator
from frl.envs.point_mass import point_mass
from frl.envs.schedule import DifferentiableRolloutSpec
from frl.envs.vector import make_vec_env
from frl.losses import apg_loss
from frl.networks import mlp
from frl.normalizers import running_normalizer
from frl.optim import adam, linear_schedule, sgd
from frl.policies import actor_only
from frl.rng import key
from frl.rollout import make_unroll
from frl.types import Rollout, Trajectory
from tests.strategies import assert_trees_close, assert_trees_equal, copy_of, draw, toy_env

CAPTURED = "aot_eager"
N, T = 3, 6
LOSS_METRICS = {"loss", "objective", "entropy", "grad_norm", "skipped_update", "skipped_excessive_gradient", "learning_rate"}
ADJOINT_METRICS = {f"action_adjoint_{name}" for name in ("preclip_mean_norm", "preclip_max_norm", "clipped_fraction", "nonfinite_fraction")}
POLICY = actor_only(2, 2, network=mlp(2, 2, hidden_sizes=[4], activation="tanh"), initial_log_std=-0.5)


@pytest.fixture(autouse=True)
def _no_fallback(monkeypatch):
    monkeypatch.setattr(compiler, "_warned", False)
    monkeypatch.setattr(compiler, "_broken", False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="frl could not compile")
        yield


@functools.cache
def toy(life=(3, 5)):
    return toy_env(life=life)


@functools.cache
def algorithm(*, n=N, life=(3, 5), optimizer="sgd", normalize=False, schedule=None, **config):
    """One algorithm for each set of options, so that graphs are shared by the tests."""
    config = {"compile_mode": "eager", "update_horizon": T, "segment_length": T, "max_grad_norm": None, **config}
    return make_apg(
        make_vec_env(toy(life), n),
        POLICY,
        {"sgd": sgd(), "adam": adam()}[optimizer],
        ApgConfig(**config),
        normalizer=running_normalizer(2) if normalize else None,
        schedule=None if schedule is None else linear_schedule(schedule),
        learning_rate=0.05,
        dtype=torch.float64,
    )


# One algorithm with everything on, so that many tests share its graphs.
FULL = {
    "life": (1_000, 1_001),
    "optimizer": "adam",
    "normalize": True,
    "ent_coef": 0.01,
    "max_grad_norm": 0.5,
    "max_grad_norm_before_clip": 1e4,
    "action_adjoint_max_norm": 0.1,
    "state_adjoint_max_norm": 0.1,
    "schedule": 4,
}


def begin(algo, seed=0):
    """A state whose policy is not the small one of the initialiser, and its first rollout."""
    state = algo.init(key(seed))
    state = state._replace(params=tree.map(lambda x: x + 0.3 * draw(*x.shape, seed=9), state.params))
    return algo.collect(state)


def faulty(rollout, step, **faults):
    """The rollout with a fault at one clock of row 1."""
    rows = {f"{name}_fault": torch.tensor([0.0, value, 0.0], dtype=torch.float64) for name, value in faults.items()}
    return rollout._replace(env_params=rollout.env_params._replace(fault_step=torch.tensor(step), **rows))


# -- the gradient ----------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
def test_gradient_of_three_linear_steps_equals_central_differences(mode):
    vec = make_vec_env(double_integrator(dimensions=2, dtype=torch.float64), 2)
    policy = actor_only(4, 2, network=mlp(4, 2, hidden_sizes=[]), initial_log_std=-1.0)
    params = policy.init(key(0), dtype=torch.float64)
    start = vec.reset(vec.row_keys(key(1)), vec.default_params)
    rollout = Rollout(env_state=start, env_params=vec.default_params, noise=draw(3, 2, 2), objective_scale=torch.ones((), dtype=torch.float64))
    unroll = make_unroll(vec, policy, mode=mode, horizon=3)
    grads, aux = apg_gradient(unroll, params, (), rollout, gamma=0.9, ent_coef=0.1, complete=True)
    loss = lambda p: apg_gradient(unroll, p, (), rollout, gamma=0.9, ent_coef=0.1, complete=True)[1]["loss"]
    assert torch.equal(loss(params), aux["loss"])
    leaves, structure = tree.flatten(params)
    for i, leaf in enumerate(leaves):
        for j in range(leaf.numel()):
            bump = torch.zeros_like(leaf).flatten()
            bump[j] = 1e-4
            high, low = (loss(tree.unflatten(structure, [*leaves[:i], leaf + s * bump.reshape(leaf.shape), *leaves[i + 1 :]])) for s in (1, -1))
            assert float(tree.leaves(grads)[i].flatten()[j]) == pytest.approx(float(high - low) / 2e-4, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("max_grad_norm", [None, 0.05])
def test_an_update_is_that_of_plain_pytorch(optimizer, max_grad_norm):
    """Loop, autograd, clip_grad_norm_ and torch.optim, for two updates."""
    algo = algorithm(optimizer=optimizer, max_grad_norm=max_grad_norm, ent_coef=0.01)
    vec = make_vec_env(toy(), N)
    state, rollout = begin(algo)
    params = tree.map(lambda x: x.clone().requires_grad_(), state.params)
    leaves = tree.leaves(params)
    oracle = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer](leaves, lr=0.05)
    for _ in range(2):
        live, rewards, entropies, done = rollout.env_state, [], [], []
        for e in rollout.noise:
            dist = POLICY.apply(params, vec.observe(live, vec.default_params))
            live, step = vec.step(live, POLICY.sample(dist, e).action, vec.default_params)
            rewards.append(step.reward), entropies.append(POLICY.distribution.entropy(dist, e)), done.append(step.terminated | step.truncated)
        discount, objective, entropy = torch.ones(N, dtype=torch.float64), 0.0, 0.0
        for r, h, d in zip(rewards, entropies, done, strict=True):
            objective, entropy = objective + (discount * r).mean(), entropy + (discount * h).mean()
            discount = torch.where(d, 1.0, discount * 0.99)
        oracle.zero_grad()
        (-objective - 0.01 * entropy).backward()
        norm = torch.nn.utils.clip_grad_norm_(leaves, math.inf if max_grad_norm is None else max_grad_norm)
        oracle.step()
        state = algo.update(state, rollout)
        assert_trees_close(state.params, tree.detach(params), ops=10_000)
        expected = {"objective": objective, "entropy": entropy, "loss": -objective - 0.01 * entropy, "grad_norm": norm}
        for name, value in expected.items():
            assert float(state.metrics[name]) == pytest.approx(float(value.detach()), rel=1e-10)
        state, rollout = algo.collect(state)


CAPTURES = {
    "segmented": {"segment_length": 3, "action_adjoint_max_norm": 0.1},
    "complete": {
        "rollout_mode": "complete",
        "gradient_accumulation_steps": 2,
        "action_adjoint_max_norm": 0.1,
        "state_adjoint_max_norm": 0.2,
        "max_grad_norm": 0.05,
        "ent_coef": 0.01,
    },
    "normalized": {"normalize": True, "clip_actions_to_space": True, "action_adjoint_max_norm": 0.1, "optimizer": "adam"},
    "recomputed": {"memory": "recompute", "steps_per_graph": 2, "deterministic_actions": True, "action_adjoint_max_norm": 0.1},
}


@pytest.mark.parametrize("name", CAPTURES)
def test_captured_updates_equal_eager_ones(name):
    """With the clip active: the eager update without it is another one."""
    algos = algorithm(compile_mode=CAPTURED, **CAPTURES[name]), algorithm(**CAPTURES[name])
    results = []
    for algo in algos:
        state, rollout = begin(algo)
        for _ in range(2):
            state, rollout = algo.collect(algo.update(state, rollout))
        results.append(state)
    assert_trees_close(results[0], results[1], ops=100_000)
    assert float(results[0].metrics["action_adjoint_clipped_fraction"]) > 0.1
    free = algorithm(**{k: v for k, v in CAPTURES[name].items() if "adjoint" not in k})
    state, rollout = begin(free)
    clipped = algos[1].update(*begin(algos[1]))
    difference = tree.map(lambda a, b: (a - b).abs().max(), free.update(state, rollout).params, clipped.params)
    assert max(float(x) for x in tree.leaves(difference)) > 1e-4


def test_recomputing_gives_the_bits_of_saving():
    recompute, save = (algorithm(compile_mode=CAPTURED, **{**CAPTURES["recomputed"], "memory": memory}) for memory in ("recompute", "save"))
    assert_trees_equal(recompute.update(*begin(recompute)), save.update(*begin(save)))


@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
def test_an_update_repeats_bit_for_bit_and_leaves_its_arguments_alone(mode):
    algo = algorithm(compile_mode=mode, **FULL)
    state = algo.init(key(0))
    before = copy_of(state)
    collected, rollout = algo.collect(state)
    assert_trees_equal(state, before)
    again, same = algo.collect(state)
    assert_trees_equal((again, same), (collected, rollout))
    arguments = copy_of((collected, rollout))
    first, second = algo.update(collected, rollout), algo.update(collected, rollout)
    assert_trees_equal(second, first)
    assert_trees_equal((collected, rollout), arguments)
    for leaf in tree.leaves((first.params, first.opt_state)):
        leaf.add_(1)
    assert_trees_equal((collected, rollout), arguments)


def test_an_update_improves_the_objective():
    algo = algorithm(deterministic_actions=True, life=(1_000, 1_001))
    state, rollout = begin(algo)
    first = algo.update(state, rollout)
    second = algo.update(first, rollout)
    assert float(second.metrics["objective"]) > float(first.metrics["objective"])
    assert float(first.metrics["grad_norm"]) > 0
    assert float(first.metrics["skipped_update"]) == 0


def test_a_quadratic_objective_of_the_action_is_solved():
    env = toy_env(gain=0.0, push=0.0, life=(1_000, 1_001))
    algo = make_apg(
        make_vec_env(env, N),
        POLICY,
        adam(),
        ApgConfig(segment_length=4, compile_mode="eager", deterministic_actions=True),
        learning_rate=0.1,
        dtype=torch.float64,
    )
    state, rollout = begin(algo)
    for _ in range(30):
        state, rollout = algo.collect(algo.update(state, rollout))
    assert int(state.counters["skipped_updates"]) == 0
    dist = POLICY.apply(state.params, make_vec_env(env, N).observe(state.env_state, env.default_params))
    assert float(dist.mean.abs().max()) < 0.1


# -- the objective's rules -------------------------------------------------------------------------------------------------------------------------------


def played_of(**fields):
    """A trajectory with these fields and no others."""
    return Trajectory(**{**{name: () for name in Trajectory._fields}, "metrics": {}, **fields})


def trajectory_of(reward, done, entropy=()):
    """One row."""
    column = lambda x, dtype: torch.tensor(x, dtype=dtype)[:, None]
    blank = torch.zeros(len(done), 1, dtype=torch.bool)
    entropy = column(entropy, torch.float64) if entropy != () else ()
    return played_of(entropy=entropy, reward=column(reward, torch.float64), terminated=column(done, torch.bool), truncated=blank, alive=~blank)


def test_discounts_restart_after_a_done_or_end_with_it():
    """Rewards 1 (done), 2, 4 at gamma 0.5: 1 + (2 + 0.5 * 4) = 5 segmented, 1 complete; the same rule for entropies."""
    played = trajectory_of([1.0, 2.0, 4.0], [True, False, False], entropy=[1.0, 2.0, 4.0])
    terms = apg_loss(played, 0.5, 0.1)
    assert [float(x) for x in (terms.objective, terms.entropy, terms.loss)] == pytest.approx([5.0, 5.0, -5.5])
    terms = apg_loss(played, 0.5, 0.1, complete=True)
    assert [float(x) for x in (terms.objective, terms.entropy, terms.loss)] == pytest.approx([1.0, 1.0, -1.1])
    terms = apg_loss(played, 0.5, 0.1, complete=True, objective_scale=torch.tensor([3.0], dtype=torch.float64))
    assert [float(x) for x in (terms.objective, terms.entropy, terms.loss)] == pytest.approx([3.0, 3.0, -3.3])
    assert float(apg_loss(trajectory_of([1.0, 2.0, 4.0], [False] * 3), 0.5).objective) == 3.0
    assert float(apg_loss(trajectory_of([1.0], [False]), 0.5).entropy) == 0.0


def test_what_follows_a_done_does_not_count_in_a_complete_rollout():
    for bad in (9.0, math.nan, math.inf):
        terms = apg_loss(trajectory_of([1.0, bad, bad], [True, False, True], entropy=[1.0, bad, bad]), 0.5, 0.1, complete=True)
        assert float(terms.loss) == pytest.approx(-1.1)

    def with_rewards_after_done(value):
        inner = make_unroll(make_vec_env(toy(), N), POLICY, mode="eager")

        def unroll(params, norm_state, env_state, env_params, noise):
            end, played = inner(params, norm_state, env_state, env_params, noise)
            return end, played._replace(reward=torch.where(played.alive, played.reward, played.reward * value))

        return make_apg(
            make_vec_env(toy(), N),
            POLICY,
            sgd(),
            ApgConfig(rollout_mode="complete", update_horizon=T, compile_mode="eager"),
            unroll=unroll,
            dtype=torch.float64,
        )

    plain = with_rewards_after_done(1.0)
    state, rollout = begin(plain)
    expected = plain.update(state, rollout)
    assert float(expected.metrics["grad_norm"]) > 0
    assert_trees_equal(with_rewards_after_done(-7.0).update(state, rollout).params, expected.params)
    segmented = algorithm(rollout_mode="segmented").update(state, rollout)
    assert float(segmented.metrics["objective"]) != float(expected.metrics["objective"])


def test_entropy_with_coefficient_zero_stays_out_of_the_gradient():
    def loss(x, coefficient):
        played = trajectory_of([1.0, 2.0], [False, False])
        return apg_loss(played._replace(reward=played.reward * x, entropy=math.inf * played.reward + x), 0.5, coefficient).loss

    x = torch.tensor(2.0, dtype=torch.float64)
    assert float(loss(x, 0.0)) == -4.0
    assert float(grad(lambda x: loss(x, 0.0))(x)) == -2.0


def test_segments_of_one_update_carry_the_discount():
    """When states have no influence on later rewards, cutting the gradient changes nothing."""
    blind = dataclasses.replace(toy_env(gain=0.0, life=(3, 4)), observe=lambda state, params: torch.zeros_like(state.x))
    results = []
    for segment in (2, 4):
        algo = make_apg(
            make_vec_env(blind, 2), POLICY, sgd(), ApgConfig(segment_length=segment, update_horizon=4, compile_mode="eager", ent_coef=0.01), dtype=torch.float64
        )
        results.append(algo.update(*begin(algo)))
    assert_trees_close(results[0]._replace(extra={}), results[1]._replace(extra={}), ops=1_000)


@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 2.0, -1.0)])
def test_accumulated_rollouts_equal_one_batch_of_their_rows(scales):
    """K microbatches average; the same rows in one batch, with each row's scale, give the same update."""
    k = len(scales)
    few = algorithm(rollout_mode="complete", gradient_accumulation_steps=k, ent_coef=0.01)
    wide = algorithm(n=k * N, rollout_mode="complete", ent_coef=0.01)
    state, parts = begin(few)
    parts = tuple(part._replace(objective_scale=torch.tensor(s, dtype=torch.float64)) for part, s in zip(parts, scales, strict=True))
    batch = Rollout(
        env_state=tree.map(lambda *x: torch.cat(x), *[part.env_state for part in parts]),
        env_params=parts[0].env_params,
        noise=torch.cat([part.noise for part in parts], 1),
        objective_scale=torch.tensor(scales, dtype=torch.float64).repeat_interleave(N),
    )
    got, expected = few.update(state, parts), wide.update(state, batch)
    assert_trees_close((got.params, got.opt_state), (expected.params, expected.opt_state), ops=10_000)
    for name in ("loss", "objective", "entropy", "grad_norm"):
        assert float(got.metrics[name]) == pytest.approx(float(expected.metrics[name]), rel=1e-9)
    assert {name: int(got.counters[name]) for name in ("updates", "rollouts", "env_steps")} == {"updates": 1, "rollouts": k, "env_steps": k * N * T}
    assert_trees_equal(few.update(state, list(parts)), got)


def test_episodes_of_all_accumulated_rollouts_are_reported():
    few = algorithm(rollout_mode="complete", gradient_accumulation_steps=2, ent_coef=0.01)
    state, parts = begin(few)
    new = few.update(state, parts)
    alone = [few.update(state, (part, part)).extra["episodes"].count / 2 for part in parts]
    assert int(new.metrics["episodes"]) == int(new.extra["episodes"].count) == int(sum(alone)) == 2 * N
    sick = few.update(state, (faulty(parts[0], 1, reward=math.nan), parts[1]))
    assert int(sick.metrics["nonfinite_rows"]) == int(sick.counters["nonfinite_rows"]) > 0


# -- collecting ------------------------------------------------------------------------------------------------------------------------------------------


def test_segmented_rollouts_continue_and_complete_ones_start_anew():
    for mode in ("segmented", "complete"):
        algo = algorithm(rollout_mode=mode)
        state, rollout = begin(algo)
        state = algo.update(state, rollout)
        _, following = algo.collect(state)
        assert torch.equal(following.env_state.env.x, state.env_state.env.x) == (mode == "segmented")
        assert int(following.env_state.steps.max()) == (T if mode == "segmented" else 0)
        assert not torch.equal(following.noise, rollout.noise)
        assert following.noise.shape == (T, N, 2)


def test_rollouts_of_one_update_differ_and_rows_do_not_depend_on_their_number():
    algo = algorithm(rollout_mode="complete", gradient_accumulation_steps=3)
    state = algo.init(key(4))
    _, parts = algo.collect(state)
    assert len({float(part.noise[0, 0, 0]) for part in parts}) == len({float(part.env_state.env.x[0, 0]) for part in parts}) == 3
    wide = algorithm(n=2 * N, rollout_mode="complete", gradient_accumulation_steps=3)
    _, many = wide.collect(wide.init(key(4)))
    assert_trees_equal([p.noise[:, :N] for p in many], [p.noise for p in parts])
    assert_trees_equal([tree.map(lambda x: x[:N], p.env_state) for p in many], [p.env_state for p in parts])


def scheduled(mode, num_steps=(2, 5, 20), **config):
    def prepare(index):
        return DifferentiableRolloutSpec(num_steps=num_steps[index % len(num_steps)], objective_scale=1.0 + index), toy().default_params._replace(
            gain=torch.tensor(0.5 + 0.1 * index, dtype=torch.float64)
        )

    env = dataclasses.replace(toy(), prepare_differentiable_rollout=prepare)
    return make_apg(make_vec_env(env, N), POLICY, sgd(), ApgConfig(rollout_mode="complete", compile_mode=mode, **config), dtype=torch.float64)


def test_a_scheduled_environment_chooses_horizon_scale_and_parameters():
    algo = scheduled("eager", gradient_accumulation_steps=2)
    state, parts = begin(algo)
    assert [len(part.noise) for part in parts] == [2, 5]
    assert [float(part.objective_scale) for part in parts] == [1.0, 2.0]
    assert [float(part.env_params.gain) for part in parts] == pytest.approx([0.5, 0.6])
    state = algo.update(state, parts)
    assert int(state.counters["env_steps"]) == 7 * N
    _, following = algo.collect(state)
    assert [len(part.noise) for part in following] == [20, 2]
    alone = [
        apg_gradient(make_unroll(make_vec_env(toy(), N), POLICY, mode="eager"), begin(algo)[0].params, (), part, gamma=0.99, complete=True)[1]["objective"]
        for part in parts
    ]
    assert float(state.metrics["objective"]) == pytest.approx(float(sum(alone)) / 2, rel=1e-10)


def test_horizons_of_a_schedule_run_the_same_graphs():
    captured, eager = scheduled(CAPTURED), scheduled("eager")
    state, rollout = begin(captured)
    state = captured.update(state, rollout)
    graphs = graph_count()
    for _ in range(2):
        state, rollout = captured.collect(state)
        state = captured.update(state, rollout)
    assert graph_count() == graphs
    other, rollout = begin(eager)
    for _ in range(3):
        other, rollout = eager.collect(eager.update(other, rollout))
    assert_trees_close(state.params, other.params, ops=10_000)


# -- what may change and what stays ----------------------------------------------------------------------------------------------------------------------


def test_hyper_parameters_change_without_a_new_graph():
    """Learning rate, coefficients and limits of eight updates: no graph after the second, and the values of the eager update."""
    algos = algorithm(compile_mode=CAPTURED, **FULL), algorithm(**FULL)
    states, graphs = [begin(algo)[0] for algo in algos], 0
    assert set(states[0].hyper) == {
        "optimizer.learning_rate",
        "gamma",
        "ent_coef",
        "max_grad_norm",
        "max_grad_norm_before_clip",
        "action_adjoint_max_norm",
        "state_adjoint_max_norm",
    }
    for i in range(8):
        factor = 1.0 + 0.1 * i
        for j, algo in enumerate(algos):
            hyper = {name: value / factor for name, value in algo.init(key(0)).hyper.items()}
            collected, rollout = algo.collect(states[j]._replace(hyper=hyper))
            states[j] = algo.update(collected, rollout)
            assert float(states[j].metrics["learning_rate"]) == pytest.approx(0.05 / factor * max(0.0, 1 - i / 4))
        if i == 1:
            graphs = graph_count()
        assert_trees_close(states[0].params, states[1].params, ops=1_000_000)
    assert graph_count() == graphs


@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_reward_that_is_not_finite_costs_one_update_and_no_more(mode, value):
    algo = algorithm(compile_mode=mode, **FULL)
    state, rollout = begin(algo)
    state, rollout = algo.collect(algo.update(state, rollout))
    # The clock of a row that is reset starts again at 0, so that row 1 falls ill once.
    sick = algo.update(state, faulty(rollout, T + 3, reward=value))
    for part in ("params", "opt_state", "norm_state", "hyper", "key"):
        assert_trees_equal(getattr(sick, part), getattr(state, part))
    added = {"updates": 1, "successful_updates": 0, "skipped_updates": 1, "env_steps": N * T, "rollouts": 1, "nonfinite_rows": 1}
    assert {name: int(sick.counters[name]) - int(state.counters[name]) for name in added} == added
    flags = {"skipped_update": 1.0, "skipped_excessive_gradient": 0.0, "nonfinite_rows": 1.0}
    assert {name: float(sick.metrics[name]) for name in flags} == flags
    assert math.isnan(float(sick.metrics["grad_norm"]))
    assert bool(tree.all_finite(sick.env_state))
    assert sick.env_state.elapsed.tolist() == [2 * T, T - 4, 2 * T]
    healthy = algo.update(state, rollout)
    assert_trees_equal(tree.map(lambda x: x[::2], sick.env_state), tree.map(lambda x: x[::2], healthy.env_state))
    # The schedule goes on where it was, and so does training.
    following, rollout = algo.collect(sick)
    following = algo.update(following, rollout)
    assert float(following.metrics["skipped_update"]) == 0
    assert float(following.metrics["learning_rate"]) == pytest.approx(0.05 * 0.75)
    assert not torch.equal(following.params["log_std"], sick.params["log_std"])
    assert bool(tree.all_finite((following.params, following.opt_state, following.norm_state, following.extra)))


@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_state_that_is_not_finite_ends_its_row_alone(mode, value):
    """The state breaks after a finite reward: the row starts over, and the gradient is that of the finite rewards."""
    algo = algorithm(compile_mode=mode, **FULL)
    state, rollout = begin(algo)
    sick = algo.update(state, faulty(rollout, 3, state=value))
    assert float(sick.metrics["skipped_update"]) == 0
    assert int(sick.metrics["nonfinite_rows"]) == int(sick.counters["nonfinite_rows"]) == 1
    assert sick.env_state.elapsed.tolist() == [T, T - 4, T]
    assert int(sick.metrics["episodes"]) == 0
    healthy = algo.update(state, rollout)
    assert_trees_equal(tree.map(lambda x: x[::2], sick.env_state), tree.map(lambda x: x[::2], healthy.env_state))
    assert bool(tree.all_finite((sick.params, sick.opt_state, sick.norm_state, sick.env_state, sick.extra)))
    assert float(sick.metrics["grad_norm"]) > 0


@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
def test_a_sick_microbatch_costs_the_whole_update(mode):
    algo = algorithm(compile_mode=mode, **CAPTURES["complete"])
    state, (first, second) = begin(algo)
    sick = algo.update(state, (faulty(first, 1, reward=math.nan), second))
    assert_trees_equal(sick.params, state.params)
    assert float(sick.metrics["skipped_update"]) == 1
    assert int(sick.counters["nonfinite_rows"]) >= 1


def test_a_sick_row_ends_its_own_adjoint_when_limits_are_on():
    """N = 2, row 0 breaks at its first step (its square root of a negative number) and is reset: with limits on, the gradient is that of the finite parts."""

    def step(state, action, params):
        inner, outcome = toy().step(state, action, params)
        sick = state.life == 77
        root = torch.sqrt(torch.where(sick, -1.0 - action[0].square(), 1.0))
        return inner._replace(x=inner.x + torch.where(sick, root, 0.0)), outcome

    env = dataclasses.replace(toy((1_000, 1_001)), step=step)
    vec = make_vec_env(env, 2)
    state = vec.reset(vec.row_keys(key(0)), vec.default_params)
    broken = state._replace(env=state.env._replace(life=torch.tensor([77, 1_000])))
    limits = {"action_adjoint_max_norm": torch.tensor(1e6, dtype=torch.float64), "state_adjoint_max_norm": torch.tensor(1e6, dtype=torch.float64)}
    params = begin(algorithm())[0].params
    noise = draw(4, 2, 2, seed=3)

    def gradient(start, rows, first=0):
        unroll = make_unroll(vec, POLICY, mode="eager", adjoint_limits=tuple(limits))
        return grad(lambda p: unroll(p, (), start, vec.default_params, noise, hyper=limits)[1].reward[first:, rows].sum())(params)

    got = gradient(broken, slice(None))
    assert bool(tree.all_finite(got))
    # Row 0: step 0 shares the broken step's adjoint row, which is zeroed; from step 1 on it is a fresh episode.
    alone = tree.map(torch.add, gradient(broken, slice(1, 2)), gradient(broken, slice(0, 1), first=1))
    assert_trees_close(got, alone, ops=10_000)


@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
def test_infinite_derivatives_after_a_done_reach_nothing(mode):
    """A square root at 0 in the episode that follows: its reward does not count in a complete rollout, and 0 * inf must not reach the gradient either."""
    inner = toy((3, 4))

    def step(state, action, params):
        floor = (state.life == 77).to(action.dtype)  # 1 in the first episode, 0 in those that follow
        new, outcome = inner.step(state._replace(life=torch.full_like(state.life, 3)), action, params)
        return new._replace(life=state.life), outcome._replace(reward=outcome.reward - torch.sqrt(floor + (floor * action).square().sum()))

    vec = make_vec_env(dataclasses.replace(inner, step=step), N)
    algo = make_apg(vec, POLICY, sgd(), ApgConfig(rollout_mode="complete", update_horizon=T, compile_mode=mode, max_grad_norm=None), dtype=torch.float64)
    state, rollout = begin(algo)
    first = rollout.env_state.env._replace(life=torch.full((N,), 77))
    rollout = rollout._replace(env_state=rollout.env_state._replace(env=first))
    whole, ended = algo.update(state, rollout), algo.update(state, rollout._replace(noise=rollout.noise[:3]))
    assert float(whole.metrics["skipped_update"]) == 0
    assert_trees_close(whole.params, ended.params, ops=10_000)


def test_updates_with_an_excessive_gradient_are_skipped():
    algo = algorithm(max_grad_norm_before_clip=1e-3, optimizer="adam")
    state, rollout = begin(algo)
    new = algo.update(state, rollout)
    assert_trees_equal((new.params, new.opt_state), (state.params, state.opt_state))
    assert (float(new.metrics["skipped_update"]), float(new.metrics["skipped_excessive_gradient"])) == (1.0, 1.0)
    open_gate = algorithm(optimizer="adam").update(*begin(algorithm(optimizer="adam")))
    assert float(new.metrics["grad_norm"]) == float(open_gate.metrics["grad_norm"]) > 1e-3
    assert float(open_gate.metrics["skipped_update"]) == 0.0


def test_a_gradient_at_the_gate_passes_and_one_above_does_not():
    algo = algorithm(max_grad_norm_before_clip=1.0)
    state, rollout = begin(algo)
    norm = algo.update(state._replace(hyper={**state.hyper, "max_grad_norm_before_clip": torch.tensor(math.inf, dtype=torch.float64)}), rollout).metrics[
        "grad_norm"
    ]
    for limit, skipped in ((norm, 0.0), (norm * (1 - 1e-12), 1.0)):
        new = algo.update(state._replace(hyper={**state.hyper, "max_grad_norm_before_clip": limit}), rollout)
        assert float(new.metrics["skipped_update"]) == skipped


@pytest.mark.parametrize("limit", [None, math.inf])
def test_clipping_can_be_off(limit):
    algo = algorithm(max_grad_norm=limit)
    state, rollout = begin(algo)
    new = algo.update(state, rollout)
    moved = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(tree.leaves(new.params), tree.leaves(state.params), strict=True)))
    assert moved == pytest.approx(0.05 * float(new.metrics["grad_norm"]), rel=1e-9)
    tight = algorithm(max_grad_norm=1e-2).update(*begin(algorithm(max_grad_norm=1e-2)))
    moved = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(tree.leaves(tight.params), tree.leaves(state.params), strict=True)))
    assert moved == pytest.approx(0.05 * 1e-2, rel=1e-3)


@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
def test_a_schedule_counts_successful_updates_and_the_rate_used_is_reported(mode):
    algo = algorithm(compile_mode=mode, **FULL)
    state, rollout = begin(algo)
    rates, skipped = [], []
    for i in range(7):
        state = algo.update(state, faulty(rollout, 0, reward=math.nan) if i in (1, 2) else rollout)
        rates.append(float(state.metrics["learning_rate"])), skipped.append(float(state.metrics["skipped_update"]))
        state, rollout = algo.collect(state)
        rollout = rollout._replace(env_state=begin(algo)[1].env_state)
    assert skipped == [0, 1, 1, 0, 0, 0, 0]
    assert rates == pytest.approx([0.05 * f for f in (1.0, 0.75, 0.75, 0.75, 0.5, 0.25, 0.0)])


def test_a_normalizer_is_frozen_in_an_update_and_learns_after_it():
    algo = algorithm(normalize=True, rollout_mode="complete", gradient_accumulation_steps=2)
    state, parts = begin(algo)
    new = algo.update(state, parts)
    alive, seen = 0, []
    for part in parts:
        unroll = make_unroll(make_vec_env(toy(), N), POLICY, running_normalizer(2), mode="eager")
        _, played = unroll(state.params, state.norm_state, part.env_state, part.env_params, part.noise)
        alive, seen = alive + int(played.alive.sum()), [*seen, played.obs[played.alive]]
    seen = torch.cat(seen)
    assert 0 < alive < 2 * N * T
    assert float(new.norm_state.count) == alive
    assert_trees_close((new.norm_state.mean, new.norm_state.m2 / alive), (seen.mean(0), seen.var(0, correction=0)), ops=100)
    segmented = algorithm(normalize=True)
    assert float(segmented.update(*begin(segmented)).norm_state.count) == N * T


# -- metrics ---------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
def test_metrics_are_named_and_zero_dimensional_and_the_state_keeps_its_structure(mode):
    for algo, names in ((algorithm(), LOSS_METRICS), (algorithm(compile_mode=mode, **FULL), LOSS_METRICS | ADJOINT_METRICS)):
        state, rollout = begin(algo)
        new = algo.update(state, rollout)
        assert names <= set(new.metrics)
        assert ADJOINT_METRICS & set(new.metrics) == ADJOINT_METRICS & names
        assert {"episode_reward_avg_100", "episode_length_avg_100", "episodes", "success_rate", "nonfinite_rows"} <= set(new.metrics)
        assert all(x.ndim == 0 for x in new.metrics.values())
        # Scans, maps and checkpoints over updates need one structure from the first state on.
        tree.check_same(new, algo.init(key(0)), "the state after an update")


def test_adjoint_metrics_are_those_of_the_adjoints():
    options = {"rollout_mode": "complete", "gradient_accumulation_steps": 2, "action_adjoint_max_norm": 0.3, "adjoint_norm_per_step": True}
    algo = algorithm(**options)
    state, parts = begin(algo)
    new = algo.update(state, parts)
    unroll = make_unroll(make_vec_env(toy(), N), POLICY, mode="eager", adjoint_limits=("action_adjoint_max_norm",))
    adjoints = [
        apg_gradient(unroll, state.params, (), part, gamma=0.99, complete=True, unroll_kwargs={"hyper": state.hyper}, probe=torch.zeros_like(part.noise))[1][
            "adjoint"
        ]
        for part in parts
    ]
    norms = torch.stack(adjoints).norm(dim=-1)
    expected = {
        "preclip_mean_norm": norms.mean(),
        "preclip_max_norm": norms.max(),
        "clipped_fraction": (norms > 0.3).double().mean(),
        "nonfinite_fraction": torch.tensor(0.0),
    }
    for name, value in expected.items():
        assert float(new.metrics[f"action_adjoint_{name}"]) == pytest.approx(float(value), rel=1e-12)
    assert 0 < float(new.metrics["action_adjoint_clipped_fraction"]) < 1
    assert_trees_close(new.extra["action_adjoint_norm_by_step"], norms[-1].mean(-1), ops=100)
    off = algorithm(**{**options, "action_adjoint_max_norm": None})
    assert float(off.update(*begin(off)).metrics["action_adjoint_clipped_fraction"]) == 0.0


def test_episode_metrics_against_a_loop():
    algo = algorithm(life=(2, 5))
    vec = make_vec_env(toy((2, 5)), N)
    state, rollout = begin(algo)
    returns, lengths = [], []
    for _ in range(3):
        live, count, won = rollout.env_state, 0, 0.0
        for e in rollout.noise:
            action = POLICY.sample(POLICY.apply(state.params, vec.observe(live, vec.default_params)), e).action
            live, step = vec.step(live, action, vec.default_params)
            for i in range(N):
                if bool(step.terminated[i] | step.truncated[i]):
                    returns.append(float(step.metrics["episode_return"][i])), lengths.append(int(step.metrics["episode_length"][i]))
                    count, won = count + 1, won + float(step.metrics["success"][i])
        state = algo.update(state, rollout)
        assert float(state.metrics["episode_reward_avg_100"]) == pytest.approx(sum(returns) / len(returns), rel=1e-9)
        assert float(state.metrics["episode_length_avg_100"]) == pytest.approx(sum(lengths) / len(lengths))
        assert int(state.metrics["episodes"]) == count
        assert float(state.metrics["success_rate"]) == pytest.approx(won / count)
        state, rollout = algo.collect(state)


@given(st.lists(st.lists(st.booleans(), min_size=2, max_size=2), min_size=1, max_size=90), st.integers(0, 250))
def test_the_episode_window_is_the_last_hundred(finished, before):
    """Against a deque, whatever number of episodes was there before."""
    window, oracle = episodes.init(torch.float64, torch.device("cpu")), deque(maxlen=episodes.WINDOW)
    for mask in (torch.ones(before, 1, dtype=torch.bool), torch.tensor(finished)):
        values = torch.arange(mask.numel(), dtype=torch.float64).reshape(mask.shape) + 0.5
        window = episodes.push(window, mask, values, -values)
        oracle.extend(values[mask].tolist())
    returns, lengths = episodes.window_means(window)
    if oracle:
        assert float(returns) == pytest.approx(sum(oracle) / len(oracle))
        assert float(lengths) == pytest.approx(-sum(oracle) / len(oracle))
    else:
        assert math.isnan(float(returns))
        assert math.isnan(float(lengths))
    assert int(window.count) == before + sum(sum(row) for row in finished)


# -- your own rollout function and populations -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
def test_your_own_rollout_function_is_differentiated(mode):
    """A system of its own: x' = x + a, reward -x^2, no environment involved."""

    def unroll(params, norm_state, env_state, env_params, noise):
        x, rewards = env_state["x"], []
        for e in noise:
            x = x + 0.1 * POLICY.sample(POLICY.apply(params, x), e).action
            rewards.append(-x.square().sum(-1))
        reward = torch.stack(rewards)
        never = torch.zeros_like(reward, dtype=torch.bool)
        return {"x": x}, played_of(reward=reward, terminated=never, truncated=never, alive=~never)

    algo = make_apg(
        make_vec_env(toy(), N),
        POLICY,
        sgd(),
        ApgConfig(compile_mode=mode, segment_length=T, max_grad_norm=None),
        unroll=unroll,
        learning_rate=0.05,
        dtype=torch.float64,
    )
    state = algo.init(key(0))
    rollout = Rollout(env_state={"x": draw(N, 2)}, env_params=(), noise=draw(T, N, 2, seed=1), objective_scale=torch.ones((), dtype=torch.float64))
    new = algo.update(state, rollout)
    total = lambda p: (unroll(p, (), rollout.env_state, (), rollout.noise)[1].reward * 0.99 ** torch.arange(T, dtype=torch.float64)[:, None]).sum(0).mean()
    assert float(new.metrics["objective"]) == pytest.approx(float(total(state.params)), rel=1e-12)
    assert_trees_close(new.params, tree.map(lambda p, g: p + 0.05 * g, state.params, grad(total)(state.params)), ops=10_000)
    assert set(new.metrics) >= LOSS_METRICS
    assert int(new.counters["env_steps"]) == N * T


@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
def test_a_population_is_mapped_over_whole_updates(mode):
    algo = algorithm(compile_mode=mode, **FULL)
    keys = rng.split(key(0), 3)
    states = vmap(algo.init)(keys)
    states, rollouts = vmap(algo.collect)(states)
    states = vmap(algo.update)(states, rollouts)
    for i in range(3):
        one, rollout = algo.collect(algo.init(keys[i]))
        assert_trees_close(tree.index(states, i), algo.update(one, rollout), ops=100_000)


# -- refusals --------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_grad_norm", (-1, -1.0, 0, 0.0, math.nan, True, False, "1.0")),
        ("max_grad_norm_before_clip", (-1, math.nan, True, "1.0")),
        ("action_adjoint_max_norm", (-1, math.nan, True, "1.0")),
        ("state_adjoint_max_norm", (-1, math.nan, True, "1.0")),
        ("gamma", (99, -0.1, 1.0001, math.nan, True, "0.9", None)),
        ("ent_coef", (-0.1, math.nan, math.inf, True, "0", None)),
        ("rollout_mode", ("whole", "Segmented", None, 1)),
        ("segment_length", (0, -1, 2.0, True, None)),
        ("update_horizon", (0, -1, 2.0, True, 20)),
        ("gradient_accumulation_steps", (0, 2, True, 1.0)),
        ("steps_per_graph", (0, True, 1.5)),
        ("compile_mode", ("fast", None)),
        ("memory", ("some", None)),
        ("stagger_episodes", ("false", 1, None)),
        ("deterministic_actions", ("false", 1, None)),
        ("clip_actions_to_space", ("no", 0)),
        ("adjoint_norm_per_step", ("no", 1)),
        ("skip_nonfinite_updates", ("no", 1)),
    ],
)
def test_wrong_configurations_are_refused_by_field_and_value(name, values):
    accepted = []
    for value in values:
        try:
            ApgConfig(**{name: value})
        except (ValueError, TypeError) as error:
            assert name in str(error) or name == "compile_mode"  # noqa: PT017
        else:
            accepted.append(value)
    assert accepted == []


def test_right_configurations_are_accepted():
    off = ApgConfig(max_grad_norm=None, max_grad_norm_before_clip=None, action_adjoint_max_norm=None, state_adjoint_max_norm=0)
    assert (off.horizon, off.complete) == (16, False)
    assert ApgConfig(max_grad_norm=math.inf, max_grad_norm_before_clip=math.inf, gamma=0, ent_coef=0).gamma == 0
    long = ApgConfig(segment_length=5, update_horizon=20)
    assert long.horizon == 20
    assert ApgConfig(rollout_mode="complete", segment_length=7, update_horizon=20, gradient_accumulation_steps=3).complete
    with pytest.raises(dataclasses.FrozenInstanceError):
        long.gamma = 0.5


def test_what_cannot_be_differentiated_is_refused():
    with pytest.raises(TypeError, match=r"functional.*make_vec_env.*SyncVectorEnv"):
        make_apg(type("SyncVectorEnv", (), {})(), POLICY, sgd())
    with pytest.raises(TypeError, match="Env"):
        make_apg(toy(), POLICY, sgd())
    opaque = dataclasses.replace(toy(), spec=dataclasses.replace(toy().spec, differentiable=False))
    with pytest.raises(ValueError, match=r"differentiable environment.*'toy'"):
        make_apg(make_vec_env(opaque, N), POLICY, sgd())


@pytest.mark.parametrize("space", [spaces.Box(-1.0, 1.0, (3,)), spaces.Box(-1.0, 1.0, (2, 1)), spaces.Discrete(2), spaces.MultiBinary(2)])
def test_an_action_space_that_the_policy_does_not_fit_is_refused(space):
    with pytest.raises(ValueError, match="2 actions"):
        make_apg(make_vec_env(dataclasses.replace(toy(), action_space=space), N), POLICY, sgd())


@pytest.mark.parametrize("config", [{"action_adjoint_max_norm": 1.0}, {"state_adjoint_max_norm": 1.0}, {"adjoint_norm_per_step": True}])
def test_limits_cannot_be_applied_inside_your_own_rollout_function(config):
    with pytest.raises(ValueError, match=next(iter(config))):
        make_apg(make_vec_env(toy(), N), POLICY, sgd(), ApgConfig(**config), unroll=lambda *args: None)


@pytest.mark.parametrize("rate", [-1.0, math.nan, math.inf, True, "1e-3"])
def test_a_wrong_learning_rate_is_refused(rate):
    with pytest.raises(ValueError, match="learning_rate"):
        make_apg(make_vec_env(toy(), N), POLICY, sgd(), learning_rate=rate)


# -- the real compiler -----------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
def test_point_mass_with_the_real_compiler_equals_eager():
    vec = make_vec_env(point_mass(max_episode_steps=6, obstacle_candidates=1), 8)
    policy = actor_only(14, 2, network=mlp(14, 2, hidden_sizes=[8], activation="tanh"))
    results = []
    for mode in ("inductor", "eager"):
        algo = make_apg(vec, policy, sgd(), ApgConfig(segment_length=8, action_adjoint_max_norm=1e-3, compile_mode=mode))
        state, rollout = algo.collect(algo.init(key(0)))
        state = algo.update(state, rollout)
        graphs = graph_count()
        state, rollout = algo.collect(state)
        results.append(algo.update(state, rollout))
        assert graph_count() == graphs
    assert float(results[0].metrics["action_adjoint_clipped_fraction"]) > 0
    assert_trees_close(results[0], results[1], ops=1_000_000)

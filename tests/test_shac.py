"""SHAC: the gradient against exact values and differences, an update against plain PyTorch, targets, temperature, skips, and graphs that stay."""

# The stubs of torch.func know neither argnums nor has_aux, and wrong arguments are passed on purpose.
# pyright: reportCallIssue=false, reportAssignmentType=false, reportArgumentType=false, reportAttributeAccessIssue=false, reportOptionalCall=false

from __future__ import annotations

import dataclasses
import functools
import math
import shutil
import warnings

import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, vmap

from frl import compile as compiler
from frl import rng, tree
from frl.algorithms.apg import ApgConfig, apg_gradient, make_apg
from frl.algorithms.minibatch import minibatch_indices
from frl.algorithms.shac import ShacConfig, make_shac, shac_gradient
from frl.compile import graph_count
from frl.critic_policies import actor_critic
from frl.envs.double_integrator import double_integrator
from frl.envs.vector import make_vec_env
from frl.losses import apg_loss, shac_loss
from frl.networks import mlp
from frl.normalizers import running_normalizer
from frl.optim import adam, linear_schedule, sgd
from frl.policies import actor_only
from frl.returns import td_lambda_returns
from frl.rng import key
from frl.rollout import make_unroll
from frl.types import Rollout, Trajectory
from tests.strategies import QUICK, assert_trees_close, assert_trees_equal, copy_of, draw, toy_env

CAPTURED = "aot_eager"
N, T = 3, 6
F64 = torch.float64


def policy_of(obs_dim=2, **options):
    actor, critic = mlp(obs_dim, 2, [4], activation="tanh"), mlp(obs_dim, 1, [4], activation="tanh")
    return actor_critic(obs_dim, 2, actor=actor, critic=critic, initial_log_std=-0.5, **options)


POLICY = policy_of()
COUNTERS = ("updates", "successful_updates", "skipped_updates", "env_steps", "rollouts", "nonfinite_rows")


@pytest.fixture(autouse=True)
def _no_fallback(monkeypatch):
    monkeypatch.setattr(compiler, "_warned", False)
    monkeypatch.setattr(compiler, "_broken", False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="frl could not compile")
        yield


@functools.cache
def toy(life=(3, 5), limit=None):
    return toy_env(life=life, max_episode_steps=limit)


@functools.cache
def algorithm(*, n=N, life=(3, 8), limit=4, optimizer="sgd", normalize=False, schedule=None, **config):
    """One algorithm for each set of options, so that graphs are shared by the tests. Episodes terminate at their 3rd to 7th step or are cut at the 4th."""
    config = {"compile_mode": "eager", "segment_length": T, "normalize_values": False, "max_grad_norm": None, "n_epochs": 2, "num_mini_batches": 2, **config}
    normalizer = running_normalizer(2) if normalize else None
    return make_shac(
        make_vec_env(toy(life, limit), n),
        POLICY,
        {"sgd": sgd(), "adam": adam()}[optimizer],
        ShacConfig(**config),
        normalizer=normalizer,
        critic_normalizer=normalizer,
        schedule=None if schedule is None else linear_schedule(schedule),
        learning_rate=0.05,
        critic_learning_rate=0.02,
        dtype=F64,
    )


# One algorithm with everything on, so that many tests share its graphs.
FULL = {
    "optimizer": "adam",
    "normalize": True,
    "normalize_values": True,
    "learn_temperature": True,
    "ent_coef": 0.1,
    "normalize_entropy": True,
    "max_grad_norm": 0.5,
    "max_grad_norm_before_clip": 1e4,
    "critic_max_grad_norm": 0.5,
    "action_adjoint_max_norm": 0.1,
    "state_adjoint_max_norm": 0.1,
    "schedule": 4,
    "segment_length": 3,
    "update_horizon": T,
}


def begin(algo, seed=0):
    """A state whose networks are not the small ones of the initialiser, with a target critic of its own, and its first rollout."""
    state = algo.init(key(seed))
    state = state._replace(params=tree.map(lambda x: x + 0.3 * draw(*x.shape, seed=9), state.params))
    target = tree.map(lambda x: x + 0.3 * draw(*x.shape, seed=5), state.extra["target_critic"])
    return algo.collect(state._replace(extra={**state.extra, "target_critic": target}))


def faulty(rollout, step, **faults):
    """The rollout with a fault at one clock of row 1."""
    rows = {f"{name}_fault": torch.tensor([0.0, value, 0.0], dtype=F64) for name, value in faults.items()}
    return rollout._replace(env_params=rollout.env_params._replace(fault_step=torch.tensor(step), **rows))


def played_of(**fields):
    """A trajectory with these fields and no others."""
    return Trajectory(**{**{name: () for name in Trajectory._fields}, "metrics": {}, **fields})


def column(values, dtype=F64):
    return torch.tensor(values, dtype=dtype)[:, None]


# -- the loss of hand-made windows -----------------------------------------------------------------------------------------------------------------------

GAMMA = 0.5
ENDS = {
    # terminated, truncated, and what the window is worth: rewards 1, 2, 4 and values 10, 20, 40 after each step, discount 0.5.
    "goes on": ([0, 0, 0], [0, 0, 0], 1 + 0.5 * 2 + 0.25 * 4 + 0.125 * 40),
    "truncated on the way": ([0, 0, 0], [0, 1, 0], (1 + 0.5 * 2 + 0.25 * 20) + (4 + 0.5 * 40)),
    "terminated on the way": ([0, 1, 0], [0, 0, 0], (1 + 0.5 * 2) + (4 + 0.5 * 40)),
    "both on the way": ([0, 1, 0], [0, 1, 0], (1 + 0.5 * 2) + (4 + 0.5 * 40)),
    "terminated at the end": ([0, 0, 1], [0, 0, 0], 1 + 0.5 * 2 + 0.25 * 4),
    "truncated at the end": ([0, 0, 0], [0, 0, 1], 1 + 0.5 * 2 + 0.25 * 4 + 0.125 * 40),
    "both at the end": ([0, 0, 1], [0, 0, 1], 1 + 0.5 * 2 + 0.25 * 4),
    "one after the other": ([1, 0, 0], [0, 1, 0], 1 + (2 + 0.5 * 20) + (4 + 0.5 * 40)),
}


@pytest.mark.parametrize("case", ENDS)
def test_a_window_ends_in_a_value_unless_it_terminated(case):
    terminated, truncated, expected = ENDS[case]
    ends, cuts = column(terminated, torch.bool), column(truncated, torch.bool)
    counted = (cuts | column([0, 0, 1], torch.bool)) & ~ends
    # Where no value is asked for, anything may stand.
    values = torch.where(counted, column([10.0, 20.0, 40.0]), math.nan)
    played = played_of(reward=column([1.0, 2.0, 4.0]), terminated=ends, truncated=cuts)
    terms = shac_loss(played, values, GAMMA)
    assert (float(terms.objective), float(terms.loss)) == (expected, -expected)
    # The gradient goes into the values that count, at the discount that has accrued since the last done.
    derivative = grad(lambda v: shac_loss(played, v, GAMMA).objective)(values)
    assert torch.equal(derivative != 0, counted)
    others = grad(lambda r: shac_loss(played._replace(reward=r), values, GAMMA).objective)(played.reward)
    assert torch.equal(derivative[counted], GAMMA * others[counted])


def test_windows_of_one_update_are_averaged_and_each_ends_in_a_value():
    never = torch.zeros(4, 1, dtype=torch.bool)
    played = played_of(reward=column([1.0, 2.0, 4.0, 8.0]), terminated=never, truncated=never)
    values = column([math.nan, 20.0, math.nan, 40.0])
    terms = shac_loss(played, values, GAMMA, segment_length=2)
    assert float(terms.objective) == ((1 + 0.5 * 2 + 0.25 * 20) + (4 + 0.5 * 8 + 0.25 * 40)) / 2
    scaled = shac_loss(played, values, GAMMA, segment_length=2, objective_scale=torch.tensor([3.0], dtype=F64))
    assert float(scaled.objective) == 3 * float(terms.objective)


def test_entropy_counts_like_reward():
    never = torch.zeros(3, 1, dtype=torch.bool)
    reward, entropy, values = column([1.0, 2.0, 4.0]), column([0.3, -0.2, 0.1]), column([0.0, 0.0, 40.0])
    soft = shac_loss(played_of(reward=reward, terminated=never, truncated=never, entropy=entropy), values, GAMMA, 0.7)
    plain = shac_loss(played_of(reward=reward + 0.7 * entropy, terminated=never, truncated=never), values, GAMMA)
    assert float(soft.loss) == pytest.approx(float(plain.loss), rel=1e-14)


flags = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=12)


def windows(rows):
    """Flags, rewards and values of one row."""
    terminated, truncated = (column([row[i] for row in rows], torch.bool) for i in (0, 1))
    return draw(len(rows), 1), draw(len(rows), 1, seed=1), terminated, truncated


@given(flags, st.floats(0, 1))
def test_without_values_a_window_is_that_of_apg(rows, gamma):
    reward, _, terminated, truncated = windows(rows)
    played = played_of(reward=reward, terminated=terminated, truncated=truncated, entropy=draw(len(rows), 1, seed=2))
    got, expected = shac_loss(played, torch.zeros_like(reward), gamma, 0.1), apg_loss(played, gamma, 0.1)
    assert_trees_close(got, expected, ops=100)


@given(flags, st.floats(0, 1))
def test_with_lambda_one_the_objective_is_the_critics_target_where_episodes_begin(rows, gamma):
    """The window's return is the sum of the TD(1) targets at its start and after every done in it."""
    reward, values, terminated, truncated = windows(rows)
    played = played_of(reward=reward, terminated=terminated, truncated=truncated)
    targets = td_lambda_returns(reward, values, terminated, truncated, gamma=gamma, td_lambda=1.0)
    begins = torch.cat([torch.ones(1, 1, dtype=torch.bool), (terminated | truncated)[:-1]])
    assert float(shac_loss(played, values, gamma).objective) == pytest.approx(float(targets[begins].sum()), rel=1e-10, abs=1e-12)


@given(flags)
def test_without_a_discount_only_rewards_count(rows):
    reward, values, terminated, truncated = windows(rows)
    played = played_of(reward=reward, terminated=terminated, truncated=truncated)
    assert_trees_close(shac_loss(played, values, 0.0), apg_loss(played, 0.0), ops=10)


# -- exact values: the linear-quadratic task -------------------------------------------------------------------------------------------------------------

LQ_GAMMA, LONG = 0.7, 100  # steps after which nothing counts any more
LINEAR = actor_only(2, 1, network=mlp(2, 1, hidden_sizes=[]), initial_log_std=-2.0)


@functools.cache
def lq():
    """Two rows without a time limit."""
    return make_vec_env(double_integrator(dtype=F64, max_episode_steps=None, dt=0.3), 2)


def system():
    """``z' = A z + B a`` and ``reward = -(z'Q z + r a^2)``."""
    p = lq().default_params
    a = torch.tensor([[1.0, float(p.dt)], [0.0, 1.0]], dtype=F64)
    b = torch.tensor([float(p.dt) ** 2 / (2 * float(p.mass)), float(p.dt) / float(p.mass)], dtype=F64)
    return a, b, torch.diag(torch.stack([p.position_weight, p.velocity_weight])), p.action_weight


def exact_value(gain, offset, gamma):
    """``V(z) = -(z'P z + 2 q'z + c)`` of ``a = gain z + offset`` for ever, by iteration of its Bellman equation."""
    a, b, cost, r = system()
    closed, push = a + torch.outer(b, gain), b * offset
    quadratic, linear, constant = torch.zeros(2, 2, dtype=F64), torch.zeros(2, dtype=F64), torch.zeros((), dtype=F64)
    for _ in range(400):
        constant = r * offset**2 + gamma * (push @ quadratic @ push + 2 * linear @ push + constant)
        linear = r * gain * offset + gamma * (closed.T @ (quadratic @ push + linear))
        quadratic = cost + r * torch.outer(gain, gain) + gamma * (closed.T @ quadratic @ closed)
    return lambda z: -(((z @ quadratic) * z).sum(-1) + 2 * z @ linear + constant)


def linear_params(gain=(-0.4, -0.7), offset=0.2):
    layer = {"weight": torch.tensor([gain], dtype=F64), "bias": torch.tensor([offset], dtype=F64)}
    return {"actor": {"layers": (layer,)}, "log_std": torch.full((1,), -2.0, dtype=F64)}


def lq_rollout(start, steps):
    return Rollout(env_state=start, env_params=lq().default_params, noise=torch.zeros(steps, 2, 1, dtype=F64), objective_scale=torch.ones((), dtype=F64))


@pytest.mark.parametrize(("mode", "length"), [("eager", 2), (CAPTURED, 5)])
def test_short_windows_with_exact_values_add_up_to_the_gradient_of_the_whole(mode, length):
    """``dJ/dtheta = sum_k gamma^(k h) g_k``: ``g_k`` is the SHAC gradient of window ``k`` with the value function of the policy, J the return for ever."""
    params = linear_params()
    layer = params["actor"]["layers"][0]
    value = exact_value(layer["weight"][0], layer["bias"][0], LQ_GAMMA)
    unroll = make_unroll(lq(), LINEAR, mode=mode, deterministic=True)
    state = lq().reset(lq().row_keys(key(3)), lq().default_params)
    whole, aux = apg_gradient(unroll, params, (), lq_rollout(state, LONG), gamma=LQ_GAMMA)
    assert float(aux["objective"]) == pytest.approx(float(value(lq().observe(state, lq().default_params)).mean()), rel=1e-12)
    total, discount, norms = tree.map(torch.zeros_like, params), 1.0, []
    for _ in range(LONG // length):
        part, aux = shac_gradient(unroll, value, params, (), lq_rollout(state, length), gamma=LQ_GAMMA)
        # Whatever the window, its objective is the value of its start.
        assert float(aux["objective"]) == pytest.approx(float(value(lq().observe(state, lq().default_params)).mean()), rel=1e-11)
        total, discount = tree.map(lambda a, b, d=discount: a + d * b, total, part), discount * LQ_GAMMA**length
        norms.append(float(part["actor"]["layers"][0]["weight"].norm()))
        state = aux["env_state"]
    assert_trees_close(total["actor"], whole["actor"], ops=1_000_000)
    assert norms[0] > 0.01
    # Without the values it would be another one.
    alone = apg_gradient(unroll, params, (), lq_rollout(lq().reset(lq().row_keys(key(3)), lq().default_params), length), gamma=LQ_GAMMA)[0]
    assert float((alone["actor"]["layers"][0]["weight"] - whole["actor"]["layers"][0]["weight"]).norm()) > 0.1 * norms[0]


@QUICK
@given(st.integers(0, 1000), st.integers(1, 5))
def test_at_the_best_policy_every_window_says_stay(seed, length):
    a, b, cost, r = system()
    quadratic = torch.zeros(2, 2, dtype=F64)
    gain = torch.zeros(2, dtype=F64)
    for _ in range(400):
        pull = LQ_GAMMA * (b @ quadratic)
        gain = -(pull @ a) / (r + pull @ b)
        quadratic = cost + LQ_GAMMA * (a.T @ quadratic @ (a + torch.outer(b, gain)))
    params = linear_params(tuple(gain.tolist()), 0.0)
    value = exact_value(gain, 0.0, LQ_GAMMA)
    unroll = make_unroll(lq(), LINEAR, mode="eager", deterministic=True)
    rollout = lq_rollout(lq().reset(lq().row_keys(key(seed)), lq().default_params), length)
    grads, _ = shac_gradient(unroll, value, params, (), rollout, gamma=LQ_GAMMA)
    moved = shac_gradient(unroll, value, linear_params(tuple((gain + 0.1).tolist()), 0.0), (), rollout, gamma=LQ_GAMMA)[0]
    size = float(moved["actor"]["layers"][0]["weight"].norm())
    assert float(grads["actor"]["layers"][0]["weight"].norm()) < 1e-9 * max(1.0, size)
    assert size > 1e-6


@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
def test_an_update_with_an_exact_critic_takes_the_exact_gradient(mode):
    """The critic of the policy is the quadratic value function itself: a plain gradient step is that of the return for ever."""
    params = linear_params()
    layer = params["actor"]["layers"][0]
    value = exact_value(layer["weight"][0], layer["bias"][0], LQ_GAMMA)
    coefficients = {"one": torch.ones((), dtype=F64)}
    policy = dataclasses.replace(
        actor_critic(2, 1, actor=mlp(2, 1, []), critic=mlp(2, 1, []), initial_log_std=-2.0),
        init=lambda key, dtype=F64, device=None: {**linear_params(), "critic": coefficients},
        value=lambda p, obs: p["critic"]["one"] * value(obs.to(F64)),
    )
    config = ShacConfig(segment_length=2, gamma=LQ_GAMMA, normalize_values=False, deterministic_actions=True, max_grad_norm=None, compile_mode=mode)
    algo = make_shac(lq(), policy, sgd(), config, learning_rate=1.0, critic_learning_rate=0.0, dtype=F64)
    state, rollout = algo.collect(algo.init(key(3)))
    new = algo.update(state, rollout)
    tail = lq_rollout(rollout.env_state, LONG)
    unroll = make_unroll(lq(), LINEAR, mode="eager", deterministic=True)

    def whole(p):
        """The return for ever in which the first two steps use ``p`` and the others the parameters as they are."""
        middle, first = unroll(p, (), tail.env_state, tail.env_params, tail.noise[:2])
        _, rest = unroll(params, (), middle, tail.env_params, tail.noise[2:])
        reward = torch.cat([first.reward, rest.reward])
        return (reward * LQ_GAMMA ** torch.arange(LONG, dtype=F64)[:, None]).sum(0).mean()

    exact = grad(whole)(params)["actor"]
    step = tree.map(torch.sub, new.params["actor"], state.params["actor"])
    assert_trees_close(step, exact, ops=1_000_000)
    assert float(new.metrics["value_loss"]) < 1e-20
    assert float(new.metrics["explained_variance"]) == pytest.approx(1.0)


@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
def test_gradient_equals_central_differences(mode):
    """Through dones of both kinds and through a network's value."""
    vec = make_vec_env(toy((3, 8), 4), N)
    unroll = make_unroll(vec, POLICY, mode=mode)
    state, rollout = begin(algorithm())
    critic = state.extra["target_critic"]
    value = lambda obs: POLICY.value(critic, obs)
    loss = lambda p: shac_gradient(unroll, value, p, (), rollout, gamma=0.9, ent_coef=0.1)[1]["loss"]
    grads, aux = shac_gradient(unroll, value, state.params, (), rollout, gamma=0.9, ent_coef=0.1)
    done = aux["trajectory"].terminated | aux["trajectory"].truncated
    assert bool(aux["trajectory"].terminated.any())
    assert bool((aux["trajectory"].truncated & ~aux["trajectory"].terminated).any())
    assert not bool(done[-1].all())
    assert_trees_equal(grads["critic"], tree.map(torch.zeros_like, grads["critic"]))
    leaves, structure = tree.flatten({name: state.params[name] for name in ("actor", "log_std")})
    got = tree.leaves({name: grads[name] for name in ("actor", "log_std")})
    for i, leaf in enumerate(leaves):
        for j in range(leaf.numel()):
            bump = torch.zeros_like(leaf).flatten()
            bump[j] = 1e-5
            moved = [tree.unflatten(structure, [*leaves[:i], leaf + s * bump.reshape(leaf.shape), *leaves[i + 1 :]]) for s in (1, -1)]
            high, low = (loss({**m, "critic": state.params["critic"]}) for m in moved)
            assert float(got[i].flatten()[j]) == pytest.approx(float(high - low) / 2e-5, rel=1e-6, abs=1e-8)


# -- a whole update --------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("limit", [None, 0.05])
def test_updates_are_those_of_plain_pytorch(optimizer, limit):
    """Loop, autograd, clip_grad_norm_, torch.optim and an average of parameters, for two updates."""
    algo = algorithm(optimizer=optimizer, max_grad_norm=limit, critic_max_grad_norm=limit, ent_coef=0.03, target_tau=0.3, td_lambda=0.7)
    vec = make_vec_env(toy((3, 8), 4), N)
    state, rollout = begin(algo)
    params = tree.map(lambda x: x.clone().requires_grad_(), state.params)
    target = state.extra["target_critic"]["critic"]
    actor = tree.leaves({name: params[name] for name in ("actor", "log_std")})
    critic = tree.leaves(params["critic"])
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[optimizer]
    steps_actor, steps_critic = kind(actor, lr=0.05), kind(critic, lr=0.02)
    cap = math.inf if limit is None else limit
    for _ in range(2):
        live, rows = rollout.env_state, []
        for e in rollout.noise:
            obs = vec.observe(live, vec.default_params)
            dist = POLICY.apply(params, obs)
            live, step = vec.step(live, POLICY.sample(dist, e).action, vec.default_params)
            soft = step.reward + 0.03 * POLICY.distribution.entropy(dist, e)
            after = torch.where(step.terminated, 0.0, POLICY.value({"critic": target}, step.final_obs))
            rows.append((obs, soft, after, step.terminated | step.truncated))
        discount, objective = torch.ones(N, dtype=F64), 0.0
        for t, (_, soft, after, done) in enumerate(rows):
            ends = done | (t == T - 1)
            objective = objective + (discount * (soft + 0.99 * torch.where(ends, after, 0.0))).mean()
            discount = torch.where(done, 1.0, 0.99 * discount)
        returns, later = [], torch.zeros(N, dtype=F64)
        for t in reversed(range(T)):
            _, soft, after, done = rows[t]
            ends = done | (t == T - 1)
            later = (soft + 0.99 * torch.where(ends, after, 0.3 * after + 0.7 * later)).detach()
            returns.append(later)
        obs, returns = torch.cat([row[0] for row in rows]).detach(), torch.cat(returns[::-1])
        steps_actor.zero_grad()
        (-objective).backward()
        norm = torch.nn.utils.clip_grad_norm_(actor, cap)
        steps_actor.step()
        losses = []
        k_plan = rng.split(state.key, 2)[1]
        for epoch in range(2):
            for index in minibatch_indices(rng.fold_in(k_plan, epoch), N * T, num_minibatches=2).index:
                steps_critic.zero_grad()
                loss = (POLICY.value(params, obs[index]) - returns[index]).square().mean()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(critic, cap)
                steps_critic.step()
                losses.append(float(loss.detach()))
        target = tree.map(lambda old, new: 0.7 * old + 0.3 * new.detach(), target, params["critic"])
        state = algo.update(state, rollout)
        assert_trees_close(state.params, tree.detach(params), ops=100_000)
        assert_trees_close(state.extra["target_critic"]["critic"], target, ops=100_000)
        assert float(state.metrics["loss"]) == pytest.approx(-float(objective.detach()), rel=1e-10)
        assert float(state.metrics["grad_norm"]) == pytest.approx(float(norm), rel=1e-10)
        assert float(state.metrics["value_loss"]) == pytest.approx(sum(losses) / 4, rel=1e-9)
        state, rollout = algo.collect(state)


@pytest.mark.parametrize("normalize", [False, True])
def test_a_linear_critic_becomes_the_least_squares_fit_of_its_targets(normalize):
    policy = actor_critic(2, 2, actor=mlp(2, 2, [4], activation="tanh"), critic=mlp(2, 1, []), initial_log_std=-0.5)
    vec = make_vec_env(toy((3, 8), 4), 8)
    config = ShacConfig(segment_length=T, n_epochs=300, num_mini_batches=1, compile_mode="eager", td_lambda=0.8, normalize_values=normalize)
    algo = make_shac(vec, policy, sgd(), config, learning_rate=0.0, critic_learning_rate=0.5, dtype=F64)
    state, rollout = algo.collect(algo.init(key(0)))
    new = algo.update(state, rollout)
    value = lambda obs: policy.value(state.extra["target_critic"], obs)
    aux = shac_gradient(make_unroll(vec, policy, mode="eager"), value, state.params, (), rollout, gamma=0.99)[1]
    played = aux["trajectory"]
    targets = td_lambda_returns(played.reward, aux["final_value"], played.terminated, played.truncated, gamma=0.99, td_lambda=0.8).flatten()
    if normalize:
        targets = (targets - targets.mean()) / targets.std(correction=0)
    inputs = torch.cat([played.obs, torch.ones(T, 8, 1, dtype=F64)], -1).flatten(0, 1)
    fit = torch.linalg.lstsq(inputs, targets[:, None]).solution[:, 0]
    layer = new.params["critic"]["layers"][0]
    assert_trees_close(torch.cat([layer["weight"][0], layer["bias"]]), fit, ops=10_000_000)
    assert float((fit[:2]).norm()) > 0.01


def test_the_next_value_of_a_normalized_critic_is_in_units_of_reward():
    """Statistics of one update scale the values of the next."""
    algo = algorithm(normalize_values=True)
    state, rollout = begin(algo)
    assert float(state.extra["value_stats"].count) == 0
    state = algo.update(state, rollout)
    stats = state.extra["value_stats"]
    mean, std = stats.mean[0], torch.sqrt(stats.m2[0] / stats.count)
    assert float(stats.count) == N * T
    state, rollout = algo.collect(state)
    value = lambda obs: mean + std * POLICY.value(state.extra["target_critic"], obs)
    unroll = make_unroll(make_vec_env(toy((3, 8), 4), N), POLICY, mode="eager")
    grads, aux = shac_gradient(unroll, value, state.params, (), rollout, gamma=0.99)
    new = algo.update(state, rollout)
    assert float(new.metrics["objective"]) == pytest.approx(float(aux["objective"]), rel=1e-12)
    assert_trees_close(new.params["actor"], tree.map(lambda p, g: p - 0.05 * g, state.params["actor"], grads["actor"]), ops=1000)
    # How good the critic was is measured in those units too.
    played = aux["trajectory"]
    targets = td_lambda_returns(played.reward, aux["final_value"], played.terminated, played.truncated, gamma=0.99, td_lambda=0.95)
    error = targets - (mean + std * POLICY.value(state.params, played.obs))
    assert float(new.metrics["explained_variance"]) == pytest.approx(1 - float(error.var() / targets.var()), rel=1e-9)


@pytest.mark.parametrize("tau", [0.0, 0.25, 1.0])
def test_the_target_critic_follows_by_its_share(tau):
    algo = algorithm(target_tau=tau)
    state, rollout = begin(algo)
    new = algo.update(state, rollout)
    old, critic, target = state.extra["target_critic"]["critic"], new.params["critic"], new.extra["target_critic"]["critic"]
    if tau in (0.0, 1.0):
        assert_trees_equal(target, critic if tau else old)
    assert_trees_close(target, tree.map(lambda a, b: a + tau * (b - a), old, critic), ops=10)
    assert float((critic["layers"][0]["weight"] - old["layers"][0]["weight"]).abs().max()) > 1e-3


def test_values_come_from_the_target_critic_alone():
    algo = algorithm()
    state, rollout = begin(algo)
    other = state._replace(params={**state.params, "critic": tree.map(lambda x: x + 1, state.params["critic"])})
    a, b = algo.update(state, rollout), algo.update(other, rollout)
    assert_trees_equal(a.params["actor"], b.params["actor"])
    far = tree.map(lambda x: x + 1, state.extra["target_critic"])
    c = algo.update(state._replace(extra={**state.extra, "target_critic": far}), rollout)
    assert float((a.params["actor"]["layers"][0]["weight"] - c.params["actor"]["layers"][0]["weight"]).abs().max()) > 1e-6


def test_two_windows_of_one_update_are_the_mean_of_two_rollouts():
    long, short = algorithm(segment_length=3, update_horizon=T, ent_coef=0.1), algorithm(segment_length=3, ent_coef=0.1)
    state, rollout = begin(long)
    new = long.update(state, rollout)
    first = short.update(state, rollout._replace(noise=rollout.noise[:3]))
    second = short.update(state, rollout._replace(noise=rollout.noise[3:], env_state=first.env_state))
    mean = tree.map(lambda a, b: (a + b) / 2, first.params["actor"], second.params["actor"])
    assert_trees_close(new.params["actor"], mean, ops=10_000)
    assert_trees_equal(new.env_state, second.env_state)
    assert float(new.metrics["objective"]) == pytest.approx(float(first.metrics["objective"] + second.metrics["objective"]) / 2, rel=1e-12)


def test_a_normalizer_is_frozen_in_an_update_and_learns_after_it():
    algo = algorithm(normalize=True)
    state, rollout = begin(algo)
    state, rollout = algo.collect(algo.update(state, rollout))
    norm = running_normalizer(2)
    unroll = make_unroll(make_vec_env(toy((3, 8), 4), N), POLICY, norm, mode="eager")
    value = lambda obs: POLICY.value(state.extra["target_critic"], norm.apply(state.norm_state, obs))
    grads, aux = shac_gradient(unroll, value, state.params, state.norm_state, rollout, gamma=0.99)
    new = algo.update(state, rollout)
    assert_trees_close(new.params["actor"], tree.map(lambda p, g: p - 0.05 * g, state.params["actor"], grads["actor"]), ops=1000)
    expected = norm.update(state.norm_state, aux["trajectory"].obs, ())
    assert_trees_close(new.norm_state, expected, ops=100)
    assert float(new.norm_state.count) == 2 * N * T
    assert "critic_norm_state" not in new.extra


def test_a_critic_may_see_more_than_the_actor():
    inner = toy((3, 8), 4)
    space = spaces.Dict({"seen": spaces.Box(-math.inf, math.inf, (2,)), "hidden": spaces.Box(-math.inf, math.inf, (1,))})
    env = dataclasses.replace(inner, observation_space=space, observe=lambda s, p: {"seen": s.x, "hidden": s.x.square().sum(-1, keepdim=True)})
    networks = {"actor": mlp(2, 2, [4], activation="tanh"), "critic": mlp(3, 1, [4], activation="tanh")}
    policy = actor_critic(2, 2, **networks, critic_obs_dim=3, obs_groups=("seen",), critic_obs_groups=("seen", "hidden"), initial_log_std=-0.5)
    normalizers = {"normalizer": running_normalizer(2), "critic_normalizer": running_normalizer(3)}
    config = ShacConfig(segment_length=T, normalize_values=False, compile_mode="eager", n_epochs=1)
    algo = make_shac(make_vec_env(env, N), policy, sgd(), config, **normalizers, dtype=F64)
    state, rollout = algo.collect(algo.init(key(0)))
    state = algo.update(state, rollout)
    assert state.extra["critic_norm_state"].mean.shape == (3,)
    assert float(state.extra["critic_norm_state"].count) == N * T
    assert_trees_close(state.extra["critic_norm_state"].mean[:2], state.norm_state.mean, ops=10)
    state, rollout = algo.collect(state)
    critic = state.extra["target_critic"]

    def value(obs):
        return policy.value(critic, normalizers["critic_normalizer"].apply(state.extra["critic_norm_state"], torch.cat([obs["seen"], obs["hidden"]], -1)))

    unroll = make_unroll(make_vec_env(env, N), policy, normalizers["normalizer"], mode="eager")
    aux = shac_gradient(unroll, value, state.params, state.norm_state, rollout, gamma=0.99)[1]
    assert float(algo.update(state, rollout).metrics["objective"]) == pytest.approx(float(aux["objective"]), rel=1e-12)
    with pytest.raises(ValueError, match="cannot share a normalizer"):
        make_shac(make_vec_env(env, N), policy, sgd(), normalizer=normalizers["normalizer"], critic_normalizer=normalizers["normalizer"])


# -- entropy ---------------------------------------------------------------------------------------------------------------------------------------------


def test_a_soft_critic_learns_rewards_with_entropy():
    """A policy of constant entropy: the targets are those of rewards that are higher by it."""
    algo, richer = algorithm(ent_coef=0.3), algorithm()
    state, rollout = begin(algo)
    entropy = float(2 * (state.params["log_std"].mean() + 0.5 * math.log(2 * math.pi * math.e)))
    soft = algo.update(state, rollout)
    assert float(soft.metrics["entropy"]) == pytest.approx(entropy, rel=1e-12)
    assert float(soft.metrics["temperature"]) == 0.3
    # The same by a fault at every clock: reward_fault is added at one clock, so the env is built with the bonus in its reward.
    inner = toy((3, 8), 4)

    def step(s, action, p):
        new, outcome = inner.step(s, action, p)
        return new, outcome._replace(reward=outcome.reward + 0.3 * entropy)

    vec = make_vec_env(dataclasses.replace(inner, step=step), N)
    config = ShacConfig(segment_length=T, normalize_values=False, max_grad_norm=None, n_epochs=2, num_mini_batches=2, compile_mode="eager")
    paid = make_shac(vec, POLICY, sgd(), config, learning_rate=0.05, critic_learning_rate=0.02, dtype=F64)
    plain_hyper = richer.init(key(0)).hyper
    expected = paid.update(state._replace(hyper=plain_hyper), rollout)
    assert_trees_close(soft.params["critic"], expected.params["critic"], ops=10_000)
    assert float(soft.metrics["loss"]) == pytest.approx(float(expected.metrics["loss"]), rel=1e-10)
    # The mean does not move the entropy, the std does: its gradient has the bonus in it.
    assert_trees_close(soft.params["actor"], expected.params["actor"], ops=10_000)
    ends = 0.3 * float(torch.tensor(0.99, dtype=F64))
    assert ends > 0
    assert bool((soft.params["log_std"] > expected.params["log_std"]).all())


@pytest.mark.parametrize("aim", [None, -5.0, 5.0])
def test_the_temperature_follows_the_entropy(aim):
    """Plain gradient steps: ``log a' = log a - rate a (H - target)``."""
    algo = algorithm(learn_temperature=True, ent_coef=0.2, target_entropy=aim, temperature_learning_rate=0.5)
    state, rollout = begin(algo)
    assert "ent_coef" not in state.hyper
    assert float(state.hyper["target_entropy"]) == (-1.0 if aim is None else aim)
    new = algo.update(state, rollout)
    entropy, temperature = float(new.metrics["entropy"]), float(new.metrics["temperature"])
    assert temperature == pytest.approx(0.2, rel=1e-12)
    expected = math.log(0.2) - 0.5 * 0.2 * (entropy - (-1.0 if aim is None else aim))
    assert float(new.extra["log_temperature"]) == pytest.approx(expected, rel=1e-12)
    assert (float(new.extra["log_temperature"]) > math.log(0.2)) == (aim == 5.0)
    fixed = algorithm(ent_coef=0.2).update(
        state._replace(hyper=algorithm(ent_coef=0.2).init(key(0)).hyper, opt_state=algorithm().init(key(0)).opt_state), rollout
    )
    assert_trees_close(new.params, fixed.params, ops=100)


def test_a_normalized_entropy_is_measured_from_its_target():
    """``(H - target) / (2 |target|)``: the actor's gradient is that of a smaller coefficient, the critic's rewards are shifted too."""
    algo = algorithm(learn_temperature=True, ent_coef=0.2, target_entropy=-4.0, normalize_entropy=True, limit=None, life=(1_000, 1_001))
    state, rollout = begin(algo)
    new = algo.update(state, rollout)
    plain = algorithm(learn_temperature=True, ent_coef=0.2 / 8, target_entropy=-4.0, limit=None, life=(1_000, 1_001))
    start = {**state.extra, "log_temperature": torch.tensor(math.log(0.2 / 8), dtype=F64)}
    other = plain.update(state._replace(extra=start), rollout)
    assert_trees_close(new.params["actor"], other.params["actor"], ops=1000)
    assert_trees_close(new.params["log_std"], other.params["log_std"], ops=1000)
    shift = 0.2 * 4 / 8 * float((0.99 ** torch.arange(T, dtype=F64)).sum())
    assert float(new.metrics["loss"]) == pytest.approx(float(other.metrics["loss"]) - shift, rel=1e-10)
    assert float(new.metrics["entropy"]) == pytest.approx(float(other.metrics["entropy"]), rel=1e-12)


# -- what may change and what stays ----------------------------------------------------------------------------------------------------------------------

CAPTURES = {
    "plain": {},
    "full": FULL,
    "recomputed": {"memory": "recompute", "steps_per_graph": 2, "deterministic_actions": True, "clip_actions_to_space": True, "action_adjoint_max_norm": 0.1},
}


@pytest.mark.parametrize("name", CAPTURES)
def test_captured_updates_equal_eager_ones(name):
    results = []
    for algo in (algorithm(compile_mode=CAPTURED, **CAPTURES[name]), algorithm(**CAPTURES[name])):
        state, rollout = begin(algo)
        for _ in range(2):
            state, rollout = algo.collect(algo.update(state, rollout))
        results.append(state)
    single = tree.map(lambda x: x.float() if x.is_floating_point() else x, results)  # statistics are float64 sums of values that were computed in float32
    assert_trees_close(single[0], single[1], ops=1_000_000)
    if "action_adjoint_max_norm" in CAPTURES[name]:
        assert float(results[0].metrics["action_adjoint_clipped_fraction"]) > 0.1


@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
def test_an_update_repeats_bit_for_bit_and_leaves_its_arguments_alone(mode):
    algo = algorithm(compile_mode=mode, **FULL)
    state = algo.init(key(0))
    before = copy_of(state)
    collected, rollout = algo.collect(state)
    assert_trees_equal(state, before)
    assert_trees_equal(algo.collect(state), (collected, rollout))
    arguments = copy_of((collected, rollout))
    first, second = algo.update(collected, rollout), algo.update(collected, rollout)
    assert_trees_equal(second, first)
    assert_trees_equal((collected, rollout), arguments)
    for leaf in tree.leaves((first.params, first.opt_state, first.extra)):
        leaf.add_(1)
    assert_trees_equal((collected, rollout), arguments)
    tree.check_same(first, state, "the state after an update")
    assert set(first.metrics) == set(state.metrics)


def test_hyper_parameters_change_without_a_new_graph():
    algos = algorithm(compile_mode=CAPTURED, **FULL), algorithm(**FULL)
    states, graphs = [begin(algo)[0] for algo in algos], 0
    assert set(states[0].hyper) == {
        *("optimizer.learning_rate", "critic_optimizer.learning_rate", "temperature_learning_rate", "gamma", "td_lambda", "target_tau", "target_entropy"),
        *("max_grad_norm", "max_grad_norm_before_clip", "critic_max_grad_norm", "action_adjoint_max_norm", "state_adjoint_max_norm"),
    }
    for i in range(5):
        factor = 1.0 + 0.1 * i
        for j, algo in enumerate(algos):
            hyper = {name: value / factor for name, value in algo.init(key(0)).hyper.items()}
            collected, rollout = algo.collect(states[j]._replace(hyper=hyper))
            states[j] = algo.update(collected, rollout)
            share = max(0.0, 1 - i / 4) / factor
            assert float(states[j].metrics["learning_rate"]) == pytest.approx(0.05 * share)
            assert float(states[j].metrics["critic_learning_rate"]) == pytest.approx(0.02 * share)
        if i == 1:
            graphs = graph_count()
        assert_trees_close(states[0].params, states[1].params, ops=10_000_000)
    assert graph_count() == graphs


@pytest.mark.parametrize(
    ("name", "value"),
    [("gamma", 0.5), ("td_lambda", 0.1), ("target_tau", 0.1), ("max_grad_norm", 0.01), ("critic_max_grad_norm", 0.01), ("target_entropy", 3.0)],
)
def test_every_hyper_parameter_has_an_effect(name, value):
    algo = algorithm(**{**FULL, "max_grad_norm": None, "critic_max_grad_norm": None})
    state, rollout = begin(algo)
    plain = algo.update(state, rollout)
    other = algo.update(state._replace(hyper={**state.hyper, name: torch.tensor(value, dtype=F64)}), rollout)
    difference = tree.map(lambda a, b: (a - b).abs().max(), (plain.params, plain.extra), (other.params, other.extra))
    assert max(float(x) for x in tree.leaves(difference)) > 1e-6


KEPT = ("params", "opt_state", "norm_state", "hyper")
OWN = ("target_critic", "log_temperature", "value_stats")


@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_reward_that_is_not_finite_costs_one_update_and_no_more(mode, value):
    algo = algorithm(compile_mode=mode, **{**FULL, "limit": None, "life": (1_000, 1_001)})
    state, rollout = begin(algo)
    state, rollout = algo.collect(algo.update(state, rollout))
    sick = algo.update(state, faulty(rollout, T + 2, reward=value))
    for part in KEPT:
        assert_trees_equal(getattr(sick, part), getattr(state, part))
    for part in OWN:
        assert_trees_equal(sick.extra[part], state.extra[part])
    assert not torch.equal(sick.key, state.key)
    expected = dict(zip(COUNTERS, (1, 0, 1, N * T, 1, 1), strict=True))
    assert {name: int(sick.counters[name]) - int(state.counters[name]) for name in COUNTERS} == expected
    assert (float(sick.metrics["skipped_update"]), float(sick.metrics["skipped_excessive_gradient"])) == (1.0, 0.0)
    assert math.isnan(float(sick.metrics["grad_norm"]))
    assert bool(tree.all_finite(sick.env_state))
    following = algo.update(*algo.collect(sick))
    assert float(following.metrics["skipped_update"]) == 0
    assert float(following.metrics["learning_rate"]) == pytest.approx(0.05 * 0.75)
    assert bool(tree.all_finite((following.params, following.opt_state, following.norm_state, following.extra)))


@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
@pytest.mark.parametrize("step", [3, T - 1])
def test_a_state_that_is_not_finite_ends_its_row_alone(mode, step):
    """The state breaks after a finite reward, on the way or at the window's end: nothing of its value is asked, and training goes on."""
    algo = algorithm(compile_mode=mode, **{**FULL, "limit": None, "life": (1_000, 1_001)})
    state, rollout = begin(algo)
    sick = algo.update(state, faulty(rollout, step, state=math.nan))
    assert float(sick.metrics["skipped_update"]) == 0
    assert int(sick.metrics["nonfinite_rows"]) == int(sick.counters["nonfinite_rows"]) == 1
    assert sick.env_state.elapsed.tolist() == [T, T - 1 - step, T]
    assert bool(tree.all_finite((sick.params, sick.opt_state, sick.norm_state, sick.env_state, sick.extra)))
    # The broken step is no sample for the critic, and the others are.
    assert float(sick.extra["value_stats"].count) == N * T - 1


@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
def test_a_critic_that_is_not_finite_costs_the_whole_update(mode):
    algo = algorithm(compile_mode=mode, **FULL)
    state, rollout = begin(algo)
    broken = tree.map(lambda x: torch.full_like(x, math.nan), state.params["critic"])
    state = state._replace(params={**state.params, "critic": broken})
    new = algo.update(state, rollout)
    assert_trees_equal((new.params, new.opt_state, new.norm_state), (state.params, state.opt_state, state.norm_state))
    assert_trees_equal(new.extra["target_critic"], state.extra["target_critic"])
    assert float(new.metrics["skipped_update"]) == 1


def test_updates_with_an_excessive_gradient_are_skipped():
    algo = algorithm(max_grad_norm_before_clip=1e-3, optimizer="adam", learn_temperature=True, ent_coef=0.1)
    state, rollout = begin(algo)
    new = algo.update(state, rollout)
    for part in KEPT:
        assert_trees_equal(getattr(new, part), getattr(state, part))
    for part in ("target_critic", "log_temperature"):
        assert_trees_equal(new.extra[part], state.extra[part])
    assert (float(new.metrics["skipped_update"]), float(new.metrics["skipped_excessive_gradient"])) == (1.0, 1.0)
    norm = new.metrics["grad_norm"]
    for limit, skipped in ((norm, 0.0), (norm * (1 - 1e-12), 1.0)):
        hyper = {**state.hyper, "max_grad_norm_before_clip": limit}
        assert float(algo.update(state._replace(hyper=hyper), rollout).metrics["skipped_update"]) == skipped


def test_clipping_bounds_the_step():
    algo = algorithm(max_grad_norm=1e-2, learn_temperature=False)
    state, rollout = begin(algo)
    new = algo.update(state, rollout)
    change = [a - b for name in ("actor", "log_std") for a, b in zip(tree.leaves(new.params[name]), tree.leaves(state.params[name]), strict=True)]
    assert math.sqrt(sum(float(x.square().sum()) for x in change)) == pytest.approx(0.05 * 1e-2, rel=1e-3)


def test_adjoint_metrics_are_those_of_the_adjoints():
    algo = algorithm(action_adjoint_max_norm=0.3)
    state, rollout = begin(algo)
    new = algo.update(state, rollout)
    unroll = make_unroll(make_vec_env(toy((3, 8), 4), N), POLICY, mode="eager", adjoint_limits=("action_adjoint_max_norm",))
    value = lambda obs: POLICY.value(state.extra["target_critic"], obs)
    probe, kwargs = torch.zeros_like(rollout.noise), {"hyper": state.hyper}
    grads, aux = shac_gradient(unroll, value, state.params, (), rollout, gamma=0.99, unroll_kwargs=kwargs, probe=probe)
    norms = aux["adjoint"].norm(dim=-1)
    assert float(new.metrics["action_adjoint_preclip_mean_norm"]) == pytest.approx(float(norms.mean()), rel=1e-12)
    clipped = float((norms > 0.3).double().mean())
    assert 0 < clipped < 1
    assert float(new.metrics["action_adjoint_clipped_fraction"]) == pytest.approx(clipped)
    assert_trees_close(new.params["actor"], tree.map(lambda p, g: p - 0.05 * g, state.params["actor"], grads["actor"]), ops=1000)
    free = algorithm().update(state._replace(hyper=algorithm().init(key(0)).hyper), rollout)
    assert float((free.params["actor"]["layers"][0]["weight"] - new.params["actor"]["layers"][0]["weight"]).abs().max()) > 1e-5


@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
def test_a_population_is_mapped_over_whole_updates(mode):
    algo = algorithm(compile_mode=mode, **FULL)
    keys = rng.split(key(0), 3)
    states = vmap(algo.init)(keys)
    states, rollouts = vmap(algo.collect)(states)
    states = vmap(algo.update)(states, rollouts)
    for i in range(3):
        one, rollout = algo.collect(algo.init(keys[i]))
        assert_trees_close(tree.index(states, i), algo.update(one, rollout), ops=1_000_000)


def test_your_own_rollout_function_is_differentiated():
    """A system of its own: x' = x + a, reward -x^2, no environment involved."""

    def unroll(params, norm_state, env_state, env_params, noise):
        x, rewards, before, after = env_state["x"], [], [], []
        for e in noise:
            before.append(x)
            x = x + 0.1 * POLICY.sample(POLICY.apply(params, x), e).action
            rewards.append(-x.square().sum(-1)), after.append(x)
        reward = torch.stack(rewards)
        never = torch.zeros_like(reward, dtype=torch.bool)
        played = played_of(obs=torch.stack(before).detach(), final_obs=torch.stack(after), reward=reward, terminated=never, truncated=never, alive=~never)
        return {"x": x}, played

    config = ShacConfig(segment_length=T, normalize_values=False, max_grad_norm=None, n_epochs=1, compile_mode="eager")
    algo = make_shac(make_vec_env(toy(), N), POLICY, sgd(), config, unroll=unroll, learning_rate=0.05, dtype=F64)
    state = algo.init(key(0))
    rollout = Rollout(env_state={"x": draw(N, 2)}, env_params=(), noise=draw(T, N, 2, seed=1), objective_scale=torch.ones((), dtype=F64))

    def total(p):
        end, played = unroll({**state.params, **p}, (), rollout.env_state, (), rollout.noise)
        rewards = (played.reward * 0.99 ** torch.arange(T, dtype=F64)[:, None]).sum(0)
        return (rewards + 0.99**T * POLICY.value(state.extra["target_critic"], end["x"])).mean()

    new = algo.update(state, rollout)
    actor = {name: state.params[name] for name in ("actor", "log_std")}
    assert float(new.metrics["objective"]) == pytest.approx(float(total(actor)), rel=1e-12)
    expected = tree.map(lambda p, g: p + 0.05 * g, actor, grad(total)(actor))
    assert_trees_close({name: new.params[name] for name in actor}, expected, ops=10_000)


# -- learning --------------------------------------------------------------------------------------------------------------------------------------------


def test_the_value_sees_past_the_window_and_apg_does_not():
    """Windows of one step: an action changes no reward in them but its own cost, so APG learns to do nothing; SHAC learns to steer back and to brake."""
    vec = make_vec_env(double_integrator(max_episode_steps=20, dt=0.3, initial_velocity=0.0), 64)
    networks = {"actor": mlp(2, 1, [], orthogonal_init=0.0), "critic": mlp(2, 1, [16], activation="tanh")}
    policy = actor_critic(2, 1, **networks, initial_log_std=-2.0)
    options = {"segment_length": 1, "gamma": 0.9, "compile_mode": "eager"}
    shac = make_shac(vec, policy, adam(), ShacConfig(**options, n_epochs=4, num_mini_batches=1), learning_rate=0.02, critic_learning_rate=0.05)
    apg = make_apg(vec, policy, adam(), ApgConfig(**options), learning_rate=0.02)
    gains = {}
    for name, algo in (("shac", shac), ("apg", apg)):
        state = algo.init(key(0))
        for _ in range(60):
            state, rollout = algo.collect(state)
            state = algo.update(state, rollout)
        gains[name] = state.params["actor"]["layers"][0]["weight"][0]
    assert bool((gains["shac"] < -0.3).all())
    assert float(gains["apg"].abs().max()) < 0.1


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
def test_the_real_compiler_equals_eager():
    vec = make_vec_env(double_integrator(max_episode_steps=6), 8)
    policy = actor_critic(2, 1, actor=mlp(2, 1, [8], activation="tanh"), critic=mlp(2, 1, [8], activation="tanh"))
    results = []
    for mode in ("inductor", "eager"):
        config = ShacConfig(segment_length=8, action_adjoint_max_norm=1e-2, n_epochs=2, compile_mode=mode)
        algo = make_shac(vec, policy, sgd(), config, learning_rate=1e-3)
        state, rollout = algo.collect(algo.init(key(0)))
        state = algo.update(state, rollout)
        graphs = graph_count()
        state, rollout = algo.collect(state)
        results.append(algo.update(state, rollout))
        assert graph_count() == graphs
    assert float(results[0].metrics["action_adjoint_clipped_fraction"]) > 0
    single = tree.map(lambda x: x.float() if x.is_floating_point() else x, results)  # statistics are float64 sums of values that were computed in float32
    assert_trees_close(single[0], single[1], ops=1_000_000)


# -- refusals --------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("segment_length", (0, -1, 2.0, True, None)),
        ("update_horizon", (0, -1, 2.0, True, 20)),
        ("gamma", (99, -0.1, 1.0001, math.nan, True, "0.9", None)),
        ("td_lambda", (-0.1, 1.5, math.nan, True, None)),
        ("target_tau", (-0.1, 1.5, math.nan, True, None)),
        ("n_epochs", (0, 1.5, True)),
        ("num_mini_batches", (0, 1.5, True)),
        ("batch_size", (0, 1.5, True, None)),
        ("max_grad_norm", (-1, 0, math.nan, True, "1.0")),
        ("critic_max_grad_norm", (-1, 0, math.nan, True, "1.0")),
        ("max_grad_norm_before_clip", (-1, math.nan, True, "1.0")),
        ("action_adjoint_max_norm", (-1, math.nan, True, "1.0")),
        ("state_adjoint_max_norm", (-1, math.nan, True, "1.0")),
        ("ent_coef", (-0.1, math.nan, math.inf, True, "0", None)),
        ("temperature_learning_rate", (-0.1, math.nan, math.inf, True, None)),
        ("learn_temperature", ("yes", 1, True)),  # true: ent_coef is 0
        ("target_entropy", (-1.0, math.nan, "auto")),  # without learn_temperature
        ("normalize_entropy", (True, 1)),
        ("normalize_values", ("yes", 1)),
        ("steps_per_graph", (0, True, 1.5)),
        ("compile_mode", ("fast", None)),
        ("memory", ("some", None)),
        ("stagger_episodes", ("false", 1, None)),
        ("deterministic_actions", ("false", 1, None)),
        ("clip_actions_to_space", ("no", 0)),
        ("skip_nonfinite_updates", ("no", 1)),
    ],
)
def test_wrong_configurations_are_refused_by_field(name, values):
    accepted = []
    for value in values:
        try:
            ShacConfig(**{name: value})
        except (ValueError, TypeError) as error:
            assert name in str(error) or name == "compile_mode"  # noqa: PT017
        else:
            accepted.append(value)
    assert accepted == []


def test_right_configurations_are_accepted():
    off = ShacConfig(max_grad_norm=None, critic_max_grad_norm=math.inf, max_grad_norm_before_clip=None, action_adjoint_max_norm=None, state_adjoint_max_norm=0)
    assert off.horizon == off.segment_length == 32
    assert ShacConfig(segment_length=5, update_horizon=20, gamma=0, td_lambda=1, target_tau=0).horizon == 20
    assert ShacConfig(learn_temperature=True, ent_coef=1.0, target_entropy=-3, normalize_entropy=True).normalize_entropy
    with pytest.raises(ValueError, match="normalize_entropy divides by target_entropy"):
        ShacConfig(learn_temperature=True, ent_coef=1.0, target_entropy=0.0, normalize_entropy=True)


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(TypeError, match=r"SHAC differentiates.*functional.*make_vec_env.*SyncVectorEnv"):
        make_shac(type("SyncVectorEnv", (), {})(), POLICY, sgd())
    opaque = dataclasses.replace(toy(), spec=dataclasses.replace(toy().spec, differentiable=False))
    with pytest.raises(ValueError, match=r"differentiable environment.*'toy'"):
        make_shac(make_vec_env(opaque, N), POLICY, sgd())
    vec = make_vec_env(toy(), N)
    with pytest.raises(ValueError, match=r"SHAC needs a policy with a critic.*'actor_only' has none"):
        make_shac(vec, actor_only(2, 2, network=mlp(2, 2, [])), sgd())
    with pytest.raises(ValueError, match="3 observation features"):
        make_shac(vec, policy_of(3), sgd())
    with pytest.raises(ValueError, match="num_minibatches must be at most"):
        make_shac(vec, POLICY, sgd(), ShacConfig(segment_length=1, num_mini_batches=N + 1))
    with pytest.raises(ValueError, match="actor_obs_normalization"):
        make_shac(vec, policy_of(actor_obs_normalization=True), sgd())
    for name in ("learning_rate", "critic_learning_rate"):
        with pytest.raises(ValueError, match=name):
            make_shac(vec, POLICY, sgd(), **{name: -1.0})
    with pytest.raises(ValueError, match="state_adjoint_max_norm cannot be applied"):
        make_shac(vec, POLICY, sgd(), ShacConfig(state_adjoint_max_norm=1.0), unroll=lambda *args: None)


def test_a_policy_whose_parts_cannot_be_told_apart_is_refused():
    vec = make_vec_env(toy(), N)
    with pytest.raises(ValueError, match=r"must give 'actor' and 'critic', got \[\]"):
        make_shac(vec, dataclasses.replace(POLICY, optimization_parameter_groups=None), sgd())
    trunk = dataclasses.replace(POLICY, value=lambda params, obs: POLICY.value(params, obs) + params["log_std"].sum())
    with pytest.raises(ValueError, match="reads the parameter 'log_std' of the other"):
        make_shac(vec, trunk, sgd())

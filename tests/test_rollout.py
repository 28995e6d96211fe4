"""The rollout function: what a plain loop with autograd would give, cuts and clips exactly where they are asked for, the same bits for any length."""

# The stubs of torch.func know neither argnums nor has_aux, and wrong arguments are passed on purpose.
# pyright: reportCallIssue=false, reportAssignmentType=false, reportArgumentType=false, reportUnusedExpression=false

from __future__ import annotations

import dataclasses
import functools
import math
import warnings

import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, vjp, vmap

from frl import compile as compiler
from frl import tree
from frl.compile import graph_count
from frl.envs.point_mass import point_mass
from frl.envs.vector import make_vec_env
from frl.gradients import clip_batched_gradient_norm
from frl.networks import mlp
from frl.normalizers import running_normalizer
from frl.policies import actor_only
from frl.rng import key
from frl.rollout import FIELDS, flatten_observation, make_unroll
from tests.strategies import QUICK, SEEDS, assert_trees_close, assert_trees_equal, copy_of, draw, toy_env
from tests.tolerances import tolerance

CAPTURED = "aot_eager"
N, T = 3, 7
ENV = toy_env(life=(3, 6))
VEC = make_vec_env(ENV, N)
POLICY = actor_only(2, 2, network=mlp(2, 2, hidden_sizes=[4], activation="tanh"), initial_log_std=-0.5)
PARAMS = tree.map(lambda x: x + 0.3 * draw(*x.shape, seed=9), POLICY.init(key(1), dtype=torch.float64))
START = VEC.reset(VEC.row_keys(key(2)), VEC.default_params)
NOISE = draw(T, N, 2, seed=3)
ACTION, STATE = "action_adjoint_max_norm", "state_adjoint_max_norm"


@pytest.fixture(autouse=True)
def _no_fallback(monkeypatch):
    monkeypatch.setattr(compiler, "_warned", False)
    monkeypatch.setattr(compiler, "_broken", False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="frl could not compile")
        yield


@functools.cache
def unroll_of(mode, **options):
    """One rollout function for each set of options, so that graphs are shared by the tests."""
    return make_unroll(VEC, POLICY, mode=mode, **options)


def weighted(trajectory):
    """A scalar in which every step and row has its own weight."""
    return (trajectory.reward * torch.linspace(0.5, 1.5, trajectory.reward.numel(), dtype=trajectory.reward.dtype).reshape(trajectory.reward.shape)).sum()


def gradient(unroll, params=PARAMS, noise=NOISE, start=START, **options):
    """Gradient of :func:`weighted`, and the trajectory."""

    def f(params):
        end, trajectory = unroll(params, (), start, VEC.default_params, noise, **options)
        return weighted(trajectory), (end, trajectory)

    return grad(f, has_aux=True)(params)


def plain_loop(params, noise=NOISE, *, action_limit=None, clip_actions=False, deterministic=False, vec=VEC, start=START, env_params=None):
    """The same with PyTorch's own means: a Python loop, autograd, hooks."""
    env_params = vec.default_params if env_params is None else env_params
    params = tree.map(lambda x: x.detach().clone().requires_grad_(), params)
    state, rows, adjoints = start, [], [None] * len(noise)

    def hook(t):
        def clip(g):
            adjoints[t] = g.clone()
            return clip_batched_gradient_norm(g, action_limit)

        return clip

    for t, e in enumerate(noise):
        obs = vec.observe(state, env_params)
        dist = POLICY.apply(params, obs)
        sample = POLICY.sample(dist, e)
        action = POLICY.distribution.mode(dist) if deterministic else sample.action
        action = action.clamp(-1.0, 1.0) if clip_actions else action
        action.register_hook(hook(t))
        state, step = vec.step(state, action, env_params)
        row = {"obs": obs, "final_obs": step.final_obs, "action": action, "reward": step.reward, "terminated": step.terminated, "truncated": step.truncated}
        rows.append({**row, "log_prob": POLICY.distribution.log_prob(dist, sample), "entropy": POLICY.distribution.entropy(dist, e), "metrics": step.metrics})
    rows = tree.stack(rows)
    weights = torch.linspace(0.5, 1.5, rows["reward"].numel(), dtype=rows["reward"].dtype).reshape(rows["reward"].shape)
    (rows["reward"] * weights).sum().backward()
    return tree.detach(state), tree.detach(rows), tree.map(lambda x: x.grad, params), torch.stack(adjoints)


# -- against a plain loop --------------------------------------------------------------------------------------------------------------------------------

OPTIONS = [{"mode": "eager"}, {"mode": CAPTURED}, {"mode": CAPTURED, "steps_per_graph": 3, "memory": "recompute"}]


@pytest.mark.parametrize("options", OPTIONS)
def test_values_and_gradients_are_those_of_a_plain_loop(options):
    state, rows, grads, _ = plain_loop(PARAMS)
    got, (end, trajectory) = gradient(unroll_of(**options))
    assert_trees_close(end, state, ops=1_000)
    for name, value in rows.items():
        assert_trees_close(getattr(trajectory, name), value, ops=1_000)
    assert_trees_close(got, grads, ops=10_000)
    assert all(float(g.abs().max()) > 0 for g in tree.leaves(got) if g.shape != (2,) or g is not got["log_std"])
    assert_trees_equal(trajectory.initial_obs, VEC.observe(START, VEC.default_params))
    done = trajectory.terminated | trajectory.truncated
    assert torch.equal(trajectory.alive, torch.cat((torch.ones(1, N, dtype=torch.bool), done[:-1].cumsum(0) == 0)))


def test_rewards_are_recorded_by_plain_autograd_too():
    params = tree.map(lambda x: x.clone().requires_grad_(), PARAMS)
    _, trajectory = unroll_of(CAPTURED)(params, (), START, VEC.default_params, NOISE)
    assert trajectory.reward.requires_grad
    grads = torch.autograd.grad(weighted(trajectory), tree.leaves(params))
    assert_trees_close(grads, tuple(tree.leaves(plain_loop(PARAMS)[2])), ops=10_000)


def test_actions_are_reparameterised():
    """d action / d log_std = std * noise where the state does not matter: one step."""
    step = lambda log_std: unroll_of(CAPTURED)({**PARAMS, "log_std": log_std}, (), START, VEC.default_params, NOISE[:1])[1].action.sum()
    std = PARAMS["log_std"].exp()
    assert_trees_close(grad(step)(PARAMS["log_std"]), (std * NOISE[0]).sum(0), ops=100)


def test_gradients_reach_noise_state_and_parameters_of_the_environment():
    def f(noise, x, gain):
        start = START._replace(env=START.env._replace(x=x))
        return weighted(unroll_of(CAPTURED)(PARAMS, (), start, VEC.default_params._replace(gain=gain), noise)[1])

    args = NOISE, START.env.x, VEC.default_params.gain
    got = grad(f, argnums=(0, 1, 2))(*args)
    for i in range(3):
        direction = draw(*args[i].shape, seed=20 + i) if args[i].ndim else torch.ones((), dtype=torch.float64)
        shifted = [[a + s * 1e-6 * direction if j == i else a for j, a in enumerate(args)] for s in (1, -1)]
        difference = (f(*shifted[0]) - f(*shifted[1])) / 2e-6
        assert float((got[i] * direction).sum()) == pytest.approx(float(difference), rel=1e-6)


# -- determinism -----------------------------------------------------------------------------------------------------------------------------------------


@QUICK
@given(seed=SEEDS)
def test_the_same_arguments_give_the_same_bits_and_stay_as_they_were(seed):
    noise = draw(T, N, 2, seed=seed)
    before = copy_of((PARAMS, START, noise))
    first, again = (gradient(unroll_of(CAPTURED), noise=noise) for _ in range(2))
    assert_trees_equal(again, first)
    assert_trees_equal((PARAMS, START, noise), before)


@QUICK
@given(length=st.integers(1, 40), horizon=st.sampled_from([None, 7]))
def test_a_shorter_rollout_is_a_prefix(length, horizon):
    """Whatever number of steps the resets were drawn for."""
    noise = draw(40, N, 2, seed=5)
    _, whole = unroll_of(CAPTURED)(PARAMS, (), START, VEC.default_params, noise)
    _, part = unroll_of(CAPTURED, horizon=horizon)(PARAMS, (), START, VEC.default_params, noise[:length])
    for name in ("obs", "final_obs", "action", "log_prob", "entropy", "reward", "terminated", "truncated", "alive", "metrics"):
        assert_trees_equal(getattr(part, name), tree.map(lambda x: x[:length], getattr(whole, name)))


@QUICK
@given(cut=st.integers(1, 19))
def test_rollouts_chain(cut):
    noise = draw(20, N, 2, seed=6)
    end, whole = unroll_of(CAPTURED)(PARAMS, (), START, VEC.default_params, noise)
    middle, first = unroll_of(CAPTURED)(PARAMS, (), START, VEC.default_params, noise[:cut])
    last, second = unroll_of(CAPTURED)(PARAMS, (), middle, VEC.default_params, noise[cut:])
    assert_trees_equal(last, end)
    assert torch.equal(torch.cat((first.reward, second.reward)), whole.reward)
    assert torch.equal(torch.cat((first.obs, second.obs)), whole.obs)


def test_any_number_of_steps_runs_the_same_graphs():
    unroll = unroll_of(CAPTURED, horizon=7)

    def run(length):
        gradient(unroll, noise=draw(length, N, 2, seed=length))
        unroll(PARAMS, (), START, VEC.default_params, draw(length, N, 2, seed=length))

    run(7), run(5)
    graphs = graph_count()
    for length in (7, 1, 16, 33):
        run(length)
    assert graph_count() == graphs


def test_a_row_does_not_depend_on_how_many_there_are():
    """To rounding: the policy is a matrix product over all rows."""
    many = make_vec_env(ENV, 5)
    start = many.reset(many.row_keys(key(2)), many.default_params)
    noise = torch.cat((NOISE, draw(T, 2, 2, seed=8)), 1)
    _, wide = make_unroll(many, POLICY, mode=CAPTURED)(PARAMS, (), start, many.default_params, noise)
    _, narrow = unroll_of(CAPTURED)(PARAMS, (), START, VEC.default_params, NOISE)
    assert_trees_close(tree.map(lambda x: x[:, :N], wide._replace(initial_obs=())), narrow._replace(initial_obs=()), ops=100)


def test_captured_point_mass_equals_eager():
    env = point_mass(max_episode_steps=4, success_threshold=1.0)
    vec = make_vec_env(env, 4)
    policy = actor_only(14, 2, network=mlp(14, 2, hidden_sizes=[8], activation="tanh"))
    start, params = vec.reset(vec.row_keys(key(0)), vec.default_params), policy.init(key(1))
    noise = policy.noise(key(2), 6, 4)

    def run(mode):
        unroll = make_unroll(vec, policy, clip_actions=True, mode=mode)

        def total(p):
            end, trajectory = unroll(p, (), start, vec.default_params, noise)
            return trajectory.reward.sum(), (end, trajectory)

        return grad(total, has_aux=True)(params)

    got, expected = run(CAPTURED), run("eager")
    assert_trees_close(got, expected, ops=10_000)
    assert bool(got[1][1].terminated.any())


def test_identical_starts_with_their_own_noise_act_differently():
    """64 copies of one row: distinct actions, mean and variance within 4 standard errors."""
    vec = make_vec_env(ENV, 64)
    start = vec.reset(vec.row_keys(key(0)), vec.default_params)
    start = tree.map(lambda x: x[:1].expand(64, *x.shape[1:]), start)
    _, trajectory = make_unroll(vec, POLICY, mode=CAPTURED)(PARAMS, (), start, vec.default_params, POLICY.noise(key(3), 1, 64, dtype=torch.float64))
    action = trajectory.action[0]
    assert len({tuple(a) for a in action.tolist()}) == 64
    dist = POLICY.apply(PARAMS, trajectory.obs[0])
    z = (action - dist.mean) / dist.log_std.exp()
    assert float(z.mean(0).abs().max()) < 4 / 8
    assert float((z.square().mean(0) - 1).abs().max()) < 4 * math.sqrt(2) / 8


# -- options ---------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
def test_deterministic_rollouts_play_the_mode(mode):
    _, rows, grads, _ = plain_loop(PARAMS, deterministic=True)
    got, (_, trajectory) = gradient(unroll_of(mode, deterministic=True))
    assert_trees_close((trajectory.action, trajectory.reward), (rows["action"], rows["reward"]), ops=1_000)
    assert_trees_close(got["actor"], grads["actor"], ops=10_000)
    assert torch.equal(got["log_std"], torch.zeros_like(PARAMS["log_std"]))
    other, (_, same) = gradient(unroll_of(mode, deterministic=True), noise=NOISE * 3.0)
    assert torch.equal(same.reward, trajectory.reward)
    assert_trees_equal(other, got)


@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
def test_clipped_actions_and_their_gradient(mode):
    """0 outside the space, 1 inside; the log-probability is that of the sample."""
    noise = NOISE * 2.0
    _, rows, grads, _ = plain_loop(PARAMS, noise, clip_actions=True)
    got, (_, trajectory) = gradient(unroll_of(mode, clip_actions=True), noise=noise)
    assert_trees_close(got, grads, ops=10_000)
    assert_trees_close((trajectory.action, trajectory.log_prob, trajectory.reward), (rows["action"], rows["log_prob"], rows["reward"]), ops=1_000)
    at_bound = trajectory.action.abs() == 1.0
    assert 0 < int(at_bound.sum()) < at_bound.numel()
    one = lambda e: unroll_of(mode, clip_actions=True)(PARAMS, (), START, VEC.default_params, e)[1].action.sum()
    assert torch.equal(grad(one)(noise[:1])[0] != 0, ~at_bound[0])


def test_the_gradient_at_a_bound_is_one():
    params = tree.map(torch.zeros_like, PARAMS)
    one = lambda e: unroll_of("eager", clip_actions=True)(params, (), START, VEC.default_params, e)[1].action.sum()
    noise = torch.tensor([[[1.0, -1.0], [1.0 + 1e-9, 0.5], [-2.0, 0.0]]], dtype=torch.float64)
    assert grad(one)(noise).tolist() == [[[1.0, 1.0], [0.0, 1.0], [0.0, 1.0]]]


def test_actions_of_an_unbounded_space_pass_and_a_space_without_bounds_is_refused():
    wide = dataclasses.replace(ENV, action_space=spaces.Box(-math.inf, math.inf, (2,)))
    _, free = make_unroll(make_vec_env(wide, N), POLICY, clip_actions=True, mode="eager")(PARAMS, (), START, VEC.default_params, NOISE * 9)
    _, expected = unroll_of("eager")(PARAMS, (), START, VEC.default_params, NOISE * 9)
    assert torch.equal(free.action, expected.action)
    with pytest.raises(TypeError, match=r"clip_actions.*Discrete"):
        make_unroll(make_vec_env(dataclasses.replace(ENV, action_space=spaces.Discrete(3)), N), POLICY, clip_actions=True)


@pytest.mark.parametrize(
    ("mode", "fields"), [("eager", (name,)) for name in FIELDS] + [(CAPTURED, ("final_obs", "metrics")), (CAPTURED, ("log_prob",)), (CAPTURED, ())]
)
def test_only_what_is_asked_for_is_recorded(mode, fields):
    _, full = unroll_of(mode)(PARAMS, (), START, VEC.default_params, NOISE)
    _, some = unroll_of(mode, record=fields, attach=())(PARAMS, (), START, VEC.default_params, NOISE)
    for name in FIELDS:
        if name in fields:
            assert_trees_equal(getattr(some, name), getattr(full, name))
        else:
            assert getattr(some, name) == ({} if name == "metrics" else ())
    assert_trees_equal((some.reward, some.terminated, some.truncated, some.alive), (full.reward, full.terminated, full.truncated, full.alive))


@pytest.mark.parametrize(("mode", "attach"), [("eager", ()), ("eager", ("obs", "action")), ("eager", ("action",)), (CAPTURED, ("action",))])
def test_only_attached_fields_carry_gradients(mode, attach):
    unroll = unroll_of(mode, record=("obs", "action", "entropy"), attach=attach)
    outputs, pull = vjp(
        lambda p: (lambda t: {"reward": t.reward, "obs": t.obs, "action": t.action})(unroll(p, (), START, VEC.default_params, NOISE)[1]), PARAMS
    )
    for name in outputs:
        ones = {other: torch.full_like(y, float(other == name)) for other, y in outputs.items()}
        reached = any(float(g.abs().max()) > 0 for g in tree.leaves(pull(ones)))
        assert reached == (name in ("reward", *attach))


def test_a_normalizer_is_applied_and_frozen():
    normalizer = running_normalizer(2, epsilon=0.0)
    stats = normalizer.update(normalizer.init(), draw(50, 2, seed=7) * 3.0 + 1.0)
    before = copy_of(stats)
    results = []
    for mode in (CAPTURED, "eager"):
        unroll = make_unroll(VEC, POLICY, normalizer, mode=mode)
        f = lambda p, u=unroll: (lambda end, t: (weighted(t), t))(*u(p, stats, START, VEC.default_params, NOISE))
        results.append(grad(f, has_aux=True)(PARAMS))
    assert_trees_close(results[0], results[1], ops=10_000)
    trajectory = results[0][1]
    dist = POLICY.apply(PARAMS, normalizer.apply(stats, trajectory.obs[0]))
    assert_trees_close(trajectory.action[0], POLICY.sample(dist, NOISE[0]).action, ops=100)
    assert_trees_equal(trajectory.initial_obs, VEC.observe(START, VEC.default_params))
    assert_trees_equal(stats, before)


# -- truncated back-propagation -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
def test_segments_cut_the_gradient_exactly(mode):
    """What happened before a boundary has gradient exactly 0 in the rewards after it, and values do not change."""
    unroll = unroll_of(mode, segment_length=3)

    def rewards(noise):
        return unroll(PARAMS, (), START, VEC.default_params, noise)[1].reward

    value, pull = vjp(rewards, NOISE)
    assert torch.equal(value, unroll_of(mode)(PARAMS, (), START, VEC.default_params, NOISE)[1].reward)
    for t in range(T):
        one = torch.zeros_like(value)
        one[t] = 1.0
        (g,) = pull(one)
        reached = g.abs().sum((1, 2)) > 0
        begin = t - t % 3
        assert not bool(reached[:begin].any()), f"reward {t} reaches {reached}"
        assert not bool(reached[t + 1 :].any())
        assert bool(reached[t])


def test_the_gradient_of_segments_is_the_sum_of_their_own():
    full, (end, trajectory) = gradient(unroll_of(CAPTURED, segment_length=2), noise=NOISE[:6])
    weights = torch.linspace(0.5, 1.5, 6 * N, dtype=torch.float64).reshape(6, N)
    state, total = START, tree.map(torch.zeros_like, PARAMS)
    for begin in (0, 2, 4):
        f = lambda p, s=state, b=begin: (lambda e, t: ((t.reward * weights[b : b + 2]).sum(), e))(
            *unroll_of(CAPTURED)(p, (), s, VEC.default_params, NOISE[b : b + 2])
        )
        g, state = grad(f, has_aux=True)(PARAMS)
        total = tree.map(torch.add, total, g)
    assert_trees_close(full, total, ops=10_000)
    assert_trees_equal(end, state)
    whole, _ = gradient(unroll_of(CAPTURED), noise=NOISE[:6])
    assert float(tree.leaves(tree.map(lambda a, b: (a - b).abs().max(), whole, full))[0]) > 1e-3


def test_a_segment_as_long_as_the_rollout_cuts_nothing():
    assert_trees_equal(gradient(unroll_of(CAPTURED, segment_length=T))[0], gradient(unroll_of(CAPTURED))[0])


# -- adjoints --------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("limit", [0.05, 0.4, math.inf])
def test_the_probe_gradient_is_what_a_hook_would_see(options, limit):
    """Unclipped at its own step, already clipped at all later ones; the parameters' gradient is the clipped one."""
    _, _, grads, adjoints = plain_loop(PARAMS, action_limit=limit)
    unroll = unroll_of(adjoint_limits=(ACTION,), **options)

    def f(params, probe):
        _, trajectory = unroll(params, (), START, VEC.default_params, NOISE, hyper={ACTION: torch.tensor(limit, dtype=torch.float64)}, probe=probe)
        return weighted(trajectory)

    got, probe = grad(f, argnums=(0, 1))(PARAMS, torch.zeros_like(NOISE))
    assert_trees_close(probe, adjoints, ops=10_000)
    assert_trees_close(got, grads, ops=10_000)
    if limit < 1:
        free = gradient(unroll_of(**options))[0]
        assert float((got["log_std"] - free["log_std"]).abs().max()) > 1e-2 * float(free["log_std"].abs().max())


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_limit_on_the_state_adjoint_keeps_a_long_rollout_finite(options, dtype):
    """x' = k x, 60 steps, objective x_60, limit 1 at every step: rows of gain 10 and 0.5 give exactly 1 and 2^-60."""
    env = toy_env(push=0.0, dtype=dtype)
    vec = make_vec_env(env, 2)
    params = tree.map(lambda x: x.to(dtype), PARAMS)
    gains = env.default_params._replace(gain=torch.tensor([10.0, 0.5], dtype=dtype))
    start = vec.reset(vec.row_keys(key(0)), vec.default_params)
    start = start._replace(env=start.env._replace(x=torch.tensor([[0.0, 0.0], [1.0, 0.0]], dtype=dtype)))
    unroll = make_unroll(vec, POLICY, record=(), adjoint_limits=(STATE,), **options)

    def final(x, limit):
        end, _ = unroll(
            params, (), start._replace(env=start.env._replace(x=x)), gains, torch.zeros(60, 2, 2, dtype=dtype), hyper={STATE: torch.tensor(limit, dtype=dtype)}
        )
        return end.env.x[:, 0].sum()

    g = grad(lambda x: final(x, 1.0))(start.env.x)
    assert float(g[0, 0]) == pytest.approx(1.0, rel=tolerance(dtype))
    assert float(g[1, 0]) == 2.0**-60
    assert g[:, 1].tolist() == [0.0, 0.0]
    free = grad(lambda x: final(x, math.inf))(start.env.x)
    assert math.isfinite(float(free[0, 0])) == (dtype == torch.float64)
    assert float(free[1, 0]) == 2.0**-60


def test_limits_can_change_without_a_new_graph():
    unroll = unroll_of(CAPTURED, adjoint_limits=(ACTION, STATE))
    run = lambda a, s: gradient(unroll, hyper={ACTION: torch.tensor(a, dtype=torch.float64), STATE: torch.tensor(s, dtype=torch.float64)})[0]
    off = run(math.inf, math.inf)
    graphs = graph_count()
    clipped = run(0.1, math.inf), run(math.inf, 0.1), run(0.0, 0.0)
    assert graph_count() == graphs
    assert_trees_equal(clipped[2], off)
    assert_trees_close(off, plain_loop(PARAMS)[2], ops=10_000)
    for g in clipped[:2]:
        assert not torch.allclose(g["log_std"], off["log_std"], rtol=1e-2)


# -- members ---------------------------------------------------------------------------------------------------------------------------------------------


def test_a_population_is_mapped_over():
    members = tree.map(lambda x: torch.stack((x, 1.1 * x, 0.7 * x, -x)), PARAMS)
    for count in (4, 2):
        some = tree.map(lambda x, c=count: x[:c], members)
        got = vmap(lambda p: gradient(unroll_of(CAPTURED), p)[0])(some)
        for i in range(count):
            assert_trees_close(tree.index(got, i), gradient(unroll_of(CAPTURED), tree.index(some, i))[0], ops=10_000)


# -- observations ----------------------------------------------------------------------------------------------------------------------------------------


def test_dict_observations_go_by_name():
    a, b = torch.tensor([1.0, 2.0]), torch.tensor([[3.0, 4.0]])
    assert flatten_observation({"b": b, "a": a}).tolist() == flatten_observation({"a": a, "b": b}).tolist() == [1.0, 2.0, 3.0, 4.0]
    assert flatten_observation({"b": b, "a": a}, ("b", "a")).tolist() == [3.0, 4.0, 1.0, 2.0]
    assert flatten_observation({"b": b, "a": {"c": a}}, ("a.c",)).tolist() == [1.0, 2.0]
    assert flatten_observation(torch.tensor(3.0)).tolist() == [3.0]


@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
def test_rollouts_of_dict_observations(mode):
    boxes = {"speed": spaces.Box(-math.inf, math.inf, (1,)), "place": spaces.Box(-math.inf, math.inf, (1,))}
    both = dataclasses.replace(ENV, observe=lambda s, p: {"speed": s.x[1:], "place": s.x[:1]}, observation_space=spaces.Dict(boxes))
    vec = make_vec_env(both, N)
    _, plain = unroll_of(mode)(PARAMS, (), START, VEC.default_params, NOISE)
    _, named = make_unroll(vec, POLICY, mode=mode)(PARAMS, (), START, VEC.default_params, NOISE)
    assert torch.equal(named.reward, plain.reward)
    assert torch.equal(torch.cat((named.obs["place"], named.obs["speed"]), -1), plain.obs)
    blind = dataclasses.replace(actor_only(1, 2, network=mlp(1, 2, hidden_sizes=[4])), obs_groups=("speed",))
    params = blind.init(key(0), dtype=torch.float64)
    _, grouped = make_unroll(vec, blind, mode=mode)(params, (), START, VEC.default_params, NOISE)
    assert torch.allclose(grouped.action[0], blind.sample(blind.apply(params, START.env.x[:, 1:]), NOISE[0]).action)


# -- refusals --------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"record": ("obs", "actoin")}, "unknown trajectory field 'actoin'"),
        ({"attach": ("nothing",)}, "unknown trajectory field 'nothing'"),
        ({"segment_length": 0}, "segment_length must be a positive integer or None, got 0"),
        ({"segment_length": True}, "segment_length must be a positive integer or None, got True"),
        ({"mode": "fast"}, "unknown compile mode 'fast'"),
    ],
)
def test_wrong_options_are_refused(options, parts):
    with pytest.raises(ValueError, match=parts):
        make_unroll(VEC, POLICY, **options)


@pytest.mark.parametrize("mode", [CAPTURED, "eager"])
def test_a_rollout_needs_at_least_one_step(mode):
    with pytest.raises(ValueError, match="at least one step"):
        unroll_of(mode)(PARAMS, (), START, VEC.default_params, NOISE[:0])

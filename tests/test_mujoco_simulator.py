"""MuJoCo's step as a function: its derivative, its threads, its failures."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from frl import compile as compiler
from frl.envs.mujoco import Simulator, load_model, simulate
from frl.envs.mujoco import simulator as room
from frl.envs.mujoco.model import gymnasium_model
from frl.scan import scan

mujoco = pytest.importorskip("mujoco")

F64 = torch.float64

# A free body with a ball joint and a hinge on it, and an actuator with a state of its own: nq = 12, nv = 10, na = 1.
MIXED = """
<mujoco>
  <option timestep="0.01" integrator="{integrator}"/>
  <worldbody>
    <geom type="plane" size="5 5 .1"/>
    <body pos="0 0 .4"><freejoint/><geom type="box" size=".1 .2 .15"/>
      <body pos=".1 0 .3"><joint type="ball"/><geom type="capsule" fromto="0 0 0 0 0 .3" size=".05"/>
        <body pos="0 0 .3"><joint name="hinge" axis="0 1 0"/><geom type="capsule" fromto="0 0 0 .3 0 0" size=".04"/></body>
      </body>
    </body>
  </worldbody>
  <actuator><general joint="hinge" dyntype="filter" dynprm=".05" gainprm="5" ctrllimited="true" ctrlrange="-1 1"/></actuator>
</mujoco>
"""
# A mass on a rail that explodes when pushed hard.
CART = """
<mujoco>
  <option timestep="0.01" integrator="Euler"/>
  <worldbody><body><joint name="rail" type="slide" axis="1 0 0"/><geom size=".1" mass="1"/><site name="top" pos="0 0 .5"/></body></worldbody>
  <actuator><motor joint="rail"/></actuator>
</mujoco>
"""


def mixed(integrator: str = "Euler", **options: Any) -> Simulator:
    return Simulator(load_model(MIXED.format(integrator=integrator)), **{"frame_skip": 2, **options})


def drawn(simulator: Simulator, rows: int, seed: int = 0, spread: float = 0.1) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows near the start, quaternions not normalised, and controls inside their limits."""
    random = np.random.default_rng(seed)
    state = simulator.start + spread * random.normal(size=(rows, simulator.size))
    return torch.from_numpy(state), torch.from_numpy(random.uniform(-0.8, 0.8, (rows, simulator.nu)))


def tips(model: Any, data: Any) -> np.ndarray:
    return np.concatenate((data.xpos[-1], data.qfrc_constraint[:3]))


# ---- forward ----


@pytest.mark.parametrize("integrator", ["Euler", "RK4", "implicitfast"])
def test_a_step_is_mujocos(integrator: str):
    simulator = mixed(integrator)
    state, ctrl = drawn(simulator, 5)
    after, seen = simulate(simulator, state, ctrl)
    assert seen.shape == (5, 0)
    for row in range(5):
        data = mujoco.MjData(simulator.model)
        data.qpos[:], data.qvel[:], data.act[:] = np.split(state[row].numpy(), [12, 22])
        data.ctrl[:] = ctrl[row].numpy()
        mujoco.mj_step(simulator.model, data, 2)
        expected = np.concatenate((data.qpos, data.qvel, data.act))
        # Positions are normalised first, which MuJoCo does where it uses them.
        np.testing.assert_allclose(after[row].numpy(), expected, rtol=1e-12, atol=1e-12)
    assert simulator.dt == pytest.approx(0.02)


def test_readings_belong_to_the_new_state_when_settled_and_lag_otherwise():
    state, ctrl = drawn(mixed(), 4)
    settled, lagging = (mixed(read=lambda model, data: data.qpos[:7].copy(), settle=settle) for settle in (True, False))
    places = [mixed(read=lambda model, data: data.xpos[1].copy(), settle=settle) for settle in (True, False)]
    plain = simulate(mixed(), state, ctrl)[0]
    for simulator in (settled, lagging):
        after, seen = simulate(simulator, state, ctrl)
        torch.testing.assert_close(after, plain, rtol=0, atol=0)
        torch.testing.assert_close(seen, after[:, :7], rtol=0, atol=0)
    now, before = (simulate(simulator, state, ctrl)[1] for simulator in places)
    torch.testing.assert_close(now, plain[:, :3], rtol=1e-12, atol=1e-12)
    assert float((before - plain[:, :3]).abs().min()) > 1e-6
    # No frames: nothing moves and the readings are those of the state.
    same, seen = simulate(places[0], plain, ctrl, frames=0)
    torch.testing.assert_close(same, plain, rtol=1e-15, atol=1e-15)
    torch.testing.assert_close(seen, plain[:, :3], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("read", [None, tips])
def test_rows_are_independent_of_threads_and_of_each_other(read: Any):
    state, ctrl = drawn(mixed(), 37)
    one, three = (mixed(read=read, threads=threads) for threads in (1, 3))
    cotangent = np.random.default_rng(1).normal(size=(2, 37, one.size))
    seen_cotangent = np.random.default_rng(2).normal(size=(2, 37, one.read_size))
    expected = one.step(state.numpy(), ctrl.numpy())
    grads = one.pull_back(state.numpy(), ctrl.numpy(), cotangent, seen_cotangent)
    for _ in range(2):
        for a, b in zip(three.step(state.numpy(), ctrl.numpy()), expected, strict=True):
            np.testing.assert_array_equal(a, b)
        for a, b in zip(three.pull_back(state.numpy(), ctrl.numpy(), cotangent, seen_cotangent), grads, strict=True):
            np.testing.assert_array_equal(a, b)
    pick = [20, 3]
    for a, b in zip(three.step(state[pick].numpy(), ctrl[pick].numpy()), expected, strict=True):
        np.testing.assert_array_equal(a, b[pick])
    for a, b in zip(three.pull_back(state[pick].numpy(), ctrl[pick].numpy(), cotangent[:, pick], seen_cotangent[:, pick]), grads, strict=True):
        np.testing.assert_allclose(a, b[:, pick], rtol=1e-13, atol=1e-13)  # sums of another length


def test_many_rows_go_in_batches(monkeypatch: pytest.MonkeyPatch):
    simulator = mixed()
    state, ctrl = drawn(simulator, 20)
    cotangent = np.ones((1, 20, simulator.size))
    expected = simulator.step(state.numpy(), ctrl.numpy()), simulator.pull_back(state.numpy(), ctrl.numpy(), cotangent, cotangent[..., :0])
    monkeypatch.setattr(room, "ROWS_PER_BATCH", 7)
    again = simulator.step(state.numpy(), ctrl.numpy()), simulator.pull_back(state.numpy(), ctrl.numpy(), cotangent, cotangent[..., :0])
    for a, b in zip(again, expected, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-13, atol=1e-13)


def test_what_fails_on_any_thread_reaches_the_caller_and_threads_end_with_their_owner():
    def read(model: Any, data: Any) -> np.ndarray:
        if data.ctrl[0] > 0.5:
            raise ArithmeticError("row")
        return data.xpos[-1]

    simulator = mixed(read=read, threads=3)
    state, ctrl = (x.numpy() for x in drawn(simulator, 37))
    ctrl[:] = 0.0
    expected = simulator.step(state, ctrl)
    threads = simulator._team().threads
    for row in (0, 18, 36):
        failing = ctrl.copy()
        failing[row] = 0.9
        with pytest.raises(ArithmeticError, match="row"):
            simulator.step(state, failing)
    for a, b in zip(simulator.step(state, ctrl), expected, strict=True):
        np.testing.assert_array_equal(a, b)
    assert [thread.is_alive() for thread in threads] == [True, True]
    del simulator
    gc.collect()
    for thread in threads:
        thread.join(10.0)
    assert [thread.is_alive() for thread in threads] == [False, False]


def test_no_rows_are_no_work():
    after, seen = mixed(threads=2).step(np.zeros((0, 23)), np.zeros((0, 1)))
    assert after.shape == (0, 23)
    assert seen.shape == (0, 0)


def test_torch_decides_the_number_of_threads_unless_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert [len(simulator._team().data) for simulator in (mixed(), mixed(threads=3))] == [2, 3]


# ---- derivatives ----


@pytest.mark.parametrize("integrator", ["Euler", "RK4", "implicitfast"])
@pytest.mark.parametrize("read", [None, tips])
def test_gradient_is_the_derivative_with_quaternions_and_activations(integrator: str, read: Any):
    simulator = mixed(integrator, read=read)
    state, ctrl = (x.requires_grad_() for x in drawn(simulator, 3))
    assert torch.autograd.gradcheck(lambda state, ctrl: simulate(simulator, state, ctrl), (state, ctrl), eps=1e-5, atol=3e-5, rtol=1e-4)


def test_gradient_along_the_manifold_is_that_of_mujocos_own_coordinates():
    simulator = mixed("RK4")
    state, ctrl = drawn(simulator, 1)
    qpos = simulator.tangent.normalize(state.numpy())[0, :12]
    weights = torch.from_numpy(np.random.default_rng(3).normal(size=simulator.size))

    def value(qpos: torch.Tensor) -> torch.Tensor:
        return simulate(simulator, torch.cat((qpos[None], state[:, 12:]), dim=1), ctrl)[0][0] @ weights

    gradient = torch.func.grad(value)(torch.from_numpy(qpos))
    for dof in range(10):
        speed, ends, tangents = np.eye(10)[dof], [], []
        for size in (1e-5, -1e-5):
            moved = qpos.copy()
            mujoco.mj_integratePos(simulator.model, moved, speed, size)
            ends.append(float(value(torch.from_numpy(moved))))
            tangents.append(moved)
        along = torch.from_numpy((tangents[0] - tangents[1]) / 2e-5)
        assert float(gradient @ along) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-6, abs=1e-6)
    # The length of a quaternion does nothing.
    for q in (3, 7):
        assert abs(float(gradient[q : q + 4] @ torch.from_numpy(qpos[q : q + 4]))) < 1e-12
        assert float(value(torch.from_numpy(np.where((np.arange(12) >= q) & (np.arange(12) < q + 4), 3 * qpos, qpos)))) == pytest.approx(
            float(value(torch.from_numpy(qpos))), abs=1e-12
        )


def test_jacobian_is_the_transition_matrix_of_mujoco():
    model = gymnasium_model("half_cheetah")
    simulator = Simulator(model, 1)
    state, ctrl = drawn(simulator, 1, spread=0.02)
    data = mujoco.MjData(model)
    data.qpos[:], data.qvel[:], data.ctrl[:] = state[0, :9].numpy(), state[0, 9:].numpy(), ctrl[0].numpy()
    a, b = np.zeros((18, 18)), np.zeros((18, 6))
    mujoco.mjd_transitionFD(model, data, 1e-6, True, a, b, None, None)
    ours = torch.func.jacrev(lambda state, ctrl: simulate(simulator, state, ctrl)[0], argnums=(0, 1))(state[0], ctrl[0])
    for mine, other in zip(ours, (a, b), strict=True):
        np.testing.assert_allclose(mine.numpy(), other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_transforms_agree(backend: str, monkeypatch: pytest.MonkeyPatch):
    simulator = mixed(read=tips)
    state, ctrl = drawn(simulator, 4)
    calls: list[int] = []
    pull_back = Simulator.pull_back
    monkeypatch.setattr(Simulator, "pull_back", lambda self, state, *rest: calls.append(len(state)) or pull_back(self, state, *rest))

    def value(state: torch.Tensor, ctrl: torch.Tensor) -> torch.Tensor:
        after, seen = simulate(simulator, state, ctrl)
        return after.sin().sum() + seen.square().sum()

    gradient = torch.func.grad(value, argnums=(0, 1))
    expected = gradient(state, ctrl)
    assert calls == [4]
    leaves = [x.clone().requires_grad_() for x in (state, ctrl)]
    results = {
        "vmap of grad": torch.func.vmap(gradient)(state, ctrl),
        "autograd": torch.autograd.grad(value(*leaves), leaves),
        "autograd of vmap": torch.autograd.grad(torch.func.vmap(value)(*leaves).sum(), leaves),
        "two levels of vmap": [
            x.flatten(0, 1)
            for x in torch.func.vmap(torch.func.vmap(gradient), in_dims=(1, 0), out_dims=0)(state.reshape(2, 2, -1).movedim(0, 1), ctrl.reshape(2, 2, -1))
        ],
        "compiled": torch.compile(gradient, backend=backend, fullgraph=True)(state, ctrl),
        "compiled vmap": torch.compile(torch.func.vmap(gradient), backend=backend, fullgraph=True)(state, ctrl),
    }
    for name, result in results.items():
        for a, b in zip(result, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=name)
    assert set(calls) == {4}
    calls.clear()
    rows = torch.func.jacrev(lambda state: simulate(simulator, state, ctrl)[0])(state)
    assert calls == [4]  # one set of differences for all rows of the Jacobian
    weights = torch.randn(rows.shape[:2], dtype=F64, generator=torch.Generator().manual_seed(0))
    pulled = torch.func.vjp(lambda state: simulate(simulator, state, ctrl)[0], state)[1](weights)[0]
    torch.testing.assert_close(torch.einsum("bs,bsct->ct", weights, rows), pulled, rtol=1e-12, atol=1e-12)


def test_what_has_no_derivative_is_refused():
    simulator = mixed()
    state, ctrl = drawn(simulator, 2)

    def value(state: torch.Tensor) -> torch.Tensor:
        return simulate(simulator, state, ctrl)[0].square().sum()

    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.func.grad(lambda state: torch.func.grad(value)(state).square().sum())(state)
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(value, (state,), (state,))
    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.hessian(value)(state)
    leaf = state.clone().requires_grad_()
    (first,) = torch.autograd.grad(value(leaf), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        first.sum().backward()


@pytest.mark.parametrize("centered", [True, False])
def test_controls_beyond_their_limits_have_no_gradient_and_at_them_the_one_from_inside(centered: bool):
    simulator = mixed(centered=centered)
    state, _ = drawn(simulator, 1)
    weights = torch.ones(simulator.size, dtype=F64)
    slope = torch.func.vmap(torch.func.grad(lambda ctrl: simulate(simulator, state[0], ctrl)[0] @ weights))
    values = slope(torch.tensor([[-1.5], [-1.0], [0.3], [1.0], [1.5]], dtype=F64))[:, 0]
    assert float(values[0]) == float(values[4]) == 0.0
    # The activation is linear in the control.
    assert float(values[2]) != 0.0
    torch.testing.assert_close(values[1:4], values[2].expand(3), rtol=1e-3, atol=0)
    after = simulate(simulator, state.expand(2, -1), torch.tensor([[1.0], [7.0]], dtype=F64))[0]
    torch.testing.assert_close(after[0], after[1], rtol=0, atol=0)


def test_cheaper_differences_are_close():
    model = gymnasium_model("hopper")
    exact = Simulator(model, 4)
    state, ctrl = drawn(exact, 16, spread=0.02)
    cotangent = np.random.default_rng(0).normal(size=(1, 16, exact.size))

    def pulled(simulator: Simulator) -> np.ndarray:
        return np.concatenate(simulator.pull_back(state.numpy(), ctrl.numpy(), cotangent, cotangent[..., :0]), axis=-1)[0]

    expected = pulled(exact)
    for options, bound in (({"centered": False}, 1e-5), ({"gradient_integrator": "euler"}, 0.2), ({"gradient_integrator": "implicitfast"}, 0.2)):
        error = np.linalg.norm(pulled(Simulator(model, 4, **options)) - expected, axis=1) / np.linalg.norm(expected, axis=1)
        assert np.median(error) < bound, options
        assert np.median(error) > 0, options


def test_rows_without_a_cotangent_cost_nothing(monkeypatch: pytest.MonkeyPatch):
    simulator = mixed()
    state, ctrl = drawn(simulator, 6)
    cotangent = np.zeros((1, 6, simulator.size))
    cotangent[:, 2] = 1.0
    played: list[int] = []
    run = Simulator._run
    monkeypatch.setattr(Simulator, "_run", lambda self, model, state, *rest: played.append(len(state)) or run(self, model, state, *rest))
    grads, _ = simulator.pull_back(state.numpy(), ctrl.numpy(), cotangent, cotangent[..., :0])
    assert played == [1, simulator.directions, simulator.directions]
    assert [bool((grads[0, row] != 0).any()) for row in range(6)] == [False, False, True, False, False, False]


# ---- failures ----


@pytest.mark.parametrize("read", [None, lambda model, data: data.site_xpos[0].copy()])
def test_a_diverged_row_is_nan_with_gradient_zero_and_the_others_do_not_notice(read: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    simulator = Simulator(load_model(CART.replace('mass="1"', 'mass=".1"')), 4, read=read, threads=2)
    state = torch.zeros(6, 2, dtype=F64)
    state[1, 0], state[2, 1] = torch.nan, 2e10
    ctrl = torch.ones(6, 1, dtype=F64)
    ctrl[3], ctrl[4] = torch.inf, 9e9  # which accelerates 0.1 kg too much

    def value(state: torch.Tensor, ctrl: torch.Tensor) -> torch.Tensor:
        after, seen = simulate(simulator, state, ctrl)
        return torch.nan_to_num(after).sum() + torch.nan_to_num(seen).sum()

    after, seen = simulate(simulator, state, ctrl)
    alone = simulate(simulator, state[:1], ctrl[:1])
    for x, y in ((after, alone[0]), (seen, alone[1])):
        assert torch.isnan(x).all(1).tolist() == [False, True, True, True, True, False] or not x.shape[1]
        torch.testing.assert_close(x[[0, 5]], y.expand(2, -1), rtol=0, atol=0)
    grads = torch.func.grad(value, argnums=(0, 1))(state, ctrl)
    for g in grads:
        assert bool((g[1:5] == 0).all())
        assert bool((g[[0, 5]] != 0).any())
        assert bool(torch.isfinite(g).all())
    assert os.listdir(tmp_path) == []  # no log file of MuJoCo's
    assert mujoco.get_mju_user_warning() is None


def test_a_handler_of_the_users_stays():
    said: list[str] = []
    mujoco.set_mju_user_warning(said.append)
    try:
        after, _ = Simulator(load_model(CART.replace('mass="1"', 'mass="1e-3"')), 2).step(np.zeros((1, 2)), np.full((1, 1), 1e9))
        assert mujoco.get_mju_user_warning() == said.append
    finally:
        mujoco.set_mju_user_warning(None)
    assert np.isnan(after).all()
    assert any("unstable" in text for text in said)


def test_models_are_read_or_refused_in_one_sentence(tmp_path: Path):
    good, bad = tmp_path / "cart.xml", tmp_path / "bad.xml"
    good.write_text(CART)
    bad.write_text(CART.replace("slide", "slither"))
    model = load_model(good)
    mujoco.mj_saveModel(model, str(tmp_path / "cart.mjb"))
    for source in (str(good), CART, tmp_path / "cart.mjb", mujoco.MjSpec.from_string(CART), model):
        assert load_model(source).nv == 1
    with pytest.raises(ValueError, match=r"there is no MuJoCo model file '.*missing.xml'$"):
        load_model(tmp_path / "missing.xml")
    with pytest.raises(ValueError, match="it is a directory"):
        load_model(tmp_path)
    with pytest.raises(ValueError, match=r"MuJoCo cannot read '.*bad.xml': .*slither"):
        load_model(bad)
    with pytest.raises(ValueError, match="cannot read the MJCF text"):
        load_model("<mujoco><worldbody>")
    with pytest.raises(TypeError, match="got int"):
        load_model(3)
    with pytest.raises(TypeError, match="expected a mujoco.MjModel, got str"):
        Simulator(CART)  # type: ignore[arg-type]


def test_models_that_cannot_be_served_are_refused():
    with pytest.raises(ValueError, match="no joints"):
        Simulator(load_model("<mujoco/>"))
    bodies = "".join(f'<body pos="{i} 0 0"><freejoint/><geom size=".1"/></body>' for i in range(50))
    with pytest.raises(ValueError, match="600 velocities, positions, activations and controls to differentiate, at most 512"):
        Simulator(load_model(f"<mujoco><worldbody>{bodies}</worldbody></mujoco>"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frame_skip": 0}, "frame_skip"),
        ({"threads": 0}, "threads"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"gradient_integrator": "RK5"}, "gradient_integrator must be one of euler, implicit, implicitfast or None"),
        ({"read": lambda model, data: 1.0}, "read must return a vector"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        Simulator(load_model(CART), **options)


def test_shapes_are_checked():
    simulator = Simulator(load_model(CART))
    with pytest.raises(ValueError, match=r"state must be \[..., 2\] and ctrl \[..., 1\]"):
        simulate(simulator, torch.zeros(3), torch.zeros(1))
    with pytest.raises(ValueError, match="same leading dimensions"):
        simulate(simulator, torch.zeros(2, 2), torch.zeros(3, 1))


def test_dtype_follows_the_state():
    simulator = mixed(read=tips)
    state, ctrl = drawn(simulator, 2)
    after, seen = simulate(simulator, state.float(), ctrl)
    assert after.dtype == seen.dtype == torch.float32
    torch.testing.assert_close(after, simulate(simulator, state, ctrl)[0].float(), rtol=1e-4, atol=1e-4)


def test_a_model_is_copied():
    model = load_model(CART)
    simulator = Simulator(model)
    before = simulator.step(np.zeros((1, 2)), np.ones((1, 1)))[0]
    model.opt.timestep = 1.0
    np.testing.assert_array_equal(simulator.step(np.zeros((1, 2)), np.ones((1, 1)))[0], before)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("name", ["hopper", "half_cheetah", "cart"])
def test_native_code_makes_the_step_that_python_makes(name: str, dtype: torch.dtype, threads: int):
    simulator = Simulator(load_model(CART) if name == "cart" else gymnasium_model(name), 3, threads=threads)
    state, ctrl = (x.to(dtype) for x in drawn(simulator, 17, spread=0.3))
    ctrl = torch.where(torch.arange(17)[:, None] == 3, 9e9 if name == "cart" else ctrl, ctrl)  # more than the engine takes
    state[5, 0], state[6, 1], ctrl[7, 0] = torch.nan, torch.inf, 1e12
    expected = simulator.step(state.numpy().astype(np.float64), ctrl.numpy().astype(np.float64))[0]
    step = compiler.jit(lambda s, c: simulate(simulator, s, c)[0] * 1.0)
    assert step.eager is not step
    for _ in range(2):  # the data of the first call are used again
        got = step(state, ctrl)
        np.testing.assert_array_equal(got.numpy(), torch.from_numpy(expected).to(dtype).numpy())
    assert np.isnan(expected[[5, 6, 7]]).all()
    assert np.isfinite(expected[[0, 1, 2]]).all()
    assert np.isnan(expected[3]).all() == (name == "cart")


def test_native_code_is_used_where_nothing_of_python_is_needed(monkeypatch: pytest.MonkeyPatch):
    simulator = Simulator(gymnasium_model("hopper"), 4)
    state, ctrl = drawn(simulator, 8)

    def step(params: tuple, carry: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        carry = simulate(simulator, carry, x)[0]
        return carry, carry.sum(-1)

    xs = torch.stack([ctrl, -ctrl, ctrl])
    expected = scan(step, (), state, xs, mode="eager")
    scan(step, (), state, xs)  # captures it, which calls it
    monkeypatch.setattr(simulator, "step", None)
    got = scan(step, (), state, xs)
    assert torch.equal(got[0], expected[0])
    assert torch.allclose(got[1], expected[1], rtol=1e-12)


def test_a_step_of_python_s_stays_right_in_a_loop():
    simulator = mixed(read=tips)
    state, ctrl = drawn(simulator, 4)
    step = compiler.jit(lambda s, c: tuple(x * 1.0 for x in simulate(simulator, s, c)))
    for got, expected in zip(step(state, ctrl), simulate(simulator, state, ctrl), strict=True):
        assert torch.equal(got, expected)

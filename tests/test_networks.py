from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from frl import rng, tree
from frl.networks import ACTIVATIONS, build_mlp_from_cfg, mlp, module_network, orthogonal
from tests.tolerances import tolerance


def _dot(grads, direction):
    return sum((g * d).sum() for g, d in zip(tree.leaves(grads), tree.leaves(direction), strict=True))


def _like(params, seed):
    names = dict(tree.items(params))
    keys = rng.split(rng.key(seed), len(names))
    values = [rng.normal(keys[i], tuple(p.shape), dtype=torch.float64).to(p.dtype) for i, p in enumerate(names.values())]
    return tree.unflatten(tree.structure(params), values)


def _reversed_dicts(value):
    if isinstance(value, dict):
        return {name: _reversed_dicts(value[name]) for name in reversed(list(value))}
    return tuple(_reversed_dicts(item) for item in value) if isinstance(value, tuple) else value


# ---- mlp ----


@given(
    lead=st.lists(st.integers(0, 3), max_size=3),
    hidden=st.lists(st.integers(1, 5), max_size=2),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    norm=st.booleans(),
)
def test_any_leading_dimensions_give_the_rows_of_single_calls(lead, hidden, dtype, norm):
    net = mlp(4, 3, hidden, use_layernorm=norm)
    params = net.init(rng.key(1), dtype=dtype)
    x = rng.normal(rng.key(2), (*lead, 4), dtype=torch.float64).to(dtype)
    y = net.apply(params, x)
    assert y.shape == (*lead, 3)
    assert y.dtype == dtype
    rows = [net.apply(params, row) for row in x.reshape(-1, 4)]
    expected = torch.stack(rows).reshape(y.shape) if rows else y
    # Layer normalisation divides by the spread of a few features, which can be small.
    torch.testing.assert_close(y, expected, rtol=0, atol=(100 if norm else 4) * tolerance(dtype, 16))


@pytest.mark.parametrize("norm", [False, True])
def test_rows_in_the_last_dimension(device, norm):
    net = mlp(4, 3, [8, 8], activation="tanh", last_activation="tanh", use_layernorm=norm)
    params = net.init(rng.key(1), dtype=torch.float64, device=device)
    x = rng.normal(rng.key(2), (16, 4), dtype=torch.float64).to(device)
    columns = torch.func.vmap(net.apply, in_dims=(None, -1), out_dims=-1)(params, x.T.contiguous())
    torch.testing.assert_close(columns.T, net.apply(params, x), rtol=0, atol=10 * tolerance(torch.float64, 32))


def test_rows_in_the_last_dimension_take_one_matrix_product_per_layer():
    net = mlp(4, 3, [8, 8])
    params = net.init(rng.key(1))
    lifted = torch.func.vmap(net.apply, in_dims=(None, -1), out_dims=-1)
    graph = make_fx(lifted)(params, torch.zeros(4, 16))
    calls = [str(node.target) for node in graph.graph.nodes]
    assert sum("aten.mm" in call for call in calls) == 3
    assert not any("bmm" in call for call in calls)


def test_it_equals_a_module_with_the_same_weights():
    net = mlp(3, 2, [5, 4], activation="silu", last_activation="tanh", use_layernorm=True)
    params = _like(net.init(rng.key(0), dtype=torch.float64), 3)
    module = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.SiLU(), nn.Linear(5, 4), nn.LayerNorm(4), nn.SiLU(), nn.Linear(4, 2), nn.Tanh()).double()
    weights = {}
    for i, layer in enumerate(params["layers"]):
        weights |= {f"{3 * i}.weight": layer["weight"], f"{3 * i}.bias": layer["bias"]}
        if i < 2:
            weights |= {f"{3 * i + 1}.weight": layer["norm_weight"], f"{3 * i + 1}.bias": layer["norm_bias"]}
    module.load_state_dict(weights)
    x = rng.normal(rng.key(4), (7, 3), dtype=torch.float64)
    torch.testing.assert_close(net.apply(params, x), module(x), rtol=0, atol=10 * tolerance(torch.float64, 32))


def test_gradient_by_central_differences():
    net = mlp(3, 2, [6, 5], activation="gelu", last_activation="softplus", use_layernorm=True)
    params, x = net.init(rng.key(0), dtype=torch.float64), rng.normal(rng.key(4), (7, 3), dtype=torch.float64)

    def loss(params, x):
        return (net.apply(params, x) ** 2).sum()

    direction, dx = _like(params, 5), rng.normal(rng.key(6), (7, 3), dtype=torch.float64)
    grads, gx = torch.func.grad(loss, argnums=(0, 1))(params, x)
    h = 1e-5
    ahead, behind = (loss(tree.map(lambda p, d: p + s * h * d, params, direction), x + s * h * dx) for s in (1, -1))  # noqa: B023
    torch.testing.assert_close(_dot(grads, direction) + (gx * dx).sum(), (ahead - behind) / (2 * h), rtol=1e-7, atol=1e-8)


def test_population_of_parameters():
    net = mlp(3, 2, [4], orthogonal_init=1.0)
    keys = rng.split(rng.key(0), 5)
    stacked = torch.func.vmap(net.init)(keys)
    x = rng.normal(rng.key(1), (6, 3))
    members = [net.init(key) for key in keys]
    tree.map(lambda a, b: torch.testing.assert_close(a, b, rtol=0, atol=10 * tolerance(torch.float32, 4)), stacked, tree.stack(members))
    torch.testing.assert_close(
        torch.func.vmap(net.apply, in_dims=(0, None))(stacked, x),
        torch.stack([net.apply(m, x) for m in members]),
        rtol=0,
        atol=10 * tolerance(torch.float32, 16),
    )


def test_insertion_order_of_parameters_has_no_meaning():
    net = mlp(4, 4, [4, 4], use_layernorm=True)
    params, x = _like(net.init(rng.key(1)), 2), rng.normal(rng.key(2), (5, 4))
    swapped: Any = _reversed_dicts(params)
    assert list(swapped["layers"][0]) != list(params["layers"][0])
    assert torch.equal(net.apply(swapped, x), net.apply(params, x))
    back = tree.unflatten(tree.structure(params), tree.leaves(swapped))
    assert torch.equal(net.apply(back, x), net.apply(params, x))


def test_key_paths_read_as_layers():
    names = [name for name, _ in tree.items(mlp(3, 2, [4], use_layernorm=True).init(rng.key(0)))]
    assert names == ["layers.0.bias", "layers.0.norm_bias", "layers.0.norm_weight", "layers.0.weight", "layers.1.bias", "layers.1.weight"]


def test_inputs_of_another_dtype_are_cast_to_the_weights():
    net = mlp(2, 1, [3])
    params = net.init(rng.key(0))
    assert net.apply(params, torch.ones(4, 2, dtype=torch.float64)).dtype == torch.float32
    assert torch.equal(net.apply(params, torch.ones(4, 2, dtype=torch.uint8)), net.apply(params, torch.ones(4, 2)))


def test_compiled_equals_eager():
    net = mlp(4, 3, [8], activation="tanh")
    params, x = net.init(rng.key(1)), rng.normal(rng.key(2), (4, 16))
    columns = torch.func.vmap(torch.func.grad(lambda p, x: net.apply(p, x).square().sum(), argnums=1), in_dims=(None, -1), out_dims=-1)
    torch.testing.assert_close(torch.compile(columns, backend="aot_eager", fullgraph=True)(params, x), columns(params, x), rtol=0, atol=1e-6)


# ---- activations ----


@pytest.mark.parametrize(
    ("name", "oracle"),
    [
        ("relu", F.relu),
        ("elu", F.elu),
        ("tanh", torch.tanh),
        ("gelu", F.gelu),
        ("silu", F.silu),
        ("swish", F.silu),
        ("SiLU", F.silu),
        ("softplus", F.softplus),
        ("leaky_relu", F.leaky_relu),
        ("identity", lambda x: x),
        ("none", lambda x: x),
    ],
)
def test_activations_by_name(name, oracle):
    net = mlp(1, 1, [1], activation=name, last_activation=name)
    one = {"weight": torch.ones(1, 1), "bias": torch.zeros(1)}
    x = torch.linspace(-3, 3, 13).unsqueeze(-1)
    assert torch.equal(net.apply({"layers": (one, one)}, x), oracle(oracle(x)))


def test_unknown_activation_names_the_nearest():
    with pytest.raises(ValueError, match="unknown activation 'rellu'; did you mean 'relu'"):
        mlp(2, 2, [2], activation="rellu")
    with pytest.raises(ValueError, match="unknown activation 'tahn'; did you mean 'tanh'"):
        mlp(2, 2, [2], last_activation="tahn")
    assert "elu" in ACTIVATIONS.names()


def test_an_activation_may_be_a_function():
    net = mlp(1, 1, [], last_activation=torch.sin)
    params = {"layers": ({"weight": torch.ones(1, 1), "bias": torch.zeros(1)},)}
    assert torch.equal(net.apply(params, torch.ones(1)), torch.sin(torch.ones(1)))


# ---- initialisation ----


@pytest.mark.parametrize("gains", [None, 1.0])
def test_same_key_same_bits_other_key_other_bits(device, gains):
    net = mlp(4, 3, [5, 5], orthogonal_init=gains)
    a, b, c = (net.init(rng.key(seed), device=device) for seed in (1, 1, 2))
    for (name, x), y, z in zip(tree.items(a), tree.leaves(b), tree.leaves(c), strict=True):
        assert torch.equal(x, y)
        assert x.device.type == device.type
        assert torch.equal(x, z) == (gains is not None and name.endswith("bias"))
    weights = [layer["weight"] for layer in net.init(rng.key(1))["layers"]]
    assert not torch.equal(weights[1][:3], weights[2])


@pytest.mark.parametrize("gains", [None, [1.4, 0.01]])
def test_float32_parameters_are_the_float64_ones_rounded(gains):
    net = mlp(4, 3, [5], orthogonal_init=gains)
    for narrow, wide in zip(tree.leaves(net.init(rng.key(1))), tree.leaves(net.init(rng.key(1), dtype=torch.float64)), strict=True):
        assert narrow.dtype == torch.float32
        assert torch.equal(narrow, wide.float())


def test_default_distribution_is_that_of_torch_linear():
    fan_in, fan_out = 9, 20000
    layer = mlp(fan_in, fan_out, []).init(rng.key(0), dtype=torch.float64)["layers"][0]
    bound = 1 / math.sqrt(fan_in)
    for x in (layer["weight"], layer["bias"]):
        assert x.abs().max() <= bound
        assert x.abs().max() > 0.999 * bound
        error = 5 / math.sqrt(x.numel())
        assert x.mean().abs() < error * bound
        assert (x.var() / (bound**2 / 3) - 1).abs() < error
    assert torch.corrcoef(torch.stack([layer["weight"][:, 0], layer["bias"]]))[0, 1].abs() < 0.04


@given(rows=st.integers(1, 8), columns=st.integers(1, 8), gain=st.sampled_from([0.01, 1.0, 1.414]), seed=st.integers(0, 2**32))
def test_orthogonal_matrices(rows, columns, gain, seed):
    q = orthogonal(rng.key(seed), (rows, columns), gain)
    assert q.shape == (rows, columns)
    gram = q @ q.T if rows <= columns else q.T @ q
    torch.testing.assert_close(gram, gain**2 * torch.eye(min(rows, columns), dtype=torch.float64), rtol=0, atol=1e-13)


def test_orthogonal_signs_are_free():
    # Without the sign correction of the QR decomposition a 1x1 draw would always be the same number.
    draws = torch.stack([orthogonal(rng.key(seed), (1, 1)) for seed in range(40)])
    assert draws.min() == -1
    assert draws.max() == 1


def test_a_gain_for_each_layer_and_zero_biases():
    params = mlp(6, 2, [8, 8], orthogonal_init=[1.4, 1.0, 0.01]).init(rng.key(0), dtype=torch.float64)
    for layer, gain in zip(params["layers"], [1.4, 1.0, 0.01], strict=True):
        torch.testing.assert_close(
            torch.linalg.svdvals(layer["weight"]), torch.full((min(layer["weight"].shape),), gain, dtype=torch.float64), rtol=1e-12, atol=0
        )
        assert not layer["bias"].any()


@pytest.mark.parametrize("gains", [[1.0, 1.0], [1.0] * 4])
def test_wrong_number_of_gains_names_both_numbers(gains):
    with pytest.raises(ValueError, match=f"{len(gains)} gains but the network has 3 linear layers"):
        mlp(2, 2, [4, 4], orthogonal_init=gains)


@pytest.mark.parametrize("gain", [-1.0, math.nan, math.inf, True, "1.0", [1.0, None]])
def test_bad_gains_are_refused(gain):
    with pytest.raises(ValueError, match="orthogonal_init"):
        mlp(2, 2, [4], orthogonal_init=gain)


@pytest.mark.parametrize(
    ("kwargs", "error", "text"),
    [
        ({"input_dim": 0}, ValueError, "input_dim"),
        ({"input_dim": True}, ValueError, "input_dim"),
        ({"output_dim": 2.0}, ValueError, "output_dim"),
        ({"hidden_sizes": [4, -1]}, ValueError, "hidden_sizes"),
        ({"hidden_sizes": "64"}, TypeError, "hidden_sizes"),
        ({"hidden_sizes": 64}, TypeError, "hidden_sizes"),
        ({"dropout_p": 0.1}, ValueError, "dropout_p must be 0, got 0.1: a rollout is a deterministic function"),
        ({"use_layernorm": "false"}, ValueError, "use_layernorm"),
    ],
)
def test_bad_arguments_are_refused(kwargs, error, text):
    with pytest.raises(error, match=text):
        mlp(**{"input_dim": 2, "output_dim": 2, "hidden_sizes": [4], **kwargs})


# ---- run-file block ----


def test_a_block_builds_the_same_network():
    block = {
        "type": "mlp",
        "network_cfg": {"hidden_sizes": [4], "activation": "tanh", "last_activation": "tanh", "orthogonal_init": [1.4, 0.01], "dropout_p": 0.0},
    }
    built, direct = build_mlp_from_cfg(block, 3, 2), mlp(3, 2, [4], activation="tanh", last_activation="tanh", orthogonal_init=[1.4, 0.01])
    x = rng.normal(rng.key(1), (3,))
    assert torch.equal(built.apply(built.init(rng.key(0)), x), direct.apply(direct.init(rng.key(0)), x))


@pytest.mark.parametrize(
    ("block", "error", "text"),
    [
        ([], TypeError, "mapping"),
        ({"type": "cnn", "network_cfg": {"hidden_sizes": [4]}}, ValueError, "'mlp', got 'cnn'"),
        ({"network_cfg": {"hidden_sizes": [4]}}, ValueError, "'mlp', got None"),
        ({"type": "mlp"}, TypeError, "network_cfg"),
        ({"type": "mlp", "network_cfg": {}}, ValueError, "hidden_sizes"),
        ({"type": "mlp", "network_cfg": {"hidden_sizes": [4], "activaton": "relu"}}, ValueError, "unknown key 'activaton'.*did you mean 'activation'"),
        ({"type": "mlp", "networkcfg": {}}, ValueError, "did you mean 'network_cfg'"),
        ({"type": "mlp", "network_cfg": {"hidden_sizes": [4], "dropout_p": 0.5}}, ValueError, "dropout_p"),
    ],
)
def test_bad_blocks_are_refused(block, error, text):
    with pytest.raises(error, match=text):
        build_mlp_from_cfg(block, 3, 2)


# ---- bridge from nn.Module ----


class _Counting(nn.Module):
    """Mutates a buffer at every call, in a way no layer type reveals."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)  # pyright: ignore[reportCallIssue]
        return self.linear(x)


class _Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.frozen = nn.Parameter(torch.full((2,), 3.0), requires_grad=False)
        self.register_buffer("scale", torch.tensor([2.0, 0.5]))

    def forward(self, x):
        return self.linear(x) * self.scale + self.frozen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bridge_equals_the_module(dtype):
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).to(dtype)
    net = module_network(module, input_dim=3)
    params, x = net.init(rng.key(0)), rng.normal(rng.key(1), (4, 3), dtype=torch.float64).to(dtype)
    assert sorted(params) == ["0.bias", "0.weight", "2.bias", "2.weight"]
    assert torch.equal(net.apply(params, x), module(x))
    columns = torch.func.vmap(net.apply, in_dims=(None, -1), out_dims=-1)(params, x.T)
    torch.testing.assert_close(columns.T, module(x), rtol=0, atol=10 * tolerance(dtype, 16))


def test_the_bridge_has_the_gradients_of_the_module():
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    net, x = module_network(module), rng.normal(rng.key(1), (4, 3), dtype=torch.float64)
    grads = torch.func.grad(lambda p: net.apply(p, x).square().sum())(net.init(rng.key(0)))
    module(x).square().sum().backward()
    for name, p in module.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=tolerance(torch.float64, 32), atol=1e-15)


def test_the_bridge_is_separate_from_the_module():
    module = nn.Linear(3, 2)
    net = module_network(module)
    before, x = net.init(rng.key(0)), torch.ones(3)
    y = net.apply(before, x)
    with torch.no_grad():
        module.weight.zero_()
        before["bias"].add_(1)
    after = net.init(rng.key(0))
    torch.testing.assert_close(net.apply(after, x), y, rtol=0, atol=0)
    assert not any(p.requires_grad for p in tree.leaves(after))


def test_buffers_and_frozen_parameters_are_constants_that_follow_the_parameters():
    module = _Scaled()
    net = module_network(module, input_dim=3)
    params = net.init(rng.key(0), dtype=torch.float64)
    assert sorted(params) == ["linear.bias", "linear.weight"]
    y = net.apply(params, torch.ones(4, 3))
    assert y.dtype == torch.float64
    torch.testing.assert_close(y.float(), module(torch.ones(4, 3)), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "layer",
    [nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False).eval(), nn.InstanceNorm1d(3, track_running_stats=True), nn.Dropout(0.1), nn.RReLU()],
)
def test_impure_layers_are_refused_by_name(layer):
    with pytest.raises(ValueError, match=rf"{type(layer).__name__} at '1' would .*module.eval\(\)"):
        module_network(nn.Sequential(nn.Linear(3, 3), layer))


def test_the_same_layers_are_accepted_in_eval_mode():
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.RReLU()).eval()
    x = rng.normal(rng.key(1), (4, 3))
    net = module_network(module, input_dim=3)
    assert torch.equal(net.apply(net.init(rng.key(0)), x), module(x))


def test_a_trial_finds_hidden_state_and_randomness():
    class Noisy(nn.Linear):
        def forward(self, input):
            return super().forward(input) + torch.randn(2)

    with pytest.raises(ValueError, match="mutates its buffers .*calls"):
        module_network(_Counting(), input_dim=3)
    with pytest.raises(ValueError, match="draws random numbers"):
        module_network(Noisy(3, 2), input_dim=3)
    net = module_network(_Counting())
    params = net.init(rng.key(0))
    assert torch.equal(net.apply(params, torch.ones(3)), net.apply(params, torch.ones(3)))


def test_other_things_are_not_modules():
    with pytest.raises(TypeError, match="torch.nn.Module"):
        module_network(lambda x: x)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="no shape yet"):
        module_network(nn.LazyLinear(2))

"""Networks as pairs of pure functions over explicit parameters.

A :class:`Network` is ``init(key) -> params`` and ``apply(params, x) -> y``. :func:`mlp` is the library's own network; :func:`module_network` turns any
``torch.nn.Module`` without hidden state or randomness into one. Layers are addressed by name, so the insertion order of a parameter dict has no meaning.
"""

from __future__ import annotations

import copy
import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from frl import rng
from frl.registry import Registry
from frl.types import Params
from frl.validate import require_count, require_number, require_switch

Activation = Callable[[Tensor], Tensor]


class Network(NamedTuple):
    """A pair of pure functions."""

    init: Callable[..., Params]  # (key [2], dtype=torch.float32, device=None) -> params
    apply: Callable[[Params, Tensor], Tensor]  # (params, x [..., I]) -> y [..., Oout]


def _identity(x: Tensor) -> Tensor:
    return x


ACTIVATIONS = Registry("activation")
"""Elementwise functions by case-insensitive name; ``ACTIVATIONS.register(name, fn)`` adds one, ``ACTIVATIONS.names()`` lists them."""
for _name, _fn in {
    "relu": F.relu,
    "elu": F.elu,
    "tanh": torch.tanh,
    "gelu": F.gelu,
    "silu": F.silu,
    "swish": F.silu,
    "softplus": F.softplus,
    "leaky_relu": F.leaky_relu,
    "identity": _identity,
    "none": _identity,
}.items():
    ACTIVATIONS.register(_name, _fn)


def check_keys(what: str, given: Iterable[Any], allowed: Iterable[str]) -> None:
    """Raise ``ValueError`` for the first key of ``given`` that is not in ``allowed``, with the nearest allowed one."""
    allowed = list(allowed)
    for key in given:
        if key not in allowed:
            near = difflib.get_close_matches(str(key), allowed, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown key {key!r} in {what}{hint} (known: {', '.join(allowed)})")


def _gains(orthogonal_init: Any, count: int) -> list[float] | None:
    """One gain per linear layer, or ``None`` for the default initialisation."""
    if orthogonal_init is None:
        return None
    each = isinstance(orthogonal_init, Sequence) and not isinstance(orthogonal_init, str)
    gains: list[Any] = list(orthogonal_init) if each else [orthogonal_init] * count
    gains = [require_number("orthogonal_init", gain, at_least=0.0) for gain in gains]
    if len(gains) != count:
        raise ValueError(f"orthogonal_init has {len(gains)} gains but the network has {count} linear layers")
    return gains


def orthogonal(key: Tensor, shape: tuple[int, int], gain: float = 1.0) -> Tensor:
    """A random matrix with orthonormal rows or columns (whichever are fewer), times ``gain``.

    ``Q diag(sign(diag R))`` of the QR decomposition of a standard normal matrix, which makes the distribution uniform (Haar) and the result a function of the
    key alone.

    Args:
        key: int64 [2].
        shape: (rows, columns).
        gain: common singular value.

    Returns:
        float64 [rows, columns], on the key's device.

    Source: Saxe et al. 2014, "Exact solutions to the nonlinear dynamics of learning in deep linear neural networks"; sign rule of Mezzadri 2007.
    """
    rows, columns = shape
    tall = (max(rows, columns), min(rows, columns))
    q, r = torch.linalg.qr(rng.normal(key, tall, dtype=torch.float64))
    diagonal = torch.diagonal(r, dim1=-2, dim2=-1)
    q = gain * q * torch.where(diagonal < 0, -1, 1)
    return q if rows >= columns else q.transpose(-2, -1)


def _init_linear(key: Tensor, fan_in: int, fan_out: int, gain: float | None) -> tuple[Tensor, Tensor]:
    weight_key, bias_key = rng.split(key, 2)
    if gain is not None:
        return orthogonal(weight_key, (fan_out, fan_in), gain), torch.zeros(fan_out, device=key.device)
    bound = fan_in**-0.5
    weight = rng.uniform(weight_key, (fan_out, fan_in), low=-bound, high=bound, dtype=torch.float64)
    return weight, rng.uniform(bias_key, (fan_out,), low=-bound, high=bound, dtype=torch.float64)


def _linear(layer: Mapping[str, Tensor], x: Tensor) -> Tensor:
    # Under vmap over rows, W @ x becomes one matrix product over all rows where F.linear becomes a batch of N vector products with an expanded weight.
    if x.ndim == 1:
        return layer["weight"] @ x + layer["bias"]
    return F.linear(x, layer["weight"], layer["bias"])


def mlp(
    input_dim: int,
    output_dim: int,
    hidden_sizes: Sequence[int],
    *,
    activation: str | Activation = "elu",
    last_activation: str | Activation | None = None,
    use_layernorm: bool = False,
    orthogonal_init: float | Sequence[float] | None = None,
    dropout_p: float = 0.0,
) -> Network:
    """A multilayer perceptron: ``[Linear, (LayerNorm), activation]`` for each hidden size, ``Linear``, optional ``last_activation``.

    Parameters are ``{"layers": ({"weight": [H, I], "bias": [H]}, ...)}``, with ``"norm_weight"`` and ``"norm_bias"`` [H] beside them in hidden layers when
    ``use_layernorm``. The float32 initialisation is the float64 one rounded.

    Args:
        input_dim: I, input features.
        output_dim: output features.
        hidden_sizes: sizes of the hidden layers; empty for a linear map.
        activation: a name in :data:`ACTIVATIONS` or a function; ``last_activation`` likewise.
        use_layernorm: normalise the features of each hidden layer (epsilon 1e-5) before its activation.
        orthogonal_init: one gain, or a list with one per linear layer, for orthogonal weights and zero biases. ``None`` draws weights and biases from
            ``U(-1/sqrt(fan_in), 1/sqrt(fan_in))``, as ``torch.nn.Linear`` does.
        dropout_p: only 0.

    Returns:
        A :class:`Network`: ``apply(params, x [..., I]) -> [..., output_dim]`` for any leading dimensions, in the dtype of the weights (``x`` is cast to it).
        Rows may also lie in the last dimension: ``torch.func.vmap(apply, in_dims=(None, -1), out_dims=-1)``.

    Raises:
        ValueError: for a size below 1, an unknown activation, a wrong gain or number of gains, a dropout.
        TypeError: for sizes that are not a list.
    """
    if not isinstance(hidden_sizes, Sequence) or isinstance(hidden_sizes, str):
        raise TypeError(f"hidden_sizes must be a list of integers, got {hidden_sizes!r}")
    sizes = [require_count("input_dim", input_dim), *(require_count("hidden_sizes", size) for size in hidden_sizes), require_count("output_dim", output_dim)]
    if isinstance(dropout_p, bool) or dropout_p != 0:
        raise ValueError(f"dropout_p must be 0, got {dropout_p!r}: a rollout is a deterministic function of its noise block, and dropout would draw more noise")
    require_switch("use_layernorm", use_layernorm)
    count = len(sizes) - 1
    gains = _gains(orthogonal_init, count)
    hidden_fn: Activation = activation if callable(activation) else ACTIVATIONS.get(activation)
    last_fn: Activation = _identity if last_activation is None else last_activation if callable(last_activation) else ACTIVATIONS.get(last_activation)

    def init(key: Tensor, dtype: torch.dtype = torch.float32, device: torch.device | str | None = None) -> Params:
        keys = rng.split(key, count)
        layers = []
        for i in range(count):
            weight, bias = _init_linear(keys[i], sizes[i], sizes[i + 1], None if gains is None else gains[i])
            layer = {"weight": weight.to(dtype=dtype, device=device), "bias": bias.to(dtype=dtype, device=device)}
            if use_layernorm and i < count - 1:
                layer["norm_weight"], layer["norm_bias"] = torch.ones_like(layer["bias"]), torch.zeros_like(layer["bias"])
            layers.append(layer)
        return {"layers": tuple(layers)}

    def apply(params: Params, x: Tensor) -> Tensor:
        *hidden, last = params["layers"]
        x = x.to(last["weight"].dtype)
        for layer in hidden:
            x = _linear(layer, x)
            if use_layernorm:
                x = F.layer_norm(x, x.shape[-1:], layer["norm_weight"], layer["norm_bias"])
            x = hidden_fn(x)
        return last_fn(_linear(last, x))

    return Network(init=init, apply=apply)


def build_mlp_from_cfg(cfg: Mapping[str, Any], input_dim: int, output_dim: int) -> Network:
    """:func:`mlp` from a run file's block ``{type: mlp, network_cfg: {hidden_sizes, activation, last_activation, use_layernorm, dropout_p, orthogonal_init}}``.

    Raises:
        ValueError: for another type, a missing ``hidden_sizes``, an unknown key, and whatever :func:`mlp` refuses.
        TypeError: for a block that is not a mapping.
    """
    if not isinstance(cfg, Mapping):
        raise TypeError(f"a network block must be a mapping with type and network_cfg, got {cfg!r}")
    check_keys("the network block", cfg, ("type", "network_cfg"))
    kind = cfg.get("type")
    if not isinstance(kind, str) or kind.lower() != "mlp":
        raise ValueError(f"network type must be 'mlp', got {kind!r}")
    settings = cfg.get("network_cfg")
    if not isinstance(settings, Mapping):
        raise TypeError(f"network_cfg must be a mapping, got {settings!r}")
    check_keys("network_cfg", settings, ("hidden_sizes", "activation", "last_activation", "use_layernorm", "dropout_p", "orthogonal_init"))
    if "hidden_sizes" not in settings:
        raise ValueError("network_cfg needs hidden_sizes, for example [64, 64]")
    return mlp(input_dim, output_dim, **settings)


def _check_pure(module: nn.Module) -> None:
    for name, part in module.named_modules():
        where = f"{type(part).__name__} at {name!r}" if name else type(part).__name__
        if isinstance(part, _BatchNorm) and (part.training or part.running_mean is None):
            raise ValueError(f"{where} would normalise with statistics of the batch, which couples its rows and moves its buffers: call module.eval()")
        if isinstance(part, _NormBase) and part.training and part.track_running_stats:
            raise ValueError(f"{where} would update its running statistics (buffers) at every call: call module.eval()")
        if isinstance(part, (_DropoutNd, nn.RReLU)) and part.training and getattr(part, "p", 1.0) > 0:
            raise ValueError(f"{where} would draw random numbers at every call, and a rollout is a deterministic function: call module.eval()")
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"{name!r} has no shape yet: call the lazy module once before handing it over")


def module_network(module: nn.Module, *, input_dim: int | None = None) -> Network:
    """A :class:`Network` that calls a copy of ``module`` through ``torch.func.functional_call``.

    Parameters are ``{name: tensor}`` with the module's own (dotted) names. Those with ``requires_grad=False`` and all buffers are constants of the network. An
    :func:`mlp` is faster when rows are mapped by ``vmap``: there ``nn.Linear`` on one row becomes a batch of vector products.

    Args:
        module: maps ``x [..., I]`` to ``[..., Oout]``. It is copied, so later changes to it do not reach the network.
        input_dim: I. When given, the module is tried once on a zero batch ``[2, I]`` to find buffers that it mutates and random numbers that it draws, in
            whatever kind of layer.

    Returns:
        ``init(key, dtype=None, device=None)`` returns clones of the module's own initial parameters (the key is not used; ``dtype=None`` keeps theirs).

    Raises:
        TypeError: for something else than a module.
        ValueError: for a module that draws random numbers, mutates buffers or couples the rows of a batch (dropout or BatchNorm in training mode, ...).
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"expected a torch.nn.Module, got {module!r}")
    _check_pure(module)
    own = copy.deepcopy(module)
    initial = {name: p.detach() for name, p in own.named_parameters() if p.requires_grad}
    fixed = {name: p.detach() for name, p in own.named_parameters() if not p.requires_grad}
    buffers = dict(own.named_buffers())

    if input_dim is not None:
        trial = {name: b.clone() for name, b in buffers.items()}
        versions = {name: b._version for name, b in trial.items()}
        like = next((p for p in (*initial.values(), *fixed.values(), *trial.values()) if p.is_floating_point()), torch.zeros(()))
        x = like.new_zeros(2, require_count("input_dim", input_dim))
        with torch.no_grad(), torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
            generator = torch.cuda.get_rng_state(x.device) if x.is_cuda else torch.get_rng_state()
            torch.func.functional_call(own, {**initial, **fixed, **trial}, (x,))
            after = torch.cuda.get_rng_state(x.device) if x.is_cuda else torch.get_rng_state()
        if not torch.equal(generator, after):
            raise ValueError("the module draws random numbers when called, and a rollout is a deterministic function of its noise block: call module.eval()")
        moved = [name for name, b in trial.items() if b._version != versions[name]]
        if moved:
            raise ValueError(f"the module mutates its buffers {moved} when called, so it is not a pure function: call module.eval() or keep no state")

    def init(key: Tensor, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Params:
        return {name: p.to(dtype=dtype, device=device, copy=True) for name, p in initial.items()}

    def apply(params: Params, x: Tensor) -> Tensor:
        like = next(iter(params.values()), x)
        x = x.to(like.dtype)

        def follow(c: Tensor) -> Tensor:
            return c.to(dtype=x.dtype if c.is_floating_point() else c.dtype, device=x.device)

        # Buffers go in as copies: a mutation that escaped the checks must not turn the network's constants into state.
        constants = {name: follow(c) for name, c in fixed.items()} | {name: follow(c).clone() for name, c in buffers.items()}
        return torch.func.functional_call(own, {**constants, **params}, (x,))

    return Network(init=init, apply=apply)

"""Epochs of gradient steps on the minibatches of one batch.

All steps are one time loop whose step is compiled once. The learning rate, the early stop and the decision to skip are values inside it, so that no minibatch
waits for the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from frl import compile as compiler
from frl import rng, tree
from frl.algorithms.minibatch import minibatch_indices
from frl.critic_policies import join_parameter_groups
from frl.losses import adaptive_learning_rate
from frl.optim import apply_updates, global_norm
from frl.optim.transform import clip_global_norm
from frl.parts import in_parts, part_count
from frl.scan import scan
from frl.types import Hyper, Metrics, Optimizer, Params, TrainState

_AT_ONCE = 1 << 26  # bytes of samples that are put in order by one call


def minibatch_step(
    loss: Callable[[Params, dict[str, Any], Hyper], tuple[Tensor, Metrics]],
    optimizer: Optimizer,
    groups: Callable[[Params], dict[str, Params]] | None = None,
    *,
    adaptive: bool = False,
    early_stop: bool = False,
    largest: Sequence[str] = (),
) -> Callable[[dict, dict, dict], tuple[dict, dict]]:
    """One gradient step on one minibatch, as the step of a :func:`frl.scan.scan` over minibatches.

    A minibatch comes in parts (:func:`frl.parts.in_parts`), whose losses and gradients are means over the valid samples of the part; weighted by their number
    they add up to those of the minibatch.

    Once a loss or gradient is not finite, or the KL exceeds the limit of an early stop, nothing changes any more: ``ok`` and ``stopped`` tell which.

    Args:
        loss: ``(params, samples, hyper) -> (loss, metrics)``, means over the samples that ``valid`` counts; metrics have ``loss``, and ``kl`` where
            it is used.
        optimizer: what steps.
        groups: parts whose gradients are clipped separately to ``hyper["max_grad_norm"]``; one of all without it.
        adaptive: the learning rate follows ``kl``.
        early_stop: stop at ``hyper["early_stop_kl"]``.
        largest: metrics that are maxima over samples and not means.

    Returns:
        ``step(consts, carry, x) -> (carry, metrics)``: consts are ``hyper``; the carry is ``params, opt_state, rate, ok, stopped``; each of ``x["parts"]`` has
        ``mini``, samples ``[..., S / K]``, and ``counted`` of the ``count`` valid samples of the minibatch; ``x["rest"]`` has ``count`` and ``first``
        (no step has been made).
    """

    def part(consts: dict[str, Any], carry: dict[str, Any], x: dict[str, Any]) -> tuple[Params, Metrics]:
        mini = tree.map(lambda v: v.movedim(-1, 0), x["mini"])

        def weighted(params: Params) -> tuple[Tensor, Metrics]:
            value, metrics = loss(params, mini, consts["hyper"])
            share = x["counted"].to(value.dtype) / x["count"].clamp(min=1).to(value.dtype)
            return value * share, {name: m if name in largest else m * share for name, m in metrics.items()}

        return torch.func.grad(weighted, has_aux=True)(carry["params"])

    def rest(consts: dict[str, Any], carry: dict[str, Any], x: dict[str, Tensor], results: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        hyper, params, rate = consts["hyper"], carry["params"], carry["rate"]
        grads, metrics = results[0]
        for more, told in results[1:]:
            grads = tree.map(torch.add, grads, more)
            metrics = {name: torch.maximum(m, told[name]) if name in largest else m + told[name] for name, m in metrics.items()}
        norm = global_norm(grads)
        finite = torch.isfinite(metrics["loss"]) & tree.all_finite(grads) & torch.isfinite(norm)
        # Before the first step the policies are the same, and their KL is rounding.
        kl = torch.where(x["first"], 0, metrics["kl"]) if adaptive or early_stop else torch.zeros_like(norm)
        stopped = carry["stopped"] | (kl > hyper["early_stop_kl"]) if early_stop else carry["stopped"]
        ok = carry["ok"] & (finite | stopped)
        go = ok & ~stopped & (x["count"] > 0)
        if adaptive:
            new_rate = adaptive_learning_rate(rate, kl, hyper["desired_kl"], hyper["minimum_learning_rate"], hyper["maximum_learning_rate"])
            rate = torch.where(go, new_rate, rate)
        safe = tree.map(lambda g: torch.where(go, g, 0), grads)
        clips = {name: clip_global_norm(group, hyper["max_grad_norm"])[0] for name, group in (groups(safe) if groups else {"": safe}).items()}
        clipped = join_parameter_groups(clips) if groups else clips[""]
        updates, opt_state = optimizer.update(clipped, carry["opt_state"], params, {**hyper, "learning_rate": rate})
        new = {
            "params": tree.where(go, apply_updates(params, updates), params),
            "opt_state": tree.where(go, opt_state, carry["opt_state"]),
            "rate": rate,
            "ok": ok,
            "stopped": stopped,
        }
        weight = torch.where(carry["ok"] & ~stopped, x["count"], 0)
        return new, {**metrics, "grad_norm": norm, "weight": weight, "stepped": go}

    return in_parts(part, rest)


def run_minibatches(
    step: Callable,
    state: TrainState,
    batch: dict[str, Any],
    plan: dict[str, Tensor],
    rate: Tensor,
    *,
    mode: str,
    prepare: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The last carry of :func:`minibatch_step` over all minibatches, and the metrics of each, ``[K]``.

    The samples of several epochs are put in order by one call, so that no step gathers; of as many as fit into 64 MiB, and of one at least.

    Args:
        step: see :func:`minibatch_step`.
        state: parameters, optimizer state and hyper-parameters to begin with.
        batch: tree of samples ``[count, ...]``, with ``valid``.
        plan: of :func:`plan_minibatches`.
        rate: learning rate to begin with.
        mode: a mode of :mod:`frl.compile`.
        prepare: what a whole minibatch ``[..., S]`` goes through before it is cut into parts; pass the same object again.
    """
    flag = torch.ones((), dtype=torch.bool, device=rate.device)
    carry = {"params": state.params, "opt_state": state.opt_state, "rate": rate, "ok": flag, "stopped": ~flag}
    epochs, parts, size = plan["index"].shape
    fitting = max(1, _AT_ONCE // max(1, sum(x.numel() * x.element_size() for x in tree.leaves(batch))))
    at_once = max(n for n in range(1, epochs + 1) if epochs % n == 0 and n <= fitting)
    told = []
    with torch.no_grad():
        for start in range(0, epochs, at_once):
            index, mask, first = (plan[name][start : start + at_once].flatten(0, 1) for name in ("index", "mask", "first"))
            pieces, count = _arranger(mode, prepare, part_count(size, rate.device))(batch, index, mask)
            carry, metrics = scan(step, {"hyper": state.hyper}, carry, {"parts": pieces, "rest": {"count": count, "first": first}}, mode=mode)
            told.append(metrics)
    return carry, tree.map(lambda *x: torch.cat(x), *told) if len(told) > 1 else told[0]


@functools.lru_cache(256)
def _arranger(
    mode: str, prepare: Callable[[dict[str, Any]], dict[str, Any]] | None, parts: int
) -> Callable[[dict[str, Any], Tensor, Tensor], tuple[Any, Tensor]]:
    def arrange(batch: dict[str, Any], index: Tensor, mask: Tensor) -> tuple[tuple[dict[str, Any], ...], Tensor]:
        """Minibatches ``[M, ..., S / K]`` in K parts, samples last, so that the loops over them are vectorised, and their valid samples' number ``[M]``."""
        if (more := -index.shape[-1] % parts) > 0:
            index = torch.cat([index, index[:, :1].expand(-1, more)], -1)
            mask = torch.cat([mask, mask.new_zeros(()).expand(len(mask), more)], -1)
        mini = tree.map(lambda x: x[index].movedim(1, -1), batch)
        mini = {**mini, "valid": mini["valid"] & mask}
        if prepare is not None:
            mini = prepare(mini)
        count = mini["valid"].sum(-1)
        pieces = []
        for k in range(parts):
            piece = tree.map(lambda x, k=k: x.tensor_split(parts, -1)[k], mini)
            pieces.append({"mini": piece, "counted": piece["valid"].sum(-1), "count": count})
        return tuple(pieces), count

    return compiler.jit(arrange, mode=mode)


def plan_minibatches(key: Tensor, count: int, epochs: int, parts: int) -> dict[str, Tensor]:
    """The partitions of all epochs: ``index`` and ``mask`` ``[E, M, S]``, ``first [E, M]``: no step has been made before it."""
    plan = minibatch_indices(rng.fold_in(key, torch.arange(epochs, device=key.device)), count, num_minibatches=parts)
    first = torch.arange(epochs * parts, device=key.device) == 0
    return {"index": plan.index, "mask": plan.mask, "first": first.reshape(epochs, parts)}


def mean_metrics(per_step: dict[str, Tensor]) -> Metrics:
    """Means over the minibatches that were looked at, each weighted by its samples; NaN where none was."""
    weight = per_step["weight"]

    def mean(x: Tensor) -> Tensor:
        share = weight.to(x.dtype)
        return torch.where(weight > 0, x * share, 0).sum() / share.sum()

    return {name: mean(x) for name, x in per_step.items() if name not in ("weight", "stepped")}

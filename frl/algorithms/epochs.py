"""Epochs of gradient steps on the minibatches of one batch.

All steps are one time loop whose step is compiled once. The learning rate, the early stop and the decision to skip are values inside it, so that no minibatch
waits for the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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
from frl.scan import scan
from frl.types import Hyper, Metrics, Optimizer, Params, TrainState


def minibatch_step(
    loss: Callable[[Params, dict[str, Any], Hyper], tuple[Tensor, Metrics]],
    optimizer: Optimizer,
    groups: Callable[[Params], dict[str, Params]] | None = None,
    *,
    adaptive: bool = False,
    early_stop: bool = False,
) -> Callable[[dict, dict, dict], tuple[dict, dict]]:
    """One gradient step on one minibatch, as the step of a :func:`frl.scan.scan` over minibatches.

    Once a loss or gradient is not finite, or the KL exceeds the limit of an early stop, nothing changes any more: ``ok`` and ``stopped`` tell which.

    Args:
        loss: ``(params, minibatch, hyper) -> (loss, metrics)``; the minibatch's ``valid`` says which samples count; metrics with ``kl`` where the KL is used.
        optimizer: what steps.
        groups: parts whose gradients are clipped separately to ``hyper["max_grad_norm"]``; one of all without it.
        adaptive: the learning rate follows ``kl``.
        early_stop: stop at ``hyper["early_stop_kl"]``.

    Returns:
        ``step(consts, carry, x) -> (carry, metrics)``: consts are ``hyper``; the carry is ``params, opt_state, rate, ok, stopped``; x is ``mini``, a minibatch
        ``[..., S]``, and ``first`` (no step has been made).
    """

    def step(consts: dict[str, Any], carry: dict[str, Any], x: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        hyper, params, rate, mini = consts["hyper"], carry["params"], carry["rate"], tree.map(lambda v: v.movedim(-1, 0), x["mini"])
        grads, metrics = torch.func.grad(lambda p: loss(p, mini, hyper), has_aux=True)(params)
        norm = global_norm(grads)
        finite = torch.isfinite(metrics["loss"]) & tree.all_finite(grads) & torch.isfinite(norm)
        # Before the first step the policies are the same, and their KL is rounding.
        kl = torch.where(x["first"], 0, metrics["kl"]) if adaptive or early_stop else torch.zeros_like(norm)
        stopped = carry["stopped"] | (kl > hyper["early_stop_kl"]) if early_stop else carry["stopped"]
        ok = carry["ok"] & (finite | stopped)
        go = ok & ~stopped & mini["valid"].any()
        if adaptive:
            new_rate = adaptive_learning_rate(rate, kl, hyper["desired_kl"], hyper["minimum_learning_rate"], hyper["maximum_learning_rate"])
            rate = torch.where(go, new_rate, rate)
        safe = tree.map(lambda g: torch.where(go, g, 0), grads)
        parts = {name: clip_global_norm(part, hyper["max_grad_norm"])[0] for name, part in (groups(safe) if groups else {"": safe}).items()}
        clipped = join_parameter_groups(parts) if groups else parts[""]
        updates, opt_state = optimizer.update(clipped, carry["opt_state"], params, {**hyper, "learning_rate": rate})
        new = {
            "params": tree.where(go, apply_updates(params, updates), params),
            "opt_state": tree.where(go, opt_state, carry["opt_state"]),
            "rate": rate,
            "ok": ok,
            "stopped": stopped,
        }
        weight = torch.where(carry["ok"] & ~stopped, mini["valid"].sum(), 0)
        return new, {**metrics, "grad_norm": norm, "weight": weight, "stepped": go}

    return step


def run_minibatches(
    step: Callable, state: TrainState, batch: dict[str, Any], plan: dict[str, Tensor], rate: Tensor, *, mode: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The last carry of :func:`minibatch_step` over all minibatches, and the metrics of each, ``[K]``.

    The samples of an epoch are put in order by one call, so that no step gathers.
    """
    flag = torch.ones((), dtype=torch.bool, device=rate.device)
    carry = {"params": state.params, "opt_state": state.opt_state, "rate": rate, "ok": flag, "stopped": ~flag}
    parts = []
    with torch.no_grad():
        for epoch in range(plan["index"].shape[0]):
            mini = _arranger(mode)(batch, plan["index"][epoch], plan["mask"][epoch])
            carry, metrics = scan(step, {"hyper": state.hyper}, carry, {"mini": mini, "first": plan["first"][epoch]}, mode=mode)
            parts.append(metrics)
    return carry, tree.map(lambda *x: torch.cat(x), *parts)


@functools.cache
def _arranger(mode: str) -> Callable[[dict[str, Any], Tensor, Tensor], dict[str, Any]]:
    def arrange(batch: dict[str, Any], index: Tensor, mask: Tensor) -> dict[str, Any]:
        """The minibatches of an epoch, ``[M, ..., S]``: samples last, so that the loops over them are vectorised."""
        mini = tree.map(lambda x: x[index].movedim(1, -1), batch)
        return {**mini, "valid": mini["valid"] & mask}

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

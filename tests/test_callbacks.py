"""Callbacks: when they are called, what they see, and that what they see stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frl.callbacks import Callback, Event, Watchers
from frl.checkpoint import read_checkpoint
from frl.evaluate import EvaluationResult
from frl.run import train_from_config
from frl.train import LoopConfig, train
from tests.test_train import STEPS, counting, first_state, scoring
from tests.tiny_runs import HORIZON, ROWS, final_state, same_bits, tiny


def watched(config: LoopConfig, *callbacks: Any, values: list[float] | None = None) -> Any:
    evaluate = None if values is None else scoring(values)
    return train(counting(), first_state(), config, evaluate=evaluate, callbacks=callbacks)


# ---- when ----


@given(every=st.integers(1, 5), updates=st.integers(1, 9), start=st.integers(0, 4))
def test_every_so_many_updates_of_the_run(every: int, updates: int, start: int):
    seen: list[int] = []
    state = first_state(updates=start, env_steps=start * STEPS)
    callback = Callback(function=lambda event: seen.append(event.num_updates), every=every)
    train(counting(), state, LoopConfig(total_updates=start + updates), callbacks=[callback])
    assert seen == [n for n in range(start + 1, start + updates + 1) if n % every == 0]


@given(every=st.integers(1, 40), updates=st.integers(1, 9))
def test_every_so_many_steps(every: int, updates: int):
    seen: list[int] = []
    watched(LoopConfig(total_updates=updates), Callback(function=lambda event: seen.append(event.global_step), every_steps=every))
    assert seen == [n * STEPS for n in range(1, updates + 1) if n * STEPS // every > (n - 1) * STEPS // every]


def test_after_evaluations():
    seen: list[tuple[int, float]] = []
    config = LoopConfig(total_updates=6, eval_frequency_steps=STEPS)
    last = Callback(function=lambda event: seen.append((event.num_updates, event.metrics["eval/avg_reward"])), on="evaluation", every=2)
    watched(config, last, values=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    assert seen == [(2, 2.0), (4, 4.0), (6, 6.0)]


def test_a_plain_function_sees_every_update_and_the_order_is_that_of_the_list():
    seen: list[tuple[str, int]] = []
    watched(LoopConfig(total_updates=2), lambda event: seen.append(("a", event.num_updates)), lambda event: seen.append(("b", event.num_updates)))
    assert seen == [("a", 1), ("b", 1), ("a", 2), ("b", 2)]
    assert not Watchers()


# ---- what ----


def test_what_is_shown():
    events: list[Event] = []
    config = LoopConfig(total_updates=2, eval_frequency_steps=2 * STEPS)
    watched(config, events.append, Callback(function=events.append, on="evaluation"), values=[3.0])
    first, second, evaluation = events
    assert [event.kind for event in events] == ["update", "update", "evaluation"]
    assert (first.num_updates, first.global_step, second.global_step) == (1, STEPS, 2 * STEPS)
    assert float(first.state.params["w"]) == 2.0
    assert first.metrics["train/loss"] == 1.0
    assert first.result is second.result is None
    assert evaluation.metrics == {"eval/avg_reward": 3.0, "eval/episodes": 5.0}
    assert isinstance(evaluation.result, EvaluationResult)
    assert float(evaluation.state.params["w"]) == 3.0


def test_what_a_callback_puts_into_its_containers_does_not_reach_the_run():
    def meddle(event: Event) -> None:
        event.state.params["w"] = torch.tensor(99.0)
        event.state.counters.clear()
        event.metrics.clear()

    state, loop = watched(LoopConfig(total_updates=3), meddle)
    assert float(state.params["w"]) == 4.0
    assert [record["train/loss"] for record in loop.train_history] == pytest.approx([1.0, 1 / 2, 1 / 3])


def test_a_tensor_changed_in_place_is_an_error_that_names_it():
    def spoil(event: Event) -> None:
        event.state.params["w"].add_(1.0)
        event.state.counters["updates"].zero_()

    with pytest.raises(RuntimeError, match=r"spoil changed the training state in place: params\.w, counters\.updates"):
        watched(LoopConfig(total_updates=3), spoil)


def test_what_a_callback_raises_ends_the_run_and_its_state_is_saved(tmp_path: Path):
    def fail(event: Event) -> None:
        if event.num_updates == 3:
            raise LookupError("no such thing")

    with pytest.raises(LookupError, match="no such thing"):
        train_from_config(tiny(tmp_path, iterations=5), callbacks=[fail])
    (directory,) = (tmp_path / "outputs").iterdir()
    assert read_checkpoint(directory / "checkpoints" / f"tiny_step_{3 * HORIZON * ROWS}.safetensors")[1]["loop"]["num_updates"] == 3
    assert '"status": "failed"' in (directory / "summary.json").read_text()
    resumed = train_from_config(tiny(tmp_path, iterations=5), resume="latest", run=directory)
    assert same_bits(final_state(resumed), final_state(train_from_config(tiny(tmp_path, iterations=5))))


def test_watching_changes_nothing(tmp_path: Path):
    options: dict[str, Any] = {"iterations": 3, "enable_eval": True, "eval_freq": 8}
    plain = train_from_config(tiny(tmp_path, **options))
    seen = train_from_config(tiny(tmp_path, **options), callbacks=[lambda event: event.state.params, Callback(function=print, on="evaluation")])
    assert same_bits(final_state(plain), final_state(seen))


# ---- refusals ----


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"function": 3}, "function of a callback must be callable, got 3"),
        ({"on": "eval"}, "on must be one of 'update', 'evaluation', got 'eval'"),
        ({"every": 0}, "every must be an integer of at least 1, got 0"),
        ({"every": True}, "every must be an integer"),
        ({"every_steps": 1.5}, "every_steps must be an integer"),
        ({"every": 2, "every_steps": 3}, "not both"),
    ],
)
def test_refused(options: dict[str, Any], text: str):
    with pytest.raises(ValueError, match=text):
        Callback(**{"function": print, **options})


def test_no_callback_at_all_is_refused_before_anything_is_written(tmp_path: Path):
    with pytest.raises(ValueError, match="callable"):
        train_from_config(tiny(tmp_path), callbacks=["log"])  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "outputs").exists()

"""The training loop by itself, around an algorithm that only counts: budgets, cadence, the best state, records, and a loop that is continued."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from frl import compile as compiler
from frl import train as rooms
from frl import tree
from frl.evaluate import EvaluationResult
from frl.train import LoopConfig, LoopState, metrics_to_host, train
from frl.types import Algorithm, TrainState

STEPS = 8  # env steps of an update


def first_state(**counters: int) -> TrainState:
    values = {"updates": 0, "successful_updates": 0, "skipped_updates": 0, "env_steps": 0, **counters}
    return TrainState(
        params={"w": torch.tensor(1.0)},
        opt_state=(),
        norm_state=(),
        env_state=(),
        key=torch.tensor([0, 0]),
        hyper={},
        counters={name: torch.tensor(value) for name, value in values.items()},
        metrics={},
        extra={},
    )


def counting(*, bad: tuple[int, ...] = (), excessive: tuple[int, ...] = ()) -> Algorithm:
    """An algorithm whose parameter counts the updates that were not skipped; ``bad`` and ``excessive`` name skipped ones."""

    def collect(state: TrainState) -> tuple[TrainState, Any]:
        return state._replace(key=state.key + 1), ()

    def update(state: TrainState, rollout: Any) -> TrainState:
        number = int(state.counters["updates"]) + 1
        skipped = number in bad or number in excessive
        added = {"updates": 1, "successful_updates": not skipped, "skipped_updates": skipped, "env_steps": STEPS}
        metrics = {
            "loss": torch.tensor(math.nan if number in bad else 1.0 / number),
            "skipped_update": torch.tensor(float(skipped)),
            "skipped_excessive_gradient": torch.tensor(float(number in excessive)),
            "episode_reward_avg_100": torch.tensor(math.nan if number == 1 else float(number)),
            "episode_length_avg_100": torch.tensor(math.nan if number == 1 else 5.0),
        }
        params = state.params if skipped else {"w": state.params["w"] + 1}
        return state._replace(params=params, counters={name: x + added[name] for name, x in state.counters.items()}, metrics=metrics)

    return Algorithm(init=lambda key: first_state(), collect=collect, update=update)


def scoring(values: list[float], name: str = "eval/avg_reward", calls: list[Any] | None = None) -> Callable[..., EvaluationResult]:
    """An evaluation that finds ``values`` one after the other."""
    left = iter(values)

    def evaluate(params: Any, norm_state: Any, *, num_episodes: int, seed: int) -> EvaluationResult:
        if calls is not None:
            calls.append((params, norm_state, num_episodes, seed))
        none = np.zeros(0)
        return EvaluationResult(
            metrics={name: next(left), "eval/episodes": float(num_episodes)}, returns=none, lengths=none, rows=none, truncated=none, success=None
        )

    return evaluate


# ---- decisions ----


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {"total_updates": 1, "total_timesteps": 8},
        {"total_updates": -1},
        {"total_timesteps": -1},
        {"total_updates": True},
        {"total_updates": 1.0},
        {"total_updates": 1, "eval_frequency_steps": -1},
        {"total_updates": 1, "save_frequency_updates": -1},
        {"total_updates": 1, "save_frequency_steps": 1.5},
        {"total_updates": 1, "save_frequency_seconds": math.nan},
        {"total_updates": 1, "stop_after_updates": 0},
        {"total_updates": 1, "num_eval_episodes": 0},
        {"total_updates": 1, "num_eval_episodes": True},
        {"total_updates": 1, "log_frequency_updates": 0},
        {"total_updates": 1, "best_eval_mode": "most"},
    ],
    ids=str,
)
def test_refused_decisions(bad: dict[str, Any]):
    with pytest.raises(ValueError, match=next(reversed(bad), "total_updates")):
        LoopConfig(**bad)


def test_decisions_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        LoopConfig(total_updates=1).total_updates = 2  # pyright: ignore[reportAttributeAccessIssue]


# ---- budgets ----


def test_nothing_to_do():
    start = first_state()
    for config in (LoopConfig(total_updates=0), LoopConfig(total_timesteps=0)):
        state, loop = train(counting(), start, config)
        assert state is start
        assert (loop.num_updates, loop.global_step, loop.train_history) == (0, 0, [])


@pytest.mark.parametrize(("timesteps", "updates"), [(1, 1), (8, 1), (9, 2), (27, 4), (32, 4)])
def test_a_step_budget_is_met_by_whole_updates(timesteps: int, updates: int):
    _, loop = train(counting(), first_state(), LoopConfig(total_timesteps=timesteps))
    assert (loop.num_updates, loop.global_step) == (updates, updates * STEPS)


def test_budgets_count_what_the_state_already_had():
    state, loop = train(counting(), first_state(updates=3, env_steps=24), LoopConfig(total_updates=5))
    assert (loop.num_updates, loop.global_step) == (5, 40)
    assert int(state.counters["updates"]) == 5
    assert [record["num_updates"] for record in loop.train_history] == [4, 5]
    done, _ = train(counting(), state, LoopConfig(total_timesteps=40))
    assert done is state


def test_skipped_updates_count_as_updates():
    state, loop = train(counting(bad=(2,), excessive=(3,)), first_state(), LoopConfig(total_updates=4))
    assert (loop.num_updates, loop.skipped_updates) == (4, 2)
    assert float(state.params["w"]) == 3.0


def test_the_start_state_is_left_as_it_was():
    start = first_state()
    before = [x.clone() for x in tree.leaves(start)]
    state, _ = train(counting(), start, LoopConfig(total_updates=3))
    assert all(torch.equal(a, b) for a, b in zip(before, tree.leaves(start), strict=True))
    assert float(state.params["w"]) == 4.0


@pytest.mark.parametrize("budget", [{"total_updates": 9}, {"total_timesteps": 9 * STEPS}])
def test_stopping_after_so_many_updates_of_this_call(budget: dict[str, int]):
    config = LoopConfig(**budget, stop_after_updates=2)
    state, loop = first_state(), None
    for reached in (2, 4, 6, 8, 9, 9):
        state, loop = train(counting(), state, config, loop=loop)
        assert loop.num_updates == reached
        assert config.reached(loop) == (reached == 9)


def test_asked_to_stop_the_loop_ends_after_the_update_and_what_is_due_at_it():
    asked: list[int] = []
    seen: dict[str, list[int]] = {"record": [], "save": []}

    def stop() -> bool:
        asked.append(1)
        return len(asked) == 4

    config = LoopConfig(total_updates=9, eval_frequency_steps=2 * STEPS, save_frequency_updates=4, log_frequency_updates=5)
    state, loop = train(
        counting(),
        first_state(),
        config,
        evaluate=scoring([1.0, 1.0]),
        stop=stop,
        on_record=lambda values, step: seen["record"].append(step // STEPS),
        on_save=lambda state, loop, kind: seen["save"].append(loop.num_updates),
    )
    assert (loop.num_updates, int(state.counters["updates"])) == (4, 4)
    assert [entry["global_step"] for entry in loop.eval_history] == [2 * STEPS, 4 * STEPS]
    assert seen == {"record": [2, 4, 4], "save": [2, 4]}


# ---- records ----


def test_records():
    records: list[tuple[dict[str, float], int]] = []
    _, loop = train(counting(), first_state(), LoopConfig(total_updates=2), on_record=lambda values, step: records.append((values, step)))
    first, last = loop.train_history
    assert set(last) == {
        *("global_step", "num_updates", "charts/SPS", "charts/episode_reward_avg_100", "charts/episode_length_avg_100"),
        *("train/loss", "train/skipped_update", "train/skipped_excessive_gradient"),
    }
    assert (first["global_step"], first["num_updates"], last["global_step"], last["num_updates"]) == (8, 1, 16, 2)
    assert math.isnan(first["charts/episode_reward_avg_100"])
    assert math.isnan(first["charts/episode_length_avg_100"])
    assert (last["charts/episode_reward_avg_100"], last["charts/episode_length_avg_100"], last["train/loss"]) == (2.0, 5.0, 0.5)
    assert loop.last_train_metrics == {name: value for name, value in last.items() if name.startswith("train/")}
    assert [step for _, step in records] == [8, 16]
    assert records[1][0] == {name: value for name, value in last.items() if name != "global_step"}


def test_the_log_may_be_thinned_but_has_the_last_update():
    records: list[int] = []
    train(counting(), first_state(), LoopConfig(total_updates=7, log_frequency_updates=3), on_record=lambda values, step: records.append(step // STEPS))
    assert records == [3, 6, 7]


def test_every_update_is_shown():
    seen: list[tuple[float, int]] = []
    train(counting(), first_state(), LoopConfig(total_updates=3), on_update=lambda state, loop: seen.append((float(state.params["w"]), loop.num_updates)))
    assert seen == [(2.0, 1), (3.0, 2), (4.0, 3)]


def test_speed_leaves_out_updates_that_compile(monkeypatch: pytest.MonkeyPatch):
    inner, calls = counting(), []

    def collect(state: TrainState) -> tuple[TrainState, Any]:
        calls.append(state)
        return inner.collect(state)

    # The first update compiles a graph.
    monkeypatch.setattr(compiler, "graph_count", lambda: min(len(calls), 1))
    _, loop = train(inner._replace(collect=collect), first_state(), LoopConfig(total_updates=3))
    assert loop.steady_steps == 2 * STEPS
    assert loop.steps_per_second == loop.steady_steps / loop.steady_seconds
    assert math.isnan(LoopState().steps_per_second)
    assert math.isnan(loop.train_history[0]["charts/SPS"])


def test_metrics_come_to_the_host_as_floats():
    metrics = {"a": torch.tensor(0.1, dtype=torch.float64), "b": torch.tensor(3), "c": torch.tensor(True), "d": torch.tensor(math.nan), "e": torch.tensor(2.0)}
    host = metrics_to_host(metrics)
    assert list(host) == list(metrics)
    assert all(type(value) is float for value in host.values())
    assert (host["a"], host["b"], host["c"], host["e"]) == (0.1, 3.0, 1.0, 2.0)
    assert math.isnan(host["d"])
    assert metrics_to_host({}) == {}


# ---- updates that are not finite ----


def test_a_skipped_update_can_be_an_error():
    config = LoopConfig(total_updates=5, skip_nonfinite_updates=False)
    start, last = first_state(), []
    with pytest.raises(FloatingPointError, match="update 3"):
        train(counting(bad=(3,)), start, config, on_update=lambda state, loop: last.append(state))
    assert [float(state.params["w"]) for state in last] == [2.0, 3.0]
    state, loop = train(counting(excessive=(3,)), start, config)
    assert (loop.skipped_updates, float(state.params["w"])) == (1, 5.0)


# ---- evaluation and the best state ----


@given(frequency=st.integers(1, 40), updates=st.integers(1, 12), start=st.integers(0, 5))
def test_evaluations_are_due_at_multiples(frequency: int, updates: int, start: int):
    calls: list[Any] = []
    state = first_state(updates=start, env_steps=start * STEPS)
    config = LoopConfig(total_updates=start + updates, eval_frequency_steps=frequency)
    _, loop = train(counting(), state, config, evaluate=scoring([0.0] * updates, calls=calls))
    steps = [(start + i) * STEPS for i in range(updates + 1)]
    expected = [b for a, b in zip(steps, steps[1:], strict=False) if b // frequency > a // frequency]
    assert [entry["global_step"] for entry in loop.eval_history] == expected
    assert len(calls) == len(expected)
    assert loop.next_eval_step == (steps[-1] // frequency + 1) * frequency


def test_every_evaluation_has_the_same_seed_and_the_state_of_its_update():
    calls: list[Any] = []
    records: list[tuple[dict[str, float], int]] = []
    config = LoopConfig(total_updates=4, eval_frequency_steps=16, num_eval_episodes=3, eval_seed=77)
    evaluate = scoring([1.0, 2.0], calls=calls)
    _, loop = train(counting(), first_state(), config, evaluate=evaluate, on_record=lambda values, step: records.append((values, step)))
    assert [(float(params["w"]), episodes, seed) for params, _, episodes, seed in calls] == [(3.0, 3, 77), (5.0, 3, 77)]
    assert loop.eval_history == [
        {"global_step": 16, "eval/avg_reward": 1.0, "eval/episodes": 3.0},
        {"global_step": 32, "eval/avg_reward": 2.0, "eval/episodes": 3.0},
    ]
    assert loop.last_eval_metrics == {"eval/avg_reward": 2.0, "eval/episodes": 3.0}
    assert ({"eval/avg_reward": 1.0, "eval/episodes": 3.0}, 16) in records


@pytest.mark.parametrize("number", [np.float64, np.float32, np.int64, torch.tensor])
def test_what_the_loop_remembers_of_an_evaluation_is_plain(number: Any):
    """Numbers of numpy in a saved state make safe loaders refuse it, or its JSON part impossible to write."""
    saved: list[str] = []
    config = LoopConfig(total_updates=2, eval_frequency_steps=8)
    on_save = lambda state, loop, reason: saved.append(json.dumps([loop.last_eval_metrics, loop.eval_history, loop.best_eval_value]))
    _, loop = train(counting(), first_state(), config, evaluate=scoring([number(1), number(2)]), on_save=on_save)
    assert {type(value) for value in (*loop.last_eval_metrics.values(), loop.best_eval_value)} == {float}
    assert json.loads(saved[-1])[2] == 2.0


def test_no_evaluation_without_a_frequency_or_an_evaluator():
    for config, evaluate in ((LoopConfig(total_updates=3), scoring([])), (LoopConfig(total_updates=3, eval_frequency_steps=8), None)):
        _, loop = train(counting(), first_state(), config, evaluate=evaluate)
        assert (loop.eval_history, loop.best_eval_value, loop.last_eval_metrics) == ([], None, {})


scores = st.lists(st.sampled_from([math.nan, math.inf, -math.inf, -2.0, -1.0, 0.0, 1.0, 1.5]), min_size=1, max_size=8)


@given(values=scores, mode=st.sampled_from(["max", "min"]), periodic=st.integers(0, 3))
def test_the_best_state(values: list[float], mode: str, periodic: int):
    saves: list[tuple[str, int, float | None]] = []
    config = LoopConfig(total_updates=len(values), eval_frequency_steps=STEPS, best_eval_mode=mode, save_frequency_updates=periodic)
    _, loop = train(
        counting(),
        first_state(),
        config,
        evaluate=scoring(values),
        on_save=lambda state, loop, kind: saves.append((kind, int(state.counters["updates"]), loop.best_eval_value)),
    )
    best: float | None = None
    at, expected = None, []
    for number, value in enumerate(values, start=1):
        better = math.isfinite(value) and (best is None or (value > best if mode == "max" else value < best))
        if better:
            best, at = value, number
            expected.append(("best", number, value))
        elif periodic and number % periodic == 0:
            expected.append(("periodic", number, best))
    assert loop.best_eval_value == best
    assert loop.best_global_step == (None if at is None else at * STEPS)
    assert saves == expected
    if at is None:
        assert loop.best_state is None
    else:
        assert loop.best_state is not None
        assert int(loop.best_state.counters["updates"]) == at


def test_a_metric_of_another_name_never_makes_a_best():
    config = LoopConfig(total_updates=2, eval_frequency_steps=8, best_eval_metric="eval/success_rate")
    _, loop = train(counting(), first_state(), config, evaluate=scoring([1.0, 2.0]))
    assert loop.best_eval_value is None
    _, loop = train(counting(), first_state(), config, evaluate=scoring([1.0, 2.0], name="eval/success_rate"))
    assert loop.best_eval_value == 2.0


def test_periodic_saves():
    saves: list[tuple[str, int]] = []
    config = LoopConfig(total_updates=7, save_frequency_updates=3)
    train(counting(), first_state(), config, on_save=lambda state, loop, kind: saves.append((kind, loop.num_updates)))
    assert saves == [("periodic", 3), ("periodic", 6)]


@pytest.mark.parametrize(("steps", "expected"), [(8, [1, 2, 3, 4, 5, 6]), (20, [3, 5]), (16, [2, 4, 6]), (100, [])])
def test_saves_by_environment_steps(steps: int, expected: list[int]):
    saves: list[int] = []
    config = LoopConfig(total_updates=6, save_frequency_steps=steps)
    train(counting(), first_state(), config, on_save=lambda state, loop, kind: saves.append(loop.num_updates))
    assert saves == expected


def test_saves_by_the_clock_count_from_the_last_save_of_any_kind(monkeypatch: pytest.MonkeyPatch):
    saves: list[tuple[str, int]] = []
    now = [0.0]
    monkeypatch.setattr(rooms.time, "monotonic", lambda: now[0])

    def tick(state: TrainState, loop: LoopState) -> None:
        now[0] = 10.0 * loop.num_updates

    config = LoopConfig(total_updates=8, save_frequency_seconds=25.0, eval_frequency_steps=4 * STEPS)
    hooks: dict[str, Any] = {"evaluate": scoring([1.0, 2.0]), "on_update": tick, "on_save": lambda state, loop, kind: saves.append((kind, loop.num_updates))}
    train(counting(), first_state(), config, **hooks)
    assert saves == [("periodic", 3), ("best", 4), ("periodic", 7), ("best", 8)]


# ---- a loop that is continued ----


def remembered(loop: LoopState) -> dict[str, Any]:
    """All but the timing and the state in memory, through JSON as a checkpoint stores it."""
    left_out = ("steady_seconds", "steady_steps", "best_state")
    values = {field.name: getattr(loop, field.name) for field in dataclasses.fields(loop) if field.name not in left_out}
    return json.loads(json.dumps(values).replace("NaN", "null"))


def untimed(loop: dict[str, Any]) -> dict[str, Any]:
    return {**loop, "train_history": [{k: v for k, v in record.items() if k != "charts/SPS"} for record in loop["train_history"]]}


@given(values=st.lists(st.sampled_from([math.nan, -1.0, 0.0, 1.0, 2.0]), min_size=2, max_size=8), data=st.data())
def test_continued_equals_uninterrupted(values: list[float], data: st.DataObject):
    cut = data.draw(st.integers(1, len(values) - 1))
    frequency = data.draw(st.integers(STEPS, 3 * STEPS))
    config = LoopConfig(total_updates=len(values), eval_frequency_steps=frequency)
    _, whole = train(counting(), first_state(), config, evaluate=scoring(values))
    evaluate = scoring(values)
    state, loop = train(counting(), first_state(), dataclasses.replace(config, total_updates=cut), evaluate=evaluate)
    _, both = train(counting(), state, config, evaluate=evaluate, loop=loop)
    assert untimed(remembered(both)) == untimed(remembered(whole))


def test_a_loop_saved_with_a_best_state_continues_like_the_others():
    saved: list[LoopState] = []
    states: list[TrainState] = []

    def on_save(state: TrainState, loop: LoopState, kind: str) -> None:
        saved.append(dataclasses.replace(loop, train_history=list(loop.train_history), eval_history=list(loop.eval_history)))
        states.append(state)

    config = LoopConfig(total_updates=6, eval_frequency_steps=16)
    _, whole = train(counting(), first_state(), config, evaluate=scoring([1.0, 0.5, 0.25]), on_save=on_save)
    assert [loop.num_updates for loop in saved] == [2]
    _, resumed = train(counting(), states[0], config, evaluate=scoring([0.5, 0.25, 0.0, 0.0]), loop=saved[0])
    assert [entry["global_step"] for entry in resumed.eval_history] == [entry["global_step"] for entry in whole.eval_history] == [16, 32, 48]


def test_a_continued_loop_may_evaluate_more_often():
    state, loop = train(counting(), first_state(), LoopConfig(total_updates=1, eval_frequency_steps=32), evaluate=scoring([]))
    _, loop = train(counting(), state, LoopConfig(total_updates=4, eval_frequency_steps=8), evaluate=scoring([0.0] * 3), loop=loop)
    assert [entry["global_step"] for entry in loop.eval_history] == [16, 24, 32]

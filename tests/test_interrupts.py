"""Ctrl-C and SIGTERM: the run saves and can be resumed, the second signal ends it, and handlers are put back."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from frl.callbacks import Event
from frl.config import parse_run_config, write_yaml
from frl.interrupts import Interrupted, Interrupts
from frl.run import train_from_config
from tests.processes import ended, kill, send, start, wait_for
from tests.tiny_runs import directories, final_state, mapping, same_bits, tiny, untimed, without_nan

BOTH = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
OPTIONS: dict[str, Any] = {"iterations": 12, "enable_eval": True, "eval_freq": 40, "normalize_observations": True, "imports": ["tests.tiny_runs"]}


def env(nap: float) -> dict[str, Any]:
    """An environment in which an update takes as long as a signal needs to come."""
    return {"name": "aged_double_integrator", "cfg": {"max_episode_steps": 3, "nap": nap}}


pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")


def command(path: str) -> None:
    """Target: the command line, with its exit code."""
    from frl.cli import main

    sys.exit(main(["train", path, "--quiet"]))


def blocked(config: dict[str, Any]) -> None:
    """Target: a run that never comes out of its second update's callback."""

    def sleep(event: Event) -> None:
        if event.num_updates == 2:
            time.sleep(600)

    train_from_config(parse_run_config(config), callbacks=[sleep])


def lines(folder: Path) -> int:
    return sum(len(file.read_text().splitlines()) for file in folder.glob("outputs/*/metrics.jsonl"))


@BOTH
@pytest.mark.filterwarnings("ignore:the run file differs")
def test_a_signal_saves_and_leaves_a_run_that_can_be_resumed(tmp_path: Path, number: signal.Signals):
    whole = train_from_config(tiny(tmp_path / "whole", env=env(0.0), **OPTIONS))
    path = tmp_path / "run.yaml"
    write_yaml(path, mapping(tmp_path, env=env(0.05), **OPTIONS))
    process = start(command, str(path))
    wait_for(lambda: lines(tmp_path) >= 3, process)
    send(process, number)
    assert ended(process) == {signal.SIGINT: 130, signal.SIGTERM: 143}[number]
    (directory,) = directories(tmp_path)
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert 3 <= summary["num_updates"] < 12
    assert Path(summary["latest_checkpoint_path"]).is_file()
    resumed = train_from_config(path, resume="latest", run=directory, overrides=["trainer.learning_env.cfg.nap=0"])
    assert resumed["status"] == "finished"
    assert same_bits(final_state(resumed), final_state(whole))
    assert untimed(resumed["train_history"]) == untimed(whole["train_history"])
    assert without_nan(resumed["eval_history"]) == without_nan(whole["eval_history"])


@BOTH
def test_a_second_signal_ends_at_once(tmp_path: Path, number: signal.Signals):
    process = start(blocked, mapping(tmp_path, iterations=9))
    try:
        wait_for(lambda: lines(tmp_path) >= 2, process)
        send(process, number)
        process.join(0.5)
        assert process.exitcode is None  # it waits for the end of the update
        send(process, number)
        assert ended(process) == -number
    finally:
        kill(process)


def test_in_python_the_interrupt_is_raised_after_everything_was_saved(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    before = signal.getsignal(signal.SIGINT)

    def press(event: Event) -> None:
        if event.num_updates == 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt) as caught:
        train_from_config(tiny(tmp_path, iterations=5, **{k: v for k, v in OPTIONS.items() if k != "iterations"}), callbacks=[press])
    assert signal.getsignal(signal.SIGINT) is before
    interrupt = caught.value
    assert isinstance(interrupt, Interrupted)
    assert (interrupt.signum, interrupt.exit_code) == (signal.SIGINT, 130)
    # The signal comes after the question whether to stop: the next update is the last.
    assert interrupt.summary["num_updates"] in (2, 3)
    assert interrupt.summary["status"] == "interrupted"
    stored = json.loads((Path(interrupt.summary["run_directory"]) / "summary.json").read_text())
    assert stored["latest_checkpoint_path"] == interrupt.summary["latest_checkpoint_path"]
    assert "SIGINT" in str(interrupt)
    assert str(interrupt.summary["run_directory"]) in str(interrupt)
    assert "once more ends at once" in capfd.readouterr().err


def test_an_error_after_a_signal_is_taken_for_its_consequence(tmp_path: Path):
    """Ctrl-C reaches the workers of an environment and the compiler too."""

    def press(event: Event) -> None:
        if event.num_updates == 2:
            signal.raise_signal(signal.SIGINT)
            raise BrokenPipeError("a worker has gone")

    with pytest.raises(Interrupted) as caught:
        train_from_config(tiny(tmp_path, iterations=5), callbacks=[press])
    assert isinstance(caught.value.__cause__, BrokenPipeError)
    summary = caught.value.summary
    assert (summary["status"], summary["num_updates"], summary["error"]) == ("interrupted", 2, "BrokenPipeError: a worker has gone")
    assert train_from_config(tiny(tmp_path, iterations=5), resume="latest", run=summary["run_directory"])["num_updates"] == 5


def test_a_run_that_reaches_its_budget_anyway_is_finished(tmp_path: Path):
    def press(event: Event) -> None:
        if event.num_updates == 2:
            signal.raise_signal(signal.SIGTERM)

    assert train_from_config(tiny(tmp_path, iterations=2), callbacks=[press])["status"] == "finished"


def test_handlers_are_put_back_and_ignored_signals_stay_ignored():
    own = lambda *_: None
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGINT, own)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        with Interrupts() as interrupts:
            assert signal.getsignal(signal.SIGINT) is not own
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
            signal.raise_signal(signal.SIGTERM)
            assert not interrupts()
        assert signal.getsignal(signal.SIGINT) is own
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_outside_the_main_thread_signals_are_left_alone(tmp_path: Path):
    before, found = signal.getsignal(signal.SIGINT), []

    def run() -> None:
        found.append(train_from_config(tiny(tmp_path, iterations=1))["status"])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == ["finished"]
    assert signal.getsignal(signal.SIGINT) is before

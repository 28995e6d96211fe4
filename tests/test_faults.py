"""Faults: a run is killed at random instants and goes on, checkpoint files are cut, flipped and exchanged, disks fill up, numbers stop being finite.

Nothing may be lost and nothing wrong may be loaded in silence: whatever the kills, the run ends with every bit of the run that was never disturbed.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from frl import rng, tree
from frl.build import build_run
from frl.callbacks import Event
from frl.checkpoint import CheckpointError, read_checkpoint
from frl.config import RunConfig, parse_run_config
from frl.envs.double_integrator import double_integrator
from frl.envs.env import Env
from frl.envs.registry import register_learning_env
from frl.resume import SavedRun
from frl.run import train_from_config
from frl.run_directory import MANIFEST
from frl.train import train
from frl.types import Algorithm, Outcome, TrainState
from tests.processes import ended, kill, start, train_in_process, wait_for
from tests.tiny_runs import HORIZON, ROWS, directories, final_state, mapping, same_bits, saved_state, strict_json, tiny, untimed, without_nan

# ---- SIGKILL ----

BUDGET = 20
LIVELY: dict[str, Any] = {
    **{"iterations": BUDGET, "save_frequency_updates": 1, "normalize_observations": True, "enable_eval": True, "eval_freq": 5 * HORIZON * ROWS},
    **{"final_eval_episodes": 2, "keep_checkpoints": 2, "imports": ["tests.tiny_runs"]},
}


def train_on_a_slow_disk(config: dict[str, Any], resume: str | None, nap: float, answer: str) -> None:
    """Target: a run whose saves take up to ``nap`` seconds at every sync, so that a kill often falls into one."""
    fsync, draw = os.fsync, random.Random()

    def slow(handle: int) -> None:
        time.sleep(draw.random() * nap)
        fsync(handle)
        time.sleep(draw.random() * nap)

    os.fsync = slow
    train_in_process(config, {"resume": "latest", "run": resume} if resume else {}, answer)


def newest_manifest(folder: Path) -> Path | None:
    return max(folder.glob(f"outputs/*/{MANIFEST}"), key=lambda path: path.parent.name, default=None)


def check_what_is_left(folder: Path, counts: Counter[str]) -> None:
    """After a kill: every file that a manifest names is whole, and nearly every update that was logged is in one."""
    for directory in directories(folder):
        unfinished = [file for file in directory.rglob(".*") if file.is_file()]
        counts["during a save"] += len(unfinished) > 0
        for file in unfinished:
            file.unlink()  # each is counted once
        if not (directory / MANIFEST).is_file():
            continue
        files = strict_json((directory / MANIFEST).read_text())["kept"]
        saved = [SavedRun.read(directory / file["path"], file["sha256"]).loop["num_updates"] for file in files]
        counts["files read"] += len(saved)
        logged = [line for line in (directory / "metrics.jsonl").read_text().splitlines() if line.endswith("}") and "train/loss" in line]
        # One save may be under way and one may wait for it.
        assert max(saved) >= json.loads(logged[-1])["num_updates"] - 2


def killed_and_resumed(tmp_path: Path, kills: int, seed: int) -> Counter[str]:
    """Start, kill and resume runs until so many kills have hit; each run that comes to its end is compared with the undisturbed one."""
    draw, counts = random.Random(seed), Counter[str]()
    whole = train_from_config(tiny(tmp_path / "whole", **LIVELY))
    expected = final_state(whole)
    chain, answer, longest = 0, tmp_path / "answer.json", whole["elapsed_time_sec"]
    while counts["kills"] < kills or directories(tmp_path / str(chain)):
        folder = tmp_path / str(chain)
        manifest = newest_manifest(folder)
        config = mapping(folder, **LIVELY)
        last = counts["kills"] >= kills  # let the run that is under way come to its end
        made = len(directories(folder))
        process = start(train_on_a_slow_disk, config, str(manifest.parent) if manifest else None, draw.choice([0.0, 0.01]), str(answer))
        if draw.random() < 0.9:  # the others are killed wherever they are, while starting too
            wait_for(lambda folder=folder, made=made, process=process: len(directories(folder)) > made or not process.is_alive())
        process.join(None if last else draw.uniform(0.0, longest))
        if process.exitcode is None:
            kill(process)
            counts["kills"] += 1
            counts["before anything was saved"] += newest_manifest(folder) is None
            check_what_is_left(folder, counts)
            continue
        assert process.exitcode == 0
        summary = json.loads(answer.read_text())
        assert summary.get("error") is None, summary
        counts["runs completed"] += 1
        counts["resumed"] += summary["resumed_from"] is not None
        assert same_bits(final_state(summary), expected)
        assert untimed(summary["train_history"]) == untimed(whole["train_history"])
        assert without_nan(summary["eval_history"]) == without_nan(whole["eval_history"])
        assert without_nan(summary["last_eval_metrics"]) == without_nan(whole["last_eval_metrics"])
        chain += 1
    return counts


@pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
@pytest.mark.parametrize("kills", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_killed_at_random_instants(tmp_path: Path, kills: int, report: Callable[[str], None]):
    counts = killed_and_resumed(tmp_path, kills, seed=kills)
    assert counts["kills"] >= kills
    assert counts["runs completed"] >= 1
    if kills >= 50:
        assert counts["during a save"] >= 5
        assert counts["resumed"] >= 3
    report(f"faults, SIGKILL: {', '.join(f'{n} {what}' for what, n in counts.items())}; every run ended with the bits of the undisturbed one")


# ---- damaged files ----


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return Path(train_from_config(tiny(tmp_path_factory.mktemp("run"), iterations=2))["latest_checkpoint_path"]).read_bytes()


def refused(path: Path, content: bytes) -> bool:
    path.write_bytes(content)
    try:
        read_checkpoint(path)
    except CheckpointError:
        return True
    return False


@pytest.mark.parametrize("count", [400, pytest.param(0, marks=pytest.mark.slow)], ids=["some", "every"])
def test_a_flipped_byte_anywhere_is_found(tmp_path: Path, checkpoint: bytes, count: int, report: Callable[[str], None]):
    """A bit, or all bits, of one byte; in the header, the metadata, the tensors."""
    draw, path = random.Random(0), tmp_path / "a.safetensors"
    assert not refused(path, checkpoint)
    places = range(len(checkpoint)) if count == 0 else [*range(48), *(draw.randrange(len(checkpoint)) for _ in range(count))]
    for place in places:
        flipped = bytearray(checkpoint)
        flipped[place] ^= draw.choice([1 << draw.randrange(8), 0xFF])
        assert refused(path, bytes(flipped)), f"byte {place} of {len(checkpoint)}"
    report(f"faults, flipped bytes: {len(places)} of {len(places)} found (file of {len(checkpoint)} bytes)")


def test_a_file_of_another_length_is_found(tmp_path: Path, checkpoint: bytes, report: Callable[[str], None]):
    draw, path, size = random.Random(1), tmp_path / "a.safetensors", len(checkpoint)
    cut = [0, 1, 7, 8, 9, size // 2, size - 1, *(draw.randrange(size) for _ in range(100))]
    damaged = [checkpoint[:place] for place in cut]
    damaged += [checkpoint + b"\0", checkpoint * 2, checkpoint[1:]]
    # What a file system may leave after a loss of power: the length, and zeros in the place of the last blocks.
    damaged += [checkpoint[:place] + bytes(size - place) for place in cut if place < size - 64]
    assert all(refused(path, content) for content in damaged)
    report(f"faults, truncated, extended and zero-filled files: {len(damaged)} of {len(damaged)} found")


# ---- full disks ----


def train_beyond_a_limit(config: dict[str, Any], limit: int, answer: str) -> None:
    """Target: from the end of the third update on no file can grow beyond ``limit`` bytes."""
    import resource

    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(event: Event) -> None:
        if event.num_updates == 3:
            time.sleep(0.2)  # the saves before are on the disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))

    result: dict[str, Any] = {}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            train_from_config(parse_run_config(config), callbacks=[fill])
        except Exception as error:
            result["error"] = f"{type(error).__name__}: {error}"
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    result["said"] = [str(one.message) for one in said]
    Path(answer).write_text(json.dumps(result))


@pytest.mark.skipif(os.name != "posix", reason="RLIMIT_FSIZE")
def test_a_disk_that_is_full_stops_saving_and_not_training(tmp_path: Path, report: Callable[[str], None]):
    options: dict[str, Any] = {"iterations": 6, "save_frequency_updates": 1, "final_eval_episodes": 0, "keep_checkpoints": None}
    whole = train_from_config(tiny(tmp_path / "whole", **options))
    answer = tmp_path / "answer.json"
    assert ended(start(train_beyond_a_limit, mapping(tmp_path, **options), 2000, str(answer))) == 0
    result = json.loads(answer.read_text())
    (directory,) = directories(tmp_path)
    assert result["error"].startswith("CheckpointError: the last state could not be saved")
    assert "File too large" in result["error"]
    assert "tiny_step_16.safetensors is the newest checkpoint" in result["error"]
    failed = [text for text in result["said"] if "could not be saved" in text]
    assert len(failed) == 4
    assert all("training goes on" in text for text in failed)
    assert any("metrics.jsonl could not be written" in text for text in result["said"])
    manifest = strict_json((directory / MANIFEST).read_text())
    assert [file["num_updates"] for file in manifest["kept"]] == [2, 1]
    assert sorted(file.name for file in (directory / "checkpoints").iterdir()) == ["tiny_step_16.safetensors", "tiny_step_8.safetensors"]
    resumed = train_from_config(tiny(tmp_path, **options), resume="latest", run=directory)
    assert same_bits(final_state(resumed), final_state(whole))
    report(f"faults, full disk (RLIMIT_FSIZE): {len(failed)} saves failed and were said, the checkpoint before goes on bit for bit")


# ---- numbers that are not finite ----


class FaultyState(NamedTuple):
    inner: Any
    start: Tensor  # [] first position


@register_learning_env("faulty_double_integrator", override=True)
def faulty(*, kind: str = "none", value: str = "nan") -> Env:
    """The double integrator with a fault in the rows that started on the right."""
    env = double_integrator(max_episode_steps=6)
    bad = float(value)

    def hit(env_state: FaultyState, good: Tensor, what: str) -> Tensor:
        return torch.where(env_state.start > 0, bad, good) if kind == what else good

    def reset(key: Tensor, env_params: Any) -> FaultyState:
        inner = env.reset(key, env_params)
        return FaultyState(inner, inner.position[0])

    def observe(env_state: FaultyState, env_params: Any) -> Tensor:
        return hit(env_state, env.observe(env_state.inner, env_params), "observation")

    def step(env_state: FaultyState, action: Tensor, env_params: Any) -> tuple[FaultyState, Outcome]:
        inner, outcome = env.step(env_state.inner, action, env_params)
        reward = hit(env_state, outcome.reward, "reward")
        if kind == "state":
            inner = inner._replace(position=hit(env_state, inner.position, "state"))
        if kind == "gradient":
            # A root at 0: its value is 0 and its derivative infinite, or NaN where the chain rule multiplies it by 0.
            root = torch.sqrt((action - action.detach()).sum() if value == "inf" else (action - action.detach()).square().sum())
            reward = torch.where(env_state.start > 0, reward + root, reward)
        return FaultyState(inner, env_state.start), outcome._replace(reward=reward)

    return dataclasses.replace(env, reset=reset, observe=observe, step=step)


def faulty_run(folder: Path, algorithm: str, **env_cfg: str) -> RunConfig:
    env = {"name": "faulty_double_integrator", "cfg": env_cfg}
    raw = mapping(folder, env=env, num_envs=8, iterations=6, normalize_observations=algorithm != "grpo")
    if algorithm == "apg_complete":
        raw["trainer"]["rollout_mode"] = "complete"
    if algorithm in ("ppo", "grpo"):
        del raw["trainer"]["segment_length"]
        raw["trainer"]["buffer_size"] = HORIZON
        raw["algorithm"] = {"name": algorithm, "cfg": {"n_epochs": 2, "batch_size": 8, **({"group_size": 2} if algorithm == "grpo" else {})}}
    if algorithm == "ppo":
        raw["policy"] |= {"name": "actor_critic", "critic": raw["policy"]["actor"]}
    return parse_run_config(raw)


ALGORITHMS = ("apg_segmented", "apg_complete", "ppo", "grpo")
FAULTS = [(kind, value) for kind in ("reward", "observation", "state") for value in ("nan", "inf", "-inf")]
AT = 4  # the update that meets the fault
LEARNED = ("params", "opt_state", "norm_state", "hyper")


def learned(state: TrainState) -> list[tuple[str, bytes]]:
    """Bits of everything that an update may not touch when it is skipped."""
    return [(f"{part}.{name}", x.numpy().tobytes()) for part in LEARNED for name, x in tree.items(getattr(state, part))]


def disturbed(folder: Path, algorithm: str, **env_cfg: str) -> tuple[list[TrainState], list[dict[str, float]]]:
    """The state before every update and after the last, and the metrics of every update, of a run of which one update meets a fault."""
    parts, bad = build_run(faulty_run(folder, algorithm)), build_run(faulty_run(folder, algorithm, **env_cfg))

    def now(state: TrainState) -> Algorithm:
        return bad.algorithm if int(state.counters["updates"]) + 1 == AT else parts.algorithm

    both = Algorithm(parts.algorithm.init, lambda state: now(state).collect(state), lambda state, rollout: now(state).update(state, rollout))
    states = [parts.algorithm.init(rng.key(0))]
    _, loop = train(both, states[0], parts.loop_config, on_update=lambda state, loop: states.append(state))
    return states, loop.train_history


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_fault_at_a_chosen_update_costs_that_update(tmp_path: Path, algorithm: str, report: Callable[[str], None]):
    """A reward, observation or gradient: the update is skipped and no bit of what is learned changes. A state: the row is reset, its step does not count."""
    faults = FAULTS + ([("gradient", "nan"), ("gradient", "inf")] if algorithm.startswith("apg") else [])
    for kind, value in faults:
        states, history = disturbed(tmp_path, algorithm, kind=kind, value=value)
        skipped = kind != "state"
        assert history[AT - 1]["train/skipped_update"] == skipped, (kind, value)
        assert (learned(states[AT]) == learned(states[AT - 1])) == skipped, (kind, value)
        assert [int(state.counters["updates"]) for state in states] == list(range(7))
        assert [int(state.counters["skipped_updates"]) for state in states] == [0] * AT + [int(skipped)] * (7 - AT), (kind, value)
        if kind != "gradient":
            rows = [int(state.counters["nonfinite_rows"]) for state in states]
            assert rows[AT - 1] == 0
            assert rows[AT] == rows[-1] > 0, (kind, value)
        # Every other update is made, and what is learned is finite throughout.
        for before, after in zip(states[AT:], states[AT + 1 :], strict=False):
            assert learned(before) != learned(after), (kind, value)
        for state in states:
            assert all(bool(tree.all_finite(getattr(state, part))) for part in ("params", "opt_state", "norm_state", "env_state")), (kind, value)
    report(f"faults, {algorithm}: {len(faults)} kinds of values that are not finite, each cost 1 update or 1 episode and no bit of what was learned")


def test_no_checkpoint_ever_holds_what_is_not_finite(tmp_path: Path):
    config = faulty_run(tmp_path, "apg_segmented", kind="reward", value="nan")
    config = RunConfig(trainer=config.trainer.model_copy(update={"save_frequency_updates": 1}), policy=config.policy, algorithm=config.algorithm)
    summary = train_from_config(config)
    assert summary["skipped_updates"] >= 4
    files = list((Path(summary["run_directory"]) / "checkpoints").iterdir())
    assert len(files) == 5
    for file in files:
        state = saved_state(file)
        kept = {
            name: x for name, x in state.items() if name.split(".")[0] in ("params", "opt_state", "norm_state", "env_state", "extra") and x.is_floating_point()
        }
        assert all(bool(torch.isfinite(x).all()) for x in kept.values())

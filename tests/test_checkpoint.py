"""Checkpoint files: exact round trips, atomic writes, refusals that name what is wrong, and training that goes on bit for bit."""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save as save_tensors
from torch import Tensor

import frl
from frl import rng, tree
from frl.algorithms.apg import ApgConfig, make_apg
from frl.checkpoint import SCHEMA_VERSION, CheckpointError, read_checkpoint, restore, save_checkpoint
from frl.envs.double_integrator import double_integrator
from frl.envs.vector import make_vec_env
from frl.normalizers import running_normalizer
from frl.optim import adam, cosine_schedule
from frl.policies import actor_only
from frl.types import Algorithm, TrainState


class Part(NamedTuple):
    """A state of every kind of leaf and node."""

    weights: dict[str, Tensor]
    count: Tensor
    flags: tuple[Tensor, ...]
    nothing: Any


def part(seed: int = 0, dtype: torch.dtype = torch.float32) -> Part:
    return Part(
        weights={"b": rng.normal(rng.key(seed), (2, 3), dtype=dtype), "a": rng.normal(rng.key(seed + 1), (), dtype=dtype)},
        count=torch.tensor(7 + seed),
        flags=(torch.tensor([True, False]), torch.zeros(0, dtype=torch.float64)),
        nothing=(),
    )


def equal(a: Any, b: Any) -> bool:
    """Same structure, dtypes and bits; NaN equals NaN of the same bits."""

    def same(x: Tensor, y: Tensor) -> bool:
        return x.dtype == y.dtype and x.shape == y.shape and x.contiguous().numpy().tobytes() == y.contiguous().numpy().tobytes()

    return tree.structure(a) == tree.structure(b) and all(same(x, y) for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True))


def load(path: Path, like: Any) -> Any:
    return restore(read_checkpoint(path)[0], like)


# ---- round trips ----


@given(st.lists(st.floats(width=32), min_size=0, max_size=6), st.integers(-(2**63), 2**63 - 1))
def test_every_bit_comes_back(tmp_path: Path, values: list[float], count: int):
    state = part()._replace(weights={"x": torch.tensor(values), "y": torch.tensor(-0.0)}, count=torch.tensor(count))
    path = save_checkpoint(tmp_path / "a.safetensors", state, {"loop": {"best": 0.1}})
    tensors, metadata = read_checkpoint(path)
    assert equal(restore(tensors, tree.map(torch.zeros_like, state)), state)
    assert metadata == {"schema_version": SCHEMA_VERSION, "loop": {"best": 0.1}}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.uint8])
def test_dtypes_come_back(tmp_path: Path, dtype: torch.dtype):
    state = {"x": torch.arange(6).reshape(2, 3).to(dtype)}
    back = load(save_checkpoint(tmp_path / "a.safetensors", state, {}), state)
    assert back["x"].dtype == dtype
    assert torch.equal(back["x"], state["x"])


def test_views_and_shared_storage_come_back(tmp_path: Path):
    base = torch.arange(12.0).reshape(3, 4)
    state = {"transposed": base.T, "row": base[1], "same": base, "expanded": torch.tensor(2.0).expand(3)}
    back = load(save_checkpoint(tmp_path / "a.safetensors", state, {}), state)
    assert all(torch.equal(back[name], state[name]) for name in state)


def test_a_state_that_requires_grad_is_saved_as_values(tmp_path: Path):
    back = load(save_checkpoint(tmp_path / "a.safetensors", {"x": torch.ones(2, requires_grad=True)}, {}), {"x": torch.zeros(2)})
    assert not back["x"].requires_grad


def test_folders_are_made_and_the_path_is_returned(tmp_path: Path):
    path = tmp_path / "some" / "where" / "a.safetensors"
    assert save_checkpoint(str(path), part(), {}) == path
    assert path.is_file()


def test_nan_in_the_metadata_comes_back(tmp_path: Path):
    path = save_checkpoint(tmp_path / "a.safetensors", part(), {"history": [{"loss": math.nan, "best": None}]})
    history = read_checkpoint(path)[1]["history"]
    assert math.isnan(history[0]["loss"])
    assert history[0]["best"] is None


def test_the_order_in_which_a_dict_was_made_does_not_matter(tmp_path: Path):
    weights = part().weights
    path = save_checkpoint(tmp_path / "a.safetensors", weights, {})
    back = load(path, {name: torch.zeros_like(weights[name]) for name in reversed(list(weights))})
    assert all(torch.equal(back[name], weights[name]) for name in weights)


# ---- a crash while writing ----


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_writer_that_raises_halfway_leaves_the_file_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = save_checkpoint(tmp_path / "latest.safetensors", part(0), {})
    before, fdopen = digest(path), os.fdopen

    class Half:
        """Writes half of what it is given, then fails."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Half:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

        def write(self, data: bytes) -> None:
            self.file.write(data[: len(data) // 2])
            raise OSError("no space left on device")

    monkeypatch.setattr(os, "fdopen", lambda *args, **kwargs: Half(fdopen(*args, **kwargs)))
    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(path, part(1), {})
    monkeypatch.undo()
    assert digest(path) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["latest.safetensors"]
    assert equal(load(path, part()), part(0))


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_crash_before_the_rename_leaves_the_file_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str):
    path = save_checkpoint(tmp_path / "latest.safetensors", part(0), {})
    before = digest(path)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, step, stop)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(path, part(1), {})
    monkeypatch.undo()
    assert digest(path) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["latest.safetensors"]


def test_metadata_that_is_not_json_is_refused_before_anything_is_written(tmp_path: Path):
    path = save_checkpoint(tmp_path / "latest.safetensors", part(0), {})
    before = digest(path)
    with pytest.raises(TypeError):
        save_checkpoint(path, part(1), {"config": object()})
    assert digest(path) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["latest.safetensors"]


@pytest.mark.skipif(os.name != "posix", reason="kills itself with a signal")
def test_a_process_killed_halfway_leaves_the_file_before(tmp_path: Path):
    path = save_checkpoint(tmp_path / "latest.safetensors", {"x": torch.zeros(3)}, {})
    before = digest(path)
    code = """
        import os, signal, sys, torch
        from frl.checkpoint import save_checkpoint
        # Everything is written to the file beside the place, nothing is renamed.
        os.fsync = lambda handle: os.kill(os.getpid(), signal.SIGKILL)
        save_checkpoint(sys.argv[1], {"x": torch.ones(3)}, {})
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(path)], cwd=Path(frl.__file__).parents[1], check=False)
    assert done.returncode == -signal.SIGKILL
    assert digest(path) == before
    # What is left over has a name that nothing takes for a checkpoint.
    assert [entry.name for entry in tmp_path.glob("[!.]*")] == ["latest.safetensors"]
    assert [entry.name for entry in tmp_path.glob("*.safetensors") if not entry.name.startswith(".")] == ["latest.safetensors"]


# ---- refusals ----


def test_a_missing_file(tmp_path: Path):
    with pytest.raises(CheckpointError, match="does not exist"):
        read_checkpoint(tmp_path / "none.safetensors")


@given(st.data())
def test_a_truncated_file_is_refused(tmp_path: Path, data: st.DataObject):
    path = save_checkpoint(tmp_path / "a.safetensors", part(), {})
    content = path.read_bytes()
    path.write_bytes(content[: data.draw(st.integers(0, len(content) - 1))])
    with pytest.raises(CheckpointError, match=r"a\.safetensors is damaged"):
        read_checkpoint(path)


@pytest.mark.parametrize("content", [b"", b"\x00" * 64, b"not a checkpoint at all", b"\xff" * 8 + b"{}"])
def test_other_bytes_are_refused(tmp_path: Path, content: bytes):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged or not a checkpoint"):
        read_checkpoint(path)


def header(text: str | None) -> dict[str, str] | None:
    return None if text is None else {"frl": text}


@pytest.mark.parametrize("text", [None, "{", "", "[]"])
def test_a_file_of_another_program_is_refused(tmp_path: Path, text: str | None):
    path = tmp_path / "a.safetensors"
    path.write_bytes(save_tensors({"x": torch.zeros(2)}, metadata=header(text)))
    with pytest.raises(CheckpointError, match="not a checkpoint of frl"):
        read_checkpoint(path)


@pytest.mark.parametrize("version", [None, 0, 1, 3, True, "2"])
def test_another_schema_version_is_refused(tmp_path: Path, version: Any):
    path = tmp_path / "a.safetensors"
    path.write_bytes(save_tensors({"x": torch.zeros(2)}, metadata=header(json.dumps({"schema_version": version}))))
    with pytest.raises(CheckpointError, match="schema version"):
        read_checkpoint(path)


class Trap:
    """Pickle calls this; a loader that unpickles is caught."""

    def __reduce__(self) -> tuple:
        return (pytest.fail, ("a checkpoint ran code",))


@pytest.mark.parametrize("name", ["a.pt", "a.pth", "a.safetensors"])
def test_pickles_are_refused_and_never_run(tmp_path: Path, name: str):
    path = tmp_path / name
    path.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(CheckpointError, match=r"\.safetensors"):
        read_checkpoint(path)
    torch.save({"policy": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match=r"\.safetensors"):
        read_checkpoint(path)


def test_every_mismatch_is_listed_by_key_path(tmp_path: Path):
    path = save_checkpoint(
        tmp_path / "a.safetensors", {"actor": {"w": torch.zeros(2, 3), "b": torch.zeros(3)}, "old": torch.zeros(1), "n": torch.tensor(1)}, {}
    )
    like = {"actor": {"w": torch.zeros(2, 4), "b": torch.zeros(3, dtype=torch.float64)}, "new": {"x": torch.zeros(1)}, "n": torch.tensor(0)}
    with pytest.raises(CheckpointError) as caught:
        restore(read_checkpoint(path)[0], like, what="a.safetensors")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("a.safetensors")
    assert sorted(line.strip() for line in lines[1:]) == [
        "actor.b: got torch.float32, expected torch.float64",
        "actor.w: got shape (2, 3), expected (2, 4)",
        "new.x: missing",
        "old: unexpected",
    ]


def test_a_refused_file_changes_nothing_live(tmp_path: Path):
    path = save_checkpoint(tmp_path / "a.safetensors", part(3)._replace(flags=(torch.tensor([True]), torch.zeros(0))), {})
    live = part(0)
    before = tree.map(torch.clone, live)
    with pytest.raises(CheckpointError):
        load(path, live)
    assert equal(live, before)


def test_loading_gives_a_new_state_and_leaves_the_live_one(tmp_path: Path):
    path = save_checkpoint(tmp_path / "a.safetensors", part(3), {})
    live = part(0)
    before = tree.map(torch.clone, live)
    back = load(path, live)
    assert equal(live, before)
    assert equal(back, part(3))
    assert not {x.data_ptr() for x in tree.leaves(back) if x.numel()} & {x.data_ptr() for x in tree.leaves(live) if x.numel()}


def test_leaves_with_the_same_key_path_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="a.b"):
        save_checkpoint(tmp_path / "a.safetensors", {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}, {})


@pytest.mark.skipif(os.name != "posix", reason="file modes")
def test_others_may_read_a_checkpoint_as_far_as_the_umask_lets_them(tmp_path: Path):
    plain = tmp_path / "plain.txt"
    plain.write_text("")
    path = save_checkpoint(tmp_path / "a.safetensors", part(), {})
    assert path.stat().st_mode == plain.stat().st_mode


def test_the_structure_is_that_of_the_live_state(tmp_path: Path):
    path = save_checkpoint(tmp_path / "a.safetensors", part(3), {})
    assert isinstance(load(path, part(0)), Part)


# ---- training that goes on ----


def algorithm(mode: str, compile_mode: str) -> Algorithm:
    """APG with everything that has a memory: moments, statistics, a schedule, running episodes."""
    env = make_vec_env(double_integrator(max_episode_steps=3), 2)
    policy = actor_only(2, 1, network={"type": "mlp", "network_cfg": {"hidden_sizes": [3]}})
    config = ApgConfig(rollout_mode=mode, segment_length=4, action_adjoint_max_norm=0.3, compile_mode=compile_mode)
    return make_apg(env, policy, adam(), config, normalizer=running_normalizer(2, initial_count=1e-4), schedule=cosine_schedule(4), learning_rate=0.05)


def advance(apg: Algorithm, state: TrainState, updates: int) -> TrainState:
    for _ in range(updates):
        state, rollout = apg.collect(state)
        state = apg.update(state, rollout)
    return state


def test_statistics_of_observations_go_on_from_their_count(tmp_path: Path):
    """A lost count would let the next few rows outweigh all before: mean 101 and variance 0."""
    normalizer = running_normalizer(1)
    thousand = torch.tensor([[-1.0], [1.0]]).repeat(500, 1)
    path = save_checkpoint(tmp_path / "a.safetensors", normalizer.update(normalizer.init(), thousand), {})
    code = """
        import sys, torch
        from frl.checkpoint import read_checkpoint, restore
        from frl.normalizers import running_normalizer, variance
        normalizer = running_normalizer(1)
        state = restore(read_checkpoint(sys.argv[1])[0], normalizer.init())
        state = normalizer.update(state, torch.full((10, 1), 101.0))
        print(float(state.count), float(state.mean), float(variance(state)))
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(path)]
    done = subprocess.run(command, cwd=Path(frl.__file__).parents[1], capture_output=True, text=True, check=True)
    assert [float(x) for x in done.stdout.split()] == pytest.approx([1010.0, 1.0, 100.990099], rel=1e-8)


@pytest.mark.parametrize("compile_mode", ["eager", "aot_eager"])
@pytest.mark.parametrize("mode", ["segmented", "complete"])
def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path, mode: str, compile_mode: str):
    apg = algorithm(mode, compile_mode)
    half = advance(apg, apg.init(rng.key(0)), 2)
    whole = advance(apg, half, 2)
    path = save_checkpoint(tmp_path / "a.safetensors", half, {})
    # A start from another seed, built without compilation, as in a new process; the compiled code itself is shared to save time.
    fresh = algorithm(mode, "eager").init(rng.key(1))
    again = algorithm(mode, compile_mode) if compile_mode == "eager" else apg
    tensors, _ = read_checkpoint(path)
    back = restore(tensors, fresh._replace(metrics=half.metrics))
    assert equal(back, half)
    resumed = advance(again, back, 2)
    assert equal(resumed, whole)
    assert not torch.equal(resumed.params["log_std"], half.params["log_std"])
    assert float(resumed.metrics["learning_rate"]) < float(half.metrics["learning_rate"])

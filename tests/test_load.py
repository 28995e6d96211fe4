"""A run from its directory alone: what is rebuilt acts as the trained policy did, and what does not fit is refused by key path."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from frl import rng, tree
from frl.checkpoint import CheckpointError, read_checkpoint, save_checkpoint
from frl.config import ConfigError
from frl.envs.host import HostEnv
from frl.envs.registry import register_learning_env
from frl.evaluate import episode_keys
from frl.load import load_run, newest_run
from frl.run_directory import MANIFEST
from tests.tolerances import tolerance
from tests.trained import named_entries, trained

OPTIONS: dict[str, dict[str, Any]] = {
    "apg": {"normalize_observations": True, "clip_actions_to_space": True, "env": {"name": "point_mass", "cfg": {"max_episode_steps": 20}}},
    "apg_float64": {"normalize_observations": True, "dtype": "float64"},
    "ppo_discrete": {"env": {"name": "cartpole", "cfg": {"max_episode_steps": 20}}, "algorithm": "ppo"},
    "ppo_own_normalizer": {"env": {"name": "pendulum", "cfg": {"max_episode_steps": 9}}, "algorithm": "ppo", "policy": {"actor_obs_normalization": True}},
    "grpo": {"env": {"name": "pendulum", "cfg": {"max_episode_steps": 9}}, "algorithm": "grpo"},
    "groups": {
        "env": "named_entries",
        "algorithm": "ppo",
        "normalize_observations": True,
        "policy": {"obs_groups": {"actor": ["place.position", "place.goal"], "critic": ["secret", "place.position"]}},
    },
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return {name: trained(tmp_path_factory.mktemp(name), **options) for name, options in OPTIONS.items()}


every_run = pytest.mark.parametrize("name", OPTIONS)


def directory(runs: dict[str, dict[str, Any]], name: str) -> Path:
    return Path(runs[name]["run_directory"])


def observations(run: Any, count: int, seed: int = 0) -> Any:
    generator = np.random.default_rng(seed)

    def draw(space: Any) -> Any:
        if hasattr(space, "spaces"):
            return {name: draw(part) for name, part in space.spaces.items()}
        return torch.from_numpy(generator.normal(size=(count, *space.shape))).to(torch.float32)

    return draw(run.observation_space)


# ---- what is rebuilt ----


@every_run
def test_the_final_evaluation_is_repeated_to_the_bit(runs: dict[str, dict[str, Any]], name: str):
    run = load_run(directory(runs, name))
    metrics = run.evaluate().metrics
    stored = runs[name]["last_eval_metrics"]
    assert set(metrics) == set(stored)
    assert all(metrics[key] == stored[key] or (np.isnan(metrics[key]) and np.isnan(stored[key])) for key in metrics)
    assert (run.num_updates, run.global_step) == (runs[name]["num_updates"], runs[name]["global_step"])


def by_hand(run: Any, rows: np.ndarray) -> np.ndarray:
    """Normalise and infer in float64 from the tensors of the file: the mean of a Gaussian, or the logits."""
    tensors, metadata = read_checkpoint(run.checkpoint)
    values = {key: x.numpy().astype(np.float64) for key, x in tensors.items()}
    x = rows
    if "norm_state.mean" in values:
        epsilon = 1e-8 if metadata["config"]["trainer"]["normalize_observations"] else 1e-2
        m2, count, prior = (values[f"norm_state.{name}"] for name in ("m2", "count", "prior"))
        x = (x - values["norm_state.mean"]) / (np.sqrt((m2 + prior) / (count + prior)) + epsilon)
    hidden = np.tanh(x @ values["params.actor.layers.0.weight"].T + values["params.actor.layers.0.bias"])
    return hidden @ values["params.actor.layers.1.weight"].T + values["params.actor.layers.1.bias"]


@every_run
def test_an_action_is_what_the_file_says(runs: dict[str, dict[str, Any]], name: str):
    run = load_run(directory(runs, name))
    obs = observations(run, 40)
    rows = torch.cat([obs["place"]["position"], obs["place"]["goal"]], -1) if name == "groups" else obs
    expected = by_hand(run, rows.numpy().astype(np.float64))
    action = run.act(obs).numpy()
    if name == "ppo_discrete":
        assert action.tolist() == expected.argmax(-1).tolist()
        return
    if OPTIONS[name].get("clip_actions_to_space"):
        assert (np.abs(expected) > 1).any()  # the bound is active
        expected = expected.clip(run.action_space.low, run.action_space.high)
    assert np.abs(action - expected).max() < 50 * tolerance(torch.float32) * np.abs(expected).max()


@every_run
def test_float64_parameters_give_float64_actions(runs: dict[str, dict[str, Any]], name: str):
    run = load_run(directory(runs, name))
    action = run.act(observations(run, 2))
    assert action.dtype == (torch.float64 if name == "apg_float64" else torch.int64 if name == "ppo_discrete" else torch.float32)


@given(lead=st.lists(st.integers(1, 3), max_size=3).map(tuple), name=st.sampled_from(list(OPTIONS)))
def test_leading_dimensions_pass_through(runs: dict[str, dict[str, Any]], lead: tuple[int, ...], name: str):
    run = load_run(directory(runs, name))
    count = int(np.prod(lead, dtype=int))
    obs = observations(run, count)
    flat = run.act(obs)
    shaped = run.act(tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), obs))
    assert shaped.shape == (*lead, *flat.shape[1:])
    assert torch.equal(shaped.reshape(flat.shape), flat)


@every_run
def test_act_maps_and_changes_nothing(runs: dict[str, dict[str, Any]], name: str):
    run = load_run(directory(runs, name))
    obs = observations(run, 6)
    before = tree.map(torch.clone, (run.params, run.norm_state, obs))
    flat = run.act(obs)
    mapped = torch.func.vmap(run.act)(obs)
    assert torch.allclose(mapped.to(torch.float64), flat.to(torch.float64), atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(tree.leaves(before), tree.leaves((run.params, run.norm_state, obs)), strict=True))


@every_run
def test_a_key_samples(runs: dict[str, dict[str, Any]], name: str):
    run = load_run(directory(runs, name))
    obs = tree.map(lambda x: x[:1].expand(400, *x.shape[1:]), observations(run, 1))
    drawn = run.act(obs, rng.key(3))
    assert torch.equal(drawn, run.act(obs, rng.key(3)))
    assert not torch.equal(drawn, run.act(obs, rng.key(4)))
    assert len(drawn.unique(dim=0)) > 1
    if name in ("grpo", "apg_float64", "ppo_own_normalizer"):  # neither squashed nor clamped: normal around the mode
        std = torch.exp(run.params["log_std"])
        z = (drawn - run.act(obs)) / std
        assert abs(float(z.mean())) < 0.2
        assert abs(float(z.std()) - 1) < 0.15


def test_arrays_and_single_rows(runs: dict[str, dict[str, Any]]):
    run = load_run(directory(runs, "apg"))
    obs = observations(run, 1)[0]
    assert run.act(obs.numpy()).shape == run.act(obs).shape == (2,)
    assert torch.equal(run.act(obs.numpy()), run.act(obs))
    assert torch.equal(run.act(obs.tolist()), run.act(obs))


def test_an_actor_needs_its_own_entries_alone(runs: dict[str, dict[str, Any]]):
    run = load_run(directory(runs, "groups"))
    obs = observations(run, 3)
    whole = run.act(obs)
    del obs["secret"]
    assert torch.equal(run.act(obs), whole)


# ---- bad observations ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda obs: obs["place"].pop("goal"), r"obs\.place\.goal: missing"),
        (lambda obs: obs.pop("place"), r"obs\.place\.position: missing; obs\.place\.goal: missing"),
        (lambda obs: obs["place"].update(goal=torch.zeros(3, 2)), r"obs\.place\.goal: got shape \(3, 2\), expected \(\.\.\., 1\)"),
        (lambda obs: obs["place"].update(goal=torch.zeros(4, 1)), r"obs\.place\.goal: got the leading dimensions \(4,\), other entries have \(3,\)"),
        (lambda obs: obs["place"].update(goal={"x": torch.zeros(3, 1)}), r"obs\.place\.goal: got a mapping, expected a tensor of shape \(\.\.\., 1\)"),
        (lambda obs: obs.update(place=torch.zeros(3, 3)), r"obs\.place: got Tensor, expected a mapping"),
    ],
)
def test_a_bad_entry_is_named(runs: dict[str, dict[str, Any]], change: Any, message: str):
    run = load_run(directory(runs, "groups"))
    obs = observations(run, 3)
    change(obs)
    with pytest.raises((KeyError, ValueError, TypeError), match=message):
        run.act(obs)


def test_a_bad_tensor_is_refused(runs: dict[str, dict[str, Any]]):
    run = load_run(directory(runs, "apg"))
    with pytest.raises(ValueError, match=r"obs: got shape \(3, 13\), expected \(\.\.\., 14\)"):
        run.act(torch.zeros(3, 13))
    with pytest.raises(ValueError, match=r"obs: got shape \(\)"):
        run.act(torch.zeros(()))
    with pytest.raises(TypeError, match="obs: got a mapping"):
        run.act({"obs": torch.zeros(14)})


def test_entries_that_nobody_asked_for_are_refused_where_all_are_read(tmp_path: Path):
    run = load_run(trained(tmp_path, env="named_entries")["run_directory"])
    obs = observations(run, 2)
    assert run.act(obs).shape == (2, 2)
    obs["place"]["more"] = torch.zeros(2, 1)
    with pytest.raises(KeyError, match=r"obs\.place\.more: unexpected"):
        run.act(obs)


# ---- which parameters ----


def test_latest_best_and_files(runs: dict[str, dict[str, Any]]):
    where = directory(runs, "ppo_discrete")
    latest, best = load_run(where), load_run(where, checkpoint="best")
    assert latest.checkpoint == Path(runs["ppo_discrete"]["latest_checkpoint_path"])
    assert best.checkpoint == Path(runs["ppo_discrete"]["best_checkpoint_path"])
    assert best.global_step == int(re.findall(r"step_(\d+)", best.checkpoint.name)[0])
    obs = observations(best, 30)
    for given_as in (best.checkpoint, best.checkpoint.name, f"checkpoints/{best.checkpoint.name}"):
        same = load_run(where, checkpoint=given_as)
        assert same.checkpoint.samefile(best.checkpoint)
        assert torch.equal(same.act(obs), best.act(obs))
    alone = load_run(best.checkpoint)
    assert (alone.checkpoint, alone.path) == (best.checkpoint, where)


def test_a_run_directory_can_be_moved(runs: dict[str, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    original = load_run(directory(runs, "apg"))
    obs = observations(original, 5)
    moved = tmp_path / "elsewhere" / "with a space"
    shutil.copytree(directory(runs, "apg"), moved)
    shutil.rmtree(moved / "configs")  # the checkpoint knows its settings
    monkeypatch.chdir(tmp_path)
    run = load_run("elsewhere/with a space")
    assert torch.equal(run.act(obs), original.act(obs))
    assert run.checkpoint.is_relative_to("elsewhere")
    assert run.evaluate().metrics == original.evaluate().metrics


def test_the_newest_run_of_a_folder(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="holds none"):
        newest_run(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        newest_run(tmp_path / "none")
    for name, time in (("b_run", 3), ("a_run", 5), ("c_run", 1)):
        (tmp_path / name).mkdir()
        (tmp_path / name / MANIFEST).write_text("{}")
        os.utime(tmp_path / name / MANIFEST, (time, time))
    (tmp_path / "no_run").mkdir()
    assert newest_run(tmp_path) == tmp_path / "a_run"
    assert newest_run(tmp_path / "c_run") == tmp_path / "c_run"


def test_a_drawn_seed_is_found_again(tmp_path: Path):
    summary = trained(tmp_path, seed=-1)
    run = load_run(summary["run_directory"])
    assert run.seed == summary["seed"] >= 0
    assert run.evaluate().metrics == summary["last_eval_metrics"]
    (Path(summary["run_directory"]) / "environment.json").unlink()
    assert load_run(summary["run_directory"]).final_seed >= 0


# ---- what does not fit ----


def changed(run: Path, target: Path, *, tensors: Any = None, **metadata: Any) -> Path:
    """The latest checkpoint, with other content, of a copy of a run."""
    shutil.copytree(run, target)
    manifest = json.loads((target / MANIFEST).read_text())
    file = target / manifest["checkpoints"]["latest"]
    have, told = read_checkpoint(file)
    return save_checkpoint(file, have if tensors is None else tensors(have), {**told, **metadata})


def test_a_checkpoint_of_another_version(runs: dict[str, dict[str, Any]], tmp_path: Path):
    with pytest.raises(CheckpointError, match="version 99"):
        load_run(changed(directory(runs, "apg"), tmp_path / "run", schema_version=99))


def test_damaged_and_missing_files(runs: dict[str, dict[str, Any]], tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_run(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=MANIFEST):
        load_run(tmp_path)
    shutil.copytree(directory(runs, "apg"), tmp_path / "run")
    with pytest.raises(FileNotFoundError, match=r"none\.safetensors does not exist"):
        load_run(tmp_path / "run", checkpoint="none.safetensors")
    manifest = json.loads((tmp_path / "run" / MANIFEST).read_text())
    file = tmp_path / "run" / manifest["checkpoints"]["best"]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="damaged"):
        load_run(tmp_path / "run", checkpoint="best")
    with pytest.raises(CheckpointError):
        load_run(file)


@pytest.mark.parametrize("how", ["torn", "lost", "exchanged", "another version"])
def test_the_one_before_the_latest_is_taken_where_that_is_unusable(tmp_path: Path, runs: dict[str, dict[str, Any]], how: str):
    latest, before, *_ = (directory(runs, "grpo") / file["path"] for file in json.loads((directory(runs, "grpo") / MANIFEST).read_text())["kept"])
    tensors, metadata = read_checkpoint(latest)
    where = tmp_path / "run"
    shutil.copytree(directory(runs, "grpo"), where)
    file = where / "checkpoints" / latest.name
    if how == "torn":
        file.write_bytes(file.read_bytes()[:100])
    elif how == "lost":
        file.unlink()
    else:
        save_checkpoint(file, tensors, {**metadata, **({"schema_version": 99} if how == "another version" else {"more": 1})})
    with pytest.warns(RuntimeWarning, match=f"{latest.name}.*Going on from .*{before.name}"):
        run = load_run(where)
    assert run.checkpoint.name == before.name
    if how != "lost":
        with pytest.raises(CheckpointError) if how != "exchanged" else contextlib.nullcontext():
            assert load_run(file).checkpoint == file


def test_every_parameter_that_does_not_fit_is_named(runs: dict[str, dict[str, Any]], tmp_path: Path):
    def spoil(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensors["params.actor.layers.0.weight"] = torch.zeros(5, 13)
        tensors["params.more"] = torch.zeros(1)
        tensors["norm_state.mean"] = tensors["norm_state.mean"].to(torch.float32)
        return {name: x for name, x in tensors.items() if name != "params.log_std"}

    where = changed(directory(runs, "apg"), tmp_path / "run", tensors=spoil)
    with pytest.raises(CheckpointError) as caught:
        load_run(where)
    text = str(caught.value)
    assert all(word in text for word in ("params.actor.layers.0.weight", "(5, 13)", "(5, 14)", "params.more", "params.log_std", "norm_state.mean", "float64"))


def test_an_environment_that_has_changed_since(runs: dict[str, dict[str, Any]], tmp_path: Path):
    summary = trained(tmp_path, env="named_entries")
    register_learning_env("named_entries", lambda: named_entries(extra=3), override=True)
    try:
        with pytest.raises(CheckpointError, match=r"params\.actor\.layers\.0\.weight: got shape \(5, 4\), expected \(5, 7\)"):
            load_run(summary["run_directory"])
    finally:
        register_learning_env("named_entries", named_entries, override=True)


def test_settings_that_cannot_be_built_here(runs: dict[str, dict[str, Any]], tmp_path: Path):
    def with_trainer(target: str, **changes: Any) -> Path:
        _, metadata = read_checkpoint(runs["apg"]["latest_checkpoint_path"])
        config = metadata["config"]
        config["trainer"].update(changes)
        return changed(directory(runs, "apg"), tmp_path / target, config=config)

    with pytest.raises(ConfigError, match="no module 'no_such_module_at_all'"):
        load_run(with_trainer("imports", imports=["no_such_module_at_all"]))
    with pytest.raises(ConfigError, match="unknown key"):
        load_run(with_trainer("key", no_such_key=1))
    if not torch.cuda.is_available():
        with pytest.warns(RuntimeWarning, match="loaded on the CPU"):
            run = load_run(with_trainer("cuda", device="cuda"))
        assert run.device == torch.device("cpu")


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("double_integrator", ["observation: got shape (2,), the policy was trained on shape (14,)", "action: got shape (1,)", "(2,)"]),
        ("cartpole", ["shape (4,)", "action: got Discrete(2), the policy was trained on Box"]),
        ("named_entries", ["observation: got no such entry", "observation.place.position: got shape (2,)"]),
        ("nothing_like_it", ["nothing_like_it"]),
    ],
)
def test_another_environment_must_fit(runs: dict[str, dict[str, Any]], env: str, words: list[str]):
    with pytest.raises(ValueError, match=env) as caught:
        load_run(directory(runs, "apg"), env=env)
    assert all(word in str(caught.value) for word in words)


def test_another_environment_that_fits(runs: dict[str, dict[str, Any]]):
    run = load_run(directory(runs, "grpo"), env="pendulum", env_cfg={"max_episode_steps": 4}, num_envs=2)
    assert run.evaluate(6).lengths.tolist() == [4] * 6
    assert run.env.num_envs == 2
    own = load_run(directory(runs, "grpo"), env_cfg={"max_episode_steps": 3})
    assert own.evaluate(2).lengths.tolist() == [3, 3]
    with pytest.warns(RuntimeWarning, match="other action bounds"):
        load_run(directory(runs, "grpo"), env="pendulum", env_cfg={"max_torque": 1.0})
    with pytest.raises(ValueError, match="max_episode_step"):
        load_run(directory(runs, "grpo"), env="pendulum", env_cfg={"max_episode_step": 4})
    with pytest.raises(ValueError, match="num_envs"):
        load_run(directory(runs, "grpo"), num_envs=0)


def test_what_only_the_critic_sees_is_not_needed(runs: dict[str, dict[str, Any]]):
    run = load_run(directory(runs, "groups"), env_cfg={"secretive": True})
    assert "secret" not in run.env.single_observation_space.spaces
    assert run.evaluate(3).episodes == 3


# ---- host environments ----


def in_gymnasium(run: Any, env_id: str, key: Tensor, episodes: int = 2) -> list[tuple[float, int]]:
    """Returns and lengths of episodes that a plain gymnasium environment plays with the actions of ``act``."""
    env = gymnasium.make(env_id)
    obs, _ = env.reset(seed=int(rng.bits(key) >> 1))
    found = []
    for _ in range(episodes):
        total, length, done = 0.0, 0, False
        while not done:
            action = run.act(obs).numpy()
            obs, reward, terminated, truncated, _ = env.step(action if action.ndim else int(action))
            total, length, done = total + float(reward), length + 1, terminated or truncated
        found.append((total, length))
        obs, _ = env.reset()
    env.close()
    return found


@pytest.mark.parametrize(("name", "env_id"), [("ppo_own_normalizer", "Pendulum-v1"), ("ppo_discrete", "CartPole-v1")])
def test_a_functional_run_plays_in_gymnasium(runs: dict[str, dict[str, Any]], name: str, env_id: str):
    with load_run(directory(runs, name), env=f"gymnasium:{env_id}", num_envs=2) as run:
        assert run.env_name == f"gymnasium:{env_id}"
        result = run.evaluate(4, seed=5)
        key = run.env.row_keys(episode_keys(5)[0])[1]
        expected = in_gymnasium(run, env_id, key)
    mine = result.rows == 1
    assert result.lengths[mine].tolist() == [length for _, length in expected]
    assert result.returns[mine].tolist() == pytest.approx([total for total, _ in expected], rel=1e-4)


def test_a_run_on_a_host_environment(tmp_path: Path):
    env = {"name": "gymnasium:Pendulum-v1", "cfg": {"max_episode_steps": 9}}
    summary = trained(tmp_path, env=env, algorithm="ppo", normalize_observations=True, compile_mode="eager")
    with load_run(summary["run_directory"]) as run:
        assert run.evaluate().metrics == pytest.approx(summary["last_eval_metrics"], nan_ok=True)
        pushed = with_output(run, [9.0])
        assert pushed.act(torch.zeros(3)).tolist() == [2.0]  # what the environment makes of it
        path = pushed.export(tmp_path / "policy.pt2")
        assert torch.export.load(path).module()(torch.zeros(1, 3)).tolist() == [[2.0]]
    with pytest.raises(RuntimeError, match="closed"):
        run.evaluate(1)


def test_host_environments_that_are_not_played_are_closed(tmp_path: Path, runs: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch):
    summary = trained(tmp_path, env={"name": "gymnasium:Pendulum-v1", "cfg": {"max_episode_steps": 9}}, algorithm="ppo")
    closed: list[str] = []
    close = HostEnv.close
    monkeypatch.setattr(HostEnv, "close", lambda self: (closed.append(self.spec.name), close(self))[1])
    with load_run(summary["run_directory"], env="pendulum") as run:
        assert closed == ["gymnasium:Pendulum-v1"]
        assert run.env_name == "pendulum"
    with pytest.raises(ValueError, match="does not fit"):
        load_run(directory(runs, "ppo_discrete"), env="gymnasium:Pendulum-v1")
    assert closed == ["gymnasium:Pendulum-v1"] * 2


# ---- one action everywhere: training, evaluation, act, export ----


def outside(programs: dict[str, tuple[Path, Any]], folder: Path) -> dict[str, np.ndarray]:
    """Run exported programs ``{name: (file, observation)}`` in a process that cannot import frl."""
    code = """
import sys
sys.modules.update(frl=None, tensordict=None, gymnasium=None)
import numpy as np, torch
observed, acted = np.load(sys.argv[1]), {}
for name in dict.fromkeys(key.split(":")[0] for key in observed):
    program, obs = torch.export.load(f"{name}.pt2").module(), {}
    for key in observed:
        if key.split(":")[0] == name:
            *above, last = key.split(":")[1].split(".")
            part = obs
            for step in above:
                part = part.setdefault(step, {})
            part[last] = torch.from_numpy(observed[key])
    acted[name] = program(obs.get("obs", obs)).detach().numpy()
np.savez(sys.argv[2], **acted)
try:
    import frl
except ImportError:
    print("alone")
"""
    flat = {}
    for name, (path, obs) in programs.items():
        assert path == folder / f"{name}.pt2"
        leaves = [("obs", obs)] if isinstance(obs, Tensor) else tree.items(obs)
        flat.update({f"{name}:{key}": x.numpy() for key, x in leaves})
    np.savez(folder / "observed.npz", **flat)
    done = subprocess.run([sys.executable, "-I", "-c", code, "observed.npz", "acted.npz"], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "alone"
    return dict(np.load(folder / "acted.npz"))


def test_an_exported_policy_runs_without_the_library(runs: dict[str, dict[str, Any]], tmp_path: Path):
    folder, programs, expected = tmp_path / "deep", {}, {}
    for name in ("apg", "ppo_discrete", "groups", "apg_float64"):
        run = load_run(directory(runs, name))
        obs = observations(run, 17)
        obs = obs.to(torch.float64) if name == "apg_float64" else obs
        expected[name] = run.act(obs).numpy()
        programs[name] = (run.export(folder / f"{name}.pt2"), obs)
    got = outside(programs, folder)
    for name, action in expected.items():
        assert got[name].dtype == action.dtype
        assert np.abs(got[name].astype(np.float64) - action).max() <= tolerance(torch.float32), name


def test_an_exported_policy_takes_any_number_of_rows(runs: dict[str, dict[str, Any]], tmp_path: Path):
    run = load_run(directory(runs, "apg"))
    path = run.export(tmp_path / "policy.pt2")
    extra = {"frl.json": ""}
    program = torch.export.load(path, extra_files=extra).module()
    for count in (1, 2, 5, 300):
        obs = observations(run, count)
        assert torch.allclose(program(obs), run.act(obs), atol=1e-6)
    told = json.loads(extra["frl.json"])
    assert (told["environment"], told["global_step"]) == ("point_mass", run.global_step)
    assert told["observation"] == {"shape": ["N", 14], "dtype": "float32"}
    assert told["action"] == {"shape": ["N", 2], "dtype": "float32"}
    with pytest.raises(ValueError, match=r"\.pt2"):
        run.export(tmp_path / "policy.onnx")


def played(run: Any) -> list[list[float]]:
    """Actions that the environment received in an evaluation."""
    values = run.evaluate(2).values
    return np.stack([values["action_0"], values["action_1"]], 1).tolist()


def with_output(run: Any, outputs: list[float]) -> Any:
    """The run with an actor that says the same of every observation."""
    layers = tree.map(torch.zeros_like, run.params["actor"]["layers"])
    layers[-1]["bias"].copy_(torch.tensor(outputs))
    return dataclasses.replace(run, params={**run.params, "actor": {"layers": layers}})


def test_actions_are_the_same_everywhere(tmp_path: Path):
    """Field report D3: rollouts, evaluation and export once gave an environment different actions."""
    squashed = load_run(trained(tmp_path / "squashed", env="told_actions", policy={"distribution": "tanh_normal"})["run_directory"])
    clamped = load_run(trained(tmp_path / "clamped", env="told_actions", clip_actions_to_space=True)["run_directory"])
    cases = {
        "middle": (with_output(squashed, [0.0, 0.0]), [5.0, 0.0]),
        "bound": (with_output(squashed, [50.0, 50.0]), [10.0, 2.0]),
        "clamped": (with_output(clamped, [-3.0, 7.0]), [0.0, 2.0]),
    }
    programs = {}
    for name, (run, expected) in cases.items():
        assert run.act(torch.zeros(2)).tolist() == pytest.approx(expected, abs=1e-5)
        assert played(run) == [pytest.approx(expected, abs=1e-5)] * 2
        programs[name] = (run.export(tmp_path / f"{name}.pt2"), torch.zeros(1, 2))
    for name, action in outside(programs, tmp_path).items():
        assert action[0].tolist() == pytest.approx(cases[name][1], abs=1e-5)
    free = dataclasses.replace(cases["clamped"][0], clamp_to=None)
    assert free.act(torch.zeros(2)).tolist() == [-3.0, 7.0]

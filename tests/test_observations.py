from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from frl import rng, tree
from frl.envs.pendulum import pendulum
from frl.envs.vector import make_vec_env
from frl.normalizers import running_normalizer
from frl.observations import (
    convert_policy_action_for_env,
    dict_to_tensordict,
    encode_observation,
    encoded_space,
    flatten_dict_observation,
    flatten_observation_groups,
    infer_policy_action,
    prepare_policy_observation,
)
from frl.policies import build_policy, observation_dim
from frl.rollout import make_unroll
from tests.tolerances import tolerance

NET = {"type": "mlp", "network_cfg": {"hidden_sizes": [8]}}


def example(rows: int = 3) -> dict[str, Any]:
    """Entries whose numbers tell where they come from."""
    return {
        "b": torch.arange(2.0 * rows).reshape(rows, 2),
        "a": {"z": 100 + torch.arange(4.0 * rows).reshape(rows, 2, 2), "y": 200 + torch.arange(1.0 * rows)},
        "c": 300 + torch.arange(1.0 * rows).reshape(rows, 1),
    }


WANT = [[200, 100, 101, 102, 103, 0, 1, 300], [201, 104, 105, 106, 107, 2, 3, 301], [202, 108, 109, 110, 111, 4, 5, 302]]


@given(order=st.permutations(["a", "b", "c"]), inner=st.permutations(["y", "z"]), as_tensordict=st.booleans())
def test_flattening_sees_no_order_of_insertion(order, inner, as_tensordict):
    obs = example()
    obs = {name: {k: obs["a"][k] for k in inner} if name == "a" else obs[name] for name in order}
    flat = flatten_dict_observation(TensorDict.from_dict(obs, batch_size=[3]) if as_tensordict else obs)
    assert flat.tolist() == WANT


@pytest.mark.parametrize("groups", [None, ["rod.angle", "omega"]])
def test_flattening_agrees_with_what_a_functional_rollout_does(groups):
    plain = pendulum()
    space = spaces.Dict(omega=spaces.Box(-8.0, 8.0, (1,)), rod=spaces.Dict(b=spaces.Box(-1.0, 1.0, (1, 1)), angle=spaces.Box(-1.0, 1.0, (2,))))

    def observe(env_state: Any, env_params: Any) -> dict[str, Any]:
        x = plain.observe(env_state, env_params)
        return {"rod": {"b": x[:1].reshape(1, 1), "angle": x[:2]}, "omega": x[2:]}

    vec = make_vec_env(dataclasses.replace(plain, observe=observe, observation_space=space), 3)
    block = {"name": "actor_critic", "actor": NET, "critic": NET, **({"obs_groups": {"actor": groups}} if groups else {})}
    policy = build_policy(block, space, vec.single_action_space)
    params = policy.init(rng.key(0))
    state = vec.reset(vec.row_keys(rng.key(1)), vec.default_params)
    noise = policy.noise(rng.key(2), 4, 3)
    _, played = make_unroll(vec, policy, mode="eager")(params, (), state, vec.default_params, noise)
    for t in range(4):
        obs = tree.index(played.obs, t)
        want = torch.cat([obs["rod"]["angle"], obs["omega"]] if groups else [obs["omega"], obs["rod"]["angle"], obs["rod"]["b"][:, 0]], -1)
        flat = flatten_observation_groups(obs, groups)
        assert torch.equal(flat, want)
        got = infer_policy_action(policy, params, obs, noise=noise[t])
        torch.testing.assert_close(got, played.action[t], rtol=0, atol=tolerance(torch.float32, 100))


def test_one_tensor_is_one_entry():
    x = torch.arange(12.0).reshape(2, 3, 2)
    assert flatten_dict_observation(x).tolist() == x.reshape(2, 6).tolist()
    assert flatten_dict_observation(torch.arange(2.0)).tolist() == [[0], [1]]


def test_groups_come_in_the_order_given():
    obs = example()
    assert flatten_observation_groups(obs, ["c", "a.y", "b"])[1].tolist() == [301, 201, 2, 3]
    assert flatten_observation_groups(TensorDict.from_dict(obs, batch_size=[3]), ["a.z"])[0].tolist() == [100, 101, 102, 103]
    assert torch.equal(flatten_observation_groups(obs, None), flatten_dict_observation(obs))
    # A name with a dot goes before a path.
    assert flatten_observation_groups({"a.y": torch.ones(2, 1), "a": {"y": torch.zeros(2, 1)}}, ["a.y"]).tolist() == [[1], [1]]


@pytest.mark.parametrize(
    ("obs", "groups", "error", "text"),
    [
        (example(), [], ValueError, "at least one entry"),
        (example(), ["d"], KeyError, "'d' is not in the observation .entries: a, b, c"),
        (example(), ["a.x"], KeyError, "'a.x' is not in the observation"),
        (example(), ["b.x"], KeyError, "'b.x' is not in the observation"),
        (torch.zeros(2, 3), ["b"], KeyError, "entries: none, it is one tensor"),
        (example(), ["a"], TypeError, "'a' must be a tensor, got dict; name its entries, such as a.y"),
        (example(), "b", TypeError, "must be a list of names, got the string 'b'"),
        ({"a": np.zeros(3)}, ["a"], TypeError, "'a' must be a tensor, got ndarray"),
    ],
)
def test_groups_that_are_refused(obs, groups, error, text):
    with pytest.raises(error, match=text):
        flatten_observation_groups(obs, groups)


def test_observations_that_are_refused():
    with pytest.raises(ValueError, match="has no entries"):
        flatten_dict_observation({})
    with pytest.raises(ValueError, match="has no entries"):
        flatten_dict_observation({"a": {}})
    with pytest.raises(TypeError, match="observation a.b must be a tensor or a mapping of tensors, got list"):
        flatten_dict_observation({"a": {"b": [1.0]}})


def test_gradients_and_compilation_pass_through():
    obs = example()

    def loss(b: Tensor) -> Tensor:
        return (flatten_observation_groups({**obs, "b": b}, ["b", "a.z"]) ** 2).sum()

    assert torch.equal(torch.func.grad(loss)(obs["b"]), 2 * obs["b"])
    compiled = torch.compile(flatten_dict_observation, backend="aot_eager", fullgraph=True)
    assert compiled(obs).tolist() == WANT


# ---- TensorDicts ----


def test_dict_to_tensordict(device):
    obs = example()
    td = dict_to_tensordict(obs, device)
    assert td.batch_size == torch.Size([3])
    assert td.device == device
    assert flatten_dict_observation(td).tolist() == WANT
    bare = dict_to_tensordict(torch.zeros(3, 2), "cpu")
    assert (list(bare.keys()), bare.batch_size, bare["obs"].shape) == (["obs"], torch.Size([3]), (3, 2))
    one = dict_to_tensordict(torch.zeros(4), "cpu")
    assert (one.batch_size, one["obs"].shape) == (torch.Size([]), (4,))
    assert dict_to_tensordict({"a": torch.zeros(2, 3), "b": torch.zeros(5)}).batch_size == torch.Size([])
    again = dict_to_tensordict(td, device)
    again.set("new", torch.zeros(3, device=device))
    assert "new" not in list(td.keys())
    for bad in (None, 3.0, [torch.zeros(2)], np.zeros(3)):
        with pytest.raises(TypeError, match="must be a TensorDict, a tensor or a mapping"):
            dict_to_tensordict(bad)


# ---- asking a policy ----


def asymmetric() -> tuple[Any, Any, dict[str, Tensor]]:
    space = spaces.Dict(near=spaces.Box(-1.0, 1.0, (2,)), far=spaces.Box(-1.0, 1.0, (3,)), hidden=spaces.Box(-1.0, 1.0, (4,)))
    block = {"name": "actor_critic", "actor": NET, "critic": NET, "obs_groups": {"actor": ["near", "far"], "critic": ["hidden"]}}
    policy = build_policy(block, space, spaces.Box(-1.0, 1.0, (2,)))
    keys = rng.split(rng.key(7), 3)
    obs = {name: rng.normal(k, (5, n)) for k, (name, n) in zip(keys, (("near", 2), ("far", 3), ("hidden", 4)), strict=True)}
    return policy, policy.init(rng.key(0)), obs


def test_an_action_is_the_mode_of_the_picked_entries():
    policy, params, obs = asymmetric()
    x = torch.cat([obs["near"], obs["far"]], -1)
    want = policy.distribution.mode(policy.apply(params, x))
    got = infer_policy_action(policy, params, obs, num_envs=5, device="cpu")
    assert torch.equal(got, want)
    assert torch.equal(infer_policy_action(policy, params, {**obs, "hidden": torch.full((5, 4), math.nan)}), want)
    noise = rng.normal(rng.key(3), (5, 2))
    drawn = infer_policy_action(policy, params, obs, noise=noise)
    assert torch.equal(drawn, policy.distribution.sample(policy.apply(params, x), noise).action)
    with pytest.raises(ValueError, match="must have 4 rows, got 5"):
        infer_policy_action(policy, params, obs, num_envs=4)


def test_the_normalizer_of_training_is_applied_and_stays_as_it_is():
    policy, params, obs = asymmetric()
    normalizer = running_normalizer(5)
    state = normalizer.update(normalizer.init(), 3 + 2 * rng.normal(rng.key(1), (100, 5)))
    before = [x.clone() for x in state]
    x = torch.cat([obs["near"], obs["far"]], -1)
    want = policy.distribution.mode(policy.apply(params, normalizer.apply(state, x)))
    got = infer_policy_action(policy, params, obs, normalizer=normalizer, norm_state=state)
    assert torch.equal(got, want)
    assert not torch.equal(got, infer_policy_action(policy, params, obs))
    assert torch.equal(got, infer_policy_action(policy, params, obs, observation_transform=lambda o: normalizer.apply(state, o)))
    assert all(torch.equal(a, b) for a, b in zip(before, state, strict=True))
    with pytest.raises(ValueError, match="normalizer or observation_transform, not both"):
        infer_policy_action(policy, params, obs, normalizer=normalizer, norm_state=state, observation_transform=lambda o: o)


def test_wide_observations_are_normalised_before_they_are_narrowed():
    policy, params, obs = asymmetric()
    offset = 1e9
    wide = {name: x.to(torch.float64) + offset for name, x in obs.items()}
    normalizer = running_normalizer(5)
    rows = torch.cat([wide["near"], wide["far"]], -1)
    state = normalizer.update(normalizer.init(), rows)
    got = infer_policy_action(policy, params, wide, normalizer=normalizer, norm_state=state)
    x = (rows - rows.mean(0)) / rows.std(0, correction=0)
    want = policy.distribution.mode(policy.apply(params, x.to(torch.float32)))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance(torch.float32, 1000))
    # Narrowed first, rows that differ by less than the spacing of float32 at 1e9 would be one.
    assert len(got.unique(dim=0)) == 5


def test_discrete_actions_have_the_numbering_of_the_space():
    policy = build_policy({"name": "actor_critic", "actor": NET, "critic": NET}, spaces.Box(-1.0, 1.0, (3,)), spaces.Discrete(4, start=-2))
    action = infer_policy_action(policy, policy.init(rng.key(0)), rng.normal(rng.key(1), (50, 3)))
    assert action.shape == (50,)
    assert set(action.tolist()) <= {-2, -1, 0, 1}


def test_prepare_policy_observation(device):
    x = prepare_policy_observation(example(), device, ["b", "c"], dtype=torch.float64)
    assert (x.device, x.dtype) == (device, torch.float64)
    assert x.tolist() == [[0, 1, 300], [2, 3, 301], [4, 5, 302]]
    assert prepare_policy_observation(torch.zeros(2, 3)).dtype == torch.float32


def test_an_action_moves_to_the_environment_unchanged(device):
    action = torch.tensor([[5.0, -7.0]])
    for env in (SimpleNamespace(device=device), SimpleNamespace(get_wrapper_attr=lambda name: {"device": device}[name])):
        moved = convert_policy_action_for_env(env, action)
        assert moved.device == device
        assert moved.tolist() == [[5, -7]]


# ---- encodings ----

KINDS = {
    "box": spaces.Box(-2.0, 3.0, (2, 2)),
    "wide": spaces.Box(-1.0, 1.0, (1,), dtype=np.float64),
    "bytes": spaces.Box(0, 255, (3,), dtype=np.uint8),
    "choice": spaces.Discrete(4, start=7),
    "choices": spaces.MultiDiscrete([2, 3], start=[-1, 4]),
    "flags": spaces.MultiBinary([2, 2]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(seed=st.integers(0, 1000), rows=st.integers(1, 4))
def test_encodings_lie_in_the_encoded_space(dtype, seed, rows):
    space = spaces.Dict({**KINDS, "inner": spaces.Dict(one=spaces.Box(0.0, 1.0, ()))})
    space.seed(seed)
    samples = [space.sample() for _ in range(rows)]

    def stack(parts: list) -> Any:
        if isinstance(parts[0], dict):
            return {name: stack([part[name] for part in parts]) for name in parts[0]}
        return torch.from_numpy(np.stack(parts))

    encoded, declared = encode_observation(space, stack(samples), dtype), encoded_space(space, dtype)
    for i in range(rows):
        row = {name: x[i].numpy() for name, x in encoded.items() if name != "inner"}
        assert declared.contains({**row, "inner": {"one": encoded["inner"]["one"][i].numpy()}})
    assert flatten_dict_observation(encoded).shape == (rows, observation_dim(declared))
    for i, sample in enumerate(samples):
        assert encoded["choice"][i].nonzero().item() == sample["choice"] - 7
        assert encoded["choices"][i, :2].nonzero().item() == sample["choices"][0] + 1
        assert encoded["choices"][i, 2:].nonzero().item() == sample["choices"][1] - 4
        assert encoded["flags"][i].tolist() == sample["flags"].reshape(-1).tolist()
        assert encoded["box"][i].tolist() == sample["box"].reshape(-1).tolist()
        assert encoded["wide"].dtype == torch.float64
        assert encoded["bytes"][i].tolist() == sample["bytes"].tolist()


def test_an_encoding_is_new_memory():
    x = torch.zeros(2, 3)
    y = encode_observation(spaces.Box(-1.0, 1.0, (3,)), x)
    x += 1
    assert y.tolist() == [[0] * 3] * 2


def test_encodings_that_are_refused():
    box = spaces.Box(-1.0, 1.0, (3,))
    with pytest.raises(ValueError, match=r"must have shape \['N', 3\], got \[2, 4\]"):
        encode_observation(box, torch.zeros(2, 4))
    with pytest.raises(TypeError, match="must be a tensor, got dict"):
        encode_observation(box, {"obs": torch.zeros(2, 3)})
    with pytest.raises(KeyError, match="lacks 'b' of its space"):
        encode_observation(spaces.Dict(a=box, b=box), {"a": torch.zeros(2, 3)})
    with pytest.raises(TypeError, match="observations of Graph have no encoding"):
        encoded_space(spaces.Dict(a=spaces.Graph(box, None)))

"""Files with the right checksums and the wrong content: refused in one line, before memory is taken, and never waited for."""

import os
import resource

import forge
import numpy as np
import pytest
import torch

from tailguard import DistributionalPPO
from tailguard.io import checkpoint
from tailguard.io.checkpoint import CheckpointError
from tailguard.io.checkpoint_folder import Checkpoints
from tailguard.io.form import COUNT, NUMBER, Maybe, form_of, require_form


@pytest.fixture(scope="module")
def original():
    return forge.trained("LSTM, everything on")


def write(path, original, change):
    forgery = forge.Forgery.of(original)
    change(forgery.manifest["tree"], forgery.tensors)
    path.write_bytes(forgery.signed())
    return path


def test_a_sample_of_damaged_and_forged_files():
    """All of them: benchmarks/forge.py."""
    before = forge.peak_megabytes()
    counts = forge.examine(30, 40, seed=1)
    wrong = {key: number for key, number in counts.items() if key[1] not in ("refused", "identical", "legal")}
    assert wrong == {}
    assert counts["forged", "refused"] > 20
    assert counts["damaged", "refused"] > 25
    assert forge.peak_megabytes() - before < forge.MEGABYTES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tree, _: tree["agent"].pop("policy"), "agent is 'a mapping without policy'"),
        (lambda tree, _: tree["agent"].update(more=1), "agent is 'a mapping with more'"),
        (lambda tree, _: tree["settings"]["policy_kwargs"].update(lstm_hidden_size=30_000), "weight_ih_l0 is"),
        (lambda tree, _: tree["settings"]["policy_kwargs"].update(net_arch=[8] * 1_000), "the number of layers is 1000"),
        (lambda tree, _: tree["settings"].update(n_steps=10**9), "n_steps is 1000000000, but it must be given to load"),
        (lambda tree, _: tree["run"].update(n_envs=10**9), "run.episode_returns.running is"),
        (lambda tree, _: tree["run"]["counters"].update(predict=1), "run.counters is 'a mapping with predict'"),
        (lambda tree, _: tree["run"]["counters"].update(num_timesteps=-5), "run.counters.num_timesteps is '-5'"),
        (lambda tree, _: tree["run"]["random"]["numpy"].__setitem__(2, 10**6), "a position up to 624"),
        (lambda tree, _: tree["settings"].update(gamma="0.9"), "settings.gamma is \"'0.9'\""),
        (lambda tree, _: tree["settings"]["critic"].update(num_quantiles="32"), "settings.num_quantiles"),
        (lambda _, tensors: tensors["agent.policy.log_std"].fill_(np.nan), "agent.policy.log_std is"),
        (lambda _, tensors: tensors.update(more=tensors["agent.policy.log_std"].clone()), None),
    ],
)
def test_what_is_wrong_is_said(tmp_path, original, change, message):
    path = write(tmp_path / "x", original, change)
    if message is None:  # described in the manifest, and used by nobody: harmless
        assert DistributionalPPO.load(path).num_timesteps > 0
        return
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError) as error:
        DistributionalPPO.load(path, env=forge.market(), force_reset=False)
    assert message in str(error.value)
    assert str(error.value).startswith(f"{path}: ")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000  # kilobytes


@pytest.mark.parametrize("entry", forge.ENTRIES, ids=str)
def test_tensors_that_torch_does_not_know_are_refused_and_the_checkpoint_before_is_taken(tmp_path, entry):
    files = Checkpoints(tmp_path, "test")
    files.save(1, {"number": 1})
    path = files.save(2, {"number": 2})
    path.write_bytes(forge.with_entry(path.read_bytes(), *entry))
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(path, kind="test")
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)
    assert files.newest(lambda tree: tree) == {"number": 1}


@pytest.mark.parametrize("raw", [torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, 4, dtype=torch.int8)])
def test_an_array_is_made_of_bytes(raw):
    """Other numbers in their place would be read as something else, of the right shape and type."""
    forgery = forge.Forgery.of(checkpoint.to_bytes({"a": np.ones(3, np.float32)}, kind="test"))
    forgery.tensors["a"] = raw
    with pytest.raises(CheckpointError, match="the array a is '<f4', but it must be the bytes of numbers"):
        checkpoint.from_bytes(forgery.signed(), kind="test", name="x")


def test_accounts_stand_where_there_are_bars(tmp_path, original):
    """The kernel reads the bars at these rows, without looking whether there are any."""

    def beyond(tree, tensors):
        name = tree["run"]["environments"]["layers"][-1]["state"]["clock"]["$array"][0]
        raw = tensors[name].numpy()
        raw.view(np.int64)[:] = 10**9

    path = write(tmp_path / "x", original, beyond)
    with pytest.raises(CheckpointError, match="the saved clock is"):
        DistributionalPPO.load(path, env=forge.market(), force_reset=False)


def test_a_large_rollout_can_be_asked_for(tmp_path, original):
    path = write(tmp_path / "x", original, lambda tree, _: tree["settings"].update(n_steps=2**21, batch_size=2**21))
    with pytest.raises(CheckpointError, match="must be given to load"):
        DistributionalPPO.load(path)
    assert DistributionalPPO.load(path, n_steps=8, batch_size=16).n_steps == 8


def test_a_policy_file_is_checked_as_well(tmp_path, original):
    path = tmp_path / "x"
    path.write_bytes(original)
    policy = DistributionalPPO.load(path).policy
    policy.save(tmp_path / "policy")
    forgery = forge.Forgery.of((tmp_path / "policy").read_bytes())
    forgery.manifest["tree"]["network"]["lstm_hidden_size"] = 30_000
    (tmp_path / "policy").write_bytes(forgery.signed())
    with pytest.raises(CheckpointError, match="the weights do not fit this network"):
        type(policy).load(tmp_path / "policy")


def test_the_largest_file_is_a_setting(tmp_path, original, monkeypatch):
    path = tmp_path / "x"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(CheckpointError, match=r"1,099,511,627,776 bytes.*TAILGUARD_LARGEST_FILE_MIB sets the most"):
        checkpoint.load(path, kind="model")
    monkeypatch.setenv("TAILGUARD_LARGEST_FILE_MIB", "many")
    with pytest.raises(ValueError, match="a whole number of MiB"):
        checkpoint.load(path, kind="model")
    monkeypatch.setenv("TAILGUARD_LARGEST_FILE_MIB", "1")
    path.write_bytes(original)
    assert checkpoint.load(path, kind="model")


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="is not a regular file"):
        checkpoint.load(tmp_path / "pipe", kind="model")


TREE = {"a": 1, "b": [1.5, None], "c": {"d": np.zeros(3)}, "e": "text", "f": True, "g": float("inf")}


class TestForm:
    def test_a_tree_has_its_own_form(self):
        require_form(TREE, form_of(TREE), "x")

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("a", 1.5, "x.a is '1.5', but it must be a whole number"),
            ("a", True, "x.a is 'True'"),
            ("a", 10**60, "x.a is"),
            ("b", [1.5], "x.b is 'a list of 1', but it must be one of 2"),
            ("b", 3, "x.b is '3', but it must be a list"),
            ("c", {"d": np.zeros(4)}, "x.c.d is 'float64 numbers of shape [4]'"),
            ("c", {"d": np.full(3, np.nan)}, "x.c.d is"),
            ("c", [], "x.c is 'a list', but it must be a mapping"),
            ("e", 2, "x.e is '2', but it must be text"),
            ("f", 1, "x.f is '1', but it must be true or false"),
            ("g", float("nan"), "x.g is 'nan', but it must be a number"),
        ],
    )
    def test_another_form_is_named(self, key, value, message):
        with pytest.raises(ValueError, match="but it must be") as error:
            require_form({**TREE, key: value}, form_of(TREE), "x")
        assert message in str(error.value)

    def test_lists_of_any_length_and_none(self):
        require_form([[1, 2], [], None], [Maybe([COUNT])], "x")
        with pytest.raises(ValueError, match=r"x\.1\.0 is '-1'"):
            require_form([[1], [-1]], [[COUNT]], "x")
        with pytest.raises(ValueError, match="a finite number"):
            require_form(float("inf"), NUMBER, "x")

"""Training and placement on a device that this machine need not have.

The device ``meta`` stands for a GPU. Either it computes (elsewhere.py), or its tensors are torch's fake tensors, which know
their shape and device only. Both refuse to be mixed with tensors of another device as real ones do.
"""

import pytest
import torch
from elsewhere import ELSEWHERE, Elsewhere, Numbers
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv
from test_observations import IMAGE, SPACES, Drawing
from torch._subclasses.fake_tensor import FakeTensorMode

from tailguard import DistributionalPPO
from tailguard.ppo.config import CriticConfig, ObsNormConfig, RiskConfig
from tailguard.ppo.critic import critic_errors
from tailguard.ppo.networks import LstmTrunk
from tailguard.ppo.rollout import EMPTY, Batch

BOX, ACTIONS, L, B = spaces.Box(-1.0, 1.0, (5,)), spaces.Box(-1.0, 1.0, (2,)), 6, 3
KINDS = {
    "mlp": ("MlpPolicy", BOX, {}),
    "normalised": ("MlpPolicy", BOX, {"obs_norm": ObsNormConfig()}),
    "risk-averse": ("MlpLstmPolicy", BOX, {"risk": RiskConfig(objective="cvar", alpha=0.1)}),
    "lstm": ("MlpLstmPolicy", BOX, {}),
    "shared lstm": ("MlpLstmPolicy", BOX, {"shared_lstm": True, "n_lstm_layers": 2}),
    "feed-forward critics": ("MlpLstmPolicy", BOX, {"enable_critic_lstm": False}),
    "gSDE": ("MlpPolicy", BOX, {"use_sde": True}),
    "images": ("CnnPolicy", IMAGE, {"share_features_extractor": False}),
    "dict": ("MultiInputLstmPolicy", SPACES["dict"], {}),
}


SMALL_EXTRACTOR = {"features_extractor_kwargs": {"features_dim": 7}}
NO_TAIL = {"critic": {"num_quantiles": 4}}
TRAININGS = {
    "parts of minibatches": ("MlpPolicy", BOX, {"normalize_obs": True, "batch_size": 4, "microbatch_size": 2}),
    "scaled steps": ("MlpPolicy", BOX, {"vgs": {"warmup_steps": 1}, "n_epochs": 2}),
    "a tail, by parts": ("MlpLstmPolicy", BOX, {"risk": {"objective": "cvar", "alpha": 0.1}, "batch_size": 2}),
    "gSDE": ("MlpLstmPolicy", BOX, {"use_sde": True, "sde_sample_freq": 2, "policy_kwargs": {"recurrent_cell": "gru"}}),
    "images": ("CnnPolicy", IMAGE, {"policy_kwargs": SMALL_EXTRACTOR}),
    "Dict": ("MultiInputLstmPolicy", SPACES["dict"], {"optimizer": {"name": "adaptive_upgd"}, "policy_kwargs": {}}),
    "perturbed": ("MlpLstmPolicy", BOX, {"adversary": {"epsilon": 0.1, "steps": 1, "warmup_updates": 0, "rollouts": 0.5}}),
    "mixed": ("MlpPolicy", BOX, {"adversary": {"epsilon": 0.1, "steps": 1, "warmup_updates": 0, "mode": "mix"}}),
}


def trained(kind, device):
    """A model that has learnt a little on a device, and what it does then."""
    policy, space, options = TRAININGS[kind]
    network = {"net_arch": [6], "lstm_hidden_size": 5, "compiled": False} | options.get("policy_kwargs", {})
    if policy == "MultiInputLstmPolicy":
        network |= {"features_extractor_kwargs": {"cnn_output_dim": 7}}
    env = DummyVecEnv([lambda: Drawing(space)] * 2)
    options = NO_TAIL | {"n_steps": 4, "n_epochs": 1, "seed": 0} | options | {"policy_kwargs": network, "device": device}
    model = DistributionalPPO(policy, env, **options).learn(2 * 4 * 2)
    return model, model.predict(model.env.reset(), deterministic=True)[0]


@pytest.mark.parametrize("kind", TRAININGS)
def test_a_training_on_the_device_is_that_on_the_cpu(kind, monkeypatch):
    # Under inference mode operations are composite, which the device does not take apart.
    monkeypatch.setattr(torch, "inference_mode", lambda mode=True: torch.set_grad_enabled(not mode))
    expected, actions = trained(kind, "cpu")
    with Elsewhere() as device, Numbers():
        model, same_actions = trained(kind, ELSEWHERE)
        weights = [parameter.detach().cpu() for parameter in model.policy.parameters()]
        assert {parameter.device for parameter in model.policy.parameters()} == {ELSEWHERE}
    assert torch.ops.aten.mm in device.computed or torch.ops.aten.addmm in device.computed
    assert not torch.equal(expected.rollout_buffer.actions[0], expected.rollout_buffer.actions[1])
    for weight, of_cpu in zip(weights, expected.policy.parameters(), strict=True):
        torch.testing.assert_close(weight, of_cpu.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.as_tensor(same_actions), torch.as_tensor(actions), rtol=1e-4, atol=1e-5)


def test_the_device_refuses_tensors_of_the_cpu():
    with Elsewhere():
        there = torch.arange(3.0).to(ELSEWHERE)
        assert (2.0 * there)[1:].cpu().tolist() == [2.0, 4.0]
        with pytest.raises(RuntimeError, match="same device"):
            there + torch.ones(3)


@pytest.fixture
def placed():
    """Return a function that builds a policy whose networks are elsewhere."""
    torch.__future__.set_overwrite_module_params_on_conversion(True)

    def build(kind):
        name, space, options = KINDS[kind]
        options = {"critic": CriticConfig(num_quantiles=1), "lstm_hidden_size": 5, "net_arch": [6]} | options
        policy = DistributionalPPO.policy_aliases[name](space, ACTIONS, **options)
        with FakeTensorMode(allow_non_fake_inputs=True):
            for module in policy.children():
                if module not in policy.statistics():
                    module.to(ELSEWHERE)
            if policy.log_std is not None:
                policy.log_std = torch.nn.Parameter(policy.log_std.detach().to(ELSEWHERE), requires_grad=False)
        return policy

    yield build
    torch.__future__.set_overwrite_module_params_on_conversion(False)


@pytest.mark.parametrize("kind", KINDS)
def test_networks_compute_on_the_device_and_statistics_on_the_cpu(placed, kind):
    policy = placed(kind)
    assert policy.device == ELSEWHERE
    assert {buffer.device.type for module in policy.statistics() for buffer in module.buffers()} <= {"cpu"}
    with FakeTensorMode(allow_non_fake_inputs=True):
        rows = torch.zeros(L, B, policy.obs_size, dtype=policy.observations.dtype)
        inputs = policy.inputs(rows)
        assert inputs.device.type == "cpu"  # as rollouts are
        dist_params, state = policy.act(inputs[0], policy.initial_state(B))
        assert dist_params.device == ELSEWHERE
        assert policy.act(inputs[1], state)[0].shape == (B, 4)
        samples = (L, B) if policy.recurrent else (L * B,)
        states = (*policy.initial_state(B), *policy.initial_critic_state(B)) if policy.recurrent else (EMPTY,) * 4
        batch = Batch(
            inputs if policy.recurrent else inputs.flatten(0, 1),
            torch.zeros(*samples, 2),
            torch.zeros(*samples, 4),
            torch.zeros(samples),
            torch.ones(samples),
            torch.zeros(2, *samples, 1),
            torch.zeros(2, *samples, 1),
            torch.zeros(L, B, 1) if policy.recurrent else EMPTY,
            *(part.cpu() for part in states),
        ).to(ELSEWHERE)
        actor, critic = batch.features(policy)
        assert policy.dist_params(actor).shape == (*samples, 4)
        errors = critic_errors(0.2, policy.return_dist, policy.critic_outputs(critic), batch.targets, batch.old_atoms)
        assert errors.device == ELSEWHERE
        assert policy.raw_atoms(critic).device.type == "cpu"


def test_the_states_of_the_last_steps_are_found_on_the_device():
    trunk = LstmTrunk(4, 5).to(ELSEWHERE)
    inputs, resets = torch.empty(L, B, 4, device=ELSEWHERE), torch.empty(L, B, 1, device=ELSEWHERE)
    outputs, after = trunk.sequence_and_states(inputs, resets, trunk.initial_state(B), torch.tensor([2, 4, 5]))
    assert outputs.device == after[0].device == after[1].device == ELSEWHERE
    assert outputs.shape == (L, B, 5)


def test_the_device_is_the_cpu_unless_another_is_asked_for(tmp_path):
    model = DistributionalPPO("MlpPolicy", "CartPole-v1", n_steps=8, seed=0)
    assert model.device.type == "cpu"
    model.save(tmp_path / "model")
    assert DistributionalPPO.load(tmp_path / "model").device.type == "cpu"
    model.device = ELSEWHERE
    with pytest.warns(UserWarning, match="You are trying to run PPO on the GPU"):
        model._maybe_recommend_cpu()

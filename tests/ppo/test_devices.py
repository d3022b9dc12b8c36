"""Placement of networks and statistics, on a device that this machine need not have.

Torch's fake tensors know their shape and device, and refuse to be mixed with those of another device as real ones do. The
device ``meta`` stands for a GPU.
"""

import pytest
import torch
from gymnasium import spaces
from test_observations import IMAGE, SPACES
from torch._subclasses.fake_tensor import FakeTensorMode

from tailguard import DistributionalPPO
from tailguard.ppo.config import CriticConfig, ObsNormConfig, RiskConfig
from tailguard.ppo.critic import critic_errors
from tailguard.ppo.networks import LstmTrunk
from tailguard.ppo.rollout import EMPTY, Batch

BOX, ACTIONS, L, B = spaces.Box(-1.0, 1.0, (5,)), spaces.Box(-1.0, 1.0, (2,)), 6, 3
ELSEWHERE = torch.device("meta")
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

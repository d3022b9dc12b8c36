"""Action masks: actions that are not possible are never taken, and the loss is that of the distribution over the others."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv

from tailguard import DistributionalPPO
from tailguard.envs.vec_env import ArrayVecEnv, StepArrays, action_masks
from tailguard.ppo.actions import MASKED, Categorical, action_distribution, masked
from tailguard.ppo.loss import Coefficients, policy_loss

ACTIONS = [spaces.Discrete(5), spaces.MultiDiscrete([3, 2]), spaces.MultiBinary(3)]


class Doors(gym.Env[Any, Any]):
    """Every step some doors are locked; a locked one must not be tried. The observation says nothing about locks."""

    def __init__(self, action_space: spaces.Space[Any] = ACTIONS[0]) -> None:
        self.action_space, self.observation_space = action_space, spaces.Box(-1.0, 1.0, (2,), np.float32)
        dist = action_distribution(action_space)
        assert isinstance(dist, Categorical)
        self.counts = dist.counts
        self.steps = 0

    def action_masks(self) -> np.ndarray:
        return np.concatenate(self.open)

    def _lock(self) -> None:
        self.open = [self.np_random.random(count) < 0.5 for count in self.counts]
        for doors in self.open:
            doors[self.np_random.integers(len(doors))] = True

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        self._lock()
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        chosen = np.atleast_1d(action)
        assert all(doors[choice] for doors, choice in zip(self.open, chosen, strict=True)), "a locked door was tried"
        self.steps += 1
        self._lock()
        return np.full(2, self.steps / 10.0, np.float32), float(chosen[0] == 0), self.steps == 7, False, {}


class Locks(ArrayVecEnv):
    """A batch that is asked once for the masks of all its environments."""

    def __init__(self) -> None:
        super().__init__(3, spaces.Box(-1.0, 1.0, (1,)), spaces.Discrete(2))
        self.asked = 0

    def action_masks(self) -> np.ndarray:
        self.asked += 1
        return np.array([[True, False], [False, True], [True, True]])

    def reset(self) -> np.ndarray:
        return np.zeros((3, 1), np.float32)

    def step_arrays(self, actions: np.ndarray) -> StepArrays:
        assert (actions[:2] == [0, 1]).all()
        zeros = np.zeros(3, np.bool_)
        return StepArrays(self.reset(), np.ones(3), zeros, zeros, np.zeros(0, np.intp), np.zeros((0, 1)))


def masked_example(counts: list[int]) -> tuple[Categorical, torch.Tensor, np.ndarray]:
    generator, rng = torch.Generator().manual_seed(0), np.random.default_rng(0)
    masks = rng.random((64, sum(counts))) < 0.6
    for first in np.cumsum([0, *counts[:-1]]):
        masks[:, first] = True
    return Categorical(counts, False, np.zeros(len(counts))), torch.randn(64, sum(counts), generator=generator), masks


def test_the_rest_of_the_distribution_is_renormalised() -> None:
    dist, logits, masks = masked_example([4])
    params = dist.masked(logits, masks)
    probabilities = torch.softmax(logits, -1) * torch.from_numpy(masks)
    probabilities /= probabilities.sum(-1, keepdim=True)
    for action in range(4):
        taken = torch.full((64, 1), float(action))
        expected = torch.where(torch.from_numpy(masks[:, action]), probabilities[:, action], 0.0)
        torch.testing.assert_close(dist.log_prob(params, taken).exp(), expected)
    plogp = torch.where(probabilities > 0, probabilities * probabilities.log(), 0.0)
    torch.testing.assert_close(dist.entropy(params), -plogp.sum(-1))


@pytest.mark.parametrize("counts", [[4], [3, 2]])
def test_loss_and_gradient_are_those_of_autograd_over_possible_actions(counts: list[int]) -> None:
    dist, logits, masks = masked_example(counts)
    old = dist.masked(logits + 0.3 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)), masks)
    actions, coefficients = dist.mode(old), Coefficients(0.2, 0.05, 0.1)
    advantages, share = torch.linspace(-1, 1, 64), torch.full((64,), 1 / 64)

    new = logits.clone().requires_grad_()
    loss, _ = policy_loss(dist, new, old, actions, advantages, share, coefficients)
    loss.backward()

    free = logits.clone().requires_grad_()
    possible = dist.masked(free, masks)
    ratio = (dist.log_prob(possible, actions) - dist.log_prob(old, actions)).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    expected = (share * (-surrogate - 0.05 * dist.entropy(possible) + 0.1 * dist.kl(old, possible))).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(new.grad, free.grad)
    assert new.grad is not None
    assert (new.grad[torch.from_numpy(~masks)] == 0.0).all()


@pytest.mark.parametrize("policy", ["MlpPolicy", "MlpLstmPolicy"])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("action_space", ACTIONS, ids=str)
def test_no_impossible_action_is_taken_and_old_and_new_policy_agree_before_the_first_step(
    policy: str, compiled: bool, action_space: spaces.Space[Any]
) -> None:
    env = DummyVecEnv([lambda: Doors(action_space)] * 4)
    kwargs = {"compiled": compiled, "net_arch": [8]} | ({"lstm_hidden_size": 8} if policy == "MlpLstmPolicy" else {})
    model = DistributionalPPO(policy, env, n_steps=16, learning_rate=0.0, n_epochs=1, policy_kwargs=kwargs, seed=0)
    model.learn(128)
    stored = model.rollout_buffer.dist_params
    assert (stored == MASKED).any()
    assert model.logger.name_to_value["train/approx_kl"] == pytest.approx(0.0, abs=1e-6)


def test_masks_can_be_left_aside() -> None:
    model = DistributionalPPO("MlpPolicy", DummyVecEnv([Doors] * 4), n_steps=16, seed=0)
    with pytest.raises(AssertionError, match="a locked door"):
        model.learn(64, use_masking=False)


def test_agents_learn_among_the_possible_actions() -> None:
    model = DistributionalPPO("MlpPolicy", DummyVecEnv([Doors] * 8), n_steps=32, learning_rate=1e-2, seed=0)
    model.learn(4_096)
    obs = np.zeros((2, 2), np.float32)
    masks = np.array([[True] * 5, [False, True, False, True, False]])
    actions, _ = model.predict(obs, deterministic=True, action_masks=masks)
    assert actions[0] == 0
    assert actions[1] in (1, 3)


def test_predictions_and_policies_take_masks_as_sb3_contrib_does() -> None:
    model = DistributionalPPO("MlpLstmPolicy", DummyVecEnv([Doors]), n_steps=16, policy_kwargs={"lstm_hidden_size": 4}, seed=0)
    only = np.array([False, False, True, False, False])
    state = None
    for _ in range(5):
        action, state = model.predict(np.zeros(2, np.float32), state, np.array([state is None]), action_masks=only)
        assert action == 2
    flat = DistributionalPPO("MlpPolicy", DummyVecEnv([Doors]), n_steps=16, seed=0).policy
    obs = torch.zeros(3, 2)
    _, log_prob, entropy = flat.evaluate_actions(obs, torch.full((3,), 2.0), np.tile(only, (3, 1)))
    torch.testing.assert_close(log_prob, torch.zeros(3))
    torch.testing.assert_close(entropy, torch.zeros(3))
    assert (flat.get_distribution(obs, np.tile(only, (3, 1))).sample() == 2).all()


def test_a_batch_is_asked_once_for_all() -> None:
    env = Locks()
    np.testing.assert_array_equal(action_masks(env), [[True, False], [False, True], [True, True]])
    model = DistributionalPPO("MlpPolicy", env, n_steps=8, seed=0)
    env.asked = 0
    model.learn(24)
    assert env.asked == 8


def test_what_cannot_be_masked_is_refused_in_one_line() -> None:
    dist = action_distribution(spaces.MultiDiscrete([2, 2]))
    with pytest.raises(ValueError, match=r"env 1 leave nothing to choose from \(choice 1\)"):
        masked(dist, torch.zeros(2, 4), [[True] * 4, [True, True, False, False]])
    with pytest.raises(ValueError, match="must have the shape"):
        masked(dist, torch.zeros(2, 4), [[True] * 3] * 2)
    with pytest.raises(ValueError, match="for Discrete, MultiDiscrete and MultiBinary"):
        masked(action_distribution(spaces.Box(-1, 1, (1,))), torch.zeros(1, 2), [[True, True]])
    model = DistributionalPPO("MlpPolicy", DummyVecEnv([Doors]), n_steps=8, adversary={"epsilon": 0.1}, seed=0)
    with pytest.raises(ValueError, match="use_masking=False"):
        model.learn(8)

"""Return scale and observation normaliser against numpy, closed forms and the invariance that PopArt promises."""

import copy
import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from stable_baselines3.common.running_mean_std import RunningMeanStd
from torch import nn

from tailguard.ppo.config import ObsNormConfig, ReturnScaleConfig
from tailguard.ppo.critic import rescale_affine
from tailguard.ppo.scaling import ObservationNormalizer, ReturnScale

means = st.floats(-1e4, 1e4)
stds = st.floats(1e-3, 1e4)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_statistics(mean, std):
    """A scale whose first update measured exactly this mean and std."""
    scale = ReturnScale(ReturnScaleConfig())
    scale.update(torch.tensor([mean - std, mean + std], dtype=torch.float64))
    return scale


def saved_and_loaded(module, fresh):
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, fresh.state_dict()[name]), name
    return fresh


class TestStatistics:
    def test_first_update_is_numpys(self):
        returns = random(128, 8) * 3.0 + 7.0
        scale = ReturnScale(ReturnScaleConfig())
        scale.update(returns)
        assert scale.mean.item() == pytest.approx(np.mean(returns.numpy()), rel=1e-12)
        assert scale.std.item() == pytest.approx(np.std(returns.numpy()), rel=1e-12)

    @given(beta=st.floats(0.01, 1.0), sizes=st.lists(st.integers(2, 50), min_size=1, max_size=8), seed=st.integers(0, 99))
    @settings(max_examples=50, deadline=None)
    def test_average_over_rollouts(self, beta, sizes, seed):
        """Without a limit, every sample of the rollout that is k updates old weighs (1 - beta)^k."""
        scale = ReturnScale(ReturnScaleConfig(beta=beta, max_relative_step=None))
        rollouts = [random(size, seed=seed + i) + i for i, size in enumerate(sizes)]
        for rollout in rollouts:
            scale.update(rollout)
        ages = np.repeat(np.arange(len(sizes))[::-1], sizes)
        weights, samples = (1.0 - beta) ** ages, np.concatenate([rollout.numpy() for rollout in rollouts])
        mean = np.average(samples, weights=weights)
        assert scale.mean.item() == pytest.approx(mean, abs=1e-9)
        assert scale.std.item() == pytest.approx(np.sqrt(np.average((samples - mean) ** 2, weights=weights)), rel=1e-9)

    def test_late_rollouts_weigh_beta(self):
        scale = ReturnScale(ReturnScaleConfig(beta=0.2, max_relative_step=None))
        for _ in range(200):
            scale.update(torch.tensor([-1.0, 1.0]))
        scale.update(torch.tensor([9.0, 11.0]))
        assert scale.mean.item() == pytest.approx(0.2 * 10.0)
        assert scale.std.item() == pytest.approx(np.sqrt(1.0 + 0.2 * 0.8 * 100.0))

    @given(outlier=st.floats(-1e12, 1e12), step=st.floats(0.01, 3.0), mean=means, std=stds)
    @settings(max_examples=100, deadline=None)
    def test_one_rollout_moves_little(self, outlier, step, mean, std):
        scale = ReturnScale(ReturnScaleConfig(max_relative_step=step))
        scale.update(torch.tensor([mean - std, mean + std], dtype=torch.float64))
        before_mean, before_std = scale.mean.item(), scale.std.item()
        scale.update(torch.tensor([outlier, 2.0 * outlier], dtype=torch.float64))
        rounding = 1e-12 * (1.0 + abs(mean) + step * std)  # of float64, at the size of the numbers that are subtracted
        assert abs(scale.mean.item() - before_mean) <= step * before_std + rounding
        assert 1.0 / (1.0 + step) <= scale.std.item() / before_std * (1.0 + 1e-9)
        assert scale.std.item() / before_std <= (1.0 + step) * (1.0 + 1e-9)

    def test_limited_statistics_still_arrive(self):
        scale = with_statistics(0.0, 1.0)
        returns = random(1000) * 500.0 - 3000.0
        for _ in range(60):
            scale.update(returns)
        assert scale.mean.item() == pytest.approx(returns.mean().item(), rel=1e-3)
        assert scale.std.item() == pytest.approx(returns.std().item(), rel=1e-2)

    def test_constant_returns_have_the_smallest_std_and_limit_nothing(self):
        scale = ReturnScale(ReturnScaleConfig(min_std=0.01, beta=0.5))
        scale.update(torch.full((10,), 3.0))
        assert (scale.mean.item(), scale.std.item()) == (3.0, 0.01)
        scale.update(torch.tensor([-100.0, 106.0] * 5))
        assert scale.std.item() > 50.0

    def test_weights_select_and_weigh(self):
        returns = torch.tensor([[1.0, 2.0], [4.0, float("nan")]])
        scale = ReturnScale(ReturnScaleConfig())
        scale.update(returns, torch.tensor([[1, 1], [2, 0]]))
        repeated = np.array([1.0, 2.0, 4.0, 4.0])
        assert scale.mean.item() == pytest.approx(repeated.mean())
        assert scale.std.item() == pytest.approx(repeated.std())

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_refuses_what_is_not_finite_and_stays(self, bad):
        scale = with_statistics(1.0, 2.0)
        before = copy.deepcopy(scale.state_dict())
        with pytest.raises(ValueError, match=f"returns is '{bad} in 1 of 3 places', but it must be finite"):
            scale.update(torch.tensor([1.0, bad, 2.0]))
        assert scale.state_dict() == before

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            (torch.tensor([1.0, -1.0]), "weights is '-1.0 in 1 of 2 places', but it must be finite and at least 0"),
            (torch.tensor([1.0, float("nan")]), "weights is 'nan in 1 of 2 places'"),
            (torch.zeros(2), "returns is '2 samples of weight 0', but it must be at least one sample with a positive weight"),
            (torch.ones(3), r"weights is \(3,\), but it must be of the returns' shape \(2,\)"),
        ],
    )
    def test_refuses_bad_weights(self, weights, message):
        with pytest.raises(ValueError, match=message):
            ReturnScale(ReturnScaleConfig()).update(torch.ones(2), weights)

    def test_refuses_no_returns(self):
        with pytest.raises(ValueError, match="returns is '0 samples"):
            ReturnScale(ReturnScaleConfig()).update(torch.ones(0))


class TestPopArt:
    @given(mean=means, std=stds, new_mean=means, new_std=stds, seed=st.integers(0, 99))
    @settings(max_examples=200, deadline=None)
    def test_no_raw_prediction_of_either_head_moves(self, mean, std, new_mean, new_std, seed):
        features = random(16, 32, seed=seed).float()
        torch.manual_seed(seed)
        heads = [nn.Linear(32, 21), nn.Linear(32, 21)]
        scale = with_statistics(mean, std)
        scale.activate()
        before = [scale.decode(head(features)) for head in heads]

        target = with_statistics(new_mean, new_std)
        scale.mean.copy_(target.mean)
        scale.std.copy_(target.std)
        rescale_affine(heads, *scale.activate())
        largest = max(abs(mean), std, abs(new_mean), new_std)  # the numbers that float32 has to carry
        for head, raw in zip(heads, before, strict=True):
            assert (scale.decode(head(features)) - raw).abs().max() <= 1e-5 * largest

    @given(mean=st.floats(-1.0, 1.0), std=st.floats(0.3, 3.0), new_mean=st.floats(-1.0, 1.0), new_std=st.floats(0.3, 3.0))
    @settings(max_examples=100, deadline=None)
    def test_invariance_is_absolute_for_returns_of_order_one(self, mean, std, new_mean, new_std):
        head, features = nn.Linear(8, 5), random(16, 8).float()
        scale = with_statistics(mean, std)
        scale.activate()
        before = scale.decode(head(features))
        scale.update(torch.tensor([new_mean - new_std, new_mean + new_std]))
        rescale_affine([head], *scale.activate())
        assert (scale.decode(head(features)) - before).abs().max() < 1e-5

    def test_a_thousand_activations_do_not_add_up(self):
        head, features = nn.Linear(8, 5), random(16, 8).float()
        scale = with_statistics(0.5, 2.0)
        rescale_affine([head], *scale.activate())
        before = scale.decode(head(features))
        for seed in range(1000):
            scale.update(random(20, seed=seed) * 2.0 + 0.5)
            rescale_affine([head], *scale.activate())
        assert (scale.decode(head(features)) - before).abs().max() < 1e-4

    def test_snapshot_changes_by_activation_only(self):
        scale = ReturnScale(ReturnScaleConfig())
        scale.update(torch.tensor([1.0, 5.0]))
        assert (scale.mean_snapshot.item(), scale.std_snapshot.item()) == (0.0, 1.0)
        scale.activate()
        assert (scale.mean_snapshot.item(), scale.std_snapshot.item()) == (3.0, 2.0)
        assert (scale.mean.item(), scale.std.item()) == (3.0, 2.0)
        scale.update(torch.tensor([1.0, 9.0]))
        assert (scale.mean_snapshot.item(), scale.std_snapshot.item()) == (3.0, 2.0)
        assert scale.mean.item() != 3.0

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_encode_and_decode_are_inverse(self, dtype):
        scale = with_statistics(-3.0, 0.25)
        scale.activate()
        normalised = random(7, 5, seed=1).to(dtype)
        raw = scale.decode(normalised)
        torch.testing.assert_close(raw, normalised * 0.25 - 3.0)
        assert raw.dtype == dtype
        torch.testing.assert_close(scale.encode(raw), normalised, atol=2e-6, rtol=0.0)
        assert scale.encode(raw[0, 0]).dtype == dtype

    def test_heads_change_in_place(self):
        """Flat parameter storage and optimizers keep pointing at the same memory."""
        head = nn.Linear(3, 2)
        weight, address = head.weight, head.weight.data_ptr()
        scale = with_statistics(0.0, 4.0)
        before = head.weight.clone()
        rescale_affine([head], *scale.activate())
        assert head.weight is weight
        assert weight.data_ptr() == address
        assert weight.requires_grad
        torch.testing.assert_close(weight, before / 4.0)

    @pytest.mark.parametrize(("degree", "factor"), [(1, 1.0), (2, 0.25)])
    def test_gradients_of_the_quantile_loss_do_not_feel_the_scale(self, degree, factor):
        """The reason why the optimizer's moments are left alone; a squared loss makes gradients s / s' times as large."""
        head, features, returns = nn.Linear(4, 1), random(64, 4).float(), random(64, 1, seed=2).float() * 3.0

        def gradient():
            head.zero_grad()
            error = scale.encode(returns) - head(features)
            loss = error**2 if degree == 2 else torch.maximum(0.3 * error, -0.7 * error)
            loss.mean().backward()
            return head.weight.grad.clone()

        scale = ReturnScale(ReturnScaleConfig())
        before = gradient()
        scale.update(torch.tensor([-3.0, 5.0]))
        rescale_affine([head], *scale.activate())
        torch.testing.assert_close(gradient(), factor * before, atol=1e-5, rtol=1e-4)

    def test_refuses_heads_that_cannot_be_rescaled(self):
        scale, head = with_statistics(0.0, 2.0), nn.Linear(3, 2)
        with pytest.raises(ValueError, match="must be different layers"):
            rescale_affine([head, head], *scale.activate())
        with pytest.raises(ValueError, match="layers with a bias"):
            rescale_affine([head, nn.Linear(3, 2, bias=False)], *scale.activate())

    def test_state_round_trip(self):
        scale = with_statistics(0.1, 0.7)
        scale.activate()
        scale.update(random(10))
        restored = saved_and_loaded(scale, ReturnScale(ReturnScaleConfig()))
        for one in (scale, restored):
            one.update(random(10, seed=5))
        assert torch.equal(scale.mean, restored.mean)
        assert torch.equal(scale.std, restored.std)


class TestObservations:
    @given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6), seed=st.integers(0, 99), shift=st.floats(-1e3, 1e3))
    @settings(max_examples=50, deadline=None)
    def test_merge_is_the_variance_of_all_data(self, sizes, seed, shift):
        normalizer = ObservationNormalizer(3, ObsNormConfig())
        data = random(sum(sizes), 3, seed=seed) * torch.tensor([1.0, 0.01, 100.0]) + shift
        for part in data.split(sizes):
            normalizer.update(part)
        np.testing.assert_allclose(normalizer.mean, data.numpy().mean(0), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(normalizer.var, data.numpy().var(0), rtol=1e-6, atol=1e-9)
        assert normalizer.count == sum(sizes)

    def test_order_of_merging_does_not_matter(self):
        parts = [random(n, 2, seed=n) * n + n for n in (3, 50, 7)]
        results = []
        for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
            normalizer = ObservationNormalizer(2, ObsNormConfig())
            for i in order:
                normalizer.update(parts[i])
            results.append(torch.stack((normalizer.mean, normalizer.var)))
        torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(results[0], results[2], rtol=1e-12, atol=1e-12)

    @given(half_life=st.floats(5.0, 1e4), sizes=st.lists(st.integers(1, 40), min_size=2, max_size=5), seed=st.integers(0, 99))
    @settings(max_examples=50, deadline=None)
    def test_half_life(self, half_life, sizes, seed):
        """A sample that was followed by n later ones weighs 2^(-n / half-life)."""
        normalizer = ObservationNormalizer(2, ObsNormConfig(half_life=half_life))
        parts = [random(size, 2, seed=seed + i) + 5.0 * i for i, size in enumerate(sizes)]
        for part in parts:
            normalizer.update(part)
        followed_by = sum(sizes) - np.cumsum(sizes)
        weights = np.repeat(0.5 ** (followed_by / half_life), sizes)
        samples = np.concatenate([part.numpy() for part in parts])
        mean = np.average(samples, axis=0, weights=weights)
        np.testing.assert_allclose(normalizer.mean, mean, rtol=1e-9, atol=1e-9)
        var = np.average((samples - mean) ** 2, axis=0, weights=weights)
        np.testing.assert_allclose(normalizer.var, var, rtol=1e-9, atol=1e-9)
        assert normalizer.count.item() == pytest.approx(weights.sum())

    def test_forward_is_the_formula(self):
        normalizer = ObservationNormalizer(4, ObsNormConfig(clip=1.5))
        batch = random(20, 6, 4) * 3.0 + 2.0
        normalizer.update(batch)
        x = random(5, 2, 4, seed=1) * 4.0
        flat = batch.reshape(-1, 4).numpy()
        expected = np.clip((x.numpy() - flat.mean(0)) / np.sqrt(flat.var(0) + 1e-8), -1.5, 1.5)
        result = normalizer(x)
        assert result.dtype == torch.float32
        np.testing.assert_allclose(result, expected, atol=1e-6)
        assert result.abs().max() == 1.5

    def test_rows_are_forward_to_the_last_bit(self):
        normalizer = ObservationNormalizer(4, ObsNormConfig(clip=1.5), [False, False, True, False])
        normalizer.update(random(20, 6, 4) * 3.0 + 2.0)
        x, out = random(7, 5, seed=1).float() * 4.0, torch.empty(7, 6)
        x[0, 0] = torch.nan
        normalizer.rows(x.numpy()[:, :4], out.numpy()[:, :4])
        torch.testing.assert_close(out[:, :4], normalizer(x[:, :4]), rtol=0.0, atol=0.0, equal_nan=True)

    def test_untrained_is_the_identity_up_to_the_clip(self):
        x = torch.tensor([0.0, 0.5, 30.0])
        torch.testing.assert_close(ObservationNormalizer(3, ObsNormConfig())(x), torch.tensor([0.0, 0.5, 10.0]))

    def test_gradients_pass(self):
        normalizer = ObservationNormalizer(2, ObsNormConfig())
        normalizer.update(random(100, 2) * 4.0)
        x = torch.zeros(2, requires_grad=True)
        normalizer(x).sum().backward()
        torch.testing.assert_close(x.grad, normalizer.var.rsqrt().float())

    def test_frozen_between_updates(self):
        normalizer = ObservationNormalizer(2, ObsNormConfig())
        normalizer.update(random(10, 2))
        before = copy.deepcopy(normalizer.state_dict())
        x = random(3, 2, seed=9)
        first = normalizer(x)
        for _ in range(100):
            normalizer(random(3, 2) * 100.0)
        assert torch.equal(normalizer(x), first)
        assert all(torch.equal(before[name], tensor) for name, tensor in normalizer.state_dict().items())

    def test_masked_columns_are_left_alone(self):
        normalizer = ObservationNormalizer(3, ObsNormConfig(), mask=[False, True, False])
        batch = random(50, 3) * 5.0 + 3.0
        normalizer.update(batch)
        x = torch.tensor([[3.0, 1e6, 3.0], [0.0, -0.25, 0.0]])
        plain = ObservationNormalizer(3, ObsNormConfig())
        plain.update(batch)
        assert torch.equal(normalizer(x)[:, 1], x[:, 1])
        assert torch.equal(normalizer(x)[:, ::2], plain(x)[:, ::2])

    def test_constant_columns_give_zero(self):
        normalizer = ObservationNormalizer(2, ObsNormConfig())
        constant = torch.tensor([0.1, 12345.678])
        for _ in range(3):
            normalizer.update(constant.expand(7, 2))
        assert torch.equal(normalizer(constant), torch.zeros(2))
        assert normalizer(constant + 1.0).tolist() == [10.0, 10.0]

    def test_all_axes_but_the_last_are_samples(self):
        normalizer = ObservationNormalizer(1, ObsNormConfig())
        normalizer.update(torch.tensor([[[1.0], [2.0]], [[4.0], [4.0]]]))
        samples = np.array([1.0, 2.0, 4.0, 4.0])
        moments = normalizer.mean.item(), normalizer.var.item(), normalizer.count.item()
        assert moments == pytest.approx((samples.mean(), samples.var(), 4.0))

    def test_drift(self):
        normalizer = ObservationNormalizer(3, ObsNormConfig(), mask=[False, False, True])
        assert normalizer.drift() == (0.0, 0.0)
        normalizer.update(torch.tensor([[-1.0, -2.0, 0.0], [1.0, 2.0, 0.0]]))
        assert normalizer.drift() == (0.0, 0.0)  # the first scale has nothing to drift from
        # Means go from 0 to 3 and stay at 0; stds from 1 to sqrt(1 + 9) and from 2 to sqrt((4 + 36) / 2).
        normalizer.update(torch.tensor([[5.0, -6.0, 99.0], [7.0, 6.0, -50.0]]))
        mean_drift, std_drift = normalizer.drift()
        assert mean_drift == pytest.approx(np.sqrt((3.0**2 + 0.0) / 2.0))
        moved = np.array([np.sqrt(10.0) - 1.0, np.sqrt(20.0) / 2.0 - 1.0])
        assert std_drift == pytest.approx(np.sqrt((moved**2).mean()))

    def test_merges_as_sb3s_running_mean_and_variance(self):
        first, second = random(40, 3).numpy() * 2.0 + 1.0, random(60, 3, seed=1).numpy()
        running = RunningMeanStd(shape=(3,))
        running.update(first)
        normalizer = ObservationNormalizer(3, ObsNormConfig())
        moments = {"mean": running.mean, "var": running.var, "count": running.count}
        normalizer.load_state_dict(
            {name: torch.tensor(value, dtype=torch.float64) for name, value in moments.items()}, strict=False
        )
        running.update(second)
        normalizer.update(torch.from_numpy(second))
        np.testing.assert_allclose(normalizer.mean, running.mean, rtol=1e-12)
        np.testing.assert_allclose(normalizer.var, running.var, rtol=1e-12)
        assert normalizer.count.item() == running.count
        x = random(5, 3, seed=2)
        expected = np.clip((x.numpy() - running.mean) / np.sqrt(running.var + 1e-8), -10.0, 10.0)
        np.testing.assert_allclose(normalizer(x), expected, atol=1e-6)

    def test_state_round_trip_acts_alike(self):
        normalizer = ObservationNormalizer(3, ObsNormConfig(half_life=50.0), mask=[True, False, False])
        for seed in range(3):
            normalizer.update(random(30, 3, seed=seed) * 3.0 + seed)
        restored = saved_and_loaded(normalizer, ObservationNormalizer(3, ObsNormConfig(half_life=50.0)))
        x = random(4, 3, seed=8)
        assert torch.equal(restored(x), normalizer(x))
        assert restored.drift() == normalizer.drift()
        for one in (normalizer, restored):
            one.update(random(30, 3, seed=9))
        assert torch.equal(restored(x), normalizer(x))
        assert torch.equal(copy.deepcopy(restored)(x), normalizer(x))

    def test_loads_as_part_of_a_model(self):
        first = nn.Sequential(ObservationNormalizer(2, ObsNormConfig()), nn.Linear(2, 1))
        first[0].update(random(10, 2) + 4.0)
        second = nn.Sequential(ObservationNormalizer(2, ObsNormConfig()), nn.Linear(2, 1))
        second.load_state_dict(first.state_dict())
        assert torch.equal(second(torch.ones(2)), first(torch.ones(2)))

    @pytest.mark.parametrize(
        ("batch", "message"),
        [
            (torch.tensor([[1.0, float("nan")]]), "batch is 'nan in 1 of 2 places', but it must be finite"),
            (torch.tensor([[1.0, float("inf")]]), "batch is 'inf in 1 of 2 places'"),
            (torch.ones(4, 3), r"batch is \(4, 3\), but it must be a shape that ends in 2"),
            (torch.tensor(1.0), "a shape that ends in 2"),
            (torch.ones(0, 2), "at least one sample with a positive weight"),
        ],
    )
    def test_refuses_bad_batches(self, batch, message):
        with pytest.raises(ValueError, match=message):
            ObservationNormalizer(2, ObsNormConfig()).update(batch)

    def test_refuses_bad_masks_and_sizes(self):
        for mask in ([True, True], [True], [0, 1]):
            with pytest.raises(ValueError, match=r"mask is .* 2 booleans"):
                ObservationNormalizer(2, ObsNormConfig(), mask=mask)
        with pytest.raises(ValueError, match="size is 0"):
            ObservationNormalizer(0, ObsNormConfig())


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (ReturnScaleConfig, {"beta": 0.0}),
        (ReturnScaleConfig, {"beta": 1.1}),
        (ReturnScaleConfig, {"min_std": 0.0}),
        (ReturnScaleConfig, {"max_relative_step": float("nan")}),
        (ReturnScaleConfig, {"unknown": 1}),
        (ObsNormConfig, {"half_life": 0.0}),
        (ObsNormConfig, {"clip": float("inf")}),
        (ObsNormConfig, {"eps": 0.0}),
    ],
)
def test_refuses_impossible_settings(config, values):
    with pytest.raises(ValidationError, match=next(iter(values))):
        config(**values)

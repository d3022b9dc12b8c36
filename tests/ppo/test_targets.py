"""GAE and SR(lambda) against their definitions, closed forms and exactly known return distributions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tailguard.ppo.quantiles import level_masses, quantile_huber_loss, tail_levels, uniform_levels
from tailguard.ppo.targets import gae, sr_lambda_targets


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors this small only make the threads of a busy machine wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def rollout(steps, envs, seed=0, atoms=None, ends=0.2, dtype=torch.float64):
    """Random rewards, values or quantiles of this and the next observation, and flags that may both be set."""
    generator = seeded(seed)
    shape = (steps, envs) if atoms is None else (steps, envs, atoms)
    rewards = torch.randn(steps, envs, generator=generator, dtype=dtype)
    values, next_values = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
    terminated, truncated = (torch.rand(steps, envs, generator=generator) < ends for _ in range(2))
    return rewards, values, next_values, terminated, truncated


def never(rewards):
    return torch.zeros_like(rewards, dtype=torch.bool)


def advantages_by_definition(rewards, values, next_values, terminated, truncated, gamma, lam):
    """A_t = sum over k of (gamma lam)^k delta_{t+k}, up to the end of the episode, looking forward from every step."""
    steps, envs = rewards.shape
    result = torch.zeros_like(rewards)
    for b in range(envs):
        for t in range(steps):
            for k in range(t, steps):
                future = 0.0 if terminated[k, b] else gamma * next_values[k, b]
                result[t, b] += (gamma * lam) ** (k - t) * (rewards[k, b] + future - values[k, b])
                if terminated[k, b] or truncated[k, b]:
                    break
    return result


rollouts = st.builds(
    rollout, st.integers(1, 12), st.integers(1, 4), st.integers(0, 2**20), ends=st.sampled_from([0.0, 0.2, 0.6])
)
shares = st.floats(0.0, 1.0)


class TestGAE:
    @settings(deadline=None)  # the first call compiles
    @given(rollouts, shares, shares)
    def test_definition(self, batch, gamma, lam):
        torch.testing.assert_close(gae(*batch, gamma, lam), advantages_by_definition(*batch, gamma, lam))

    @settings(deadline=None)
    @given(rollouts, shares)
    def test_lambda_zero_is_the_one_step_error(self, batch, gamma):
        rewards, values, next_values, terminated, _ = batch
        delta = rewards + gamma * torch.where(terminated, 0.0, next_values) - values
        torch.testing.assert_close(gae(*batch, gamma, 0.0), delta)

    @settings(deadline=None)
    @given(st.integers(0, 2**20), shares)
    def test_lambda_one_is_the_return_with_a_bootstrap(self, seed, gamma):
        rewards, values, _, _, _ = rollout(9, 2, seed)
        last = torch.randn(1, 2, generator=seeded(seed), dtype=torch.float64)
        next_values = torch.cat([values[1:], last])
        discounts = gamma ** torch.arange(9, dtype=torch.float64).unsqueeze(-1)
        expected = (discounts * rewards).sum(0) + gamma**9 * last[0] - values[0]
        actual = gae(rewards, values, next_values, never(rewards), never(rewards), gamma, 1.0)[0]
        torch.testing.assert_close(actual, expected)

    @settings(deadline=None)
    @given(rollouts, shares, shares)
    def test_exact_values_leave_no_advantage(self, batch, gamma, lam):
        _, values, next_values, terminated, truncated = batch
        rewards = values - gamma * torch.where(terminated, 0.0, next_values)
        advantages = gae(rewards, values, next_values, terminated, truncated, gamma, lam)
        torch.testing.assert_close(advantages, torch.zeros_like(rewards), rtol=0, atol=1e-12)

    @pytest.mark.parametrize("flag", ["terminated", "truncated"])
    def test_the_next_episode_never_leaks_back(self, flag):
        rewards, values, next_values, terminated, truncated = rollout(10, 2, ends=0.0)
        (terminated if flag == "terminated" else truncated)[4, 0] = True
        before = gae(rewards, values, next_values, terminated, truncated, 0.99, 0.95)
        for tensor in (rewards, values, next_values):
            tensor[5:, 0] += 1000.0
        after = gae(rewards, values, next_values, terminated, truncated, 0.99, 0.95)
        assert torch.equal(before[:5, 0], after[:5, 0])
        assert torch.equal(before[:, 1], after[:, 1])
        assert not torch.equal(before[5:, 0], after[5:, 0])

    @pytest.mark.parametrize("lam", [0.0, 0.95, 1.0])
    def test_a_truncated_episode_is_worth_as_much_as_an_endless_one(self, lam):
        """One state, reward 1, episodes of 100 steps: V = 1 / (1 - gamma) = 100."""
        assert self.learnt_value(lam, cut="truncated") == pytest.approx(100.0, rel=1e-3)

    def test_a_cut_that_counts_as_an_end_is_worth_less(self):
        """The mean over k = 1..100 of (1 - gamma^k) / (1 - gamma)."""
        assert self.learnt_value(1.0, cut="terminated") == pytest.approx(37.24, abs=0.01)

    @staticmethod
    def learnt_value(lam, cut):
        rewards = torch.ones(200, 1, dtype=torch.float64)
        ends = never(rewards)
        ends[99::100] = True
        flags = {"terminated": never(rewards), "truncated": never(rewards), cut: ends}
        value = torch.zeros_like(rewards)
        for _ in range(1500):
            value += gae(rewards, value, value, flags["terminated"], flags["truncated"], 0.99, lam).mean()
        return float(value[0, 0])

    def test_float32_adds_up_in_float64(self):
        batch = rollout(2000, 3, ends=0.001, dtype=torch.float32)
        single, precise = (
            gae(*batch, 0.999, 0.999),
            gae(*(x.double() if x.is_floating_point() else x for x in batch), 0.999, 0.999),
        )
        assert single.dtype == torch.float32
        torch.testing.assert_close(single, precise.float(), rtol=1e-7, atol=0)

    def test_any_strides_and_no_gradient(self):
        rewards, values, next_values, terminated, truncated = rollout(6, 4)
        expected = gae(rewards, values, next_values, terminated, truncated, 0.9, 0.8)
        strided = [x.T.contiguous().T for x in (rewards, values, next_values, terminated, truncated)]
        strided[1] = strided[1].clone().requires_grad_()
        actual = gae(*strided, 0.9, 0.8)
        assert torch.equal(actual, expected)
        assert not actual.requires_grad

    @pytest.mark.parametrize("name", ["rewards", "values", "next_values"])
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_is_named(self, name, bad):
        batch = dict(zip(("rewards", "values", "next_values", "terminated", "truncated"), rollout(7, 4, ends=0.0), strict=True))
        batch["truncated"][3, 2] = True
        for place in ((3, 2), (5, 0), (3, 3)):
            batch[name][place] = bad
        with pytest.raises(ValueError, match=f"^{name} of env 2 at step 3 is {bad}, but it must be finite"):
            gae(**batch, gamma=0.99, lam=0.95)

    def test_a_value_after_the_end_is_never_read(self):
        rewards, values, next_values, terminated, truncated = rollout(7, 4)
        expected = gae(rewards, values, next_values, terminated, truncated, 0.99, 0.95)
        next_values[terminated] = math.nan
        assert torch.equal(gae(rewards, values, next_values, terminated, truncated, 0.99, 0.95), expected)

    def test_huge_finite_numbers_are_finite(self):
        rewards = torch.full((3, 2), 3e38)
        zeros = torch.zeros_like(rewards)
        assert torch.equal(gae(rewards, zeros, zeros, never(rewards), never(rewards), 0.0, 0.0), rewards)

    def test_impossible_arguments_are_refused(self):
        rewards, values, next_values, terminated, truncated = rollout(5, 3)
        for index, name in enumerate(("values", "next_values", "terminated", "truncated"), start=1):
            batch = [rewards, values, next_values, terminated, truncated]
            batch[index] = batch[index][:4]
            with pytest.raises(ValueError, match=rf"shape of {name} is \(4, 3\), but it must be \(5, 3\)"):
                gae(*batch, 0.99, 0.95)
        with pytest.raises(ValueError, match=r"shape of rewards is \(5,\)"):
            gae(rewards[:, 0], values[:, 0], next_values[:, 0], terminated[:, 0], truncated[:, 0], 0.99, 0.95)
        with pytest.raises(ValueError, match=r"dtype of terminated is torch\.float64"):
            gae(rewards, values, next_values, terminated.double(), truncated, 0.99, 0.95)
        with pytest.raises(ValueError, match="dtype of values"):
            gae(rewards, values.long(), next_values, terminated, truncated, 0.99, 0.95)
        for bad in (-0.1, 1.1, math.nan):
            with pytest.raises(ValueError, match=r"gamma is .* in \[0, 1\]"):
                gae(rewards, values, next_values, terminated, truncated, bad, 0.95)
            with pytest.raises(ValueError, match=r"lam is .* in \[0, 1\]"):
                gae(rewards, values, next_values, terminated, truncated, 0.99, bad)


def sr(batch, gamma, lam, seed=0):
    rewards, _, next_quantiles, terminated, truncated = batch
    return sr_lambda_targets(rewards, next_quantiles, terminated, truncated, gamma, lam, seeded(seed))


class TestSRLambda:
    def test_lambda_zero_is_one_step_bellman(self):
        batch = rewards, _, quantiles, terminated, _ = rollout(8, 3, atoms=5)
        expected = rewards.unsqueeze(-1) + 0.9 * torch.where(terminated.unsqueeze(-1), 0.0, quantiles)
        torch.testing.assert_close(sr(batch, 0.9, 0.0), expected)

    def test_lambda_one_is_monte_carlo_with_a_bootstrap(self):
        rewards, _, quantiles, terminated, truncated = rollout(6, 3, atoms=5, ends=0.0)
        terminated[3, 1] = truncated[3, 2] = True
        targets = sr((rewards, None, quantiles, terminated, truncated), 0.9, 1.0)
        for first, last, env, bootstrap in ((0, 5, 0, True), (0, 3, 1, False), (4, 5, 1, True), (1, 3, 2, True)):
            total = sum(0.9 ** (k - first) * rewards[k, env] for k in range(first, last + 1))
            future = 0.9 ** (last + 1 - first) * quantiles[last, env] if bootstrap else torch.zeros(5, dtype=torch.float64)
            torch.testing.assert_close(targets[first, env], total + future)

    @settings(deadline=None)
    @given(st.integers(0, 2**20), shares, st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 0.3]))
    def test_mean_is_the_lambda_return_where_nothing_is_drawn(self, seed, gamma, lam, ends):
        rewards, _, quantiles, terminated, truncated = rollout(7, 3, seed, atoms=4, ends=ends)
        values = torch.zeros_like(rewards)
        values[1:] = quantiles.mean(-1)[:-1]  # V(s_t) is what the step before bootstraps from
        returns = gae(rewards, values, quantiles.mean(-1), terminated, truncated, gamma, lam) + values
        targets = sr((rewards, None, quantiles, terminated, truncated), gamma, lam)
        torch.testing.assert_close(targets.mean(-1), returns)

    def test_mean_over_draws_is_the_lambda_return(self):
        copies, lam, levels = 20_000, 0.7, tail_levels(6, 0.2, 3, torch.float64)
        rewards, _, quantiles, terminated, truncated = rollout(8, 1, seed=5, atoms=6)
        masses, values = level_masses(levels), torch.zeros_like(rewards)
        next_values = quantiles @ masses
        values[1:] = next_values[:-1]
        returns = gae(rewards, values, next_values, terminated, truncated, 0.9, lam) + values
        wide = [x.expand(8, copies, *x.shape[2:]) for x in (rewards, quantiles, terminated, truncated)]
        means = (sr_lambda_targets(*wide, 0.9, lam, seeded()) * masses).sum(-1)  # [8, copies]
        error = means.std(-1) / math.sqrt(copies)
        assert bool(((means.mean(-1) - returns[:, 0]).abs() <= 4 * error + 1e-9).all())

    def test_depths_are_geometric_for_every_atom(self):
        """Quantiles that tell their step: the atom of step 0 shows how far it looked ahead."""
        steps, copies, atoms, lam = 6, 20_000, 3, 0.6
        rewards = torch.zeros(steps, copies)
        quantiles = (torch.arange(1.0, steps + 1)[:, None] + 10.0 * torch.arange(atoms)).unsqueeze(1).expand(-1, copies, -1)
        looked = sr_lambda_targets(rewards, quantiles, never(rewards), never(rewards), 1.0, lam, seeded())[0]
        depth = looked - 10.0 * torch.arange(atoms)  # 1..6, and each atom still carries its own index
        for n in range(1, steps + 1):
            expected = (1 - lam) * lam ** (n - 1) if n < steps else lam ** (n - 1)
            error = math.sqrt(expected * (1 - expected) / copies)
            assert bool(((depth == n).double().mean(0) - expected).abs().max() <= 4 * error)
        assert bool(((depth >= 1) & (depth <= steps)).all())

    def test_atoms_decide_independently(self):
        """Two atoms look equally far ahead as often as two independent geometric depths are equal."""
        steps, copies, lam = 6, 20_000, 0.6
        rewards = torch.zeros(steps, copies)
        quantiles = torch.arange(1.0, steps + 1)[:, None, None].expand(-1, copies, 3)
        depth = sr_lambda_targets(rewards, quantiles, never(rewards), never(rewards), 1.0, lam, seeded())[0]
        chances = [(1 - lam) * lam ** (n - 1) if n < steps else lam ** (n - 1) for n in range(1, steps + 1)]
        expected = sum(chance**2 for chance in chances)
        error = math.sqrt(expected * (1 - expected) / copies)
        for one, other in ((0, 1), (0, 2), (1, 2)):
            assert abs((depth[:, one] == depth[:, other]).double().mean() - expected) <= 4 * error

    @pytest.mark.parametrize("flag", ["terminated", "truncated"])
    def test_the_next_episode_never_leaks_back(self, flag):
        batch = rewards, _, quantiles, terminated, truncated = rollout(10, 2, atoms=4, ends=0.0)
        (terminated if flag == "terminated" else truncated)[4, 0] = True
        before = sr(batch, 0.99, 0.95)
        rewards[5:, 0] += 1000.0
        quantiles[5:, 0] += 1000.0
        after = sr(batch, 0.99, 0.95)
        assert torch.equal(before[:5, 0], after[:5, 0])
        assert torch.equal(before[:, 1], after[:, 1])

    def test_the_generator_alone_decides(self):
        batch = rollout(10, 3, atoms=8)
        state = torch.get_rng_state()
        first = sr(batch, 0.99, 0.5, seed=1)
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(7)
        assert torch.equal(sr(batch, 0.99, 0.5, seed=1), first)
        assert not torch.equal(sr(batch, 0.99, 0.5, seed=2), first)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_dtype_shape_and_gradient(self, dtype):
        rewards, _, quantiles, terminated, truncated = rollout(5, 3, atoms=4, dtype=dtype)
        kept = quantiles.clone()
        targets = sr_lambda_targets(rewards, quantiles.requires_grad_(), terminated, truncated, 0.99, 0.5, seeded())
        assert targets.shape == (5, 3, 4)
        assert targets.dtype == dtype
        assert not targets.requires_grad
        assert torch.equal(quantiles.detach(), kept)

    def test_what_is_not_finite_is_named(self):
        batch = rewards, _, quantiles, terminated, _ = rollout(6, 4, atoms=3, ends=0.0)
        terminated[1, 1] = True
        expected = sr(batch, 0.99, 0.5)
        quantiles[1, 1] = math.nan  # nobody reads it
        assert torch.equal(sr(batch, 0.99, 0.5), expected)
        quantiles[4, 3, 2] = math.inf
        with pytest.raises(ValueError, match=r"^next_quantiles of env 3 at step 4 is inf, but it must be finite"):
            sr(batch, 0.99, 0.5)
        rewards[2, 0] = math.nan
        with pytest.raises(ValueError, match=r"^rewards of env 0 at step 2 is nan"):
            sr(batch, 0.99, 0.5)

    def test_impossible_arguments_are_refused(self):
        rewards, _, quantiles, terminated, truncated = rollout(5, 3, atoms=4)
        for bad in (quantiles[:4], quantiles[..., 0], quantiles[..., :0]):
            with pytest.raises(ValueError, match=r"shape of next_quantiles is .* \(5, 3\) as rewards"):
                sr_lambda_targets(rewards, bad, terminated, truncated, 0.99, 0.5, seeded())
        with pytest.raises(ValueError, match="lam is 2"):
            sr_lambda_targets(rewards, quantiles, terminated, truncated, 0.99, 2.0, seeded())


class TestLearntDistribution:
    """Two states in turn, rewards N(+1, 1) and N(-1, 1): the return from both is Gaussian with variance 1 / (1 - gamma^2)."""

    GAMMA, MEANS, STEPS, ENVS = 0.8, torch.tensor([1.0, -1.0]), 10, 24

    def learn(self, levels, lam, updates=1000):
        """Tabular quantiles ``[2, N]`` by quantile regression on SR(lambda), averaged over the second half of the updates."""
        generator, masses = seeded(), level_masses(levels)
        state = torch.arange(self.STEPS) % 2
        table = torch.zeros(2, len(levels), requires_grad=True)
        average = torch.zeros(2, len(levels))
        optimizer = torch.optim.Adam([table], lr=0.3, betas=(0.9, 0.99))
        decrease = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 / (1 + 40 * update / updates))
        for update in range(updates):
            rewards = self.MEANS[state, None] + torch.randn(self.STEPS, self.ENVS, generator=generator)
            truncated = torch.rand(self.STEPS, self.ENVS, generator=generator) < 0.05
            following = table.detach()[1 - state].unsqueeze(1).expand(-1, self.ENVS, -1)
            targets = sr_lambda_targets(rewards, following, never(rewards), truncated, self.GAMMA, lam, generator)
            # The loss is linear in the distribution of the target: all targets of a state may stand in one row.
            rows = torch.stack([targets[first::2].flatten() for first in (0, 1)])
            weights = masses.repeat(rows.shape[1] // len(levels)) / (rows.shape[1] // len(levels))
            optimizer.zero_grad()
            quantile_huber_loss(table, rows, levels, 0.0, weights).sum().backward()
            optimizer.step()
            decrease.step()
            if update >= updates // 2:
                average += table.detach() / (updates - updates // 2)
        return average

    def check(self, table, levels):
        masses = level_masses(levels)
        means = (masses * table).sum(-1, keepdim=True)
        deviations = (masses * (table - means) ** 2).sum(-1).sqrt()
        np.testing.assert_allclose(deviations, 1 / math.sqrt(1 - self.GAMMA**2), rtol=0.02)
        np.testing.assert_allclose(means[:, 0], self.MEANS / (1 + self.GAMMA), atol=0.06)

    @pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
    def test_spread_is_right_for_every_lambda(self, lam):
        levels = uniform_levels(160)
        self.check(self.learn(levels, lam), levels)

    def test_spread_is_right_for_levels_that_are_not_uniform(self):
        levels = tail_levels(160, 0.2, 60)
        self.check(self.learn(levels, 0.9), levels)

    @pytest.mark.parametrize(
        ("gamma", "lam", "ratio"), [(0.99, 0.95, 0.415), (0.9, 0.95, 0.840), (0.9, 0.0, 0.436), (0.9, 1.0, 1.0)]
    )
    def test_scalar_lambda_returns_are_too_narrow(self, gamma, lam, ratio):
        """The reason for SR(lambda): quantiles of the lambda-return with exact V miss the spread by a known factor."""
        assert ratio == pytest.approx(math.sqrt((1 - gamma**2) / (1 - (gamma * lam) ** 2)), abs=6e-4)
        rewards = torch.randn(300, 2000, generator=seeded())
        exact = torch.zeros_like(rewards)
        returns = gae(rewards, exact, exact, never(rewards), never(rewards), gamma, lam)
        sample = returns[:200:10].flatten()  # far enough from the end of the rollout
        levels = torch.tensor([0.05, 0.95])
        low, high = torch.full((2,), -50.0), torch.full((2,), 50.0)
        for _ in range(40):
            middle = ((low + high) / 2).requires_grad_()
            (gradient,) = torch.autograd.grad(quantile_huber_loss(middle, sample, levels, 0.0), middle)
            low, high = torch.where(gradient < 0, middle, low).detach(), torch.where(gradient < 0, high, middle).detach()
        truth = 2 * stats.norm.ppf(0.95) / math.sqrt(1 - gamma**2)
        assert float(low.diff()) / truth == pytest.approx(ratio, rel=0.02)

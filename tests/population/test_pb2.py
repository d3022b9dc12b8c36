"""Population-based bandits: the kernel and the bound against plain linear algebra, and a schedule that has to be found."""

import sys

import numpy as np
import pytest
from population_toys import MovingOptimum

from tailguard.population import HyperparamConfig, PBTConfig, PBTScheduler, PopulationMember
from tailguard.population.engines.serial import SerialEngine
from tailguard.population.pb2 import ForgettingRBF, Surrogate, observations, propose


def kernel(a, b, length, forgetting):
    """Compute the kernel entry by entry, from its definition."""
    return np.array(
        [
            [
                np.exp(-sum((p - q) ** 2 for p, q in zip(x[1:], y[1:], strict=True)) / (2.0 * length**2))
                * (1.0 - forgetting) ** (abs(x[0] - y[0]) / 2.0)
                for y in b
            ]
            for x in a
        ]
    )


def data(n=12, dims=2, seed=0):
    rng = np.random.default_rng(seed)
    inputs = np.hstack([np.arange(n)[:, None] / 2.0, rng.random((n, 1)) * 7.0 - 3.0, rng.random((n, dims))])
    return inputs, rng.standard_normal(n)


class TestKernel:
    def test_values(self):
        a, b = data(5)[0], data(7, seed=1)[0]
        covariances = ForgettingRBF(0.7, 0.2)
        np.testing.assert_allclose(covariances(a, b), kernel(a, b, 0.7, 0.2), rtol=1e-12)
        np.testing.assert_allclose(np.diag(covariances(a)), covariances.diag(a))

    def test_gradient(self):
        """Derivatives are in the logarithms, in the order of theta."""
        points, step = data(6)[0], 1e-6
        start = ForgettingRBF(0.7, 0.2)
        analytic = start(points, eval_gradient=True)[1]
        assert analytic.shape == (6, 6, 2)
        for i in range(2):
            move = np.eye(2)[i] * step
            up, down = (start.clone_with_theta(start.theta + sign * move)(points) for sign in (1.0, -1.0))
            np.testing.assert_allclose(analytic[..., i], (up - down) / (2.0 * step), atol=1e-8)

    def test_what_is_long_ago_is_forgotten(self):
        now, before = np.array([[0.0, 1.0, 0.5]]), np.array([[20.0, 1.0, 0.5]])
        assert ForgettingRBF(1.0, 0.5)(now, before)[0, 0] == pytest.approx(0.5**10)


class TestSurrogate:
    def test_the_bound_is_the_mean_and_kappa_standard_deviations(self):
        """The bound is the posterior from the normal equations, without observation noise."""
        inputs, gains = data()
        surrogate = Surrogate(inputs, gains)
        fitted = surrogate._process.kernel_
        scale, noise = fitted.k1.k1.constant_value, fitted.k2.noise_level
        length, forgetting = fitted.k1.k2.length, fitted.k1.k2.forgetting

        def scaled(points):
            low, high = inputs[:, 1].min(), inputs[:, 1].max()
            return np.column_stack([points[:, 0], (points[:, 1] - low) / (high - low), points[:, 2:]])

        x, y = scaled(inputs), np.clip((gains - gains.mean()) / gains.std(), -2.0, 2.0)
        pending, points = data(3, seed=2)[0], data(9, seed=3)[0]
        surrogate.expect(pending)

        def weights(seen):
            covariance = scale * kernel(seen, seen, length, forgetting) + noise * np.eye(len(seen))
            cross = scale * kernel(scaled(points), seen, length, forgetting)
            return cross, np.linalg.solve(covariance, cross.T)

        cross, solved = weights(np.vstack([x, scaled(pending)]))
        variance = scale - (cross * solved.T).sum(1)
        kappa = np.sqrt(0.2 + np.log(0.4 * 12))
        expected = weights(x)[1].T @ y + kappa * np.sqrt(variance)
        np.testing.assert_allclose(surrogate.upper_bound(points), expected, rtol=1e-6, atol=1e-8)

    def test_pending_points_lower_the_bound_around_them(self):
        inputs, gains = data()
        surrogate = Surrogate(inputs, gains)
        point = np.array([[7.0, 0.0, 0.3, 0.9]])
        before = surrogate.upper_bound(point)
        surrogate.expect(point)
        assert surrogate.upper_bound(point) < before

    def test_constant_data_is_no_problem(self):
        inputs = np.tile([[1.0, 2.0, 0.5]], (4, 1))
        assert np.isfinite(Surrogate(inputs, np.zeros(4)).upper_bound(inputs)).all()


MIXED = (
    HyperparamConfig(name="lr", min_value=1e-5, max_value=1e-2, is_log_scale=True),
    HyperparamConfig(name="gamma", min_value=0.9, max_value=0.999, is_log_scale=True, is_one_minus=True),
    HyperparamConfig(name="epochs", min_value=1, max_value=5, is_integer=True),
    HyperparamConfig(name="net", values=("small", "medium", "large")),
)


def told(scheduler, rounds, score):
    exploits = []
    for number in range(rounds):
        for member in scheduler.members:
            scheduler.report(member.member_id, member.step + 10, score(number, member))
        decided = scheduler.decide().exploits
        exploits += decided
        for exploit in decided:
            scheduler.commit(exploit)
    return exploits


class TestProposals:
    @pytest.mark.parametrize("mode", ["max", "min"])
    def test_all_kinds_of_hyperparameters_stay_legal(self, mode):
        config = PBTConfig(
            population_size=6, perturbation_interval=10, hyperparams=MIXED, explore_method="pb2", metric_mode=mode
        )
        rng = np.random.default_rng(0)
        exploits = told(PBTScheduler(config), 6, lambda number, member: number + rng.standard_normal())
        assert len(exploits) == 12
        for exploit in exploits:
            for hyperparam in MIXED:
                hyperparam.require_legal(exploit.hyperparams[hyperparam.name])

    def test_observations_are_gains_per_step_from_where_they_started(self):
        search = (HyperparamConfig(name="x", min_value=0.0, max_value=2.0),)
        config = PBTConfig(population_size=2, perturbation_interval=10, hyperparams=search, metric_mode="min")
        scheduler = PBTScheduler(config, [{"x": 0.5}, {"x": 1.5}])
        scheduler.report(0, 10, 4.0)
        scheduler.report(1, 10, 9.0)
        (exploit,) = scheduler.decide().exploits
        scheduler.commit(exploit)
        scheduler.report(0, 20, 3.0)
        scheduler.report(1, 20, float("nan"))
        scheduler.report(1, 30, 2.0)
        scheduler.report(0, 30, 2.5)
        inputs, gains = observations(config, search, scheduler.members)
        # Member 1 was a copy at 4.0, but its interval ended without a score, and the next one started without.
        np.testing.assert_allclose(inputs, [[1.0, 4.0, 0.25], [2.0, 3.0, 0.25]])
        np.testing.assert_allclose(gains, [0.1, 0.05])

    def test_a_copy_starts_from_the_performance_of_its_source(self):
        search = (HyperparamConfig(name="x", min_value=0.0, max_value=2.0),)
        config = PBTConfig(population_size=2, perturbation_interval=10, hyperparams=search)
        scheduler = PBTScheduler(config, [{"x": 0.5}, {"x": 1.5}])
        told(scheduler, 1, lambda number, member: (4.0, 1.0)[member.member_id])
        scheduler.report(1, 20, 6.0)
        inputs, gains = observations(config, search, scheduler.members)
        np.testing.assert_allclose(inputs, [[1.0, 4.0, scheduler.members[1].hyperparams["x"] / 2.0]])
        np.testing.assert_allclose(gains, [0.2])

    def test_members_of_one_round_try_different_things(self):
        """One observation in the middle: the ends are uncertain, and the second target takes the end that is left."""
        search = (HyperparamConfig(name="x", min_value=0.0, max_value=1.0),)
        config = PBTConfig(population_size=3, perturbation_interval=10, hyperparams=search, explore_method="pb2")
        members = [PopulationMember(i, {"x": 0.5}, performance=1.0, step=20) for i in range(3)]
        entry = {"since": 10, "step": 20, "baseline": 1.0, "performance": 1.0, "hyperparams": {"x": 0.5}}
        members[0].history.append(entry)
        for seed in range(10):
            proposed = propose(config, members, {1: 0, 2: 0}, np.random.default_rng(seed))
            low, high = sorted(values["x"] for values in proposed.values())
            assert low < 0.02
            assert high > 0.98

    def test_a_restored_scheduler_proposes_the_same(self):
        config = PBTConfig(population_size=3, perturbation_interval=10, hyperparams=MIXED, explore_method="pb2")
        scheduler = PBTScheduler(config)
        told(scheduler, 3, lambda number, member: float(number + member.member_id))
        twin = PBTScheduler(config)
        twin.load_state_dict(scheduler.state_dict())
        expected = told(scheduler, 2, lambda number, member: float(member.member_id))
        assert told(twin, 2, lambda number, member: float(member.member_id)) == expected

    def test_without_observations_proposals_are_uniform(self):
        config = PBTConfig(population_size=2, hyperparams=MIXED, explore_method="pb2")
        scheduler = PBTScheduler(config)
        scheduler.report(0, 5, 1.0)
        scheduler.report(1, 5, 0.0)
        epochs = [propose(config, scheduler.members, {1: 0}, np.random.default_rng(seed))[1]["epochs"] for seed in range(500)]
        assert set(epochs) == {1, 2, 3, 4, 5}
        assert propose(config, scheduler.members, {}, np.random.default_rng(0)) == {}

    def test_without_scikit_learn_the_scheduler_says_what_to_install(self, monkeypatch):
        monkeypatch.delitem(sys.modules, "tailguard.population.pb2")
        monkeypatch.setitem(sys.modules, "sklearn.gaussian_process", None)
        with pytest.raises(ImportError, match=r"pip install \"tailguard\[pb2\]\""):
            PBTScheduler(PBTConfig(hyperparams=MIXED, explore_method="pb2"))


def test_a_moving_optimum_is_followed_better_than_by_random_steps():
    """20 seeds; the best possible total is the horizon, 120."""

    def total(method, seed):
        config = PBTConfig(
            population_size=4, perturbation_interval=10, hyperparams=MovingOptimum.search, explore_method=method, seed=seed
        )
        engine = SerialEngine(PBTScheduler(config), MovingOptimum)
        engine.run(MovingOptimum.horizon // 10)
        return max(learner.total for learner in engine.learners)

    random = ("perturb", "resample", "both")
    totals = {method: np.array([total(method, seed) for seed in range(20)]) for method in (*random, "pb2")}
    for method in random:
        lead = totals["pb2"] - totals[method]
        assert lead.mean() > 3.0 * lead.std(ddof=1) / np.sqrt(20)
        assert (lead > 0.0).sum() >= 14
    assert np.median(totals["pb2"]) > 100.0

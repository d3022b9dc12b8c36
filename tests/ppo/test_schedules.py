"""Entropy schedule, KL control and learning rate: closed forms, clamps, and who may write what."""

import io
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from tailguard.ppo.schedules import (
    EntropyConfig,
    EntropySchedule,
    KLConfig,
    KLControl,
    LearningRate,
    LinearSchedule,
)

GOOD, BAD = 0.9, -0.5
coefficients = st.floats(0.0, 1.0)


def through_files(state):
    """A state after JSON; torch.save must give the same."""
    text = json.dumps(state, allow_nan=False)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == state == json.loads(text)
    return json.loads(text)


def optimizer(*scales):
    """SGD with one parameter group per scale; None leaves the key out."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))]} for _ in scales]
    for group, scale in zip(groups, scales, strict=True):
        if scale is not None:
            group["lr_scale"] = scale
    return torch.optim.SGD(groups, lr=123.0)


def rates(sgd):
    return [group["lr"] for group in sgd.param_groups]


@st.composite
def entropy_configs(draw):
    floor = draw(coefficients)
    return EntropyConfig(
        initial=floor + draw(coefficients),
        final=draw(coefficients),
        decay_steps=draw(st.integers(1, 20)),
        min_coefficient=floor,
        plateau_window=draw(st.sampled_from([0, 2, 5])),
        plateau_tolerance=draw(st.floats(0.0, 2.0)),
        plateau_min_updates=draw(st.integers(0, 10)),
        boost_factor=draw(st.floats(0.01, 10.0)),
        bad_explained_patience=draw(st.integers(0, 3)),
    )


measurements = st.lists(
    st.tuples(st.none() | st.floats(-10.0, 10.0), st.none() | st.floats(-5.0, 1.0)), min_size=1, max_size=60
)


class TestEntropy:
    @given(config=entropy_configs(), measured=measurements)
    @settings(max_examples=200, deadline=None)
    def test_both_clamps_hold(self, config, measured):
        schedule = EntropySchedule(config)
        for performance, explained_variance in measured:
            value = schedule.step(performance, explained_variance)
            assert value == schedule.value
            assert schedule.scheduled >= config.min_coefficient
            assert value >= config.min_coefficient
            highest = max(config.initial, config.final) * config.max_boost
            assert value <= max(highest, config.min_coefficient) * (1.0 + 1e-12)

    def test_linear_decay_starts_at_once_without_a_plateau(self):
        schedule = EntropySchedule(EntropyConfig(initial=0.1, final=0.02, decay_steps=4))
        assert schedule.decay_start == 0
        values = [schedule.value, *(schedule.step(0.0, GOOD) for _ in range(6))]
        assert values == pytest.approx([0.1, 0.08, 0.06, 0.04, 0.02, 0.02, 0.02])
        assert values[-1] == 0.02

    def test_decay_stops_at_the_floor(self):
        schedule = EntropySchedule(EntropyConfig(initial=0.1, final=0.0, decay_steps=10, min_coefficient=0.05))
        values = [schedule.step(0.0, GOOD) for _ in range(12)]
        assert values[:4] == pytest.approx([0.09, 0.08, 0.07, 0.06])
        assert values[5:] == [0.05] * 7

    def test_without_final_it_stays(self):
        schedule = EntropySchedule(EntropyConfig(initial=0.03))
        assert {schedule.step(0.0, GOOD) for _ in range(10)} == {0.03}

    def test_decay_starts_at_the_first_plateau(self):
        config = EntropyConfig(initial=1.0, final=0.0, decay_steps=10, plateau_window=4, plateau_tolerance=0.1)
        schedule = EntropySchedule(config)
        for update in range(1, 11):  # rises by 1 per update: no plateau
            assert schedule.step(float(update), GOOD) == 1.0
            assert schedule.decay_start is None
        assert schedule.slope == pytest.approx(1.0)
        # Then flat. The slopes of the last four are 0.7, 0.3 and, with four equal ones, 0.
        assert [schedule.step(10.0, GOOD) for _ in range(3)] == [1.0, 1.0, 1.0]
        assert schedule.decay_start == 13
        # Plateaus after the start add nothing: one tenth per update.
        assert [schedule.step(10.0, GOOD) for _ in range(3)] == pytest.approx([0.9, 0.8, 0.7])
        assert schedule.decay_start == 13

    @given(values=st.lists(st.floats(-1.0, 1.0), min_size=1, max_size=40), tolerance=st.floats(0.0, 0.5))
    @settings(max_examples=100, deadline=None)
    def test_start_is_the_first_update_on_a_plateau(self, values, tolerance):
        window, earliest = 4, 7
        config = EntropyConfig(
            initial=1.0,
            final=0.0,
            decay_steps=5,
            plateau_window=window,
            plateau_tolerance=tolerance,
            plateau_min_updates=earliest,
        )
        schedule, first = EntropySchedule(config), None
        for update, value in enumerate(values, start=1):
            schedule.step(value, None)
            a, b, c, d = values[update - 4 : update] if update >= window else (0.0, 99.0, 198.0, 297.0)
            slope = (-1.5 * a - 0.5 * b + 0.5 * c + 1.5 * d) / 5.0
            if abs(abs(slope) - tolerance) < 1e-12:
                return  # rounding decides
            if first is None and update >= earliest and abs(slope) <= tolerance:
                first = update
        assert schedule.decay_start == first
        expected = 1.0 if first is None else max(1.0 - (len(values) - first) / 5.0, 0.0)
        assert schedule.value == pytest.approx(expected)

    def test_no_plateau_counts_before_its_time_or_with_too_few_measurements(self):
        config = EntropyConfig(initial=1.0, final=0.0, decay_steps=10, plateau_window=3, plateau_min_updates=6)
        schedule = EntropySchedule(config)
        for performance in (1.0, 1.0, 1.0, 1.0, 1.0):
            schedule.step(performance, GOOD)
        assert schedule.decay_start is None
        schedule.step(1.0, GOOD)
        assert schedule.decay_start == 6

        unmeasured = EntropySchedule(config)
        for performance in (None, None, None, None, None, None, 1.0, None, 1.0):
            unmeasured.step(performance, GOOD)
        assert unmeasured.decay_start is None
        unmeasured.step(1.0, GOOD)
        assert unmeasured.decay_start == 10

    def test_no_start_at_the_floor(self):
        config = EntropyConfig(initial=0.01, min_coefficient=0.01, final=0.0, decay_steps=5, plateau_window=2)
        schedule = EntropySchedule(config)
        for _ in range(20):
            assert schedule.step(1.0, GOOD) == 0.01
        assert schedule.slope == 0.0
        assert schedule.decay_start is None

    def test_boost_waits_grows_is_bounded_and_ends(self):
        config = EntropyConfig(initial=0.1, boost_factor=1.5, max_boost=5.0, bad_explained_patience=2)
        schedule = EntropySchedule(config)
        values = [schedule.step(0.0, BAD) for _ in range(8)]
        assert values == pytest.approx([0.1, 0.1, 0.15, 0.225, 0.3375, 0.5, 0.5, 0.5])
        assert schedule.step(0.0, None) == pytest.approx(0.5)  # undefined: no verdict
        assert schedule.step(0.0, 0.0) == 0.1  # at the threshold: not bad
        assert [schedule.step(0.0, BAD) for _ in range(3)] == pytest.approx([0.1, 0.1, 0.15])
        for _ in range(10_000):
            schedule.step(0.0, BAD)
        assert schedule.value == pytest.approx(0.5)

    def test_boost_acts_on_the_decayed_coefficient(self):
        config = EntropyConfig(initial=0.4, final=0.0, decay_steps=4, boost_factor=2.0, bad_explained_patience=0)
        schedule = EntropySchedule(config)
        assert [schedule.step(0.0, BAD) for _ in range(4)] == pytest.approx([0.3 * 2, 0.2 * 4, 0.1 * 5, 0.0])

    def test_a_reducing_boost_stops_at_the_floor(self):
        config = EntropyConfig(initial=0.4, min_coefficient=0.3, boost_factor=0.5, bad_explained_patience=0)
        assert EntropySchedule(config).step(0.0, BAD) == 0.3

    @given(config=entropy_configs(), measured=measurements, split=st.integers(0, 60))
    @settings(max_examples=100, deadline=None)
    def test_state_round_trip(self, config, measured, split):
        schedule = EntropySchedule(config)
        for measurement in measured[:split]:
            schedule.step(*measurement)
        restored = EntropySchedule(config)
        restored.load_state_dict(through_files(schedule.state_dict()))
        assert restored.value == schedule.value
        for measurement in measured[split:]:
            assert restored.step(*measurement) == schedule.step(*measurement)
        assert restored.state_dict() == schedule.state_dict()

    def test_new_settings_continue_from_the_old_state(self):
        waiting = EntropySchedule(EntropyConfig(initial=1.0, final=0.0, decay_steps=4, plateau_window=3))
        for performance in (1.0, 5.0, 9.0):
            waiting.step(performance, GOOD)
        changed = EntropySchedule(EntropyConfig(initial=2.0, final=0.0, decay_steps=4))
        changed.load_state_dict(waiting.state_dict())
        assert changed.decay_start == 3
        assert [changed.step(9.0, GOOD) for _ in range(2)] == [1.5, 1.0]

    def test_refuses_what_is_not_finite(self):
        schedule = EntropySchedule(EntropyConfig())
        with pytest.raises(ValueError, match="performance is nan, but it must be finite"):
            schedule.step(float("nan"), GOOD)
        with pytest.raises(ValueError, match="explained_variance is -inf"):
            schedule.step(0.0, -math.inf)
        assert schedule.updates == 0
        with pytest.raises(ValueError, match=r"entropy schedule's state is .a mapping of \['boost'\]"):
            schedule.load_state_dict({"boost": 1.0})

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"initial": 0.1, "min_coefficient": 0.2}, "initial is 0.1, but it must be at least min_coefficient 0.2"),
            ({"final": 0.0}, "decay_steps is 0, but it must be at least 1 to reach final 0.0"),
            ({"plateau_window": 1}, "plateau_window is 1"),
            ({"initial": float("nan")}, "initial"),
            ({"boost_factor": 0.0}, "boost_factor"),
            ({"max_boost": 0.5}, "max_boost"),
            ({"ent_coef": 0.5}, "ent_coef"),
        ],
    )
    def test_refuses_impossible_settings(self, values, message):
        with pytest.raises(ValidationError, match=message):
            EntropyConfig(**values)


class TestKL:
    def test_early_stop_comes_before_the_step(self):
        """Descend a Gaussian policy's mean; the step that was due when the KL was too large is not taken."""
        mean = torch.nn.Parameter(torch.zeros(()))
        sgd = torch.optim.SGD([mean], lr=0.1)
        control = KLControl(KLConfig(mode="early_stop", target=0.01))
        steps, stopped_at = 0, None
        for _ in range(10):
            kl = 0.5 * mean.item() ** 2  # of N(mean, 1) from N(0, 1)
            if control.should_stop(kl):
                stopped_at = mean.item()
                break
            sgd.zero_grad()
            mean.backward()
            sgd.step()
            steps += 1
        # Means 0, -0.1, -0.2 have KL 0, 0.005, 0.02 > 0.015: two steps.
        assert steps == 2
        assert mean.item() == stopped_at == pytest.approx(-0.2)

    def test_threshold(self):
        control = KLControl(KLConfig(mode="early_stop", target=0.1, stop_factor=2.0))
        assert not control.should_stop(0.2)
        assert control.should_stop(0.2000001)
        assert not control.should_stop(-1.0)
        with pytest.raises(ValueError, match="kl is nan, but it must be finite"):
            control.should_stop(float("nan"))

    @pytest.mark.parametrize("mode", ["none", "early_stop", "penalty", "adaptive_lr"])
    def test_only_one_way_at_a_time(self, mode):
        control = KLControl(KLConfig(mode=mode))
        for kl in (1.0, 1.0, 1e-6):
            control.update(kl, base_lr=3e-4)
        assert control.should_stop(1.0) == (mode == "early_stop")
        assert (control.coefficient > 0.0) == (mode == "penalty")
        assert (control.lr_factor != 1.0) == (mode == "adaptive_lr")
        with pytest.raises(ValueError, match="kl is inf"):
            control.update(math.inf, base_lr=3e-4)
        with pytest.raises(ValueError, match="base_lr is -1"):
            control.update(0.01, base_lr=-1.0)

    def test_doubling(self):
        control = KLControl(KLConfig(mode="penalty", target=0.01, penalty_initial=0.2, penalty_min=0.1, penalty_max=0.5))
        expected = {0.0151: 0.4, 0.015: 0.4, 0.0067: 0.4, 0.0066: 0.2, 0.0: 0.1, -0.001: 0.1, 1.0: 0.2, 2.0: 0.4, 3.0: 0.5}
        for kl, coefficient in expected.items():
            control.update(kl, base_lr=0.0)
            assert control.coefficient == coefficient, kl

    @given(log_c=st.floats(-9.0, 2.0), log_initial=st.floats(-9.0, 4.6))
    @settings(max_examples=100, deadline=None)
    def test_penalty_settles_on_a_policy_whose_kl_is_c_over_beta(self, log_c, log_initial):
        config = KLConfig(mode="penalty", penalty_initial=math.exp(log_initial))
        control, c = KLControl(config), math.exp(log_c)
        for _ in range(60):
            control.update(c / control.coefficient, base_lr=0.0)
        best = min(max(c / config.target, config.penalty_min), config.penalty_max)
        # Doubling comes to rest anywhere in the band, or where a bound stops it.
        assert best / 1.5 * (1.0 - 1e-9) <= control.coefficient <= best * 1.5 * (1.0 + 1e-9)
        settled = control.coefficient
        control.update(c / settled, base_lr=0.0)
        assert control.coefficient == pytest.approx(settled, rel=1e-6)

    @given(kls=st.lists(st.floats(-1.0, 1e6), max_size=50))
    @settings(max_examples=100, deadline=None)
    def test_penalty_never_leaves_its_bounds(self, kls):
        control = KLControl(KLConfig(mode="penalty", penalty_min=1e-3, penalty_max=7.0))
        for kl in kls:
            control.update(kl, base_lr=0.0)
            assert 1e-3 <= control.coefficient <= 7.0

    def test_adaptive_lr_rule(self):
        control = KLControl(KLConfig(mode="adaptive_lr", target=0.01, lr_min=1e-5, lr_max=1e-2))
        for kl, factor in ((0.021, 1 / 1.5), (0.02, 1 / 1.5), (0.005, 1 / 1.5), (0.0, 1 / 1.5), (-1.0, 1 / 1.5), (0.004, 1.0)):
            control.update(kl, base_lr=1e-3)
            assert control.lr_factor == pytest.approx(factor), kl
        for _ in range(50):
            control.update(1.0, base_lr=1e-3)
        assert control.lr_factor * 1e-3 == pytest.approx(1e-5)
        for _ in range(50):
            control.update(1e-9, base_lr=1e-3)
        assert control.lr_factor * 1e-3 == pytest.approx(1e-2)

    def test_adaptive_lr_settles_in_its_band(self):
        """On a policy whose KL is 100 lr^2."""
        control, rate = KLControl(KLConfig(mode="adaptive_lr", target=0.01)), LearningRate(1e-4)
        sgd = optimizer(None)
        for _ in range(40):
            lr = rate.apply(sgd, 1.0, control.lr_factor)
            control.update(1e2 * lr**2, rate.base_at(1.0))
        assert 0.005 <= 1e2 * lr**2 <= 0.02

    def test_adaptive_lr_never_moves_the_wrong_way(self):
        low, high = KLControl(KLConfig(mode="adaptive_lr")), KLControl(KLConfig(mode="adaptive_lr"))
        low.update(1.0, base_lr=1e-7)  # below lr_min already: not raised
        high.update(1e-9, base_lr=0.5)  # above lr_max already: not lowered
        assert low.lr_factor == high.lr_factor == 1.0
        low.update(1.0, base_lr=0.0)
        assert low.lr_factor == 1.0

    @pytest.mark.parametrize("mode", ["penalty", "adaptive_lr"])
    def test_state_round_trip(self, mode):
        config = KLConfig(mode=mode)
        control = KLControl(config)
        for kls in ((), (0.1, 0.003, 0.07)):
            for kl in kls:
                control.update(kl, base_lr=3e-4)
            restored = KLControl(config)
            restored.load_state_dict(through_files(control.state_dict()))
            for each in (control, restored):
                each.update(0.05, base_lr=3e-4)
            assert restored.state_dict() == control.state_dict()
            assert restored.coefficient == control.coefficient
        assert set(control.kl_penalty_state) == {"beta"}

    def test_refuses_foreign_states(self):
        control = KLControl(KLConfig())
        with pytest.raises(ValueError, match="the KL control's state"):
            control.load_state_dict({})
        with pytest.raises(ValueError, match="kl_penalty_state is"):
            control.load_state_dict({"kl_penalty_state": {}, "lr_factor": 1.0})

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"mode": "both"}, "mode"),
            ({"target": 0.0}, "target"),
            ({"penalty_initial": 1e3}, "penalty_initial is 1000.0, but it must be within penalty_min 0.0001"),
            ({"penalty_min": 0.0}, "penalty_min"),
            ({"lr_min": 1.0}, "lr_min is 1.0, but it must be at most lr_max 0.01"),
            ({"stop_factor": -1.0}, "stop_factor"),
        ],
    )
    def test_refuses_impossible_settings(self, values, message):
        with pytest.raises(ValidationError, match=message):
            KLConfig(**values)


class TestLearningRate:
    def test_every_group_is_written(self):
        sgd = optimizer(None, 2.0, 0.5)
        assert LearningRate(1e-3).apply(sgd, 0.7, 1.0) == 1e-3
        assert rates(sgd) == [1e-3, 2e-3, 5e-4]

    def test_linear_schedule(self):
        rate, sgd = LearningRate(LinearSchedule(1e-3, 1e-4)), optimizer(None)
        assert rate.apply(sgd, 1.0, 1.0) == 1e-3
        assert rate.apply(sgd, 0.5, 1.0) == pytest.approx(5.5e-4)
        assert rate.apply(sgd, 0.0, 1.0) == 1e-4
        assert rate.apply(sgd, -0.02, 1.0) == 1e-4  # the last rollout overshoots the planned number of steps

    @given(value=st.floats(0.0, 1.0), progress=st.floats(0.0, 1.0))
    def test_a_constant_is_exact(self, value, progress):
        assert LearningRate(value).base_at(progress) == value

    @pytest.mark.parametrize("base", [1e-3, LinearSchedule(1e-3), lambda progress: 1e-3 * progress**2])
    def test_what_was_set_survives(self, base):
        rate, sgd = LearningRate(base), optimizer(None, 3.0)
        rate.apply(sgd, 1.0, 1.0)
        rate.set(7e-5)
        for i in range(100):
            assert rate.apply(sgd, 1.0 - i / 100.0, 1.0) == 7e-5
            assert rates(sgd) == [7e-5, 3.0 * 7e-5]
        restored = LearningRate(base)
        restored.load_state_dict(through_files(rate.state_dict()))
        assert restored.apply(sgd, 0.5, 1.0) == 7e-5

    def test_the_factor_is_separate_from_the_base(self):
        rate, sgd = LearningRate(1e-3), optimizer(None)
        assert rate.apply(sgd, 1.0, 0.5) == 5e-4
        assert rate.base_at(1.0) == 1e-3
        rate.set(1e-2)
        assert rate.apply(sgd, 1.0, 0.5) == 5e-3
        assert rate.apply(sgd, 1.0, 1.0) == 1e-2

    def test_loading_an_optimizer_does_not_bring_an_old_rate_back(self):
        rate, sgd = LearningRate(1e-3), optimizer(None)
        rate.apply(sgd, 1.0, 1.0)
        old = sgd.state_dict()
        rate.set(1e-5)
        sgd.load_state_dict(old)
        rate.apply(sgd, 0.9, 1.0)
        assert rates(sgd) == [1e-5]

    @pytest.mark.parametrize("base", [3e-4, LinearSchedule(3e-4, 1e-7)])
    def test_state_round_trip(self, base):
        rate, restored = LearningRate(base), LearningRate(1.0)
        restored.load_state_dict(through_files(rate.state_dict()))
        assert all(restored.base_at(p) == rate.base_at(p) for p in (1.0, 0.37, 0.0))

    def test_a_function_must_be_given_again(self):
        state = through_files(LearningRate(lambda progress: 1e-3 * progress).state_dict())
        with pytest.raises(ValueError, match=r"functions are not saved: give that function again instead of LinearSchedule"):
            LearningRate(1e-3).load_state_dict(state)
        again = LearningRate(lambda progress: 1e-3 * progress)
        again.load_state_dict(state)
        assert again.base_at(0.5) == 5e-4

    def test_refuses_impossible_values(self):
        sgd = optimizer(None)
        with pytest.raises(ValueError, match="initial is -1"):
            LearningRate(-1.0)
        with pytest.raises(ValueError, match="initial is nan"):
            LearningRate(1.0).set(float("nan"))
        with pytest.raises(ValueError, match="final is inf"):
            LinearSchedule(1.0, math.inf)
        with pytest.raises(ValueError, match=r"the learning rate at progress_remaining 0.5 is -0.5"):
            LearningRate(lambda progress: -progress).apply(sgd, 0.5, 1.0)
        for progress in (1.5, math.nan, -math.inf):
            with pytest.raises(ValueError, match="progress_remaining is"):
                LearningRate(1.0).apply(sgd, progress, 1.0)
        for factor in (0.0, math.nan, math.inf):
            with pytest.raises(ValueError, match="factor is"):
                LearningRate(1.0).apply(sgd, 1.0, factor)
        with pytest.raises(ValueError, match="lr_scale is -2"):
            LearningRate(1.0).apply(optimizer(-2.0), 1.0, 1.0)
        with pytest.raises(ValueError, match="the learning rate's state"):
            LearningRate(1.0).load_state_dict({"initial": 1.0})
        assert rates(sgd) == [123.0]

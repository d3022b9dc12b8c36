"""Settings of a population: the hyperparameters that it searches, and how it exploits and explores."""

import math
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from tailguard.validation import require

Value = bool | int | float | str
Share = Annotated[float, Field(ge=0.0, le=1.0)]


class HyperparamConfig(BaseModel):
    """One hyperparameter of the search: a range or a list of choices.

    :param name: the key under which members know it.
    :param min_value: lowest value of a range.
    :param max_value: highest value of a range, above ``min_value``.
    :param values: the choices, instead of a range: two or more, in an order in which neighbours are alike (64, 128, 256).
    :param perturbation_factor: a perturbation multiplies or divides by this, each half of the time. 1.2 is the usual step; 2
        crosses the range quickly and settles badly.
    :param perturbation_noise: None multiplies. A number adds Gaussian noise instead, with a standard deviation of this share of
        the range (on the scale of the search); 0.1 is a bold step.
    :param resample_probability: with ``explore_method`` "both", how often a fresh draw takes the place of a perturbation.
    :param is_log_scale: search the logarithm, so that 1e-5 to 1e-4 counts as much as 1e-4 to 1e-3. For learning rates.
    :param is_one_minus: search 1 - x, so that 0.99 to 0.999 is a step of a factor of ten. For gamma and lambda, usually
        together with ``is_log_scale``.
    :param is_integer: whole numbers; a perturbation moves by one at least.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Annotated[str, Field(min_length=1)]
    min_value: float | None = None
    max_value: float | None = None
    values: tuple[Value, ...] | None = None
    perturbation_factor: Annotated[float, Field(gt=1.0)] = 1.2
    perturbation_noise: PositiveFloat | None = None
    resample_probability: Share = 0.25
    is_log_scale: bool = False
    is_one_minus: bool = False
    is_integer: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        ranged = self.min_value is not None or self.max_value is not None
        got = {"min_value": self.min_value, "max_value": self.max_value, "values": self.values}
        require(ranged != (self.values is not None), self.name, got, "a range or a list of values, one of the two")
        if self.values is not None:
            self._check_choices(self.values)
        else:
            self._check_range()
        return self

    def _check_choices(self, values: tuple[Value, ...]) -> None:
        distinct = len({(type(value), value) for value in values})
        require(distinct == len(values) >= 2, f"values of {self.name}", values, "two or more different choices")
        scales = (self.is_log_scale, self.is_one_minus, self.is_integer, self.perturbation_noise is not None)
        require(not any(scales), f"scale or noise of {self.name}", scales, "left alone: choices have neither")

    def _check_range(self) -> None:
        low, high = self.min_value, self.max_value
        if low is None or high is None:
            raise ValueError(f"{self.name} needs both min_value and max_value, got {low} and {high}")
        require(low < high, f"min_value of {self.name}", low, f"below max_value {high}")
        if self.is_one_minus:
            require(
                high < 1.0 or not self.is_log_scale, f"max_value of {self.name}", high, "below 1 for the logarithm of 1 - x"
            )
            require(high <= 1.0, f"max_value of {self.name}", high, "at most 1, for is_one_minus")
            require(not self.is_integer, f"is_integer of {self.name}", True, "False together with is_one_minus")
        else:
            require(low > 0.0 or not self.is_log_scale, f"min_value of {self.name}", low, "above 0 on a log scale")
        if self.is_integer:
            whole = low == math.floor(low) and high == math.floor(high)
            require(whole, f"range of {self.name}", (low, high), "whole numbers, for is_integer")
            require(
                low >= 1.0 or not self.is_log_scale, f"min_value of {self.name}", low, "at least 1 for integers on a log scale"
            )

    # ------------------------------------------------------------------------------------------- the scale of the search

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest value of a range."""
        if self.min_value is None or self.max_value is None:
            raise ValueError(f"{self.name} is a choice and has no bounds")
        return self.min_value, self.max_value

    def require_legal(self, value: Value) -> None:
        """Raise for a value that the search could not have produced: of another type, out of bounds, or not a choice.

        :param value: of the hyperparameter.
        """
        if self.values is not None:
            known = any(type(choice) is type(value) and choice == value for choice in self.values)
            require(known, self.name, value, f"one of {list(self.values)}")
            return
        kind = int if self.is_integer else float
        hint = "an int" if self.is_integer else "a float; set is_integer if it counts something"
        require(type(value) is kind, self.name, value, hint)
        low, high = self.bounds
        require(low <= float(value) <= high, self.name, value, f"within {low} and {high}")

    def nearest_legal(self, x: float) -> int | float:
        """Return the nearest value of a range: clipped to its bounds, and whole for ``is_integer``.

        :param x: any number.
        """
        low, high = self.bounds
        clipped = min(max(x, low), high)
        return round(clipped) if self.is_integer else clipped

    def to_unit(self, value: float) -> float:
        """Return the position of a value of a range on the scale of the search, in [0, 1].

        :param value: within the bounds.
        """
        start, end = self._scaled_bounds()
        return min(max((self._scaled(value) - start) / (end - start), 0.0), 1.0)

    def from_unit(self, unit: float) -> int | float:
        """Return the value at a position in [0, 1]; the inverse of :meth:`to_unit` up to rounding.

        :param unit: position on the scale of the search.
        """
        start, end = self._scaled_bounds()
        scaled = start + unit * (end - start)
        base = math.exp(scaled) if self.is_log_scale else scaled
        return self.nearest_legal(1.0 - base if self.is_one_minus else base)

    def _scaled(self, x: float) -> float:
        base = 1.0 - x if self.is_one_minus else x
        return math.log(base) if self.is_log_scale else base

    def _scaled_bounds(self) -> tuple[float, float]:
        low, high = self.bounds
        if self.is_integer:  # a cell of width 1 around every whole number: uniform draws give each the same share
            low, high = low - 0.5, high + 0.5
        return self._scaled(low), self._scaled(high)


class PBTConfig(BaseModel):
    """Population-based training: the size of the population, how often it decides, how it exploits and how it explores.

    :param population_size: members, 2 or more. 4 to 8 tune one or two hyperparameters, 20 and more are usual in papers.
    :param perturbation_interval: steps that a member trains between two decisions, in whatever unit its ``train`` counts. Too
        short and a score says nothing about the hyperparameters yet; too long and there are few decisions.
    :param hyperparams: the hyperparameters that are searched.
    :param exploit_method: ``truncation``: the worst share copies members of the best share; ``binary_tournament``: every member
        meets one other and copies it if that one is better; ``t_test``: the same, if it is better by Welch's test, which is
        the choice for noisy scores, together with ten or more evaluations per score.
    :param explore_method: what happens to the hyperparameters of a member that has copied another: ``perturb`` them,
        ``resample`` them, ``both`` (each of them resampled with its ``resample_probability``, otherwise perturbed), ``pb2`` (a
        Gaussian process proposes ranges, choices go as in ``both``; needs scikit-learn), or ``none``.
    :param inherit_hyperparams: explore from the source's hyperparameters (the usual way) or, if False, from one's own: a
        copy then keeps more diversity.
    :param truncation_ratio: share that truncation replaces, in (0, 0.5]; at least one member, at most half of them.
        0.2 is usual; more converges sooner, on less.
    :param t_test_level: probability of copying a member that is no better, in (0, 1). 0.05 is usual; less copies more rarely.
    :param t_test_window: evaluations of a member, the latest since its last copy, that enter the test; 2 or more. More
        are surer, and slower to notice progress.
    :param checkpoint_dir: folder in which engines keep the members' files.
    :param metric_name: name of the score in tables and logs.
    :param metric_mode: ``max`` if a high score is good, ``min`` if a low one is.
    :param ready_percentage: share of the living members that must have a score before a decision, in (0, 1]. 1 waits for
        the slowest.
    :param min_ready_members: after ``ready_check_max_wait`` checks that failed, this many are enough.
    :param ready_check_max_wait: checks in a row that may fail before the population continues without the missing members.
    :param optimizer_exploit_strategy: ``copy`` takes over the source's optimizer state, ``reset`` starts with an empty one.
    :param synchronous: decide for all members together, when they have arrived; False decides for each as it arrives, against
        the latest known scores of the others.
    :param protect_first_member: member 0 keeps its hyperparameters throughout, as a control; others may copy it. It is replaced
        only if it is dead or has no finite score, and keeps its hyperparameters even then.
    :param seed: random seed of all decisions.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    population_size: Annotated[int, Field(ge=2)] = 10
    perturbation_interval: PositiveInt = 5
    hyperparams: tuple[HyperparamConfig, ...] = ()
    exploit_method: Literal["truncation", "binary_tournament", "t_test"] = "truncation"
    explore_method: Literal["perturb", "resample", "both", "pb2", "none"] = "both"
    inherit_hyperparams: bool = True
    truncation_ratio: Annotated[float, Field(gt=0.0, le=0.5)] = 0.2
    t_test_level: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    t_test_window: Annotated[int, Field(ge=2)] = 10
    checkpoint_dir: str = "pbt_checkpoints"
    metric_name: str = "mean_reward"
    metric_mode: Literal["max", "min"] = "max"
    ready_percentage: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    min_ready_members: PositiveInt = 2
    ready_check_max_wait: PositiveInt = 10
    optimizer_exploit_strategy: Literal["reset", "copy"] = "reset"
    synchronous: bool = True
    protect_first_member: bool = False
    seed: NonNegativeInt = 0

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        names = [hyperparam.name for hyperparam in self.hyperparams]
        require(len(set(names)) == len(names), "hyperparams", names, "all different")
        legal = f"at most population_size {self.population_size}"
        require(self.min_ready_members <= self.population_size, "min_ready_members", self.min_ready_members, legal)
        ranged = any(hyperparam.values is None for hyperparam in self.hyperparams)
        require(ranged or self.explore_method != "pb2", "explore_method", "pb2", "used with at least one range")
        return self


class PopulationConfig(PBTConfig):
    """A population of trading agents: the settings of :class:`PBTConfig`, its length and its validation score.

    ``perturbation_interval`` counts updates: each is ``n_steps`` steps of every account.

    :param intervals: number of intervals that every member trains. With 20 and more a population can find a schedule.
    :param validation_share: share of the training rows, at their end, that members are scored on and not trained on. The rows
        of the test are never touched.
    :param validation_blocks: parts of these rows that are traded and scored each by itself; the t-test needs 2, better 10.
    :param score: score of a block: ``growth``, its log growth after costs, or ``sharpe``, its Sharpe ratio per year.
    :param cpus_per_member: cores that a member holds on a Ray cluster; a fraction lets members share one.
    """

    intervals: PositiveInt = 20
    validation_share: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.25
    validation_blocks: Annotated[int, Field(ge=1)] = 8
    score: Literal["growth", "sharpe"] = "growth"
    cpus_per_member: PositiveFloat = 1.0
    metric_name: str = "validation score"

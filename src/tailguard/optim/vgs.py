"""Variance-based gradient scaling (VGS): the noisier the gradients of a head, the shorter its steps.

With V = Var[g] / E[g]^2 the noise of a minibatch's gradient in units of its signal (``gradient_statistics.py``), the step of a
head is multiplied by

    f = clamp(1 / (1 + alpha V), min_scaling_factor, 1).

alpha = 1 is the factor that a noisy quadratic asks for: the step that lowers the loss most is 1 / (1 + V) of the one without
noise (McCandlish et al. 2018; Balles and Hennig 2018).

The order of calls, once per optimizer step and however many backward passes have filled the gradients::

    optimizer.zero_grad(); loss.backward() ...
    scaler.scale_gradients()            # measures the raw gradients, then scales
    clip_grad_norm_(parameters, ...)
    optimizer.step()
    scaler.step()

V comes from the steps before this one, so the factor does not depend on the noise of the gradient that it scales. Gradients are
measured before they are scaled or clipped: measuring afterwards would feed the factor back into itself.

How the factor reaches the weights. Steps of SGD and UPGD are proportional to the gradients, and the gradients are multiplied.
Adam and its relatives divide by the size of the gradients, so that a constant factor on them cancels; there the step itself is
scaled (``step_scaling.py``): by the optimizer itself if it is of this project, and otherwise after it has moved the weights.
:meth:`VarianceGradientScaler.attach` chooses by the optimizer's class. Note that clipping undoes a factor on the gradients for
as long as the scaled norm is still above the limit; ``action="step"`` does not have that weakness. Without an attached
optimizer the factor acts on the gradients.

Heads. Noise differs by orders of magnitude between a policy and its critics, and one factor for all would let the noisiest
brake the rest. Give a mapping of names to parameters, and each head has its own. Parameters whose gradients are views of one
flat tensor are recognised and measured in one compiled pass. On the CPU nothing waits for a device; elsewhere one copy per step
does.
"""

import logging
import re
from collections.abc import Mapping
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torch.utils.hooks import RemovableHandle

from tailguard.optim.config import Action, Aggregate, Estimator, VGSConfig
from tailguard.optim.gradient_statistics import GradientStatistics, NoiseScale
from tailguard.optim.layout import Heads, Parameters
from tailguard.optim.step_scaling import FallbackStepScaling, RangeScaledOptimizer, RangeStepScaling
from tailguard.optim.upgd import UPGD
from tailguard.validation import build, require

logger = logging.getLogger(__name__)

VERSION = "4.0"  # 1 to 3.2 are the original's; their statistics measured something else
PROPORTIONAL = (SGD, UPGD)  # optimizers whose step is proportional to the gradient
PERCENTILE = 0.9
RISKY_SIGMA = 1e-4  # fixed noise below this is harmless beside any gradient
DEFAULT = VGSConfig()


class VarianceGradientScaler:
    """Scales the steps of each head by the noise of its gradients.

    :param parameters: parameters, which make one head, or a mapping of heads to parameters.
    :param enabled: False scales nothing and measures nothing. This and the others: see :class:`VGSConfig`.
    :param beta: decay of the running statistics.
    :param alpha: gain; 0 measures without scaling.
    :param eps: least signal, as a share of the gradient's mean square.
    :param warmup_steps: steps without scaling.
    :param estimator: quantity whose variance is measured.
    :param aggregate: how the tensors of a head are combined.
    :param min_scaling_factor: smallest factor.
    :param action: scale gradients or steps.
    """

    def __init__(
        self,
        parameters: Parameters,
        *,
        enabled: bool = DEFAULT.enabled,
        beta: float = DEFAULT.beta,
        alpha: float = DEFAULT.alpha,
        eps: float = DEFAULT.eps,
        warmup_steps: int = DEFAULT.warmup_steps,
        estimator: Estimator = DEFAULT.estimator,
        aggregate: Aggregate = DEFAULT.aggregate,
        min_scaling_factor: float = DEFAULT.min_scaling_factor,
        action: Action = DEFAULT.action,
    ) -> None:
        settings = {
            "enabled": enabled,
            "beta": beta,
            "alpha": alpha,
            "eps": eps,
            "warmup_steps": warmup_steps,
            "estimator": estimator,
            "aggregate": aggregate,
            "min_scaling_factor": min_scaling_factor,
            "action": action,
        }
        self.config = build(VGSConfig, settings)
        self.step_count = 0
        self.noise_scale = NoiseScale(beta)
        self._parameters: Heads | None = None
        self._statistics: GradientStatistics | None = None
        self._variances: list[float] | None = None  # of the statistics as they are; None when they have changed
        self._scaled = False  # since the last step()
        self._step_scaling: RangeStepScaling | FallbackStepScaling | None = None  # None: the factor acts on gradients
        self._hooks: list[RemovableHandle] = []
        self.update_parameters(parameters)

    @classmethod
    def from_config(cls, parameters: Parameters, config: VGSConfig) -> Self:
        """Build a scaler with these settings."""
        return cls(parameters, **config.model_dump())

    # ---------------------------------------------------------------------------------------------------------- links

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters whose gradients are measured."""
        return self._heads().parameters

    @property
    def heads(self) -> tuple[str, ...]:
        """The names of the heads, in the order of all lists of factors."""
        return self._heads().names

    def update_parameters(self, parameters: Parameters) -> None:
        """Measure these parameters from now on, as after a model was loaded; an attached optimizer has to be attached again.

        Statistics are kept if the parameters have the same sizes, and reset otherwise.
        """
        heads = Heads.of(parameters)
        self.detach()
        self._parameters = heads
        known = self._statistics
        if known is None or known.numel.tolist() != heads.numel.tolist():
            if known is not None and self.step_count > 0:
                logger.warning("VGS: the parameters have other sizes than before; its statistics are reset")
            self._reset()
            self._statistics = GradientStatistics(heads, self.config.estimator, self.config.beta)
        else:
            known.link(heads)
            self._variances = None

    def attach(self, optimizer: Optimizer) -> None:
        """Choose how the factor acts by the class of this optimizer; replaces an optimizer attached before.

        :param optimizer: moves the parameters of this scaler.
        """
        self.detach()
        if self.config.enabled:
            _warn_of_fixed_noise(optimizer)
        action = self.config.action
        if action == "auto":
            action = "gradient" if isinstance(optimizer, PROPORTIONAL) else "step"
        if action == "step":
            if isinstance(optimizer, RangeScaledOptimizer):
                self._step_scaling = RangeStepScaling(self._heads(), optimizer)
            else:
                self._step_scaling = FallbackStepScaling(self._heads(), optimizer)
            self._hooks = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]

    def detach(self) -> None:
        """Detach the optimizer; the factor acts on gradients again."""
        for hook in self._hooks:
            hook.remove()
        self._reset_step_factors()
        self._unlink()

    # ------------------------------------------------------------------------------------------------------- each step

    def observe_microbatch(self, samples: float) -> None:
        """Measure the noise scale; to be called after the backward pass of each microbatch, see :class:`NoiseScale`.

        :param samples: number of samples in this microbatch. The accumulated gradient must weight each microbatch's mean by its
            share of samples.
        """
        self.noise_scale.add([parameter.grad for parameter in self.parameters if parameter.grad is not None], samples)

    def scale_gradients(self) -> float:
        """Measure the raw gradients and apply the factors to the step that follows.

        :returns: the smallest factor of all heads.
        """
        return min(self.apply())

    def apply(self) -> list[float]:
        """Do what :meth:`scale_gradients` does and return the factors of all heads."""
        if self._scaled:
            raise RuntimeError(
                "scale_gradients() was called twice for one step: call it once, and step() after optimizer.step()"
            )
        factors = self.factors()
        if self.config.enabled:
            self.update_statistics()
            self._scaled = True
            if min(factors) < 1.0:
                self._apply_factors(factors)
        return factors

    def step(self) -> None:
        """Close the step. Measures the gradients as they are if :meth:`scale_gradients` has not done so."""
        if not self.config.enabled:
            return
        if not self._scaled:
            self.update_statistics()
        self._scaled = False
        self._reset_step_factors()
        self.step_count += 1

    def update_statistics(self) -> None:
        """Fold the present gradients into the statistics."""
        self._known_statistics().update(self.parameters)
        self.noise_scale.close()
        self._variances = None

    # -------------------------------------------------------------------------------------------------------- results

    @property
    def warming_up(self) -> bool:
        """True during the first ``warmup_steps`` steps, which are not scaled."""
        return self.step_count < self.config.warmup_steps

    def factors(self) -> list[float]:
        """Return the VGS factor f = clamp(1 / (1 + alpha V), min_scaling_factor, 1) of each head for the next step."""
        config = self.config
        if not config.enabled or self.warming_up:
            return [1.0] * len(self.heads)
        return [
            max(1.0 / (1.0 + config.alpha * variance), config.min_scaling_factor) for variance in self.normalized_variances()
        ]

    def get_scaling_factor(self) -> float:
        """Return the smallest factor of all heads."""
        return min(self.factors())

    def normalized_variances(self) -> list[float]:
        """Return V = Var[g] / E[g]^2 of each head, from 0 to 1 / eps."""
        if self._variances is None:
            statistics, heads, eps = self._known_statistics(), self._heads(), self.config.eps
            if self.config.aggregate == "ratio":
                self._variances = [_ratio(row, eps) for row in statistics.head_parts.tolist()]
            else:
                each = np.array([_ratio(row, eps) for row in statistics.parts.tolist()])
                members = [each[(heads.head_of == head) & statistics.seen] for head in range(len(heads.names))]
                self._variances = [float(np.quantile(own, PERCENTILE)) if len(own) else 0.0 for own in members]
        return self._variances

    def get_normalized_variance(self) -> float:
        """Return the largest V of all heads."""
        return max(self.normalized_variances())

    def metrics(self) -> dict[str, float]:
        """Return the values to log, under the names of docs/metrics.md."""
        statistics = self._known_statistics()
        mean, variance, norm, largest = statistics.overall_means()
        per_element = statistics.parts[:, 0].clip(min=0.0)
        if self.config.estimator == "elementwise":
            per_element = per_element / statistics.numel
        metrics = {
            "vgs/scaling_factor": self.get_scaling_factor(),
            "vgs/normalized_variance": self.get_normalized_variance(),
            "vgs/step_count": float(self.step_count),
            "vgs/warmup_active": float(self.warming_up),
            "vgs/stochastic_var_mean": float(per_element.mean()),
            "vgs/grad_norm_ema": norm,
            "vgs/grad_mean_ema_spatial": mean,
            "vgs/grad_var_ema_spatial": variance,
            "vgs/grad_max_ema": largest,
        }
        for percent in (10, 50, 90):
            metrics[f"vgs/stochastic_var_p{percent}"] = float(np.quantile(per_element, percent / 100.0))
        if len(self.heads) > 1:
            for name, factor, normalized in zip(self.heads, self.factors(), self.normalized_variances(), strict=True):
                metrics[f"vgs/scaling_factor_{name}"], metrics[f"vgs/normalized_variance_{name}"] = factor, normalized
        if self.noise_scale.value is not None:
            metrics["vgs/noise_scale"] = self.noise_scale.value
        return metrics

    # ---------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return settings and statistics, as tensors, numbers and strings."""
        settings = self.config.model_dump()
        statistics = self._known_statistics().state_dict()
        noise = {f"noise_scale_{name}": value for name, value in self.noise_scale.state_dict().items()}
        return {**settings, "step_count": self.step_count, **statistics, **noise, "vgs_version": VERSION}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned.

        The state of an older version is accepted with a warning: its settings are taken, its statistics are reset.
        """
        version = str(state.get("vgs_version", "1.0"))
        require(re.fullmatch(r"\d+(\.\d+)*", version) is not None, "vgs_version", version, "numbers and dots, like '4.0'")
        known = {name: state[name] for name in VGSConfig.model_fields if name in state}
        require(
            _number(version) <= _number(VERSION), "vgs_version", version, f"at most {VERSION}: it was saved by a newer release"
        )
        config = build(VGSConfig, {**self.config.model_dump(), **known})
        statistics = GradientStatistics(self._heads(), config.estimator, config.beta)
        outdated = _number(version) < _number(VERSION)
        if outdated:
            logger.warning("VGS state of version %s is older than %s: its statistics are reset", version, VERSION)
        else:
            statistics.load_state_dict(state)
        self.config, self._statistics = config, statistics
        self._reset()
        if not outdated:
            self.noise_scale.load_state_dict({name: state[f"noise_scale_{name}"] for name in self.noise_scale.state_dict()})
            self.step_count = int(state["step_count"])

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without parameters, optimizer and hooks: a copy belongs to another model."""
        links = ("_parameters", "_step_scaling", "_hooks")
        return {name: value for name, value in self.__dict__.items() if name not in links}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state; call :meth:`update_parameters` and :meth:`attach` afterwards."""
        self.__dict__.update(state)
        self._parameters = None
        self._unlink()

    # ---------------------------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        self.step_count, self._variances, self._scaled = 0, None, False
        self.noise_scale = NoiseScale(self.config.beta)

    def _unlink(self) -> None:
        self._step_scaling, self._hooks = None, []

    def _heads(self) -> Heads:
        if self._parameters is None:
            raise RuntimeError("the scaler has no parameters after it was copied or loaded: call update_parameters() first")
        return self._parameters

    def _known_statistics(self) -> GradientStatistics:
        return cast(GradientStatistics, self._statistics)

    def _apply_factors(self, factors: list[float]) -> None:
        """Scale the next step, or the gradients."""
        if self._step_scaling is not None:
            self._step_scaling.set_factors(factors)
            return
        heads = self._heads()
        pairs = [(param.grad, factors[head]) for param, head in zip(heads.parameters, heads.head_of, strict=True)]
        torch._foreach_mul_([grad for grad, _ in pairs if grad is not None], [f for grad, f in pairs if grad is not None])

    def _before_step(self, *_: Any) -> None:
        # Not only when factors are known: a closure may call scale_gradients() inside the step.
        if self._step_scaling is not None and self.config.enabled and self.config.alpha > 0.0 and not self.warming_up:
            self._step_scaling.before_step()

    def _after_step(self, *_: Any) -> None:
        if self._step_scaling is not None:
            self._step_scaling.after_step()
        self._reset_step_factors()

    def _reset_step_factors(self) -> None:
        """Drop the factors: a step without scale_gradients() is not scaled."""
        if self._step_scaling is not None:
            self._step_scaling.set_factors(None)


def _ratio(parts: list[float], eps: float) -> float:
    """Return V, from 0 to 1 / eps. A gradient that was always 0 has no noise."""
    noise, signal, scale = parts
    denominator = max(signal, eps * scale)
    return min(max(noise, 0.0) / denominator, 1.0 / eps) if denominator > 0.0 else 0.0


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))


def _warn_of_fixed_noise(optimizer: Optimizer) -> None:
    """Warn of noise that stays as it is while gradients are scaled down."""
    for group in optimizer.param_groups:
        if "adaptive_noise" in group and not group["adaptive_noise"] and group["sigma"] > RISKY_SIGMA:
            logger.warning(
                "VGS enabled with UPGD adaptive_noise=false and sigma=%s. This may cause excessive noise when VGS scales "
                "gradients down. Consider setting adaptive_noise=true for stability.",
                group["sigma"],
            )

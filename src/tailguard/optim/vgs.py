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
shortened: by the optimizer itself if it is of this project (``pieces.py``), and otherwise after it has moved (``anchor.py``).
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

from tailguard.optim.anchor import Anchor
from tailguard.optim.config import Action, Aggregate, VGSConfig, warn_of_fixed_noise
from tailguard.optim.gradient_statistics import Estimator, GradientStatistics
from tailguard.optim.layout import Heads, Parameters
from tailguard.optim.noise_scale import NoiseScale
from tailguard.optim.pieces import Piecewise, PiecewiseSteps
from tailguard.optim.upgd import UPGD
from tailguard.validation import build, require

logger = logging.getLogger(__name__)

VERSION = "4.0"  # 1 to 3.2 are the original's; their statistics measured something else
PROPORTIONAL = (SGD, UPGD)  # optimizers whose step is proportional to the gradient
PERCENTILE = 0.9
DEFAULT = VGSConfig()


class VarianceGradientScaler:
    """Scales the steps of each head by the noise of its gradients.

    :param parameters: parameters, which make one head, or a mapping of heads to parameters.
    :param enabled: False scales nothing and measures nothing. This and the others: see :class:`VGSConfig`.
    :param beta: memory of the statistics.
    :param alpha: gain; 0 only monitors.
    :param eps: least signal, as a share of the gradient's mean square.
    :param warmup_steps: steps without scaling.
    :param estimator: what the variance is about.
    :param aggregate: how tensors make a head.
    :param min_scaling_factor: no factor is smaller.
    :param action: whether gradients or steps are scaled.
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
        self._steps: Anchor | PiecewiseSteps | None = None  # None: the factor acts on gradients
        self._hooks: list[RemovableHandle] = []
        self.update_parameters(parameters)

    @classmethod
    def from_config(cls, parameters: Parameters, config: VGSConfig) -> Self:
        """A scaler with these settings."""
        return cls(parameters, **config.model_dump())

    # ---------------------------------------------------------------------------------------------------------- links

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that are watched."""
        return self._heads().parameters

    @property
    def heads(self) -> tuple[str, ...]:
        """The names of the heads, in the order of all lists of factors."""
        return self._heads().names

    def update_parameters(self, parameters: Parameters) -> None:
        """Watch these parameters from now on, as after a model was loaded; an attached optimizer has to be attached again.

        Statistics of parameters of the same sizes stay; otherwise they start anew.
        """
        heads = Heads.of(parameters)
        self.detach()
        self._parameters = heads
        known = self._statistics
        if known is None or known.numel.tolist() != heads.numel.tolist():
            if known is not None and self.step_count > 0:
                logger.warning("VGS: the parameters have other sizes than before; its statistics start anew")
            self._reset()
            self._statistics = GradientStatistics(heads, self.config.estimator, self.config.beta)
        else:
            known.link(heads)
            self._variances = None

    def attach(self, optimizer: Optimizer) -> None:
        """Let the factor act in the way that this optimizer needs; replaces an optimizer attached before.

        :param optimizer: moves the parameters that are watched.
        """
        self.detach()
        if self.config.enabled:
            warn_of_fixed_noise(optimizer)
        action = self.config.action
        if action == "auto":
            action = "gradient" if isinstance(optimizer, PROPORTIONAL) else "step"
        if action == "step":
            if isinstance(optimizer, Piecewise):
                self._steps = PiecewiseSteps(self._heads(), optimizer)
            else:
                self._steps = Anchor(self._heads(), optimizer)
            self._hooks = [
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            ]

    def detach(self) -> None:
        """Leave the optimizer alone; the factor acts on gradients again."""
        for hook in self._hooks:
            hook.remove()
        self._leave_whole()
        self._unlink()

    # ------------------------------------------------------------------------------------------------------- each step

    def observe_microbatch(self, samples: float) -> None:
        """After the backward pass of a microbatch, if the noise scale is wanted; see ``noise_scale.py``.

        :param samples: in this microbatch. The accumulated gradient must weight each microbatch's mean by its share of samples.
        """
        self.noise_scale.add([one.grad for one in self.parameters if one.grad is not None], samples)

    def scale_gradients(self) -> float:
        """Measure the raw gradients and put the factors in force for the step that follows.

        :returns: the smallest factor of all heads.
        """
        return min(self.apply())

    def apply(self) -> list[float]:
        """The same as :meth:`scale_gradients`, with the factors of all heads."""
        if self._scaled:
            raise RuntimeError(
                "scale_gradients() was called twice for one step: call it once, and step() after optimizer.step()"
            )
        factors = self.factors()
        if self.config.enabled:
            self.update_statistics()
            self._scaled = True
            if min(factors) < 1.0:
                self._put(factors)
        return factors

    def step(self) -> None:
        """Close the step. Measures the gradients as they are if :meth:`scale_gradients` has not done so."""
        if not self.config.enabled:
            return
        if not self._scaled:
            self.update_statistics()
        self._scaled = False
        self._leave_whole()
        self.step_count += 1

    def update_statistics(self) -> None:
        """Fold the present gradients into the statistics."""
        self._known_statistics().update(self.parameters)
        self.noise_scale.close()
        self._variances = None

    # -------------------------------------------------------------------------------------------------------- results

    @property
    def warming_up(self) -> bool:
        """Whether the statistics only gather as yet."""
        return self.step_count < self.config.warmup_steps

    def factors(self) -> list[float]:
        """The factor of each head for the next step."""
        config = self.config
        if not config.enabled or self.warming_up:
            return [1.0] * len(self.heads)
        return [
            max(1.0 / (1.0 + config.alpha * variance), config.min_scaling_factor) for variance in self.normalized_variances()
        ]

    def get_scaling_factor(self) -> float:
        """The smallest factor of all heads."""
        return min(self.factors())

    def normalized_variances(self) -> list[float]:
        """V of each head, from 0 to 1 / eps."""
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
        """The largest V of all heads."""
        return max(self.normalized_variances())

    def metrics(self) -> dict[str, float]:
        """What to log, under the names of docs/metrics.md."""
        statistics = self._known_statistics()
        mean, variance, norm, largest = statistics.overall_means()
        per_element = statistics.parts[:, 0].clip(min=0.0)
        if self.config.estimator == "elementwise":
            per_element = per_element / statistics.numel
        found = {
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
            found[f"vgs/stochastic_var_p{percent}"] = float(np.quantile(per_element, percent / 100.0))
        if len(self.heads) > 1:
            for name, factor, normalized in zip(self.heads, self.factors(), self.normalized_variances(), strict=True):
                found[f"vgs/scaling_factor_{name}"], found[f"vgs/normalized_variance_{name}"] = factor, normalized
        if self.noise_scale.value is not None:
            found["vgs/noise_scale"] = self.noise_scale.value
        return found

    # ---------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Settings and statistics, as tensors, numbers and strings."""
        settings = self.config.model_dump()
        statistics = self._known_statistics().state_dict()
        noise = {f"noise_scale_{name}": value for name, value in self.noise_scale.state_dict().items()}
        return {**settings, "step_count": self.step_count, **statistics, **noise, "vgs_version": VERSION}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken.

        The state of an older version is accepted with a warning: its settings count, its statistics start anew.
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
            logger.warning("VGS state of version %s is older than %s: its statistics start anew", version, VERSION)
        else:
            statistics.load_state_dict(state)
        self.config, self._statistics = config, statistics
        self._reset()
        if not outdated:
            self.noise_scale.load_state_dict({name: state[f"noise_scale_{name}"] for name in self.noise_scale.state_dict()})
            self.step_count = int(state["step_count"])

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: without parameters, optimizer and hooks, which would be those of another model."""
        links = ("_parameters", "_steps", "_hooks")
        return {name: value for name, value in self.__dict__.items() if name not in links}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """To be followed by :meth:`update_parameters` and :meth:`attach`."""
        self.__dict__.update(state)
        self._parameters = None
        self._unlink()

    # ---------------------------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        self.step_count, self._variances, self._scaled = 0, None, False
        self.noise_scale = NoiseScale(self.config.beta)

    def _unlink(self) -> None:
        self._steps, self._hooks = None, []

    def _heads(self) -> Heads:
        if self._parameters is None:
            raise RuntimeError("the scaler has no parameters after it was copied or loaded: call update_parameters() first")
        return self._parameters

    def _known_statistics(self) -> GradientStatistics:
        return cast(GradientStatistics, self._statistics)

    def _put(self, factors: list[float]) -> None:
        """In force: on the step that comes, or on the gradients."""
        if self._steps is not None:
            self._steps.put(factors)
            return
        heads = self._heads()
        pairs = [(one.grad, factors[head]) for one, head in zip(heads.parameters, heads.head_of, strict=True)]
        torch._foreach_mul_([grad for grad, _ in pairs if grad is not None], [f for grad, f in pairs if grad is not None])

    def _before_step(self, *_: Any) -> None:
        # Not only when factors are known: a closure may call scale_gradients() inside the step.
        if self._steps is not None and self.config.enabled and self.config.alpha > 0.0 and not self.warming_up:
            self._steps.before()

    def _after_step(self, *_: Any) -> None:
        if self._steps is not None:
            self._steps.after()
        self._leave_whole()

    def _leave_whole(self) -> None:
        """What the factors were for is over: steps without scale_gradients() have their full length."""
        if self._steps is not None:
            self._steps.put(None)


def _ratio(parts: list[float], eps: float) -> float:
    """V, from 0 to 1 / eps. A gradient that was always 0 has no noise."""
    noise, signal, scale = parts
    below = max(signal, eps * scale)
    return min(max(noise, 0.0) / below, 1.0 / eps) if below > 0.0 else 0.0


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("."))

"""Utility-based perturbed gradient descent (Elsayed and Mahmood 2024): useful weights are protected, useless ones perturbed.

Every step of a weight is multiplied by 2 (1 - s), where s in [0, 1] is the protection that its utility has earned
(``upgd_step.py``), and Gaussian noise is added to the direction, so that weights that nothing depends on keep moving:

    weight <- (1 - lr * weight_decay) * weight - lr * 2 (1 - s) * (direction + noise).

:class:`UPGD` takes the gradient as its direction, :class:`AdaptiveUPGD` and :class:`UPGDW` Adam's. With s = 1/2 and without
noise they are SGD, Adam with decoupled decay, and AdamW.

Noise. With ``adaptive_noise=False`` its standard deviation is ``sigma``: in units of the gradient for UPGD, and of a direction
whose entries are about 1 for the others. With ``adaptive_noise=True`` it is sigma times the root mean square of that tensor's
direction. Use it together with variance-based gradient scaling: fixed noise beside a gradient that is scaled down by 10 is 10
times as large a share of the step. ``sigma=0`` draws nothing.

Three implementations give the same steps up to rounding: ``single`` (readable), ``foreach`` (lists of tensors, any device) and
``fused`` (compiled, float32 on the CPU; not for the reference gate, whose range is unbounded). ``auto`` takes the fastest that
applies.

The state is tensors and plain numbers. The random generator's state is the tensor ``generator`` of :meth:`state_dict`, once a
number has been drawn.
"""

import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TypedDict, Unpack

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from tailguard.optim.config import Gate
from tailguard.optim.layout import kernels_apply
from tailguard.optim.noise import NormalNumbers
from tailguard.optim.step_scaling import WHOLE, RangeScaledOptimizer
from tailguard.optim.upgd_step import (
    Foreach,
    Fused,
    GateScale,
    GroupGradients,
    SingleTensor,
    gate_scale,
    joint_range,
    protection,
    utility_range,
)
from tailguard.validation import require

Implementation = Literal["auto", "single", "foreach", "fused"]
INFINITY = float("inf")


class UPGDOptions(TypedDict, total=False):
    """The keyword arguments of all three optimizers, explained at :class:`UtilityGated`."""

    gate: Gate
    adaptive_noise: bool
    noise_beta: float
    min_noise_std: float
    instant_noise_scale: bool
    maximize: bool
    implementation: Implementation
    generator: torch.Generator | None


class UtilityGated(RangeScaledOptimizer):
    """The base of the optimizers of this module.

    :param params: parameters or groups of them, real, dense and on one device.
    :param defaults: the hyperparameters of the subclass.
    :param gate: ``minmax``, ``reference`` or ``none``, see ``upgd_step.py``.
    :param adaptive_noise: measure ``sigma`` in units of the direction; recommended with variance-based gradient scaling.
    :param noise_beta: decay of the running mean of the direction's root mean square, in [0, 1).
    :param min_noise_std: smallest adaptive noise, so that it does not vanish with a gradient of 0.
    :param instant_noise_scale: adaptive noise follows the present direction and not the running mean, which would lag behind a
        gradient that has just been scaled down.
    :param maximize: ascend.
    :param implementation: see above; ``fused`` raises where it does not apply.
    :param generator: generator of the noise. None makes one at the first draw, seeded from PyTorch's global generator.
    """

    adaptive: ClassVar[bool]

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        gate: Gate = "minmax",
        adaptive_noise: bool = False,
        noise_beta: float = 0.999,
        min_noise_std: float = 1e-6,
        instant_noise_scale: bool = True,
        maximize: bool = False,
        implementation: Implementation = "auto",
        generator: torch.Generator | None = None,
    ) -> None:
        require(gate in ("minmax", "reference", "none"), "gate", gate, "'minmax', 'reference' or 'none'")
        known = ("auto", "single", "foreach", "fused")
        require(implementation in known, "implementation", implementation, f"one of {known}")
        require(implementation != "fused" or gate != "reference", "implementation", implementation, "another for this gate")
        self.gate: Gate = gate
        self.implementation: Implementation = implementation
        self.generator = generator
        self._fused, self._normal_numbers = Fused(), NormalNumbers()
        noise = {
            "adaptive_noise": adaptive_noise,
            "noise_beta": noise_beta,
            "min_noise_std": min_noise_std,
            "instant_noise_scale": instant_noise_scale,
            "maximize": maximize,
        }
        super().__init__(params, {**defaults, **noise})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, which may have hyperparameters of its own."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name in ("lr", "weight_decay", "sigma", "min_noise_std"):
            require(0.0 <= group[name] < INFINITY, name, group[name], "finite and at least 0")
        for name in ("beta_utility", "noise_beta", *(("beta1", "beta2") if self.adaptive else ())):
            require(0.0 <= group[name] < 1.0, name, group[name], "in [0, 1)")
        if self.adaptive:
            require(0.0 < group["eps"] < INFINITY, "eps", group["eps"], "finite and above 0")
        for param in group["params"]:
            require(param.is_floating_point(), "the type of a parameter", param.dtype, "real: the order of utilities needs it")
        devices = {param.device for other in self.param_groups for param in other["params"]}
        require(
            len(devices) <= 1, "the devices of the parameters", sorted(map(str, devices)), "one: the gate compares them all"
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Move every parameter that has a gradient.

        :param closure: computes the loss and the gradients anew; its value is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        batches = [batch for batch in map(self._batch, self.param_groups) if batch.params]
        if batches:
            rules = self._rules(batches)
            self._count_steps(batches)
            noises = self._noise(batches)
            scale = gate_scale(self.gate, joint_range([rules.update_utility(batch) for batch in batches]))
            for batch, noise in zip(batches, noises, strict=True):
                rules.move(batch, scale, noise)
        return loss

    def protection(self, param: Tensor) -> Tensor:
        """Return the present protection s in [0, 1] of each weight of a parameter, see ``upgd_step.py``.

        :param param: one of the parameters, after at least one step with its gradient.
        """
        batches = [self._batch_of(group, [p for p in group["params"] if p in self.state]) for group in self.param_groups]
        owner = next((batch for batch in batches if any(p is param for p in batch.params)), None)
        if owner is None:
            raise ValueError("this parameter has no utility yet: it is not in this optimizer, or no step had its gradient")
        scale: GateScale = gate_scale(self.gate, joint_range([utility_range(batch) for batch in batches if batch.params]))
        state = self.state[param]
        return protection(state["avg_utility"] / (1.0 - owner.group["beta_utility"] ** state["step"]), scale)

    # -------------------------------------------------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return PyTorch's state, with the state of the noise's generator as the tensor ``generator`` if it has been used."""
        state: dict[str, Any] = super().state_dict()
        if self.generator is not None:
            state["generator"] = self.generator.get_state()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned. The state is copied: two optimizers never share a tensor."""
        super().load_state_dict(copy.deepcopy(dict(state_dict)))
        if "generator" in state_dict:
            self._noise_generator().set_state(state_dict["generator"].cpu())

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles; PyTorch's own lacks the attributes of this class."""
        generator = None if self.generator is None else (str(self.generator.device), self.generator.get_state())
        return {**super().__getstate__(), "gate": self.gate, "implementation": self.implementation, "generator": generator}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`__getstate__` returned. PyTorch also calls it while loading, with its own entries only."""
        state = dict(state)
        if "gate" in state:
            self._fused, self._normal_numbers, self.generator = Fused(), NormalNumbers(), None
            if (saved := state.pop("generator")) is not None:
                self.generator = torch.Generator(saved[0]).set_state(saved[1])
        super().__setstate__(state)

    # ------------------------------------------------------------------------------------------------ parts of a step

    def _batch(self, group: dict[str, Any]) -> GroupGradients:
        """Return the parameters of a group that have a gradient."""
        params = [param for param in group["params"] if param.grad is not None and param.numel() > 0]
        for param in params:
            layout = param.grad.layout
            require(
                layout == torch.strided, "the layout of a gradient", layout, "dense (torch.strided): make it so before step()"
            )
        return self._batch_of(group, params)

    def _batch_of(self, group: dict[str, Any], params: list[Tensor]) -> GroupGradients:
        grads = [param.grad for param in params if param.grad is not None]
        if group["maximize"] and grads:
            grads = list(torch._foreach_neg(grads))
        states, ranges = [self.state[param] for param in params], [self.scaled_ranges.get(param, WHOLE) for param in params]
        return GroupGradients(params, grads, states, group, ranges, self.adaptive)

    def _count_steps(self, batches: list[GroupGradients]) -> None:
        """Count one more step of every parameter; a first step starts from a state of zeros."""
        keys = ("avg_utility", "first_moment", "sec_moment") if self.adaptive else ("avg_utility",)
        for batch in batches:
            for param, state in zip(batch.params, batch.states, strict=True):
                if not state:
                    state["step"] = 0
                    state.update((key, torch.zeros_like(param, memory_format=torch.preserve_format)) for key in keys)
                state["step"] += 1

    def _rules(self, batches: list[GroupGradients]) -> SingleTensor | Foreach | Fused:
        if self.implementation == "single":
            return SingleTensor()
        if self.implementation == "foreach" or self.gate == "reference":
            return Foreach()
        possible = all(kernels_apply(batch.params) and kernels_apply(batch.grads) for batch in batches)
        require(
            possible or self.implementation == "auto", "implementation", "fused", "another: it needs dense float32 on the CPU"
        )
        return self._fused if possible else Foreach()

    def _noise(self, batches: list[GroupGradients]) -> list[list[Tensor] | None]:
        """Return standard normal numbers for every batch with noise: one draw, split."""
        noisy = [batch.group["sigma"] > 0.0 for batch in batches]
        sizes = [param.numel() for batch, has_noise in zip(batches, noisy, strict=True) if has_noise for param in batch.params]
        if not sizes:
            return [None] * len(batches)
        numbers = iter(self._normal_numbers.draw(sum(sizes), self._noise_generator()).split(sizes))
        return [
            [next(numbers).view_as(param).to(param) for param in batch.params] if has_noise else None
            for batch, has_noise in zip(batches, noisy, strict=True)
        ]

    def _noise_generator(self) -> torch.Generator:
        if self.generator is None:
            self.generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        return self.generator


class UPGD(UtilityGated):
    """Gradient descent with protected weights.

    :param params: as in any optimizer.
    :param lr: step size. A weight of middling utility moves as under SGD; the same values suit, 0.01 to 0.1 for small networks.
    :param weight_decay: decoupled: every step multiplies a weight by 1 - lr * weight_decay.
    :param beta_utility: decay of the running mean of utilities, in [0, 1). 0.9 where tasks change within a thousand steps,
        0.999 if slowly.
    :param sigma: standard deviation of the noise; 0 is none.
    :param options: gate, noise and implementation, see :class:`UtilityGated`.
    """

    adaptive: ClassVar[bool] = False

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-5,
        weight_decay: float = 0.001,
        beta_utility: float = 0.999,
        sigma: float = 0.001,
        **options: Unpack[UPGDOptions],
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "beta_utility": beta_utility, "sigma": sigma}
        super().__init__(params, defaults, **options)


class AdaptiveUPGD(UtilityGated):
    """Adam with protected weights and decoupled decay.

    :param params: as in any optimizer.
    :param lr: step size, as Adam's.
    :param weight_decay: decoupled: every step multiplies a weight by 1 - lr * weight_decay.
    :param beta_utility: decay of the running mean of utilities, in [0, 1).
    :param sigma: standard deviation of the noise, in units of Adam's direction (about 1 per weight); 0 is none.
    :param beta1: decay of the running mean of gradients.
    :param beta2: decay of the running mean of squared gradients.
    :param eps: added to the root of the latter, above 0. A larger one slows weights with tiny gradients; PPO often uses 1e-5.
    :param options: gate, noise and implementation, see :class:`UtilityGated`.
    """

    adaptive: ClassVar[bool] = True

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-5,
        weight_decay: float = 0.001,
        beta_utility: float = 0.999,
        sigma: float = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        **options: Unpack[UPGDOptions],
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "beta_utility": beta_utility, "sigma": sigma}
        super().__init__(params, {**defaults, "beta1": beta1, "beta2": beta2, "eps": eps}, **options)


class UPGDW(AdaptiveUPGD):
    """:class:`AdaptiveUPGD` with AdamW's order of parameters and its defaults.

    :param params: as in any optimizer.
    :param lr: step size.
    :param betas: decays of the running means of gradients and of squared gradients.
    :param eps: added to the root of the latter, above 0.
    :param weight_decay: decoupled.
    :param sigma: standard deviation of the noise, in units of Adam's direction.
    :param beta_utility: decay of the running mean of utilities; None takes the second of `betas`.
    :param options: gate, noise and implementation, see :class:`UtilityGated`.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        sigma: float = 0.001,
        beta_utility: float | None = None,
        **options: Unpack[UPGDOptions],
    ) -> None:
        beta_utility = betas[1] if beta_utility is None else beta_utility
        super().__init__(params, lr, weight_decay, beta_utility, sigma, betas[0], betas[1], eps, **options)

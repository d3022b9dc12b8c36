"""Optimizers that protect useful weights, and a scaler of steps by the noise of their gradients; for any PyTorch model."""

from tailguard.optim.upgd import UPGD, UPGDW, AdaptiveUPGD
from tailguard.optim.vgs import VarianceGradientScaler

__all__ = ["UPGD", "UPGDW", "AdaptiveUPGD", "VarianceGradientScaler"]

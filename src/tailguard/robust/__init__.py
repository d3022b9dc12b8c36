"""Agents that keep their behaviour when observations are wrong: attacks, the regulariser of SA-PPO, and certificates."""

from tailguard.robust.attacks import StatePerturbation
from tailguard.robust.config import PerturbationConfig, SAPPOConfig

__all__ = ["PerturbationConfig", "SAPPOConfig", "StatePerturbation"]

"""Populations: members that train side by side, copy each other and change their hyperparameters while they train."""

from tailguard.population.config import HyperparamConfig, PBTConfig
from tailguard.population.member import PopulationMember
from tailguard.population.scheduler import PBTScheduler

__all__ = ["HyperparamConfig", "PBTConfig", "PBTScheduler", "PopulationMember"]

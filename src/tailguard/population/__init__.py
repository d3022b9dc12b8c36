"""Population-based training: members train side by side, copy better ones and change their hyperparameters."""

from tailguard.population.config import HyperparamConfig, PBTConfig
from tailguard.population.member import PopulationMember
from tailguard.population.scheduler import PBTScheduler

__all__ = ["HyperparamConfig", "PBTConfig", "PBTScheduler", "PopulationMember"]

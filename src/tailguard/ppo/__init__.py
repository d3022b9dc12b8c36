"""Distributional PPO: the algorithm, its critics, its targets and its objective."""

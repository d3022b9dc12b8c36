"""Evaluation: backtests, statistics, the verdict and the report."""

from tailguard.evaluate import statistics
from tailguard.evaluate.backtest import BacktestRow, backtest

__all__ = ["BacktestRow", "backtest", "statistics"]

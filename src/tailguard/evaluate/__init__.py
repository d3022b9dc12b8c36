"""Evaluation: backtests and the statistics that judge them."""

from tailguard.evaluate import statistics
from tailguard.evaluate.backtest import BacktestRow, backtest

__all__ = ["BacktestRow", "backtest", "statistics"]

"""Agents that are averse to the tail of their months, against one that is not: `python benchmarks/tail_agents.py`.

The market pays a premium for holding, and crashes. Phases of calm and of danger follow each other; in danger volatility is more
than twice as large, and from its ninth day on the market loses 8 % in a day with probability 5 %. Danger pays for that on
average, so the mean gives no reason to leave. Volatility comes first, so the danger can be seen. Nothing else is known: every
agent gets a CSV of bars, and the defaults of `tailguard walkforward`.

Accounts are compared at equal mean exposure: returns times a constant, so that their mean absolute weight is 1. Returns over 21
bars, every window; worst 1 % and 5 % of them, as a share of those of the neutral agent if it is among the agents, else
of holding. The goal is 0.6, with a Sharpe ratio of at least that of holding. The row `rule` holds while
volatility is below a threshold that was best on the training bars. For the frontier of mean against CVaR there are holding and
the neutral agent under the guard of 5 % per 21 bars, and holding under targets of the same CVaR: of volatility (63 bars,
normal) and of GARCH(1,1)-t, as in `tail.py frontier`; ``--targets`` asks for these.

With ``--unselected`` agents are trained in this process, once, on the training bars of the first fold, and trade the bars
after it: what the objective has taught, without the selection, which may trust an agent with a part of the account only.
Otherwise runs that exist already in the folder are not made again. Settings were chosen on markets 10 to 14.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from tail import predicted_losses, targeted

from tailguard.config import load_config
from tailguard.evaluate.backtest_window import BacktestWindow
from tailguard.evaluate.folds import longest_lookback, make_folds
from tailguard.evaluate.record import AccountHistory, load_record
from tailguard.experiments.decisions import trade_market
from tailguard.experiments.prepared_market import Split, market_features, prepare_market
from tailguard.experiments.training import build_model, train_model
from tailguard.market.data import load_source
from tailguard.market.guard import guard
from tailguard.market.volatility import measure

PERIOD = 21
TAIL = f"alpha: 0.05, period: {PERIOD}"
AGENTS = {
    "neutral": "{objective: neutral}",
    "CVaR": f"{{objective: cvar, {TAIL}}}",
    "mean-CVaR .1": f"{{objective: mean_cvar, weight: 0.1, {TAIL}}}",
    "mean-CVaR .2": f"{{objective: mean_cvar, weight: 0.2, {TAIL}}}",
    "constrained -4 %": f"{{objective: constrained, limit: -0.04, {TAIL}}}",
}
REDUCED = (
    "walkforward.folds=1",
    "walkforward.seeds=1",
    "training.policy=MlpPolicy",
    "selection.seeds=1",
    "selection.blocks=3",
)
LIMIT = 0.05
CALM_DAYS, DANGER_DAYS, WARNING_DAYS = 80, 30, 8
PREMIUM, CALM_STD, DANGER_STD = 0.0006, 0.005, 0.012
CRASH_PROBABILITY, CRASH_SIZE = 0.05, 0.08


def crash_market(n: int, seed: int) -> pd.DataFrame:
    """Return bars, with the column ``danger``, which no agent is shown."""
    rng = np.random.default_rng(seed)
    danger, crash, age = np.zeros(n, bool), np.zeros(n, bool), 0
    for t in range(1, n):
        leaves = 1.0 / CALM_DAYS if not danger[t - 1] else (1.0 / DANGER_DAYS if age >= WARNING_DAYS else 0.0)
        danger[t] = danger[t - 1] ^ (rng.random() < leaves)
        age = age + 1 if danger[t] else 0
        crash[t] = age > WARNING_DAYS and rng.random() < CRASH_PROBABILITY
    # In danger the premium makes up for the crashes of an average phase.
    paid_back = CRASH_PROBABILITY * CRASH_SIZE * DANGER_DAYS / (DANGER_DAYS + WARNING_DAYS)
    std = np.where(danger, DANGER_STD, CALM_STD)
    returns = PREMIUM + danger * paid_back + std * rng.normal(size=n) - crash * CRASH_SIZE
    close = 100.0 * np.cumprod(1.0 + returns)
    opened = np.append(100.0, close[:-1]) * (1.0 + 0.0003 * rng.normal(size=n))
    above, below = np.abs(rng.normal(size=(2, n))) * 0.3 * std
    return pd.DataFrame(
        {
            "open": opened,
            "high": np.maximum(opened, close) * (1.0 + above),
            "low": np.minimum(opened, close) * (1.0 - below),
            "close": close,
            "volume": 1e6,
            "danger": danger,
        },
        index=pd.bdate_range("2000-01-03", periods=n, tz="UTC", name="time"),
    )


def tail_mean(sums: np.ndarray, alpha: float) -> float:
    ordered = np.sort(sums)
    return float(ordered[: max(int(alpha * len(ordered)), 1)].mean())


def windows(returns: np.ndarray) -> np.ndarray:
    return np.lib.stride_tricks.sliding_window_view(np.log1p(returns), PERIOD).sum(axis=1)


def figures(account: AccountHistory, danger: np.ndarray) -> dict[str, float]:
    """Return what an account did, and its tails at a mean exposure of 1."""
    returns, weights = account.excess, account.weights[:, 0]
    exposure = max(float(np.abs(weights).mean()), 1e-12)
    scaled = windows(np.maximum(returns / exposure, -0.99))
    return {
        "calm": float(weights[~danger].mean()),
        "danger": float(weights[danger].mean()),
        "mean": float(windows(returns).mean()),
        "CVaR 5 %": tail_mean(windows(returns), 0.05),
        "Sharpe": float(returns.mean() / max(returns.std(), 1e-12) * 252**0.5),
        "worst 5 %": tail_mean(scaled, 0.05),
        "worst 1 %": tail_mean(scaled, 0.01),
    }


class Market:
    """A crash market as a CSV, and the accounts that trade it.

    :param path: of the file.
    :param bars: with the column ``danger``.
    :param settings: of the configuration.
    """

    def __init__(self, path: Path, bars: pd.DataFrame, settings: list[str]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        bars.drop(columns="danger").to_csv(path)
        self.path, self.settings, self.danger = path, settings, bars["danger"].to_numpy()
        self.config = load_config(None, settings)
        self.bars = load_source(str(path))
        self.features = market_features(self.bars, self.config)
        lookback = longest_lookback(self.config.features)
        folds = make_folds(len(bars), self.features.warmup, lookback, self.config.walkforward)
        self.first, self.tested = folds[0], (folds[0].span[0], folds[-1].span[1])

    def traded(self, targets: np.ndarray, span: tuple[int, int] | None = None) -> dict[str, float]:
        """Return the figures of target weights over a span, by default the tests of all folds."""
        span = self.tested if span is None else span
        return self.shown(BacktestWindow(self.bars, self.config.trading, span).trade("", targets))

    def guarded(self, weights: np.ndarray) -> dict[str, float]:
        """Return the figures of weights under the guard.

        :param weights: ``[n, 1]`` over the tests of all folds, decided at each close.
        """
        first, fee = self.tested[0], self.config.trading.costs_per_side([""])
        full = np.zeros((len(self.bars), 1))
        full[first : first + len(weights)] = weights
        limited = guard(full, self.bars, max_loss=LIMIT, period=PERIOD, fee=fee, first=first).weights
        return self.traded(limited[first : first + len(weights)])

    def targets(self) -> dict[str, dict[str, float]]:
        """Return the figures of holding under targets of volatility and of GARCH."""
        first, last = self.tested[0], self.tested[1] - 1
        losses = predicted_losses(measure(self.bars).returns[:, 0], first - 250)
        held = np.ones((last - first, 1))
        return {f"{name} target": self.traded(targeted(held, loss[first:last], LIMIT)) for name, loss in losses.items()}

    def shown(self, account: AccountHistory) -> dict[str, float]:
        """Return the figures of an account."""
        times = pd.DatetimeIndex(self.bars.index)
        return figures(account, self.danger[times.get_indexer(pd.DatetimeIndex(account.times))])

    def rule(self) -> dict[str, float]:
        """Hold while volatility is low. The threshold is the best for mean-CVaR .1 on the training bars."""
        volatility = self.features.values[:, self.features.names.index("volatility_parkinson")]
        first, last = max(self.first.train[0], self.features.warmup), self.first.train[1]
        best: tuple[float, float] = (-np.inf, 0.0)
        for share in np.arange(0.4, 1.0, 0.05):
            threshold = float(np.quantile(volatility[first:last], share))
            found = self.traded((volatility[first : last - 1, None] <= threshold).astype(float), (first, last))
            best = max(best, (0.9 * found["mean"] + 0.1 * found["CVaR 5 %"], threshold))
        return self.traded((volatility[self.tested[0] : self.tested[1] - 1, None] <= best[1]).astype(float))

    def walked(self, folder: Path, risk: str) -> AccountHistory:
        """Return the account of the command that anybody would run, which is run unless it was done before."""
        if not (folder / "evaluation" / "metrics.json").is_file():
            sets = [argument for setting in (f"training.risk={risk}", *self.settings) for argument in ("--set", setting)]
            command = [sys.executable, "-m", "tailguard", "walkforward", "--data", str(self.path), "--run", str(folder), *sets]
            subprocess.run([*command, "--no-ledger", "--quiet"], check=True, stdout=subprocess.DEVNULL)
        return load_record(folder / "evaluation").agent

    def trained(self, risk: str) -> dict[str, float]:
        """Train an agent as the first fold does without a selection, and trade its test."""
        config = load_config(None, [f"training.risk={risk}", "training.tensorboard=null", *self.settings])
        prepared = prepare_market(self.bars, config, Split(self.first.train, self.first.test), self.features)
        model = build_model(prepared, config.training)
        train_model(model, config.training.steps)
        ((targets, _),) = trade_market(model, prepared, [self.tested], config.walkforward.warmup)
        return self.traded(targets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0,1,2,3,4", help="of the markets")
    parser.add_argument("--bars", type=int, default=8000)
    parser.add_argument("--reduced", action="store_true", help="one fold and seed, without memory: a tenth of the time")
    parser.add_argument("--unselected", action="store_true", help="as --reduced, and without the selection: a fiftieth")
    parser.add_argument("--agents", default=",".join(AGENTS), help=f"of {', '.join(AGENTS)}")
    parser.add_argument("--folder", type=Path, default=Path("artifacts/tail_agents"))
    parser.add_argument("--set", dest="settings", action="append", default=[], help="as of the command, for all agents")
    parser.add_argument("--targets", action="store_true", help="also the guard, and targets of volatility and GARCH")
    options = parser.parse_args()
    settings = [*(REDUCED if options.reduced or options.unselected else ()), *options.settings]
    names = list(filter(None, options.agents.split(",")))
    against = "neutral" if "neutral" in names else "holding"
    columns = ("calm", "danger", "mean", "CVaR 5 %", "Sharpe", f"worst 5 %, of {against}", f"worst 1 %, of {against}")
    print(f"| market | agent | {' | '.join(columns)} |\n|{'---|' * (len(columns) + 2)}", flush=True)
    for seed in map(int, options.seeds.split(",")):
        market = Market(options.folder / f"crash-{seed}.csv", crash_market(options.bars, seed), settings)
        ones = np.ones((market.tested[1] - market.tested[0] - 1, 1))
        found = {"holding": market.traded(ones), "rule": market.rule()}
        if options.targets:
            found |= {"holding, guard": market.guarded(ones)} | market.targets()
        for name in names:
            if options.unselected:
                found[name] = market.trained(AGENTS[name])
                continue
            account = market.walked(options.folder / f"{seed}-{name.replace(' ', '').replace('%', '')}", AGENTS[name])
            found[name] = market.shown(account)
            if options.targets and name == "neutral":
                found["neutral, guard"] = market.guarded(account.weights)
        for name, of_account in found.items():
            shares = " | ".join(f"{of_account[level] / found[against][level]:.2f}" for level in ("worst 5 %", "worst 1 %"))
            held = f"{of_account['calm']:+.2f} | {of_account['danger']:+.2f} | {of_account['mean']:+.2%}"
            print(
                f"| {seed} | {name} | {held} | {of_account['CVaR 5 %']:+.2%} | {of_account['Sharpe']:.2f} | {shares} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

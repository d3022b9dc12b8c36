"""The verdict's speed, its false claims of skill, and its power.

    python benchmarks/verdict.py [PART ...] [--walks 200] [--draws 1000]

`speed` is the time of one paired bootstrap, and of a file of returns judged with its report. `walks` counts verdicts on
synthetic markets whose truth is known: driftless random walks, and AR(1) returns that a momentum policy can use, traded without
costs and taken through the whole assessment, baselines and permutations included. A share p of N walks has a standard error of
sqrt(p (1 - p) / N): 1.1 % for 2.5 % of 200. `nulls` does so for six kinds of policy without an edge on a market with drift and
clusters of volatility, whose mean is proportional to its variance: then not even timing the volatility pays. `returns` judges
the same accounts by their returns alone, with the market as benchmark and without one. `ledger` takes the best of 50 coin
policies per market, with and without the ledger of trials. `power` counts what is found of a planted edge. `trained` counts
verdicts on agents that were trained on random walks, walk-forward. `cores` compares walk-forward on two processes with one.
Without a name all of them run, which takes about half an hour on one core that has nothing else to do.
"""

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage

import numpy as np
import pandas as pd

import tailguard
from tailguard.config import load_config
from tailguard.evaluate import statistics
from tailguard.evaluate.assessment import Context, Effort, assess
from tailguard.evaluate.backtest_window import BacktestWindow, closes
from tailguard.evaluate.folds import WalkforwardConfig, longest_lookback, make_folds
from tailguard.evaluate.ledger import Ledger, Trial, data_key
from tailguard.evaluate.record import Provenance
from tailguard.experiments.walkforward import Pair, WalkforwardRun, train_all, walkforward
from tailguard.market.baselines import strategy
from tailguard.market.planted import best_threshold, open_returns, oracle_weights, planted_market
from tailguard.market.rules import TradingRules
from tailguard.market.synthetic import ar1_returns, random_walk

OUTCOMES = ("evidence of skill", "no evidence of skill", "too little data to tell", "worse than")
BARS_PER_YEAR = 252
DAILY_VARIANCE = 0.01**2
HISTORY = 252  # bars before the test, for the look-backs of the baselines
PERMUTATIONS = 99
TRAINED_AGENTS = 20
SHORT_TRAINING = ["training.steps=20000", "trading.fee=0.0005"]
EMPTY = Context("", "", pd.DataFrame(), pd.DataFrame(), Provenance("", "", {}, (0,), 1, ""))


def main():
    parts = {
        "speed": speed, "walks": walks, "nulls": nulls, "returns": returns, "ledger": ledger, "power": power,
        "trained": trained, "cores": cores,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*parts, []], default=list(parts), help="what to measure")
    parser.add_argument("--walks", type=int, default=200, help="markets per row of `walks`")
    parser.add_argument("--draws", type=int, default=1000, help="resamples per verdict")
    options = parser.parse_args()
    for name in options.parts:
        parts[name](options)


def speed(options, draws=10_000, bars=5_000, strategies=8):
    rng = np.random.default_rng(0)
    returns = {str(k): rng.standard_t(4, bars) * 0.01 for k in range(strategies)}
    statistics.bootstrap(returns, BARS_PER_YEAR, draws=2)  # compiles
    metrics = len(statistics.METRICS)
    print(f"{draws:,} resamples x {bars:,} bars x {strategies} strategies, {metrics} metrics, one thread, CPU time")
    for block in (1.0, 10.0, 50.0):
        start = time.process_time()
        statistics.bootstrap(returns, BARS_PER_YEAR, draws=draws, block=block)
        print(f"  blocks of {block:>4.0f} bars: {time.process_time() - start:6.2f} s")
    start = time.process_time()
    statistics.superior_ability(np.zeros(bars), returns, draws=draws)
    print(f"  SPA:               {time.process_time() - start:6.2f} s")
    start = time.process_time()
    statistics.overfitting(rng.standard_normal((bars, 100)))
    print(f"  PBO of 100 trials: {time.process_time() - start:6.2f} s")
    print(f"  returns of 10,000 bars judged, with report: {judged_file():.2f} s", flush=True)


def judged_file(bars=10_000):
    """Return the seconds that a file of returns takes, report included."""
    rng = np.random.default_rng(0)
    days = pd.bdate_range("1985-01-01", periods=bars)
    market = rng.standard_t(4, bars) * 0.007
    with tempfile.TemporaryDirectory() as folder:
        for name, returns in (("market", market), ("mine", 0.3 * market + 0.005 * rng.standard_normal(bars))):
            pd.Series(returns, days, name="returns").to_csv(f"{folder}/{name}.csv")
        start = time.process_time()
        tailguard.judge(f"{folder}/mine.csv", benchmark=f"{folder}/market.csv", ledger=None).save(folder)
        return time.process_time() - start


def walks(options):
    print(f"\n{options.walks} markets per row\n{'market':<14}{'policy':<10}{'bars':>6}", *(f"{name:>24}" for name in OUTCOMES))
    for n in (500, 2500):
        for policy in ("coin", "momentum"):
            tell("random walk", policy, n, options, lambda seed, n=n: random_walk(HISTORY + n, seed=seed))
    for n in (250, 500, 1250, 2500):
        edge = {"rho": 0.1, "overnight_share": 0.0}
        tell("AR(1) 0.1", "momentum", n, options, lambda seed, n=n, edge=edge: ar1_returns(HISTORY + n, **edge, seed=seed))


def tell(market, policy, n, options, make_bars):
    counts = Counter(judged(make_bars(seed), policy, seed, options.draws) for seed in range(options.walks))
    print_row(f"{market:<14}{policy:<10}{n:>6}", counts)


def print_row(label, counts):
    total = sum(counts.values())
    print(label, *(f"{counts[outcome] / total:>24.1%}" for outcome in OUTCOMES), flush=True)


def judged(bars, policy, seed, draws):
    if policy == "coin":
        weights = strategy("random_positions", turnover=0.1, seed=seed)(bars)
    else:
        weights = np.sign(np.diff(bars["close"].to_numpy(), prepend=bars["close"].iloc[0]))
    window = BacktestWindow(bars, TradingRules(fee=0.0), (HISTORY, len(bars)))
    targets = weights[HISTORY:-1, None]
    effort = Effort(draws=draws, permutations=PERMUTATIONS, seed=seed)
    return assess(window, {"seed 0": targets}, [len(targets)], EMPTY, effort=effort).verdict.outcome


def clustered_market(n, seed):
    """Return daily bars of a GARCH market whose mean is proportional to its variance, with a Sharpe ratio of about 0.5."""
    rng = np.random.default_rng([seed, 11])
    variance, moves = DAILY_VARIANCE, np.empty(n)
    premium = 0.5 / np.sqrt(DAILY_VARIANCE * BARS_PER_YEAR)
    for t, shock in enumerate(rng.standard_t(6, n) / np.sqrt(6 / 4)):
        moves[t] = premium * variance + np.sqrt(variance) * shock
        variance = 0.03 * DAILY_VARIANCE + 0.09 * (moves[t] - premium * variance) ** 2 + 0.88 * variance
    close = 100.0 * np.cumprod(np.exp(moves))
    opens = np.concatenate([[100.0], close[:-1] * np.exp(0.2 * moves[1:])])
    table = {"open": opens, "high": np.maximum(opens, close), "low": np.minimum(opens, close), "close": close, "volume": 1e6}
    return pd.DataFrame(table, index=pd.bdate_range("2000-01-03", periods=n, unit="ns", name="time"))


NULL_POLICIES = {
    "coin": lambda bars, seed: strategy("random_positions", turnover=0.1, seed=seed)(bars),
    "last move": lambda bars, seed: np.sign(np.diff(bars["close"].to_numpy(), prepend=bars["close"].iloc[0])),
    "trend": lambda bars, seed: np.sign(bars["close"] - bars["close"].rolling(50).mean()).fillna(0.0).to_numpy(),
    "hold": lambda bars, seed: np.full(len(bars), 0.9),
    "volatility": lambda bars, seed: np.nan_to_num(strategy("volatility_target")(bars)),
    "weekday": lambda bars, seed: np.where(bars.index.day_of_week == seed % 5, 1.0, 0.2),
}


def nulls(options, years=10):
    n = years * BARS_PER_YEAR
    rows = [f"{name:>24}" for name in OUTCOMES]
    print(f"\n{options.walks} markets with drift and clusters per row, {years} years, no costs\n{'policy':<30}", *rows)
    for name, policy in NULL_POLICIES.items():
        counts = Counter()
        for seed in range(options.walks):
            bars = clustered_market(HISTORY + n, seed)
            weights = pd.Series(policy(bars, seed)[HISTORY:], bars.index[HISTORY:])
            counts[judged_weights(bars, weights, seed, options.draws)] += 1
        print_row(f"{name:<30}", counts)


def returns(options, years=10):
    n = years * BARS_PER_YEAR
    rows = [f"{name:>24}" for name in OUTCOMES]
    print(f"\n{options.walks} markets with drift and clusters per row, {years} years, by returns alone\n{'policy':<30}", *rows)
    for name, policy in NULL_POLICIES.items():
        counts = {"with": Counter(), "without": Counter()}
        for seed in range(options.walks):
            bars = clustered_market(HISTORY + n, seed)
            window = BacktestWindow(bars, TradingRules(fee=0.0), (HISTORY, len(bars)))
            account = window.trade(name, policy(bars, seed)[HISTORY:-1])
            earned = pd.Series(account.returns, account.times)
            effort = Effort(draws=options.draws, seed=seed)
            for kind, benchmark in (("with", bars["close"]), ("without", None)):
                judgement = tailguard.judge(earned, benchmark=benchmark, effort=effort, ledger=None)
                counts[kind][judgement.verdict.outcome] += 1
        for kind, outcomes in counts.items():
            print_row(f"{f'{name}, {kind} a benchmark':<30}", outcomes)


def judged_weights(bars, weights, seed, draws, ledger=None, fee=0.0):
    effort = Effort(draws=draws, permutations=PERMUTATIONS, seed=seed)
    return tailguard.judge(
        weights=weights, bars=bars, trading={"fee": fee}, effort=effort, ledger=ledger
    ).verdict.outcome  # fmt: skip


def ledger(options, trials=50, years=5):
    n = years * BARS_PER_YEAR
    print(f"\nbest of {trials} coin policies in {options.walks} markets, {years} years, no costs")
    print(" " * 30, *(f"{name:>24}" for name in OUTCOMES))
    counts = {"without": Counter(), "with": Counter()}
    for seed in range(options.walks):
        bars = clustered_market(HISTORY + n, seed)
        window = BacktestWindow(bars, TradingRules(fee=0.0), (HISTORY, len(bars)))
        coins = [NULL_POLICIES["coin"](bars, 1000 * seed + k)[HISTORY:] for k in range(trials)]
        accounts = [window.trade("coin", coin[:-1]) for coin in coins]
        best = int(np.argmax([statistics.sharpe(account.excess, BARS_PER_YEAR) for account in accounts]))
        weights = pd.Series(coins[best], bars.index[HISTORY:])
        with tempfile.TemporaryDirectory() as folder:
            known, key = Ledger(Path(folder) / "trials.jsonl"), data_key(bars.index, closes(bars))
            for account in accounts:
                known.append(Trial(key, "", "", "", "", "", 0.0, account.times, account.excess))
            for name, kept in (("without", None), ("with", known)):
                counts[name][judged_weights(bars, weights, seed, options.draws, kept)] += 1
    for name, outcomes in counts.items():
        print_row(f"{name + ' the ledger':<30}", outcomes)


def power(options, fee=0.0005):
    print(f"\n{options.walks} markets with a planted edge per row; the oracle trades it at {1e4 * fee:g} basis points")
    print(" " * 30, *(f"{name:>24}" for name in OUTCOMES))
    for sharpe, years in ((0.5, 10), (1.0, 10), (2.0, 5), (2.0, 10)):
        counts = Counter()
        other = planted_market("ar", 20_000, sharpe=sharpe, fee=fee, seed=options.walks)
        threshold = best_threshold(other.expected, open_returns(other.bars), fee)  # not fitted to the markets below
        for seed in range(options.walks):
            market = planted_market("ar", HISTORY + years * BARS_PER_YEAR, sharpe=sharpe, fee=fee, seed=seed)
            targets = oracle_weights(market.expected, threshold)[HISTORY:, 0]
            weights = pd.Series(targets, market.bars.index[HISTORY:])
            counts[judged_weights(market.bars, weights, seed, options.draws, fee=fee)] += 1
        print_row(f"Sharpe ratio {sharpe:g}, {years} years", counts)


def trained(options):
    config, walk = load_config(None, SHORT_TRAINING), WalkforwardConfig(folds=2, seeds=2, jobs=1)
    settings = ", ".join(SHORT_TRAINING)
    print(
        f"\n{TRAINED_AGENTS} agents trained on random walks of 1,500 bars: {walk.folds} folds x {walk.seeds} seeds, {settings}"
    )
    counts, start = Counter(), time.process_time()
    for seed in range(TRAINED_AGENTS):
        effort = Effort(draws=options.draws, permutations=PERMUTATIONS, seed=seed)
        with tempfile.TemporaryDirectory() as folder:
            bars = random_walk(1500, seed=seed)
            record = walkforward(bars, config, walk, Path(folder), source=f"walk {seed}", effort=effort)
        counts[record.verdict.outcome] += 1
    print(" " * 30, *(f"{name:>24}" for name in OUTCOMES))
    print_row(f"{'random walk':<14}{'trained':<10}{len(record.agent.times):>6}", counts)
    print(f"  {time.process_time() - start:.0f} s of CPU time")


def cores(options, pairs=8):
    config = load_config(None, ["selection=null"])
    bars = random_walk(3000, seed=0)
    walk = WalkforwardConfig(folds=1, seeds=pairs)
    (fold,) = make_folds(len(bars), 63, longest_lookback(config.features), walk)
    seconds, cpu = {}, {}
    for jobs in (1, 2):
        with tempfile.TemporaryDirectory() as folder:
            start, busy = time.perf_counter(), cpu_seconds()
            todo = [Pair(fold, seed) for seed in range(pairs)]
            train_all(WalkforwardRun(bars, config, walk.warmup, Path(folder)), [fold], todo, jobs, lambda *said: None)
            seconds[jobs], cpu[jobs] = time.perf_counter() - start, cpu_seconds() - busy
    print(f"\nwalk-forward, {pairs} trainings of {config.training.steps:,} steps, one process against two")
    print(f"  wall clock: {seconds[1]:.1f} s and {seconds[2]:.1f} s, {seconds[1] / seconds[2]:.2f} times as fast")
    print(f"  CPU time:   {cpu[1]:.1f} s and {cpu[2]:.1f} s: {2.0 * cpu[1] / cpu[2]:.2f} times on two cores that are free")


def cpu_seconds():
    """Return the CPU time of this process and of those it has waited for."""
    return sum(usage.ru_utime + usage.ru_stime for usage in map(getrusage, (RUSAGE_SELF, RUSAGE_CHILDREN)))


if __name__ == "__main__":
    main()

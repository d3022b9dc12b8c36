"""The shipped markets through the whole walk-forward with the default configuration; writes the tables of docs/results.md.

    python benchmarks/results.py [--folder results] [--jobs 2] [--markets nasdaq-1d ...] [--out docs/results.md]

Only the fee differs between markets: what a small account pays there. A run that was stopped continues where it was. With the
default settings it takes about half an hour on two cores.
"""

import argparse
import sys
from datetime import UTC, datetime
from pathlib import Path

from tailguard.config import load_config
from tailguard.evaluate.folds import WalkforwardConfig
from tailguard.experiments.walkforward import walkforward
from tailguard.market.data import load_source

FEES = {"nasdaq-1d": 0.0005, "aapl-1d+ibm-1d+msft-1d": 0.0005, "btcusd-1h": 0.001, "eurusd-1h": 0.0001}
MARKETS = ("nasdaq-1d", "aapl-1d+ibm-1d+msft-1d", "btcusd-1h", "eurusd-1h")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("results"), help="where the runs are kept")
    parser.add_argument("--markets", nargs="+", default=list(MARKETS), help="shipped sets, a+b is a portfolio")
    parser.add_argument("--jobs", type=int, default=None, help="processes; default one per core")
    parser.add_argument("--set", dest="settings", action="append", default=[], help="override, such as training.steps=1000")
    parser.add_argument("--out", type=Path, default=None, help="file to write; default is the terminal")
    options = parser.parse_args()
    walk = WalkforwardConfig(jobs=options.jobs)
    records = {}
    for market in options.markets:
        config = load_config(None, [f"trading.fee={FEES.get(market, 0.001)}", *options.settings])
        say = progress(market)
        records[market] = walkforward(load_source(market), config, walk, options.folder / market, source=market, report=say)
        print(f"{market}: {records[market].verdict.headline}", file=sys.stderr, flush=True)
    text = report(records, walk, options.settings)
    if options.out is None:
        print(text)
    else:
        options.out.write_text(text, encoding="utf-8")


def progress(market):
    shown = [0]

    def say(done, total, line):
        if done >= total or done - shown[0] >= total // 50:
            shown[0] = done
            print(f"{market}: {done / total:.0%}, {line}", file=sys.stderr, flush=True)

    return say


def report(records, walk, settings):
    date = datetime.now(UTC).date().isoformat()
    changes = "".join(f", {setting}" for setting in settings)
    lines = [
        "# Results",
        "",
        f"Written by `benchmarks/results.py` on {date}: the shipped markets through `walkforward` with the default "
        f"configuration ({walk.folds} folds, {walk.mode}, {walk.seeds} seeds per fold, warm-up {walk.warmup}{changes}) and the "
        "fee named below. The agent is the ensemble of the seeds, out of sample from the first fold to the last. Intervals are "
        "95 %, from a paired stationary bootstrap. The verdicts stand as they came out.",
        "",
    ]
    for market, record in records.items():
        lines += [*section(market, record), ""]
    return "\n".join(lines)


def section(market, record):
    first, last = record.agent.times[0], record.agent.times[-1]
    sanity, spread = record.sanity, record.sanity.dispersion
    lines = [
        f"## {market}",
        "",
        f"**Verdict: {record.verdict.headline}.** {len(record.agent.times):,} test bars, {first:%Y-%m-%d} to {last:%Y-%m-%d}, "
        f"fee {FEES.get(market, 0.001):.2%} per side, data `{record.provenance.fingerprint[:19]}`.",
        "",
        *(f"- {reason}" for reason in record.verdict.reasons),
        "",
        "| account | Sharpe | return per year | volatility | max drawdown | CVaR 5 % per bar | turnover per year | exposure |",
        "|---|---|---|---|---|---|---|---|",
        *(row(record, history.name) for history in record.histories),
        "",
    ]
    costs = ", ".join(f"{point.multiple:g}x {point.sharpe:.2f}" for point in sanity.cost_curve)
    even = "never traded" if sanity.break_even_cost is None else f"{sanity.break_even_cost:.3%} of what is traded"
    lines.append(f"Sharpe at other costs: {costs}; break-even cost {even}. One bar later: {sanity.delay.sharpe:.2f}.")
    if spread is not None:
        lines.append(
            f"Seeds: median Sharpe {spread.median:.2f}, middle half {spread.low:.2f} to {spread.high:.2f}, "
            f"worst {spread.worst:.2f}, interquartile mean over folds and seeds {spread.interquartile_mean:.2f} "
            f"[{spread.interquartile_low:.2f}, {spread.interquartile_high:.2f}]."
        )
    if record.calibration is not None:
        tests = "; ".join(
            f"{test.exceptions} of {test.bars} below the predicted {tail:.0%} quantile (Kupiec p = {test.exact_p_value:.3f})"
            for tail, test in record.calibration.coverage.items()
        )
        uniform = record.calibration.uniformity.p_value
        bars = record.calibration.horizon
        lines.append(f"Predicted tail of the account, about {bars} bars ahead: {tests}; uniformity p = {uniform:.3f}.")
    return lines


def row(record, name):
    figures = record.statistics[name]
    sharpe = figures["sharpe"]
    return (
        f"| {name} | {sharpe.value:.2f} [{sharpe.low:.2f}, {sharpe.high:.2f}] | {figures['cagr'].value:+.1%} "
        f"| {figures['volatility'].value:.1%} | {figures['max_drawdown'].value:.1%} | {figures['cvar_5'].value:.2%} "
        f"| {figures['turnover'].value:.1f}x | {figures['exposure'].value:.2f} |"
    )


if __name__ == "__main__":
    main()

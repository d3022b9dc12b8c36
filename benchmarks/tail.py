"""Calibration of predicted tails and realised tails of guarded accounts, against rivals on the same positions.

    python benchmarks/tail.py forecast    # a: coverage and pinball loss by position and period
    python benchmarks/tail.py guard       # b: realised CVaR of months and mean return for limits of 3, 5 and 10 %
    python benchmarks/tail.py frontier    # c: mean against CVaR of months, for the guard and for targets of the same limits
    python benchmarks/tail.py show        # the tables of what is there

Each series is worked on alone and kept in `--folder`, so that an interrupted run is resumed. Synthetic series are drawn with
`--seeds`; the settings of forecast and guard were chosen on seeds 0 and 1. With `--unusual` the series are those of
`tail_families.py`: files of hours and half hours, short ones, breaks, gaps, missing bars. Rivals: historical simulation over
1,000 bars, EWMA (RiskMetrics) and GARCH(1,1)-t with filtered historical simulation (package `arch`, fitted to the last 1,500
bars every 250). The guard is compared with volatility targeting (63 bars) and GARCH targeting, both tuned in hindsight to the
CVaR that the guard has realised, and both changed only by more than a tenth. Fee 0.1 %.

The frontier takes accounts of the guard from the records of `guard` where they are there. Its rivals know no more than the
guard: they hold min(1, limit / forecast) times the position, with the CVaR of the next 21 bars as the forecast: 2.06 deviations
of 63 bars (normal), or that of GARCH(1,1)-t with filtered historical simulation. Their realised tails differ from the guard's,
so that means are compared at the CVaR of the guard, on the line through cash, the three limits and the position as it is.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import ndtri
from scipy.stats import binom, chi2, norm
from tail_families import unusual_series
from tail_series import POSITIONS, holding, real_series, synthetic_series, trend

from tailguard.market import simulate
from tailguard.market.account_tail import AccountTail, account_tail
from tailguard.market.guard import guard
from tailguard.market.tail_forecast import observe_market
from tailguard.market.volatility import measure
from tailguard.periods import Period

Floats = NDArray[np.float64]
LEVELS = (0.05, 0.1)
PERIODS = ("1W", "1M", 5)
LIMITS = (0.03, 0.05, 0.1)
RIVALS = ("historical", "EWMA", "GARCH-t")
FEE = 0.001
REFIT, FITTED, PATHS = 250, 1500, 1000
MONTH = 21


def first_row(bars: pd.DataFrame) -> int:
    """Return the row from which predictions count."""
    return 500 if len(bars) > 1200 else 250


# ------------------------------------------------------------------------------------------------------------- rivals


class Garch:
    """GARCH(1,1)-t of a series of returns, fitted to the past now and then, with filtered historical simulation."""

    def __init__(self, returns: Floats, first: int) -> None:
        from arch import arch_model

        self.returns, n = returns, len(returns)
        self.variance, self.fits = np.full(n, np.nan), np.full(n, -1)
        self.parameters: list[tuple[float, float, float, float, Floats]] = []
        for row in range(first, n, REFIT):
            past = returns[max(row + 1 - FITTED, 1) : row + 1]
            unit = float(past.std())  # the optimizer is told nothing of the size of returns
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fit = arch_model(past / unit, mean="Constant", vol="GARCH", p=1, q=1, dist="t", rescale=False).fit(disp="off")
            mean, omega, alpha, beta = (float(fit.params[name]) for name in ("mu", "omega", "alpha[1]", "beta[1]"))
            shocks = np.asarray(fit.std_resid)
            self.parameters.append((unit * mean, unit**2 * omega, alpha, beta, shocks[np.isfinite(shocks)]))
            variance = unit**2 * float(fit.conditional_volatility[-1]) ** 2
            for t in range(row, min(row + REFIT, n)):
                if t > row:
                    variance = self.step(variance, returns[t - 1])
                self.fits[t], self.variance[t] = len(self.parameters) - 1, self.step(variance, returns[t])

    def step(self, variance: Any, change: Any) -> Any:
        """Return the variance of the next bar after a return."""
        mean, omega, alpha, beta, _ = self.parameters[-1]
        return omega + alpha * (change - mean) ** 2 + beta * variance

    def paths(self, row: int, bars: int) -> Floats:
        """Simulate log returns over the next bars."""
        mean, omega, alpha, beta, shocks = self.parameters[self.fits[row]]
        drawn = np.random.default_rng(row).choice(shocks, (bars, PATHS))
        variance, total = np.full(PATHS, self.variance[row]), np.zeros(PATHS)
        for shock in drawn:
            move = np.sqrt(variance) * shock
            total += mean + move
            variance = omega + alpha * move**2 + beta * variance
        return total


def rival_quantiles(returns: Floats, held: Floats, rows: Floats, to_go: Floats, garch: Garch | None) -> dict[str, Floats]:
    """Return the quantiles ``[n, 2]`` of the log return that rivals predict at some rows."""
    result: dict[str, list[Floats]] = {"historical": [], "EWMA": []} | ({} if garch is None else {"GARCH-t": []})
    decay = 0.94 ** np.arange(1000)[::-1]
    for t in rows:
        past, bars = returns[max(t - 999, 0) : t + 1] @ held[t], int(to_go[t])
        total = np.concatenate([[0.0], np.cumsum(past)])
        result["historical"].append(np.quantile(total[bars:] - total[:-bars], LEVELS))
        weights = decay[-len(past) :]
        result["EWMA"].append(np.sqrt(weights @ past**2 / weights.sum() * bars) * ndtri(LEVELS))
        if garch is not None:
            scale = float(held[t].sum())  # one asset, or equal shares of all
            result["GARCH-t"].append(np.quantile(scale * garch.paths(t, bars), LEVELS))
    return {name: np.array(values) for name, values in result.items()}


# ----------------------------------------------------------------------------------------------------------- forecast


def pinball(outcomes: Floats, quantiles: Floats, level: float) -> float:
    """Return the mean pinball loss."""
    misses = outcomes - quantiles
    return float(np.mean(misses * (level - (misses < 0.0))))


def inside_band(exceptions: int, n: int, level: float) -> bool:
    """Return whether a number of exceptions is inside the central 95 % of the binomial distribution."""
    return bool(binom.ppf(0.025, n, level) <= exceptions <= binom.ppf(0.975, n, level))


def kupiec(exceptions: int, n: int, level: float) -> float:
    """Return the p-value of Kupiec's test that exceptions are as frequent as predicted."""

    def likelihood(p: float) -> float:
        return (exceptions * np.log(p) if exceptions else 0.0) + ((n - exceptions) * np.log(1.0 - p) if exceptions < n else 0.0)

    return float(chi2.sf(max(2.0 * (likelihood(exceptions / n) - likelihood(level)), 0.0), 1))


def christoffersen(below: NDArray[np.bool_]) -> float:
    """Return the p-value of Christoffersen's test that exceptions are independent of the one before."""
    before, after = below[:-1], below[1:]
    counts = np.array([[np.sum(~before & ~after), np.sum(~before & after)], [np.sum(before & ~after), np.sum(before & after)]])

    def likelihood(successes: float, failures: float, p: float) -> float:
        return (successes * np.log(p) if successes else 0.0) + (failures * np.log(1.0 - p) if failures else 0.0)

    shares = [row[1] / row.sum() if row.sum() else 0.0 for row in counts]
    pooled = counts[:, 1].sum() / counts.sum()
    separate = sum(likelihood(row[1], row[0], share) for row, share in zip(counts, shares, strict=True))
    ratio = 2.0 * (separate - likelihood(counts[:, 1].sum(), counts[:, 0].sum(), pooled))
    return float(chi2.sf(max(ratio, 0.0), 1))


def forecast_series(bars: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a row per position and period."""
    found, returns, start = [], measure(bars).returns, first_row(bars)
    equal = returns.mean(axis=1)
    garch = Garch(equal, start)
    for period in PERIODS:
        length = Period.parse(period)
        rows = length.rows(pd.DatetimeIndex(bars.index))
        market = observe_market(bars, int(rows.to_go.max()))
        for name, position in POSITIONS.items():
            weights = position(bars)
            tail = account_tail(bars, weights, length, fee=0.0, market=market)
            single = garch if returns.shape[1] == 1 or name == "holding" else None
            found.append({"period": str(period), "position": name} | compare(tail, returns, start, single))
    return [row for row in found if row["n"] >= 20]


def compare(tail: AccountTail, returns: Floats, start: int, garch: Garch | None) -> dict[str, Any]:
    """Compare the predictions of one account with the outcomes of its periods, beside the rivals'."""
    counted = tail.rows.restarts & np.isfinite(tail.outcomes) & (tail.quantiles[:, 0] < 0.0)
    known = np.arange(len(counted))
    rows = np.flatnonzero(counted & (known >= start) & (known >= 2 * tail.rows.to_go))  # historical simulation needs periods
    result: dict[str, Any] = {"n": len(rows)}
    if len(rows) < 20:
        return result
    outcomes = np.log1p(tail.outcomes[rows])
    predicted = {"tailguard": np.log1p(np.stack([tail.value_at_risk(level)[rows] for level in LEVELS], axis=1))}
    predicted |= rival_quantiles(returns, tail.held, rows, tail.rows.to_go, garch)
    for name, quantiles in predicted.items():
        for i, level in enumerate(LEVELS):
            below = outcomes < quantiles[:, i]
            result[f"{name} {level}"] = {
                "loss": pinball(outcomes, quantiles[:, i], level),
                "exceptions": int(below.sum()),
                "inside": inside_band(int(below.sum()), len(rows), level),
                "independence": christoffersen(below),
            }
    return result


# -------------------------------------------------------------------------------------------------------------- guard


def months(bars: pd.DataFrame, weights: Floats, start: int) -> Floats:
    """Trade weights and return the simple returns of the months after the start."""
    equity = simulate(bars, weights if weights.shape[1] > 1 else weights[:, 0], fee=FEE).equity
    own = Period.parse("1M").rows(pd.DatetimeIndex(bars.index)).own
    ends = np.flatnonzero(np.append(own[1:] != own[:-1], False))
    ends = ends[ends >= start]
    return np.asarray(equity[ends[1:]] / equity[ends[:-1]] - 1.0)


def cvar(returns: Floats, level: float = 0.05) -> float:
    """Return the mean of the worst share; a fraction of a month counts as a fraction."""
    ordered, share = np.sort(returns), level * len(returns)
    whole = int(share)
    return float((ordered[:whole].sum() + (share - whole) * ordered[whole]) / share)


def lazily(exposure: Floats, share: float = 0.1) -> Floats:
    """Return an exposure that is changed only by more than a share of it."""
    result, current = np.empty_like(exposure), 0.0
    for t, value in enumerate(np.nan_to_num(exposure)):
        current = value if abs(value - current) > share * current else current
        result[t] = current
    return result


def at_same_cvar(bars: pd.DataFrame, weights: Floats, base: Floats, start: int, target: float) -> float:
    """Return the mean month of min(1, c / base) times the weights, with c tuned to a realised CVaR."""
    points = []
    usual = float(np.nanmedian(base[start:]))
    for c in np.geomspace(0.02, 5.0, 24):
        earned = months(bars, weights * lazily(np.minimum(1.0, c * usual / base))[:, None], start)
        points.append((cvar(earned), float(earned.mean())))
    tails, means = np.array(sorted(points)).T
    return float(np.interp(target, tails, means))


def guard_series(bars: pd.DataFrame) -> list[dict[str, Any]]:
    """Return a row per position and limit."""
    found, start = [], first_row(bars)
    returns = measure(bars).returns
    equal = returns.mean(axis=1)
    volatility = pd.Series(equal).rolling(63, min_periods=20).std().to_numpy()
    garch = Garch(equal, first_row(bars) // 2)
    mean = np.array([p[1] / max(1.0 - p[2] - p[3], 0.01) for p in garch.parameters])
    decay = np.array([min(p[2] + p[3], 0.999) for p in garch.parameters])
    fits = np.maximum(garch.fits, 0)
    pull = (1.0 - decay[fits] ** MONTH) / (MONTH * (1.0 - decay[fits]))
    expected = np.sqrt(mean[fits] + (garch.variance - mean[fits]) * pull)
    for name, position in {"holding": holding, "trend": trend}.items():
        weights = position(bars)
        free = months(bars, weights, start)
        if len(free) < 24:
            continue
        for limit in LIMITS:
            began = time.process_time()
            guarded = guard(weights, bars, max_loss=limit, period="1M", fee=FEE)
            seconds = time.process_time() - began
            earned = months(bars, guarded.weights, start)
            rng = np.random.default_rng(0)
            draws = [cvar(earned[rng.integers(0, len(earned), len(earned))]) for _ in range(1000)]
            tail = cvar(earned)
            found.append(
                {
                    "position": name,
                    "limit": limit,
                    "months": len(earned),
                    "free_cvar": cvar(free),
                    "free_mean": float(free.mean()),
                    "cvar": tail,
                    "low": float(np.quantile(draws, 0.025)),
                    "high": float(np.quantile(draws, 0.975)),
                    "mean": float(earned.mean()),
                    "exposure": float(guarded.exposure[start:].mean()),
                    "volatility_target": at_same_cvar(bars, weights, volatility, start, tail),
                    "garch_target": at_same_cvar(bars, weights, expected, start, tail),
                    "seconds": seconds,
                }
            )
    return found


# ----------------------------------------------------------------------------------------------------------- frontier


def targeted(weights: Floats, loss: Floats, limit: float) -> Floats:
    """Return the weights times min(1, limit / predicted loss), which is changed only by more than a tenth."""
    return np.asarray(weights * lazily(np.minimum(1.0, limit / np.maximum(loss, 1e-9)))[:, None])


def predicted_losses(returns: Floats, first: int) -> dict[str, Floats]:
    """Return the CVaR of a month of holding equal shares that each rival predicts, as a loss, by bar."""
    normal = float(norm.pdf(ndtri(0.05))) / 0.05
    deviation = pd.Series(returns).rolling(63, min_periods=20).std().to_numpy()
    garch, simulated = Garch(returns, first), np.full(len(returns), np.nan)
    for t in range(first, len(returns)):
        simulated[t] = -cvar(np.expm1(garch.paths(t, MONTH)))
    return {"volatility": normal * np.sqrt(MONTH) * deviation, "GARCH-t": simulated}


def frontier_series(bars: pd.DataFrame, guarded: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row per position, rule and limit: CVaR and mean of its months.

    :param guarded: rows of :func:`guard_series`, if they are there.
    """
    found, start = [], first_row(bars)
    losses = predicted_losses(measure(bars).returns.mean(axis=1), start // 2)
    known = {(row["position"], row["limit"]): row for row in guarded}
    for name, position in {"holding": holding, "trend": trend}.items():
        weights = position(bars)
        free = months(bars, weights, start)
        if len(free) < 24:
            continue
        found.append({"position": name, "rule": "none", "limit": None, "cvar": cvar(free), "mean": float(free.mean())})
        for limit in LIMITS:
            row = known.get((name, limit))
            if row is None:
                kept = guard(weights, bars, max_loss=limit, period="1M", fee=FEE).weights
                earned = months(bars, kept, start)
                row = {"cvar": cvar(earned), "mean": float(earned.mean())}
            found.append({"position": name, "rule": "guard", "limit": limit, "cvar": row["cvar"], "mean": row["mean"]})
            for rule, loss in losses.items():
                earned = months(bars, targeted(weights, loss, limit), start)
                point = {"cvar": cvar(earned), "mean": float(earned.mean())}
                found.append({"position": name, "rule": rule, "limit": limit} | point)
    return found


def mean_at(points: pd.DataFrame, tail: float) -> float:
    """Return the mean that a rule would have had at a CVaR: on the line through its points and cash, by CVaR."""
    line = pd.concat([pd.DataFrame({"cvar": [0.0], "mean": [0.0]}), points[["cvar", "mean"]]]).sort_values("cvar")
    return float(np.interp(tail, line["cvar"], line["mean"]))


# ------------------------------------------------------------------------------------------------------------- tables


def show_forecast(rows: pd.DataFrame) -> None:
    """Print coverage and loss ratios by position, by period, and of all."""
    for by in ("position", "period", None):
        print()
        groups = rows.groupby(by) if by else [("all", rows)]
        for label, group in groups:
            for level in LEVELS:
                own, n = group[f"tailguard {level}"], group["n"]
                covered = [kupiec(x["exceptions"], count, level) >= 0.05 for x, count in zip(own, n, strict=True)]
                cells = [f"{label!s:12} {len(group):4} {level:4.0%}: in band {np.mean([x['inside'] for x in own]):4.0%}"]
                cells.append(f"Kupiec {np.mean(covered):4.0%}")
                cells.append(f"Christoffersen {np.mean([x['independence'] >= 0.05 for x in own]):4.0%}")
                ratios = {}
                for rival in RIVALS:
                    known = group[group[f"{rival} {level}"].notna()] if f"{rival} {level}" in group else group[:0]
                    if len(known):
                        ratios[rival] = _ratio(known, rival, level)
                        cells.append(f"{rival} {ratios[rival][1]}")
                best = max(ratios, key=lambda rival: ratios[rival][0])
                print("  ".join([*cells, f"best rival {best} {ratios[best][0]:.3f}"]))


def _ratio(rows: pd.DataFrame, rival: str, level: float) -> tuple[float, str]:
    """Return the geometric mean of the loss relative to a rival's, and in words with its 95 % interval over series.

    Behind it stands the share of cases in which the rival's exceptions are inside the binomial band.
    """
    logs = pd.Series(
        [np.log(a["loss"] / b["loss"]) for a, b in zip(rows[f"tailguard {level}"], rows[f"{rival} {level}"], strict=True)],
        index=rows["series"],
    )
    logs = logs[np.isfinite(logs)]
    by_series = logs.groupby(level=0).mean().to_numpy()
    rng = np.random.default_rng(0)
    draws = np.exp([by_series[rng.integers(0, len(by_series), len(by_series))].mean() for _ in range(2000)])
    covered = np.mean([x["inside"] for x in rows[f"{rival} {level}"]])
    low, high = np.quantile(draws, [0.025, 0.975])
    mean = float(np.exp(by_series.mean()))
    return mean, f"{mean:.3f} [{low:.3f}, {high:.3f}] ({covered:.0%})"


def show_guard(rows: pd.DataFrame) -> None:
    """Print realised tails and means by position and limit."""
    print("\nposition   limit series  inside  touches  CVaR/limit (worst)  exposure  mean %/y: free  guard  vol target  GARCH")
    for (position, limit), group in rows.groupby(["position", "limit"]):
        ratio = -group["cvar"] / limit
        means = [1200.0 * group[name].mean() for name in ("free_mean", "mean", "volatility_target", "garch_target")]
        print(
            f"{position:10} {limit:5.0%} {len(group):6} {np.mean(ratio <= 1.0):7.0%} "
            f"{np.mean(group['high'] >= -limit):8.0%} {ratio.mean():9.2f} ({ratio.max():.2f}) {group['exposure'].mean():13.2f}"
            + "".join(f"{mean:10.2f}" for mean in means)
        )
        gap = 1200.0 * (group["mean"] - group["volatility_target"])
        rng = np.random.default_rng(0)
        draws = [gap.to_numpy()[rng.integers(0, len(gap), len(gap))].mean() for _ in range(2000)]
        low, high = np.quantile(draws, [0.025, 0.975])
        print(f"{'':17} guard minus volatility target {gap.mean():+.2f} %/y [{low:+.2f}, {high:+.2f}]")


def show_frontier(rows: pd.DataFrame) -> None:
    """Print CVaR and mean of months by position, rule and limit, and the guard's lead at equal CVaR."""
    print("\nposition   rule        limit series  CVaR of months  inside  mean %/y")
    for (position, rule, limit), group in rows.groupby(["position", "rule", "limit"], dropna=False, sort=False):
        inside = "" if rule == "none" else f"{np.mean(group['cvar'] >= -limit):.0%}"
        name = "" if rule == "none" else f"{limit:.0%}"
        tail, mean = 100.0 * group["cvar"].mean(), 1200.0 * group["mean"].mean()
        print(f"{position:10} {rule:10} {name:>6} {len(group):6} {tail:15.2f} {inside:>7} {mean:9.2f}")
    print("\nat the CVaR of the guard: its mean minus that of the rival, %/y, with 95 % intervals over series")
    rng = np.random.default_rng(0)
    for position, of_position in rows.groupby("position", sort=False):
        for rival in ("volatility", "GARCH-t"):
            for limit in LIMITS:
                gaps = []
                for _, series in of_position.groupby("series"):
                    own = series[(series["rule"] == "guard") & (series["limit"] == limit)].iloc[0]
                    points = series[series["rule"].isin([rival, "none"])]
                    gaps.append(1200.0 * (own["mean"] - mean_at(points, own["cvar"])))
                draws = [np.mean(rng.choice(gaps, len(gaps))) for _ in range(2000)]
                low, high = np.quantile(draws, [0.025, 0.975])
                print(f"{position:10} guard minus {rival:10} {limit:4.0%} {np.mean(gaps):+6.2f} [{low:+.2f}, {high:+.2f}]")


def main() -> None:
    """Work on what is missing, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["forecast", "guard", "frontier", "show"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[100, 101])
    parser.add_argument("--folder", type=Path, default=Path("artifacts/tail"))
    parser.add_argument("--only", nargs="*", help="names of series")
    parser.add_argument("--unusual", action="store_true", help="the series of tail_families.py")
    options = parser.parse_args()
    seeds = tuple(options.seeds)
    series = unusual_series(seeds) if options.unusual else real_series() | synthetic_series(seeds)

    def stored(part: str, name: str) -> list[dict[str, Any]]:
        path = file_of(part, name)
        return json.loads(path.read_text()) if path.exists() else []

    def file_of(part: str, name: str) -> Path:
        folder: Path = options.folder
        return folder / part / f"{name.replace(' ', '-')}.json"

    works: dict[str, Callable[[str, pd.DataFrame], list[dict[str, Any]]]] = {
        "forecast": lambda _, bars: forecast_series(bars),
        "guard": lambda _, bars: guard_series(bars),
        "frontier": lambda name, bars: frontier_series(bars, stored("guard", name)),
    }
    tables: dict[str, list[dict[str, Any]]] = {part: [] for part in works}
    for part, work in works.items():
        for name, load in series.items():
            path = file_of(part, name)
            if part == options.part and not path.exists() and (not options.only or name in options.only):
                if part in ("guard", "frontier") and name in ("btcusd-1h", "eurusd-1h", "btcusd-1h daily"):
                    continue  # fewer than 28 months
                began = time.process_time()
                found = work(name, load())
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(found))
                print(f"{part} {name}: {time.process_time() - began:.0f} s", flush=True)
            tables[part] += [{"series": name} | row for row in stored(part, name)]
    if tables["forecast"]:
        show_forecast(pd.DataFrame(tables["forecast"]))
    if tables["guard"]:
        show_guard(pd.DataFrame(tables["guard"]))
    if tables["frontier"]:
        show_frontier(pd.DataFrame(tables["frontier"]))


if __name__ == "__main__":
    main()

"""The statistics of the report: the label of each, and its meaning in one sentence."""

from dataclasses import dataclass

from tailguard.evaluate.report.formatting import NumberFormat, capital, readable


@dataclass(frozen=True)
class Term:
    """A statistic as the report shows it.

    :param label: name of the statistic.
    :param kind: format of its numbers.
    :param meaning: one sentence.
    :param more_is_better: False where less is better; None where neither is.
    """

    label: str
    kind: NumberFormat
    meaning: str
    more_is_better: bool | None = True


TERMS = {
    "total_return": Term("Total return", "percent", "Gain of the account over the whole test, after all costs."),
    "cagr": Term("Annual return (CAGR)", "percent", "Constant yearly growth rate that leads to the same final value."),
    "sharpe": Term("Sharpe ratio", "number", "Mean return over cash per volatility, annual. Above 3, suspect a bug."),
    "lo_sharpe": Term("Sharpe ratio (Lo)", "number", "The Sharpe ratio, corrected for autocorrelated returns (Lo 2002)."),
    "sortino": Term("Sortino ratio", "number", "Like the Sharpe ratio, but only returns below those of cash count as risk."),
    "calmar": Term("Calmar ratio", "number", "Annual return over cash, divided by the maximum drawdown."),
    "volatility": Term("Annual volatility", "percent", "Standard deviation of the returns over cash, per year.", None),
    "max_drawdown": Term("Maximum drawdown", "percent", "Largest loss from a peak to a later low.", False),
    "ulcer": Term("Ulcer index", "percent", "Root mean square of the drawdowns: their depth and length in one number.", False),
    "cdar_5": Term("CDaR 5%", "percent", "Average of the largest 5% of drawdowns.", False),
    "cvar_1": Term("CVaR 1% per bar", "percent", "Average return of the worst 1% of bars."),
    "cvar_5": Term("CVaR 5% per bar", "percent", "Average return of the worst 5% of bars."),
    "turnover": Term("Annual turnover", "multiple", "Traded value per year, in multiples of the account's value.", None),
    "exposure": Term("Exposure", "percent", "Average share of the account that is invested, long or short.", None),
    "net_exposure": Term("Net exposure", "percent", "Average long minus short positions, as a share of the account.", None),
    "hit_rate": Term("Hit rate", "percent", "Share of the bars that beat cash among all bars that differ from it."),
    "cost_share": Term("Cost share", "percent", "Share of the gross gain over cash that costs took.", False),
    "costs": Term("Costs paid", "percent", "Fees and slippage over the whole test, as a share of the starting value.", False),
    "agent_lead": Term("Lead", "number", "Sharpe ratio of what was evaluated minus that of this account, paired bar by bar."),
    "alpha": Term("Annual alpha", "percent", "Annual return over cash that the market does not explain."),
    "alpha_t": Term("Alpha, t-statistic", "number", "Alpha over its standard error; above 2 it is rarely luck."),
    "beta": Term("Beta", "number", "Average move of the account when the market moves by 1%, in percent.", None),
    "r_squared": Term("R-squared", "percent", "Share of the account's variance that the market explains.", None),
    "psr": Term("Probabilistic Sharpe ratio", "number", "Confidence that the true Sharpe ratio is above 0."),
    "probabilistic_sharpe": Term("Probabilistic Sharpe ratio", "number", "Confidence that the true Sharpe ratio is above 0."),
    "dsr": Term("Deflated Sharpe ratio", "number", "The PSR, corrected for the number of trials; above 0.95 passes."),
    "deflated_sharpe": Term(
        "Deflated Sharpe ratio",
        "number",
        "Confidence that the true Sharpe ratio is above 0, corrected for the number of trials; above 0.95 passes.",
    ),
    "pbo": Term("Overfitting (PBO)", "percent", "How often the best trial in one half of the data is poor in the rest.", False),
    "minimum_track_record": Term(
        "Minimum track record", "count", "Bars needed to show a true Sharpe ratio above 0 with 95% confidence.", False
    ),
}  # fmt: skip


def term(key: str) -> Term:
    """Return how the report shows a statistic; one that is not in the glossary is shown by its name."""
    return TERMS.get(key, Term(capital(readable(key)), "number", "No description.", None))

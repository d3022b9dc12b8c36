"""What every statistic is called and what it means, in one sentence for somebody who has never met it."""

from dataclasses import dataclass

from tailguard.evaluate.report.formatting import Kind, capital, plain


@dataclass(frozen=True)
class Term:
    """A statistic in words.

    :param label: its name.
    :param kind: how its numbers are written.
    :param meaning: one sentence.
    :param more_is_better: False where less is; None where neither is.
    """

    label: str
    kind: Kind
    meaning: str
    more_is_better: bool | None = True


TERMS = {
    "total_return": Term("Total return", "percent", "What the account gained over the whole test, after all costs."),
    "cagr": Term("Return per year", "percent", "The steady yearly growth that leads to the same end."),
    "sharpe": Term("Sharpe ratio", "number", "Mean return over volatility, per year: 0 is a coin toss, 1 good, 3 suspicious."),
    "lo_sharpe": Term("Sharpe ratio (Lo)", "number", "The Sharpe ratio corrected for returns that follow one another."),
    "sortino": Term("Sortino ratio", "number", "Like the Sharpe ratio, but only falls count as risk."),
    "calmar": Term("Calmar ratio", "number", "Return per year over the deepest fall."),
    "volatility": Term("Volatility per year", "percent", "How far a year's return usually strays from its mean.", None),
    "max_drawdown": Term("Deepest fall", "percent", "The worst loss from a peak to the lowest point after it.", False),
    "ulcer": Term("Ulcer index", "percent", "Depth and length of all falls in one figure.", False),
    "cdar_5": Term("CDaR 5%", "percent", "Mean of the worst 5% of all drawdowns.", False),
    "cvar_1": Term("CVaR 1% per bar", "percent", "Mean return of the worst bar in a hundred."),
    "cvar_5": Term("CVaR 5% per bar", "percent", "Mean return of the worst bar in twenty."),
    "turnover": Term("Turnover per year", "multiple", "How often the whole account was traded in a year.", None),
    "exposure": Term("Exposure", "percent", "Mean share of the account that stood in the market, long or short.", None),
    "net_exposure": Term("Net exposure", "percent", "The same with shorts counted against longs.", None),
    "hit_rate": Term("Hit rate", "percent", "Share of the bars with a gain, among those with a gain or a loss."),
    "cost_share": Term("Cost share", "percent", "Part of the gross gain that costs took; infinite if there was none.", False),
    "costs": Term("Costs paid", "percent", "Fees and slippage over the whole test, as a share of the start.", False),
    "agent_lead": Term("Agent's lead", "number", "The agent's Sharpe ratio minus this account's, on the same resampled bars."),
    "alpha": Term("Alpha per year", "percent", "What is left of the return once the market's part is taken out."),
    "alpha_t": Term("Alpha, t value", "number", "Alpha in units of its own error; beyond 2 it is seldom luck."),
    "beta": Term("Beta", "number", "How much the account moves when the market moves by one.", None),
    "r_squared": Term("Share explained by the market", "percent", "Part of its moves that holding the market explains.", None),
    "psr": Term("Probabilistic Sharpe", "number", "Confidence that the true Sharpe ratio is above 0."),
    "probabilistic_sharpe": Term("Probabilistic Sharpe", "number", "Confidence that the true Sharpe ratio is above 0."),
    "dsr": Term("Deflated Sharpe", "number", "The same, once every trial is counted; 0.95 is needed."),
    "deflated_sharpe": Term("Deflated Sharpe", "number", "The same, once every trial is counted; 0.95 is needed."),
    "pbo": Term("Overfitting (PBO)", "percent", "How often the best trial of one half is poor in the other.", False),
    "minimum_track_record": Term("Track record needed", "count", "Bars after which it is no longer luck.", False),
}  # fmt: skip


def term(key: str) -> Term:
    """A statistic in words; one that nobody has explained keeps its name."""
    return TERMS.get(key, Term(capital(plain(key)), "number", "A figure of the record.", None))

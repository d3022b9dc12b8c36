"""Where the figures come from, and the figures to take away."""

from tailguard.evaluate.record import Evaluation
from tailguard.evaluate.report.blocks import Section, Tabs
from tailguard.evaluate.report.formatting import day, say
from tailguard.evaluate.report.markup import Html, join, table, tag


def provenance(evaluation: Evaluation) -> Section:
    """Configuration, data, versions, seeds, downloads."""
    source = evaluation.provenance
    versions = table(["package", "version"], [[name, version] for name, version in source.versions.items()], "Versions.", 2)
    config = tag("pre", tag("code", source.config), tabindex=0, role="region", aria_label="Configuration")
    panes = Tabs(
        "provenance-tabs",
        "Details",
        {"Data and seeds": [_facts(evaluation)], "Configuration": [config], "Versions": [versions]},
    )
    lead = "With the same data, configuration, versions and seeds the same figures come out."
    return Section("provenance", "Provenance", "How to get the same figures again", lead, [panes, _downloads()])


def _facts(evaluation: Evaluation) -> Html:
    source, times = evaluation.provenance, evaluation.agent.times
    several = evaluation.prices.shape[1] > 1
    facts = {
        "Data": evaluation.source,
        "Fingerprint": source.fingerprint,
        "Tested": f"{day(times[0])} to {day(times[-1])}, {len(times):,} bars, {say(evaluation.periods_per_year)} per year",
        "Assets": ", ".join(str(name) for name in evaluation.prices.columns) if several else evaluation.source,
        "Training seeds": ", ".join(str(seed) for seed in source.seeds),
        "Trials": f"{source.trials:,}: agents that could have been chosen by looking at these bars, each a chance for luck",
        "Evaluated on": source.date,
    }
    return tag("dl", join(*(join(tag("dt", name), tag("dd", value)) for name, value in facts.items())), class_="facts")


def _downloads() -> Html:
    """The files are inside the page: no network and no second file is needed."""
    buttons = [
        tag("button", name, type="button", class_="download", data_download=key)
        for key, name in (("json", "metrics.json"), ("csv", "metrics.csv"), ("config", "config.yaml"))
    ]
    return tag("p", tag("span", "Take the numbers away: "), *buttons, class_="downloads")

"""The HTML report of an evaluation, and the comparison of several evaluations."""

from tailguard.evaluate.report.compare import compare, comparison_rows
from tailguard.evaluate.report.report import write_page, write_report

__all__ = ["compare", "comparison_rows", "write_page", "write_report"]

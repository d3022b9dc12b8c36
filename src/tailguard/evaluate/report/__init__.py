"""The report: one page that opens anywhere, from the record of an evaluation; and several records side by side."""

from tailguard.evaluate.report.compare import compare, comparison_rows
from tailguard.evaluate.report.report import write_page, write_report

__all__ = ["compare", "comparison_rows", "write_page", "write_report"]

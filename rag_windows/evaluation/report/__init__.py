"""The report of a run: one HTML file that needs nothing else, and the same tables as Markdown."""

from rag_windows.evaluation.report.reading import reported
from rag_windows.evaluation.report.reported import ReportedRun, Values
from rag_windows.evaluation.report.writing import write_report

__all__ = ["ReportedRun", "Values", "reported", "write_report"]

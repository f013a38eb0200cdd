"""In-context learning: labels and choices learnt from demonstrations in windows."""

from rag_windows.evaluation.icl.named import NAMED
from rag_windows.evaluation.icl.options import IclOptions
from rag_windows.evaluation.icl.task import IclTask

__all__ = ["NAMED", "IclOptions", "IclTask"]

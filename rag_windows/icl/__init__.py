"""In-context learning: labels learnt from demonstrations in windows."""

from rag_windows.icl.classifier import Classification
from rag_windows.icl.demonstrations import Demonstration, Template

__all__ = ["Classification", "Demonstration", "Template"]

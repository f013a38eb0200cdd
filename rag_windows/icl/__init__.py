"""In-context learning: labels learnt from demonstrations in windows."""

from rag_windows.icl.classifier import Classification, Demonstration, Template

__all__ = ["Classification", "Demonstration", "Template"]

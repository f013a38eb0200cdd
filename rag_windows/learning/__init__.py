"""In-context learning: labels learnt from demonstrations in windows."""

from rag_windows.learning.classification import Classification
from rag_windows.learning.demonstration import Demonstration
from rag_windows.learning.template import Template

__all__ = ["Classification", "Demonstration", "Template"]

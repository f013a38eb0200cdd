"""How the query reads the windows: one small class a method."""

from rag_windows.rescaling.ape import APE
from rag_windows.rescaling.base import Method
from rag_windows.rescaling.pcw import PCW
from rag_windows.rescaling.registry import METHODS, resolve
from rag_windows.rescaling.sequential import Sequential

__all__ = ["APE", "METHODS", "PCW", "Method", "Sequential", "resolve"]

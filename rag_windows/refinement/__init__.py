"""What changes the keys and values of encoded windows before anybody reads or stores them."""

from rag_windows.refinement.iterative import IterativeRefinement, Positions

__all__ = ["IterativeRefinement", "Positions"]

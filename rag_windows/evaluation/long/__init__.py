"""A sweep over the number of passages and the place of the one that answers."""

from rag_windows.evaluation.long.scoring import CellScore, cell_table, cells
from rag_windows.evaluation.long.task import LongOptions, LongTask

__all__ = ["CellScore", "LongOptions", "LongTask", "cell_table", "cells"]

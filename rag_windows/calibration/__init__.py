"""Comparing methods, and choosing their numbers, on a model and questions of one's own."""

from rag_windows.calibration.compare import (
    METHODS_TO_ASK,
    Example,
    ape_grid,
    default_grid,
    read_examples,
)
from rag_windows.calibration.profile import (
    Comparison,
    Cost,
    Mean,
    ModelFingerprint,
    Profile,
    Setting,
)
from rag_windows.calibration.words import ARTICLES, bag_f1, chatrag_words, compared_words, contains

__all__ = [
    "ARTICLES",
    "METHODS_TO_ASK",
    "Comparison",
    "Cost",
    "Example",
    "Mean",
    "ModelFingerprint",
    "Profile",
    "Setting",
    "ape_grid",
    "bag_f1",
    "chatrag_words",
    "compared_words",
    "contains",
    "default_grid",
    "read_examples",
]

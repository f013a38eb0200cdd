"""Choosing a method's numbers for a model and its documents."""

from rag_windows.calibration.calibrate import Example, ape_grid, default_grid, read_examples
from rag_windows.calibration.profile import Comparison, Mean, ModelFingerprint, Profile, Setting

__all__ = [
    "Comparison",
    "Example",
    "Mean",
    "ModelFingerprint",
    "Profile",
    "Setting",
    "ape_grid",
    "default_grid",
    "read_examples",
]

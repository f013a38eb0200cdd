"""Parity of the engine with an independent dense reference, on random small models."""

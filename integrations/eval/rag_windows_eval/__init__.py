"""Evaluation: datasets, a run that can be killed, scores with intervals, and the report."""

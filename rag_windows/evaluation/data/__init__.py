"""Datasets: their own files in, examples out; and predictions in the datasets' own formats."""

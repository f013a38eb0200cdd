"""Kernels in Triton; each is imported by its backend alone, where Triton is installed."""

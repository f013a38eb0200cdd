"""How good answers and rankings are, by the metrics that the datasets' own scripts use."""

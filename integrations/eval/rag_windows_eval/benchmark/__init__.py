"""The benchmark: seconds, tokens per second and bytes, compared with what a user runs today."""

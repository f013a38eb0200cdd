"""The benchmark: seconds, tokens per second and bytes, beside what a user runs today."""

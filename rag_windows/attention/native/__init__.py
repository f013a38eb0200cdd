"""A kernel in C for a few rows over many keys on a CPU, compiled where it is first needed."""

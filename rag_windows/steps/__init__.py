"""Further steps of some methods: ensembles, refinement, selective recompute."""

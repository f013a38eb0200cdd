"""The judgement of the methods: what ``benchmarks/methods.py`` runs."""

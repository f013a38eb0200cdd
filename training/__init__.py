"""Trains the embedded readers: an invented world, its texts, a tokenizer, a trainer.

Nothing here is needed to use `rag_windows`; the product lies in `rag_windows/models/tiny-reader`.
"""

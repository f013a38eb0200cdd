"""Trains the embedded readers: an invented world, its texts, a tokenizer, a trainer.

Nothing here is needed to use `rag_windows`; what comes out is in
`rag_windows/models/tiny-reader` and the folders of `training/models`.
"""

"""The commands `rag-windows eval ...`."""

"""The command `rag-windows`: questions over documents from a terminal or a script."""

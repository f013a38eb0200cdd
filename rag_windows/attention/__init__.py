"""Attention over windows: the hook, what travels with a call, backends, and what is refused."""

from rag_windows.attention.hook import NAME as ATTENTION
from rag_windows.attention.native.kernel import kernel as native_kernel
from rag_windows.attention.native.linear import NAME as NATIVE_LINEAR

__all__ = ["ATTENTION", "NATIVE_LINEAR", "native_kernel"]

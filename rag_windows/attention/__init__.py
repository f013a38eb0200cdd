"""Attention over windows: the hook, what travels with a call, backends, and what is refused."""

from rag_windows.attention import backends
from rag_windows.attention.cuda import CudaBackend
from rag_windows.attention.hook import NAME as ATTENTION
from rag_windows.attention.native.kernel import NativeBackend
from rag_windows.attention.native.kernel import kernel as native_kernel
from rag_windows.attention.native.linear import NAME as NATIVE_LINEAR

# They import the contract from `backends`, which therefore can't name them itself.
backends.BACKENDS.update(native=NativeBackend(), cuda=CudaBackend())

__all__ = ["ATTENTION", "NATIVE_LINEAR", "native_kernel"]

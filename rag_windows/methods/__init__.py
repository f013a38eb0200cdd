"""How windows are encoded and how the query reads them: one small class a method."""

from rag_windows.methods.ape import APE as APE
from rag_windows.methods.auto import Auto as Auto
from rag_windows.methods.base import Alignment as Alignment
from rag_windows.methods.base import Method as Method
from rag_windows.methods.base import query_bias as query_bias
from rag_windows.methods.base import window_starts as window_starts
from rag_windows.methods.codebook import Codebook as Codebook
from rag_windows.methods.composed import Composed as Composed
from rag_windows.methods.composed import chain as chain
from rag_windows.methods.deep_thinking import DeepThinking as DeepThinking
from rag_windows.methods.ensemble import ParallelEnsemble as ParallelEnsemble
from rag_windows.methods.linked import Linked as Linked
from rag_windows.methods.linked import linked as linked
from rag_windows.methods.mateicl import MateICL as MateICL
from rag_windows.methods.neighbours import Neighbours as Neighbours
from rag_windows.methods.pced import PCED as PCED
from rag_windows.methods.pcw import PCW as PCW
from rag_windows.methods.query_likelihood import QueryLikelihood as QueryLikelihood
from rag_windows.methods.registry import METHODS as METHODS
from rag_windows.methods.registry import describe as describe
from rag_windows.methods.registry import resolve as resolve
from rag_windows.methods.sequential import Sequential as Sequential
from rag_windows.methods.sink import Sink as Sink
from rag_windows.methods.structured_prompting import StructuredPrompting as StructuredPrompting

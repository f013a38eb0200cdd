"""The command `rag-windows eval inscit` and its options."""

from __future__ import annotations

from rag_windows.cli import options
from rag_windows.cli.evaluation import options as own
from rag_windows.cli.evaluation.asking import Asking, Reading, ask
from rag_windows.cli.options import spreading

TOP_K = ["20"]


@spreading()
def inscit(
    *,
    data: own.Data,
    corpus: own.Corpus = None,
    pool: own.Pool = None,
    model: options.Model = "tiny-reader",
    methods: own.Methods = own.METHODS,
    retriever: own.Retriever = "bm25",
    embedder: own.Embedder = None,
    top_k: own.TopK = TOP_K,
    asking: Asking,
    style: own.Style = "plain",
    evidence: own.Evidence = 1,
    speed: own.Speed = 3,
    reading: Reading,
) -> None:
    """INSCIT: conversations over Wikipedia; each turn is answered over retrieved passages.

    --data is the dataset's own dev.json or test.json. Predictions are written in its own format.
    """
    from rag_windows.cli.evaluation.running import Search
    from rag_windows.cli.evaluation.source import Source, check_pool

    check_pool(corpus, pool)
    depths = own.numbers(top_k)
    chosen = {
        "corpus": None if corpus is None else str(corpus),
        "style": style,
        "evidence": evidence,
    }
    source = Source("inscit", str(data), asking.limit, chosen)
    search = Search(retriever, max(depths), embedder)
    ask(source, search, model, methods, depths, asking, reading, speed=speed)

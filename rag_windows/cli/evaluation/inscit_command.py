"""The command `rag-windows eval inscit` and its options."""

from __future__ import annotations

from rag_windows.cli import options
from rag_windows.cli.evaluation import options as own

TOP_K = ["20"]


def inscit(
    data: own.Data,
    corpus: own.Corpus = None,
    pool: own.Pool = None,
    model: options.Model = "tiny-reader",
    methods: own.Methods = own.METHODS,
    retriever: own.Retriever = "bm25",
    embedder: own.Embedder = None,
    top_k: own.TopK = TOP_K,
    out: own.Out = None,
    shard: own.ShardOf = None,
    limit: own.Limit = None,
    seed: own.Seed = 0,
    max_new_tokens: own.MaxNewTokens = None,
    system: own.System = None,
    style: own.Style = "plain",
    evidence: own.Evidence = 1,
    speed: own.Speed = 3,
    temperature: own.Temperature = None,
    scale: own.Scale = None,
    link_tokens: options.LinkTokens = None,
    profile: own.Profile = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    max_window_tokens: options.MaxWindowTokens = None,
    cache_memory: own.CacheMemory = own.MEMORY,
    fresh: own.Fresh = False,
    json: options.Json = False,
    verbose: options.Verbose = False,
) -> None:
    """INSCIT: conversations over Wikipedia; each turn is answered over retrieved passages.

    --data is the dataset's own dev.json or test.json. Predictions are written in its own format.
    """
    from rag_windows.cli.evaluation.compared import Compared, arms_of
    from rag_windows.cli.evaluation.running import Plan, Search, evaluate
    from rag_windows.cli.evaluation.source import Source, check_pool

    check_pool(corpus, pool)
    depths = own.numbers(top_k)
    evaluate(
        Plan(
            Source(
                "inscit",
                str(data),
                limit,
                {
                    "corpus": None if corpus is None else str(corpus),
                    "style": style,
                    "evidence": evidence,
                },
            ),
            arms_of(Compared(",".join(methods), depths, temperature, scale, link_tokens, profile)),
            Search(retriever, max(depths), embedder),
            own.model_options(
                model, device, dtype, max_window_tokens, cache_memory, profile, verbose=verbose
            ),
            out=out,
            shard=shard,
            system=system,
            max_new_tokens=max_new_tokens,
            seed=seed,
            speed=speed,
            fresh=fresh,
            as_json=json,
        )
    )

"""The command `rag-windows eval chatrag` and its options."""

from __future__ import annotations

from typing import Annotated

import typer

from rag_windows.cli import options
from rag_windows.cli.evaluation import options as own

Dataset = Annotated[
    str,
    typer.Option(
        "--dataset",
        metavar="NAME",
        help="Which of the ten the file is of, such as doc2dial, quac or inscit.",
        show_default=False,
    ),
]

TOP_K = ["5"]
"""As many as the benchmark's own script takes."""


def chatrag(
    data: own.Data,
    dataset: Dataset,
    model: options.Model = "tiny-reader",
    methods: own.Methods = own.METHODS,
    top_k: own.TopK = TOP_K,
    out: own.Out = None,
    shard: own.ShardOf = None,
    limit: own.Limit = None,
    seed: own.Seed = 0,
    max_new_tokens: own.MaxNewTokens = None,
    system: own.System = None,
    style: own.Style = "chatrag",
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
    """ChatRAG-Bench: ten conversational datasets that bring their passages in ranked order."""
    from rag_windows.cli.evaluation.compared import Compared, arms_of
    from rag_windows.cli.evaluation.running import Plan, Search, evaluate
    from rag_windows.cli.evaluation.source import Source

    depths = own.numbers(top_k)
    evaluate(
        Plan(
            Source("chatrag", str(data), limit, {"dataset": dataset, "style": style}),
            arms_of(Compared(",".join(methods), depths, temperature, scale, link_tokens, profile)),
            Search("given", max(depths)),
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

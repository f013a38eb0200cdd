"""The command `rag-windows eval chatrag` and its options."""

from __future__ import annotations

from typing import Annotated

import typer

from rag_windows.cli import options
from rag_windows.cli.evaluation import options as own
from rag_windows.cli.evaluation.asking import Asking, Reading, ask
from rag_windows.cli.options import spreading

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


@spreading()
def chatrag(
    *,
    data: own.Data,
    dataset: Dataset,
    model: options.Model = "tiny-reader",
    methods: own.Methods = own.METHODS,
    top_k: own.TopK = TOP_K,
    asking: Asking,
    style: own.Style = "chatrag",
    speed: own.Speed = 3,
    reading: Reading,
) -> None:
    """ChatRAG-Bench: ten conversational datasets that bring their passages in ranked order."""
    from rag_windows.cli.evaluation.running import Search
    from rag_windows.cli.evaluation.source import Source

    depths = own.numbers(top_k)
    source = Source("chatrag", str(data), asking.limit, {"dataset": dataset, "style": style})
    search = Search("given", max(depths))
    ask(source, search, model, methods, depths, asking, reading, speed=speed)

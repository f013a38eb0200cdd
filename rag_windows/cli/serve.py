"""The command `serve`: an HTTP server with OpenAI's routes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from rag_windows.cli import options
from rag_windows.cli.options import ModelOptions, SearchOptions, option
from rag_windows.samples import sample_questions


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where the server listens, who may ask, and for how much; see `server.Settings`."""

    host: Annotated[str, option("HOST", "Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, option("PORT", "Port to listen on.", min=0, max=65535)] = 8000
    api_key_file: Annotated[
        str | None,
        option(
            "FILE", 'Who may ask: a "NAME KEY" in each line; "operator" behind it for operators.'
        ),
    ] = None


@options.spreading()
def serve(*, search: SearchOptions, model: ModelOptions, server: ServeOptions) -> None:
    """Serve OpenAI's routes; answers say which passages they read."""
    from rag_windows.server import Keys, Settings, create_app

    keys = Keys() if server.api_key_file is None else Keys.load(server.api_key_file)
    retriever = None
    if search.docs or model.model is None:
        retriever = options.open_corpus(search, model.model)
    # Nobody can guess what the sample documents tell of.
    examples = () if search.docs or model.model else tuple(sample_questions()[:3])
    import uvicorn

    with options.loaded_model(model) as lm:
        settings = Settings(model_name=model.name, top_k=search.top_k, examples=examples)
        app = create_app(lm, settings, retriever, keys=keys)
        uvicorn.run(app, host=server.host, port=server.port, log_level="warning")

"""The command `serve`: an HTTP server with OpenAI's routes."""

from __future__ import annotations

import ipaddress
import logging
import os
import re
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from rag_windows import cli
from rag_windows.cli import LoadOptions, RayOptions, SearchOptions, count, flag, option
from rag_windows.errors import InputError
from rag_windows.samples import sample_questions
from rag_windows.visible_text import encodable

if TYPE_CHECKING:
    from rag_windows_server import Settings


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Where the server listens, who may ask, and for how much; see `rag_windows_server`."""

    host: Annotated[str, option("HOST", "Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, option("PORT", "Port to listen on.", min=0, max=65535)] = 8000
    served_model_name: Annotated[
        str | None,
        option(
            "NAME",
            "The model's name in requests and answers. Default: the last part of --model; the "
            "whole of it is taken, too.",
        ),
    ] = None
    allow_host: Annotated[
        list[str] | None,
        option(
            "NAME",
            "Answer under this name, too, as behind a proxy; can be repeated. It is needed where "
            "there are no keys and --host is this machine.",
        ),
    ] = None
    api_key_file: Annotated[
        str | None,
        option(
            "FILE",
            "Who may ask: in each line a name and a key, for operators with the word operator "
            "behind them. Default: everybody.",
        ),
    ] = None
    system: Annotated[
        str | None,
        option(
            "TEXT",
            "Instruction (system prompt) before every request's own. Default: that of rag-windows "
            'ask, for requests without one that are answered from --docs; "" sends none.',
            parser=encodable,
        ),
    ] = None
    max_new_tokens: Annotated[int, count("Tokens of an answer for which none are asked.")] = 512
    max_prompt_tokens: Annotated[
        int | None, count("Largest number of tokens of a request with its passages.")
    ] = None
    refuse: Annotated[
        list[str] | None,
        option(
            "FIELD",
            "What requests may not set: method, rag_temperature, link_tokens, fallback, "
            "citations or chat_template_kwargs; can be repeated.",
        ),
    ] = None
    parse_sources: Annotated[
        bool,
        flag(
            "--parse-sources",
            "Take Open WebUI's <source> blocks in messages for documents; their text could forge "
            "further ones.",
        ),
    ] = False
    max_rows: Annotated[int, count("Requests that are answered at a time.")] = 16
    max_waiting: Annotated[
        int, option("N", "Requests in line behind them; more are refused.", min=0)
    ] = 64
    wait: Annotated[
        float, option("SECONDS", "Time in line, after which a request is refused.", min=0.1)
    ] = 60.0
    timeout: Annotated[
        float, option("SECONDS", "Time for an answer, after which it is ended.", min=0.1)
    ] = 600.0
    grace: Annotated[
        float, option("SECONDS", "Time for answers under way when the server is stopped.", min=0)
    ] = 5.0
    cors: Annotated[
        list[str] | None,
        option("ORIGIN", "Pages of this origin may ask; can be repeated. Default: none."),
    ] = None
    retriever: Annotated[
        str | None,
        option(
            "MODULE:NAME",
            "What finds passages, in place of --docs: a retriever or vector store of LangChain, a "
            "retriever or index of LlamaIndex, or a function that makes one.",
        ),
    ] = None
    log_texts: Annotated[bool, flag("--log-texts", "Write questions and answers to the log.")] = (
        False
    )


@dataclass(frozen=True, slots=True)
class FleetPart(RayOptions):
    """Several readers behind one address, by Ray Serve; see `rag_windows_server.fleet`."""

    max_replicas: Annotated[
        int | None, count("The most processes, started as questions come in. Default: --replicas.")
    ] = None
    cache_memory: Annotated[
        str, option("SIZE", "Host memory of each process's passage cache, with --replicas.")
    ] = "4GiB"


@cli.spreading()
def serve(
    *, search: SearchOptions, model: LoadOptions, server: ServeOptions, fleet: FleetPart
) -> None:
    """Serve OpenAI's routes over documents; answers say which passages they read."""
    model.check()
    if fleet.wanted:
        _serve_fleet(search, model, server, fleet)
        return
    # What would fail after the documents and the model fails before them.
    with cli.progress("Checking the options"):
        from rag_windows_server import Keys
        from rag_windows_server.process import free_port, run

        keys = Keys() if server.api_key_file is None else Keys.load(server.api_key_file)
        settings = _settings(search, model, server)
        free_port(server.host, server.port)
    retriever: Any = None
    if server.retriever is not None:
        retriever = _named(search, model, server.retriever)
    elif model.model is None or search.docs or search.index is not None:
        retriever = cli.open_corpus(search, model)
    with cli.loaded_model(model) as lm:
        from rag_windows_server import create_app

        _tell_who_may_ask(model, server)
        logging.basicConfig(format="%(message)s")
        logging.getLogger("rag_windows.server").setLevel(logging.INFO)
        follow = _followed(retriever, search)
        app = create_app(lm, settings, retriever, keys=keys, follow=follow)
        held = getattr(retriever, "passages", None)
        text = f"{'' if held is None else f'{len(held)} passages, '}{model.name}"
        run(app, server.host, server.port, server.grace, lambda at: cli.tell(text + at))


def _named(search: SearchOptions, model: LoadOptions, name: str) -> object:
    """The retriever of --retriever."""
    from rag_windows_server.foreign import named_retriever

    if search.docs or search.index is not None:
        raise InputError("--retriever finds passages by itself. Leave --docs and --index out.")
    if model.model is None:
        raise InputError("--retriever needs a model that can answer over its passages: --model.")
    return named_retriever(name)


def _serve_fleet(
    search: SearchOptions, model: LoadOptions, server: ServeOptions, fleet: FleetPart
) -> None:
    from rag_windows_server.fleet import run

    if server.retriever is not None:
        raise InputError("--retriever is for one process. Leave --replicas and --ray out.")
    made = cli.fleet_options(
        search,
        model,
        **fleet.size,
        max_replicas=fleet.max_replicas,
        cache_memory=None if model.no_cache else fleet.cache_memory,
        api_key_file=server.api_key_file and os.path.abspath(server.api_key_file),
        settings=_settings(search, model, server),
    )
    # Errors in documents and keys are reported before anything starts.
    made.load_keys()
    corpus = None
    if search.docs or model.model is None:
        corpus = cli.open_corpus(search, model)
    from rag_windows_server.collection import Follower, index_of

    follower: AbstractContextManager[object] = nullcontext()
    # Readers on other machines have no part in an index, and read the documents themselves.
    if fleet.ray is None and (index := index_of(corpus)) is not None:
        made = made.model_copy(update={"index": os.path.abspath(index.folder)})
        follower = Follower(index, _followed(corpus, search))
        logging.basicConfig(format="%(message)s")
        logging.getLogger("rag_windows.server").setLevel(logging.INFO)
    _tell_who_may_ask(model, server)
    text = f"{made.replicas} readers, {model.name}"
    with follower:
        run(
            made,
            server.host,
            server.port,
            address=fleet.ray,
            grace_s=server.grace,
            on_ready=lambda at: cli.tell(text + at),
        )


def _followed(corpus: object, search: SearchOptions) -> list[str]:
    """The paths that are watched while the server runs."""
    from rag_windows_server.collection import followed, index_of

    docs = [*map(str, search.docs or ())]
    if (index := index_of(corpus)) is not None:
        return followed(index, docs)
    if docs:
        cli.tell("Note: Changes of the documents are taken up at the next start only.")
    return []


def _settings(search: SearchOptions, model: LoadOptions, server: ServeOptions) -> Settings:
    from rag_windows_server import Settings

    keys = server.api_key_file is not None
    name = server.served_model_name or _last_part(model.name)
    local = _names(server.host, server.allow_host or ())
    return Settings(
        model_name=name,
        model_aliases=(model.name,),
        allow=_allowed(server.refuse or ()),
        most_prompt_tokens=server.max_prompt_tokens,
        system=server.system or None,
        default_system=(cli.default_instruction(model.name) if server.system is None else None),
        top_k=search.top_k,
        parse_sources=server.parse_sources,
        new_tokens=server.max_new_tokens,
        most_new_tokens=max(server.max_new_tokens, 4096),
        max_rows=server.max_rows,
        most_waiting=server.max_waiting,
        wait_s=server.wait,
        timeout_s=server.timeout,
        cors=tuple(server.cors or ()),
        # A page that a name of its own leads here could else ask a server without keys.
        hosts=() if keys or not _local(server.host) else local,
        log_texts=server.log_texts,
        # Nobody can guess what the sample documents tell of.
        examples=() if search.docs or model.model else tuple(sample_questions()[:3]),
    )


def _tell_who_may_ask(model: LoadOptions, server: ServeOptions) -> None:
    if model.model is None:
        cli.tell(cli.SAMPLE_MODEL)
    if server.api_key_file is None and not _local(server.host):
        cli.tell("Note: Everybody who reaches this address may ask; see --api-key-file.")


def _allowed(refused: Collection[str]) -> frozenset[Any]:
    """The fields that requests may set."""
    from rag_windows_server.settings import PerRequest

    fields = frozenset(get_args(PerRequest))
    if unknown := sorted(set(refused) - fields):
        raise InputError(f"--refuse {unknown[0]!r} must be one of {', '.join(sorted(fields))}.")
    return fields - set(refused)


def _local(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _names(host: str, further: Collection[str]) -> tuple[str, ...]:
    own = {"localhost", "127.0.0.1", "[::1]", f"[{host}]" if ":" in host else host}
    return tuple(own | {name.lower() for name in further})


def _last_part(name: str) -> str:
    """A model's name without the folders of this machine."""
    parts = [part for part in re.split(r"[/\\]", name) if part not in ("", ".", "..")]
    return parts[-1] if parts else Path(name).resolve().name or name


def add(app: typer.Typer) -> None:
    """Add `serve` to the commands; the entry point of the group `rag_windows.commands`."""
    app.command()(serve)

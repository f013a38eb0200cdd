"""Tasks and threads, in both frameworks: the loop stays free, work ends with its caller."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from transformers import LogitsProcessor

from langchain_rag_windows import ChatRagWindows, RagWindows
from langchain_rag_windows.errors import RequestTimeoutError
from llama_index.llms.rag_windows import RagWindowsLLM
from rag_windows import GenerationError, InputError, LimitError
from tests.integrations.cases import (
    LONG,
    PLACES,
    Held,
    Pace,
    case,
    passes,
    reader,
    same_text,
)
from tests.integrations.langchain import asking as langchain
from tests.integrations.llama_index import asking as llama_index
from tests.rag_windows import small

Asked = Coroutine[Any, Any, str]


@dataclass(frozen=True)
class Caller:
    """One asynchronous way to ask a model of one framework."""

    kind: Callable[..., Any]
    verb: str
    way: str

    def __repr__(self) -> str:
        return f"{self.kind.__name__}.{self.verb}.{self.way}"

    async def ask(self, model: Any, question: str, passages: Any, **options: Any) -> str:
        """The text of an answer."""
        if self.kind is RagWindowsLLM:
            given = llama_index.question(self.verb, question)
            options = {"passages": passages, **options}
            _, pieces = await llama_index.asked(model, self.verb, self.way, given, **options)
            return llama_index.text_of(pieces[-1])
        made = await langchain.ASYNC[self.way](model, question, documents=[*passages], **options)
        return langchain.text_of(made)


KINDS = (ChatRagWindows, RagWindows)
CALLERS = [
    *(Caller(kind, "", way) for kind in KINDS for way in langchain.ASYNC),
    *(Caller(RagWindowsLLM, verb, way) for verb, way in llama_index.AWAITED),
]
EACH = pytest.mark.parametrize("caller", CALLERS, ids=repr)


@pytest.fixture(params=["lone", "in a batch"])
def alone_or_not(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone call is answered by itself; here it is also made to go into the batch."""
    if request.param == "in a batch":
        monkeypatch.setattr("rag_windows.integration.calls.Calls.idle", lambda _: False)


def asked(caller: Caller, *paces: LogitsProcessor, tokens: int = 400, **options: Any) -> Asked:
    """One question over its passages, answered with so many tokens."""
    one = case(PLACES[0])
    forced = {"min_new_tokens": tokens, "logits_processor": list(paces)}
    model = caller.kind(lm=reader(), max_new_tokens=tokens, generate_kwargs=forced, **options)
    return caller.ask(model, one.question, one.passages)


@pytest.mark.usefixtures("alone_or_not")
@EACH
def test_the_event_loop_goes_on(caller: Caller) -> None:
    held = Held()
    asyncio.run(held.beside(lambda: asked(caller, held, tokens=4)))


@pytest.mark.usefixtures("alone_or_not")
@EACH
def test_cancelling_stops_within_a_token(caller: Caller) -> None:
    async def cancel() -> int:
        pace = Pace(0.01)
        task = asyncio.ensure_future(asked(caller, pace))
        while not pace.started.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return pace.settle()

    assert asyncio.run(cancel()) <= 2  # the one under way, and the one whose end is awaited


@pytest.mark.usefixtures("alone_or_not")
@pytest.mark.parametrize("kind", [*KINDS, RagWindowsLLM])
@pytest.mark.parametrize("close", [True, False])
def test_a_stream_that_is_left_stops(kind: Callable[..., Any], close: bool) -> None:
    """Closed, or left by break: then the loop closes it when nothing refers to it."""
    stream = "stream_complete" if kind is RagWindowsLLM else "stream"
    pace = Pace(0.01)
    model = kind(lm=reader(), generate_kwargs={**LONG, "logits_processor": [pace]})

    async def leave() -> None:
        pieces: Any = getattr(model, f"a{stream}")("Who?")
        pieces = await pieces if kind is RagWindowsLLM else pieces
        async for _ in pieces:
            break
        if close:
            await pieces.aclose()
        else:
            del pieces
            gc.collect()
            await asyncio.sleep(0.01)

    asyncio.run(leave())
    assert pace.settle() <= 1
    pieces = getattr(model, stream)("Who?")
    next(pieces)
    pieces.close()
    assert pace.settle() <= 1


@pytest.mark.usefixtures("alone_or_not")
@EACH
def test_errors_and_timeouts_come_out_at_once(caller: Caller) -> None:
    started = time.process_time()
    with pytest.raises(RuntimeError, match="the worker broke"):
        asyncio.run(asked(caller, Pace(fails_at=3)))
    assert time.process_time() - started < 1
    if caller.kind is RagWindowsLLM:  # its synthesizers would swallow a ValueError
        with pytest.raises(GenerationError, match="not that one"):
            asyncio.run(asked(caller, Pace(fails_at=2, error=ValueError("not that one"))))
    else:
        with pytest.raises(RequestTimeoutError, match=r"not complete after 0\.2 seconds"):
            asyncio.run(asked(caller, Pace(0.01), timeout=0.2))
        model = caller.kind(lm=reader(), generate_kwargs=LONG)
        with pytest.raises(RequestTimeoutError):
            model.invoke("Who?", timeout=0.1, logits_processor=[Pace(0.01)])


def stop_iteration(*_: object) -> Any:
    """A callback of somebody who called next() without a default."""
    return next(iter(()))


@EACH
@pytest.mark.parametrize(
    "options",
    [
        {"logits_processor": [stop_iteration]},
        {"stopping_criteria": [stop_iteration]},
        {"prefix_allowed_tokens_fn": stop_iteration},
        {"on_encoded": stop_iteration},
        {"header": stop_iteration},
    ],
    ids=lambda options: "".join(options),
)
def test_a_call_ends_when_a_callback_raises_stop_iteration(
    caller: Caller, options: dict[str, Any]
) -> None:
    """Nothing that a coroutine awaits can raise one: it would wait for ever."""
    of_model = {key: value for key, value in options.items() if key == "header"}
    model = caller.kind(lm=small.wrapped(**of_model))
    of_call = {key: value for key, value in options.items() if key != "header"}
    asking = caller.ask(model, "Who?", ["One two three.", "Four five six."], **of_call)
    # Of what encodes, which is a generator, Python itself makes a RuntimeError.
    with pytest.raises(RuntimeError, match="StopIteration"):
        asyncio.run(asyncio.wait_for(asking, timeout=20))


# Calls that are made at once

COUNT = 16
DOCUMENTS = tuple(f"Document {i}: " + "abcdefgh"[i] * (9 + 4 * (i % 3)) for i in range(8))
QUESTIONS = [f"Question {i}?" for i in range(COUNT)]


def passages(i: int) -> list[str]:
    """Two that all questions read, and one that every sixth reads."""
    return [*DOCUMENTS[:2], DOCUMENTS[2 + i % 6]]


def crowded(kind: Callable[..., Any], tokens: int = 60, **options: Any) -> Any:
    forced = {"min_new_tokens": tokens, "max_new_tokens": tokens}
    return kind(**{"lm": small.lm(), "generate_kwargs": forced, **options})


def assert_their_own(texts: Sequence[str], same: bool = False) -> None:
    for i in (0, 1, 4, COUNT - 1):
        given = passages(0 if same else i)
        alone = small.lm().generate(QUESTIONS[i], given, min_new_tokens=12, max_new_tokens=12)
        assert same_text(texts[i], alone.text)


@pytest.mark.parametrize("kind", [*KINDS, RagWindowsLLM])
def test_threads_and_models_of_one_engine_share_steps(kind: Callable[..., Any]) -> None:
    lm = small.wrapped()
    models = [crowded(kind, lm=lm) for _ in range(4)]
    with passes(lm) as rows, ThreadPoolExecutor(COUNT) as threads:
        asking = []
        for i, question in enumerate(QUESTIONS):
            model = models[i // 4]
            name = "passages" if kind is RagWindowsLLM else "documents"
            ask = model.complete if kind is RagWindowsLLM else model.invoke
            asking.append(threads.submit(ask, question, **{name: passages(i)}))
        texts = [langchain.text_of(one.result()) for one in asking]
    assert max(rows) >= COUNT // 2
    assert_their_own(texts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_batches_share_steps(kind: Callable[..., Any]) -> None:
    model = crowded(kind)
    for way, at_once in (("batch", 4), ("abatch", COUNT)):  # a pool of threads has few
        with passes(small.lm()) as rows:
            made = getattr(model, way)(QUESTIONS, documents=passages(0))
            answers = made if way == "batch" else asyncio.run(made)
        assert_their_own([langchain.text_of(answer) for answer in answers], same=True)
        assert max(rows) >= at_once // 2
    if kind is RagWindows:
        with passes(small.lm()) as rows:
            model.generate(QUESTIONS, documents=passages(0))
        assert max(rows) == COUNT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("caller", "options", "most"),
    [
        *((caller, {"batch_rows": rows}, rows) for caller in CALLERS[::4] for rows in (1, 3)),
        (CALLERS[0], {"concurrency": 3}, 3),
    ],
)
def test_the_number_of_rows_is_kept(caller: Caller, options: dict[str, Any], most: int) -> None:
    async def all_at_once(model: Any) -> None:
        await asyncio.gather(*(caller.ask(model, each, ["A."]) for each in QUESTIONS[:8]))

    with passes(small.lm()) as rows:
        asyncio.run(all_at_once(crowded(caller.kind, **options)))
    assert max(rows) == most


@EACH
def test_the_number_of_bytes_is_kept(caller: Caller) -> None:
    async def all_at_once(model: Any) -> list[Any]:
        asked = [caller.ask(model, each, ["A."]) for each in QUESTIONS[:4]]
        return await asyncio.gather(*asked, return_exceptions=True)

    with passes(small.lm()) as rows:
        refused = asyncio.run(all_at_once(crowded(caller.kind, batch_bytes="10KiB")))
        assert all(isinstance(one, LimitError) for one in refused)
        assert not any(rows)
        asyncio.run(all_at_once(crowded(caller.kind, batch_bytes="1GiB")))
    assert max(rows) == 4


@pytest.mark.slow
@EACH
def test_what_befalls_one_leaves_the_others(caller: Caller) -> None:
    endless = Pace()
    befalls: dict[int, dict[str, Any]] = {
        5: {"logits_processor": [Pace(fails_at=3)]},
        9: {"num_beams": "two"},
        11: {**LONG, "logits_processor": [endless]},
    }
    if caller.kind is not RagWindowsLLM:
        befalls[7] = {**LONG, "timeout": 0.3, "logits_processor": [Pace(0.005)]}

    async def all_at_once(model: Any) -> list[Any]:
        tasks = []
        for i, question in enumerate(QUESTIONS):
            asking = caller.ask(model, question, passages(i), **befalls.get(i, {}))
            tasks.append(asyncio.ensure_future(asking))
        while endless.tokens < 3 and not tasks[11].done():
            await asyncio.sleep(0.001)
        tasks[11].cancel()
        got = await asyncio.gather(*tasks, return_exceptions=True)
        assert endless.settle() == 0
        return got

    with passes(small.lm()) as rows:
        got = asyncio.run(all_at_once(crowded(caller.kind)))
    kinds = {5: RuntimeError, 7: RequestTimeoutError, 9: InputError, 11: asyncio.CancelledError}
    assert all(isinstance(got[i], kinds[i]) for i in befalls)
    assert_their_own(got)
    assert max(rows) >= COUNT // 2

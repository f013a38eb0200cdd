"""The server's page in a real Chromium: it answers, shows what was read, and stays harmless."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from rag_windows import WindowedLM
from rag_windows_retrievers import BM25Retriever
from rag_windows_server import Keys, Settings, create_app, page
from rag_windows_server.routes import Served

EVIL = (
    '<script>window.hacked=1</script>"><img src=x onerror=window.hacked=1></details></section>'
    "<style>body{display:none}</style><iframe src=https://example.org></iframe> "
    "[here](javascript:window.hacked=1) <a href='javascript:window.hacked=1'>x</a> ${hacked=1} "
    "{{7*7}} \u202eesrever \x1b[31m \u2066 " + "W" * 90
)
DESK, PHONE = (1280, 900), (390, 844)
KEY = "a-key-of-a-client-0123456789"


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The address of an application that answers on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)


class Script:
    """A server whose answers the test writes; `asked` are the bodies of its requests.

    A piece of an answer is a text, the data of an event, raw bytes, or a threading.Event to wait
    for; a Response is sent as it is.
    """

    def __init__(self) -> None:
        self.answers: list[Response | Sequence[Any]] = []
        self.asked: list[dict[str, Any]] = []
        self.left = threading.Event()
        self.model = "a-model"
        self.app = FastAPI()
        self.examples: tuple[str, ...] = ()
        served = SimpleNamespace(settings=self, tenant=lambda request: None)
        self.app.include_router(page.routes(cast(Served, served)))
        self.app.add_api_route("/v1/models", self._models)
        self.app.add_api_route("/v1/chat/completions", self._answer, methods=["POST"])

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": self.model}]})

    async def _answer(self, request: Request) -> Response:
        self.asked.append(await request.json())
        answer = self.answers.pop(0)
        if isinstance(answer, Response):
            return answer
        return StreamingResponse(self._pieces(answer), media_type="text/event-stream")

    async def _pieces(self, pieces: Sequence[Any]) -> AsyncIterator[bytes]:
        try:
            for piece in pieces:
                if isinstance(piece, threading.Event):
                    while not piece.is_set():
                        await asyncio.sleep(0.01)
                elif isinstance(piece, bytes):
                    yield piece
                else:
                    text = {"choices": [{"index": 0, "delta": {"content": piece}}]}
                    yield event(text if isinstance(piece, str) else piece)
        except asyncio.CancelledError:
            self.left.set()
            raise


def event(data: Any) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


def end(*citations: dict[str, Any], reason: str = "stop") -> list[Any]:
    """How a stream ends: citations with the last piece, usage, and the mark."""
    last = {"index": 0, "delta": {"citations": list(citations)}, "finish_reason": reason}
    details = {"cached_tokens": 1800}
    usage = {"prompt_tokens": 1912, "completion_tokens": 41, "prompt_tokens_details": details}
    return [{"choices": [last]}, {"choices": [], "usage": usage}, b"data: [DONE]\n\n"]


def cited(index: int, weight: float, title: str | None = None, **more: Any) -> dict[str, Any]:
    return {"index": index, "id": f"doc-{index}", "title": title, "weight": weight, **more}


@pytest.fixture
def script() -> Iterator[tuple[Script, str]]:
    written = Script()
    with serving(written.app) as url:
        yield written, url


@pytest.fixture(scope="module")
def real(lm: WindowedLM, corpus: BM25Retriever) -> Iterator[str]:
    """The true server over the sample documents, as `rag-windows serve` makes it."""
    with serving(create_app(lm, Settings(), corpus)) as url:
        yield url


@pytest.fixture
def visit(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a page that may ask its own server alone, and must not complain."""
    opened: list[Any] = []
    addresses: list[str] = []
    said: list[str] = []

    def request(one: Any) -> None:
        if not one.url.startswith(addresses[-1]):
            said.append(one.url)

    def console(one: Any) -> None:
        if "Failed to load" not in one.text:  # Chromium's own line about errors of the server
            said.append(one.text)

    def dialog(one: Any) -> None:
        said.append(one.message)
        one.dismiss()

    def opens(url: str, size: tuple[int, int] = DESK, scheme: Any = "light") -> Any:
        viewport = {"width": size[0], "height": size[1]}
        tab = browser.new_page(viewport=viewport, color_scheme=scheme)
        opened.append(tab)
        tab.set_default_timeout(20_000)
        addresses.append(url)
        tab.on("request", request)
        tab.on("pageerror", lambda error: said.append(str(error)))
        tab.on("dialog", dialog)
        tab.on("console", console)
        tab.goto(url)
        return tab

    yield opens
    for tab in opened:
        tab.close()
    assert said == []


def ask(tab: Any, question: str) -> Any:
    """Ask by the keyboard, wait for the end; the turn's element."""
    turns = tab.locator("#turns > li")
    before = turns.count()
    tab.get_by_label("Question").fill(question)
    tab.keyboard.press("Enter")
    turns.nth(before).wait_for()
    tab.get_by_role("button", name="Stop").wait_for(state="hidden")
    return turns.nth(before)


def facts(turn: Any) -> dict[str, str]:
    names, values = turn.locator("dt").all_inner_texts(), turn.locator("dd").all_inner_texts()
    return dict(zip(names, values, strict=True))


def test_it_answers_over_the_documents_and_shows_what_was_read(
    visit: Callable[..., Any], real: str
) -> None:
    tab = visit(real)
    turn = ask(tab, "Which genre does Gentle Horizon have?")
    assert "saga" in turn.locator(".answer > .text").inner_text()
    first = turn.locator(".passage").first
    assert first.locator(".name").inner_text() == "Gentle Horizon"
    text = first.locator(".text")
    assert not text.is_visible()
    first.locator("summary").click()
    assert "saga" in text.inner_text()
    weights = [float(amount.rstrip("%")) for amount in turn.locator(".amount").all_text_contents()]
    widths = turn.locator(".track").evaluate_all(
        "all => all.map(one => one.firstChild.getBoundingClientRect().width"
        " / one.getBoundingClientRect().width)"
    )
    assert weights == sorted(weights, reverse=True)
    assert len(weights) == Settings().top_k
    assert 0 < sum(weights) <= 100
    # A full bar would be all of the attention, whatever the others got.
    shown = [(width, weight) for width, weight in zip(widths, weights, strict=True) if width]
    assert shown
    for width, weight in shown:
        assert width == pytest.approx(weight / 100, abs=0.02)
    told = facts(turn)
    assert re.fullmatch(r"\d+\.\d\d s", told["First token"])
    assert float(told["First token"][:-2]) <= float(told["Whole answer"][:-2])
    assert re.fullmatch(r"[\d,]+ of [\d,]+ tokens", told["From the cache"])
    again = facts(ask(tab, "Which genre does Gentle Horizon have?"))
    cached = again["From the cache"].split(" of ")[0]
    assert int(cached.replace(",", "")) > 0


def test_a_follow_up_question_is_understood(visit: Callable[..., Any], real: str) -> None:
    tab = visit(real)
    ask(tab, "What is the birthplace of Valin Everley?")
    turn = ask(tab, "Which job does she have?")
    assert "librarian" in turn.locator(".answer > .text").inner_text()
    assert turn.locator(".passage .name").first.inner_text() == "Valin Everley"
    tab.get_by_role("button", name="New conversation").click()
    assert tab.locator("#turns > li").count() == 0
    assert "librarian" not in ask(tab, "Which job does she have?").inner_text()


def test_a_sentence_names_its_sources(
    visit: Callable[..., Any], script: tuple[Script, str]
) -> None:
    server, url = script
    said = [f"Goats eat <b>grass</b> 🎉. {EVIL} ends.", "It is said.", "It is said."]
    first = {"passage": 0, "mass": 0.4, "drop": 3.25, "supports": "yes"}
    second = {"passage": 1, "mass": 0.31, "drop": 0.5, "supports": "unsure"}
    statements = [
        {"text": said[0], "citations": [first]},
        {"text": said[1], "citations": []},
        {"text": said[2], "citations": [first, {**second, "drop": None}]},
    ]
    ending = end(cited(0, 0.4, "Goats", text="a"), cited(1, 0.3, EVIL, text="b"))
    ending[0]["choices"][0]["delta"]["rag"] = {"supported": False, "statements": statements}
    server.answers = [[" ".join(said), *ending]]
    tab = visit(url)
    tab.get_by_role("switch", name="Leave each source out").check()
    turn = ask(tab, "What?")
    assert server.asked[0]["citations"] == "removal"
    assert "No passage supports this answer" in turn.inner_text()
    words, sources = turn.locator(".said"), turn.locator(".sources")
    assert words.all_text_contents() == [said[0], said[2]]
    assert turn.locator(".answer > .text").evaluate(
        "one => [...one.childNodes].map(n => n.nodeType === 3 ? n.data : n.firstChild.textContent)"
        ".join('')"
    ) == " ".join(said)
    assert not sources.nth(1).is_visible()
    words.first.focus()
    assert sources.first.inner_text() == "Goats 40%, supports it, −3.3 nats without it"
    tab.keyboard.press("Escape")
    assert not sources.first.is_visible()
    words.nth(1).hover()
    assert len(sources.nth(1).inner_text().splitlines()) == 2
    tab.keyboard.press("Escape")
    assert not sources.nth(1).is_visible()
    assert tab.evaluate("window.hacked") is None


def test_stopping_ends_the_request(visit: Callable[..., Any], script: tuple[Script, str]) -> None:
    server, url = script
    server.answers = [["half ", threading.Event()], ["whole", *end()]]
    tab = visit(url)
    tab.get_by_role(
        "switch", name="Sequential beside windows"
    ).check()  # what is stopped goes on with no other way of reading
    tab.get_by_label("Question").fill("What?")
    tab.keyboard.press("Enter")
    tab.locator(".answer > .text", has_text="half").wait_for()
    tab.get_by_role("button", name="Stop").click()
    assert server.left.wait(5)
    tab.get_by_role("button", name="Stop").wait_for(state="hidden")
    assert tab.evaluate("document.activeElement.id") == "question"
    assert len(server.asked) == 1
    tab.get_by_role("switch", name="Sequential beside windows").uncheck()
    ask(tab, "And?")
    contents = [message["content"] for message in server.asked[1]["messages"]]
    first = tab.locator("#turns > li").first
    assert first.locator("h3").all_inner_texts() == ["Windows"]
    assert "Stopped." in first.inner_text()
    assert contents == ["What?", "half ", "And?"]


def test_hostile_texts_stay_texts(visit: Callable[..., Any], script: tuple[Script, str]) -> None:
    server, url = script
    size = PHONE
    server.model = EVIL
    server.examples = (EVIL,)
    sources = [
        cited(0, 0.3, EVIL, text=f"{EVIL}\n{EVIL}"),
        cited(1, 0.2, None, text=EVIL) | {"id": EVIL},
        cited(2, 0.1, "", text=None) | {"id": None},
        *(cited(i, 0.01, EVIL, text="") for i in range(3, 9)),
    ]
    broken = JSONResponse(
        {"error": {"message": EVIL, "type": "x", "param": None, "code": None}}, 400
    )
    last = end(*sources)
    fallback = {"message": EVIL}
    last[0]["choices"][0]["delta"] |= {
        "reasoning_content": EVIL,
        "rag": {"method": {"name": EVIL}, "notes": [EVIL], "fallback": fallback},
    }
    server.answers = [[EVIL, *last], broken]
    tab = visit(url, size, "dark")
    tab.locator("#examples button").wait_for()
    assert tab.evaluate("document.scrollingElement.scrollWidth") == size[0]
    tab.get_by_role("switch", name="Sequential beside windows").check()
    turn = ask(tab, EVIL)
    tab.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert tab.evaluate("window.hacked") is None
    inside = "[...document.querySelectorAll('main *')].map(one => one.localName)"
    assert set(tab.evaluate(inside)) <= set(
        "noscript p div ul ol li button h2 h3 h4 section dl dt dd details summary span bdi".split()
    )
    assert turn.locator("h2").text_content() == EVIL
    assert turn.locator(".answer > .text").first.text_content() == EVIL
    assert turn.locator(".name").nth(0).text_content() == EVIL
    assert turn.locator(".name").nth(1).text_content() == EVIL
    assert turn.locator(".name").nth(2).text_content() == "Passage 3"
    assert turn.locator(".passage > .text").nth(0).text_content() == f"{EVIL}\n{EVIL}"
    assert turn.locator(".bad").text_content() == EVIL
    assert turn.locator(".more > .text").text_content() == EVIL
    assert turn.locator("p.soft").all_text_contents() == [EVIL, EVIL]
    assert tab.locator("#model").text_content() == EVIL
    assert tab.evaluate("document.scrollingElement.scrollWidth") == size[0]
    # What is typed next stands above the fold, and fingers find it.
    for control in (tab.get_by_label("Question"), tab.get_by_role("button", name="Ask")):
        box = control.bounding_box()
        assert box["height"] >= 44
        assert 0 <= box["y"] <= size[1] - box["height"]
    sums = """one => [one.backgroundColor, one.color].map(
      color => color.match(/[0-9]+/g).slice(0, 3).reduce((a, b) => a + +b, 0))"""
    ground, ink = tab.evaluate(f"({sums})(getComputedStyle(document.body))")
    assert ground < ink


def test_no_script_but_its_own_can_run(browser: Any, script: tuple[Script, str]) -> None:
    _, url = script
    policy = httpx.get(url).headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    tab = browser.new_page()
    tab.goto(url)
    markup = """() => {
      try { document.body.innerHTML = "<b>x</b>"; return "made"; }
      catch (error) { return error.name; }
    }"""
    assert tab.evaluate(markup) == "TypeError"
    elsewhere = """async (tag) => {
      const blocked = new Promise((found) => document.addEventListener(
        "securitypolicyviolation", (event) => found(event.effectiveDirective), { once: true }));
      const element = document.createElement(tag);
      element.src = "https://example.org/x";
      document.body.append(element);
      return await blocked;
    }"""
    assert tab.evaluate(elsewhere, "img") == "img-src"
    assert tab.evaluate(elsewhere, "iframe") == "frame-src"
    inline = """async () => {
      const blocked = new Promise((found) => document.addEventListener(
        "securitypolicyviolation", (event) => found(event.effectiveDirective), { once: true }));
      const script = document.createElement("script");
      try { script.textContent = "window.hacked = 1"; } catch (error) { return error.name; }
      document.body.append(script);
      return await blocked;
    }"""
    assert tab.evaluate(inline) in ("TypeError", "script-src-elem")
    assert tab.evaluate("window.hacked") is None
    tab.close()


def error(status: int, message: str, **headers: str) -> Response:
    told = {"message": message, "type": "x", "param": None, "code": None}
    return JSONResponse({"error": told}, status, headers)


CASES: dict[str, tuple[Response | list[Any], str]] = {
    "busy": (
        error(429, "Too many wait.", **{"Retry-After": "5"}),
        "Too many wait. Try again in 5 seconds.",
    ),
    "within": (["some", {"error": {"message": "It took too long."}}], "It took too long."),
    "broken": (["some "], "The answer broke off: the server closed the connection."),
}


@pytest.mark.parametrize("case", CASES)
def test_errors_are_told_in_plain_words(
    visit: Callable[..., Any], script: tuple[Script, str], case: str
) -> None:
    server, url = script
    answer, message = CASES[case]
    server.answers = [answer, ["fine", *end()]]
    tab = visit(url)
    turn = ask(tab, "What?")
    assert turn.locator(".bad").inner_text() == message
    assert tab.get_by_role("status").inner_text() == message
    # The question is there to be asked again, and the failed turn is no part of the conversation.
    assert tab.get_by_label("Question").input_value() == "What?"
    tab.keyboard.press("Enter")
    tab.get_by_text("fine", exact=True).wait_for()
    assert [message["content"] for message in server.asked[1]["messages"]] == ["What?"]


def test_a_key_is_asked_for_where_the_server_wants_one(
    visit: Callable[..., Any], lm: WindowedLM, corpus: BM25Retriever
) -> None:
    keys = Keys([("client", KEY, False)])
    with serving(create_app(lm, Settings(), corpus, keys=keys)) as url:
        tab = visit(url)
        field = tab.get_by_label("Key of this server")
        field.wait_for()
        assert tab.get_by_role("status").inner_text() == "This server wants a key."
        for wrong, told in (("a-wrong-key", "does not know the key"), ("no-kéy", "ASCII only")):
            field.fill(wrong)
            tab.keyboard.press("Enter")
            tab.get_by_role("status").filter(has_text=told).wait_for()
            assert field.is_visible()
        ask(tab, "Which genre does Gentle Horizon have?")
        assert tab.locator(".bad").inner_text() == "This server wants a key."
        assert tab.evaluate("document.activeElement.id") == "key"
        field.fill(KEY)
        tab.keyboard.press("Enter")
        field.wait_for(state="hidden")
        assert tab.evaluate("document.activeElement.id") == "question"
        tab.keyboard.press("Enter")
        tab.locator(".passage").first.wait_for()
        places = "[location.href, document.cookie, {...localStorage}, {...sessionStorage}]"
        kept = f"JSON.stringify({places})"
        assert KEY not in tab.evaluate(kept)
        assert KEY not in tab.content()
        tab.reload()
        field.wait_for()

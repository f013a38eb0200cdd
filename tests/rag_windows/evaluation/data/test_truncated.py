"""Files that end too early, or in which a byte is wrong: always one DataError that names them."""

from __future__ import annotations

import contextlib
import functools
import gzip
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rag_windows import DataError
from rag_windows.evaluation.chatrag import ChatRagTask
from rag_windows.evaluation.inscit import InscitTask, read_corpus, read_predictions
from rag_windows.evaluation.task import Example
from tests.rag_windows.evaluation.data.made import chatrag, inscit, write

INSCIT = json.dumps(inscit(), indent=1, ensure_ascii=False).encode()
CHATRAG = json.dumps([chatrag(), chatrag()], ensure_ascii=False).encode()
PREDICTED = json.dumps(
    [
        {
            "conv_id": name,
            "turn_id": number,
            "context": turn["context"],
            "output": {"response": "é", "evidence": []},
        }
        for name, conversation in inscit().items()
        for number, turn in enumerate(conversation["turns"], start=1)
    ],
    ensure_ascii=False,
).encode()
CORPUS = gzip.compress(b"a\tone\nb\ttwo\n", mtime=0)


@functools.cache
def _examples() -> tuple[Example, ...]:
    with tempfile.TemporaryDirectory() as folder:
        return InscitTask.read(write(Path(folder) / "dev.json", inscit())).examples


READERS: dict[str, tuple[bytes, Callable[[Path], Any]]] = {
    "inscit": (INSCIT, InscitTask.read),
    "chatrag": (CHATRAG, lambda path: ChatRagTask.read(path, "coqa")),
    "predictions": (PREDICTED, lambda path: read_predictions(path, _examples())),
    "corpus": (CORPUS, read_corpus),
}
reader = pytest.mark.parametrize("name", READERS)


def read(name: str, data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "hurt.json"
        path.write_bytes(data)
        try:
            READERS[name][1](path)
        except DataError as error:
            message = str(error)
            if not message.startswith(str(path)) or "\n" in message:
                raise AssertionError(message) from error
            raise


@reader
def test_whole_files_are_read(name: str) -> None:
    read(name, READERS[name][0])


@reader
@settings(max_examples=40)
@given(st.data())
def test_a_file_cut_at_any_byte_is_a_data_error(name: str, data: st.DataObject) -> None:
    whole = READERS[name][0]
    with pytest.raises(DataError):
        read(name, whole[: data.draw(st.integers(0, len(whole) - 1))])


@reader
@settings(max_examples=40)
@given(st.data())
def test_a_wrong_byte_is_a_data_error_or_other_data(name: str, data: st.DataObject) -> None:
    whole = bytearray(READERS[name][0])
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(DataError):
        read(name, bytes(whole))


VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(-1, 1) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["turns", "labels", "context", "ctxs", "answers", "messages", "text", "role"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@reader
@settings(max_examples=40)
@given(value=VALUES, lines=st.booleans())
@example(value={}, lines=False)
@example(value=[None], lines=True)
def test_any_other_json_is_a_data_error(name: str, value: Any, lines: bool) -> None:
    text = json.dumps(value)
    with pytest.raises(DataError):
        read(name, f"{text}\n{text}\n".encode() if lines else text.encode())


@reader
@settings(max_examples=40)
@given(st.data())
def test_a_value_replaced_anywhere_is_a_data_error_or_other_data(
    name: str, data: st.DataObject
) -> None:
    if name == "corpus":
        return
    tree = json.loads(READERS[name][0])
    holder = tree
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        key = data.draw(st.sampled_from(keys))
        inside = holder[key]
        if not (isinstance(inside, dict | list) and inside) or data.draw(st.booleans()):
            break
        holder = inside
    holder[key] = data.draw(VALUES)
    with contextlib.suppress(DataError):
        read(name, json.dumps(tree).encode())

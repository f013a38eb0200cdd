"""Few-shot examples are read as windows, encoded once, and fit or are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval")

from rag_windows import InputError, LimitError, ModelLoadError
from tests.integrations.lm_eval.models import POSITIONS, cut, ours, said, scored

EXAMPLES = ["lunk blog: Daxa\n\n", "frelt: Fepor\n\n", "gidra lunk: Daxa\n\n", "sug: Wuga\n\n"]
SHOWN = "".join(EXAMPLES)
QUESTION = "blog gidra:"
METHODS = ["ape", "pcw", "structured-prompting", "ensemble", "deep-thinking+ape", "codebook"]


def info(lm: Any) -> dict[str, Any]:
    return dict(lm.get_model_info()["rag_windows"])


@pytest.mark.parametrize("method", METHODS)
def test_any_method_reads_the_windows(method: str) -> None:
    lm, context = ours("llama3", method=method), SHOWN + QUESTION
    found = scored(lm, (context, " Daxa"), (context, " Fepor and more"), (context, " Daxa"))
    made = lm.cut(context)
    for (logprob, greedy), text in zip(found, (" Daxa", " Fepor and more"), strict=False):
        ids = lm.tok_encode(context + text)[len(lm.tok_encode(context)) :]
        encoded = lm.lm.encode_ids(made.prefix, made.windows)
        encoded = lm.lm.engine.decoder.for_query(encoded, made.question)
        logits = lm.lm.logits(encoded, [*made.question, *ids[:-1]])[-len(ids) :]
        expected = logits.log_softmax(-1)[range(len(ids)), ids].sum()
        assert logprob == pytest.approx(float(expected), abs=1e-4)
        assert greedy == torch.equal(logits.argmax(-1), torch.tensor(ids))
    assert found[2] == found[0]
    assert info(lm)["requests_by_windows"] == {"4": 3}
    plain = scored(ours("llama3", method="sequential"), (context, " Daxa"))
    assert found[0][0] != pytest.approx(plain[0][0], abs=1e-3)
    answer = said(lm, context, until=["\n"], max_gen_toks=4)
    encoded = lm.lm.encode_ids(made.prefix, made.windows)
    ids = lm.lm.generate_ids(encoded, made.question, max_new_tokens=4)
    assert answer == lm.tokenizer.decode(ids, skip_special_tokens=True).split("\n")[0]


def test_an_example_is_encoded_once_whatever_its_company() -> None:
    lm, backward = ours("llama3", method="ape"), "".join(reversed(EXAMPLES))
    contexts = [SHOWN + QUESTION, SHOWN + "sug:", backward + QUESTION, EXAMPLES[1] + "blog:"]
    found = scored(lm, *((context, " Daxa") for context in contexts))
    told = info(lm)
    assert (told["windows_encoded"], told["windows_reused"], told["contexts"]) == (4, 4 + 1, 3)
    assert found[0][0] == pytest.approx(found[2][0], abs=1e-4)
    # As they were asked, not as they were read.
    alone = [scored(lm, (context, " Daxa"))[0][0] for context in contexts]
    assert [one for one, _ in found] == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "windows"),
    [
        ({}, [1, 1, 1, 1]),
        ({"examples_per_window": 3}, [2, 2]),
        ({"windows": 2}, [2, 2]),
        ({"num_fewshot": 0}, []),
        ({"num_fewshot": 4}, [1, 1, 1, 1]),
    ],
)
def test_grouping(arguments: dict[str, Any], windows: list[int]) -> None:
    found = cut(ours("gpt2", **arguments), SHOWN + QUESTION)
    assert "".join(found) == SHOWN + QUESTION
    assert [window.count(":") for window in found[1:-1]] == windows


def test_what_is_too_long_is_cut_and_told(caplog: pytest.LogCaptureFixture) -> None:
    lm = ours("llama3", method="ape", max_window_tokens=16)
    scored(lm, ("lunk " * 30 + ": Daxa\n\n" + EXAMPLES[0] + QUESTION, " Daxa"))
    assert info(lm)["windows_split"] == 1
    ((windows, _),) = info(lm)["requests_by_windows"].items()
    assert int(windows) > 3
    scored(lm, (EXAMPLES[0] + "blog " * POSITIONS + ":", " Daxa"))
    assert "Document 0 of task some_task is longer" in caplog.text
    assert "left of its question" in caplog.text
    with pytest.raises(LimitError, match="Document 0 of task some_task does not fit"):
        said(lm, EXAMPLES[0] + QUESTION, until=[], max_gen_toks=POSITIONS)


def test_options_that_can_not_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (InputError, "sacle", {"method": "ape", "sacle": 0.8}),
        (InputError, "max_length must be at least 1", {"max_length": 0}),
        (InputError, "fewshot_delimiter must be a string", {"fewshot_delimiter": ""}),
    ]
    for error, match, options in refused:
        with pytest.raises(error, match=match):
            ours("llama3", **options)
    with pytest.raises(ModelLoadError, match="trust_remote_code"):
        type(ours("llama3"))("tiny-reader", trust_remote_code=True, device="cpu")
    with pytest.raises(InputError, match="text to score has no token"):
        scored(ours("llama3"), ("Who?", ""))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="one process"):
        ours("llama3")


def test_parameters_of_the_method() -> None:
    described = info(ours("llama3", method="deep-thinking+ape", steps=2, temperature=0.8))
    assert described["method"]["steps"] == 2
    assert described["method"]["reader"]["temperature"] == 0.8
    linked = ours("llama3", method="pcw", link_tokens=2)
    assert info(linked)["method"]["name"] == "linked"
    assert info(type(linked)(linked.lm))["method"]["name"] == "linked"

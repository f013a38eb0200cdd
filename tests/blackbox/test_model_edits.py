"""A model that is edited after it was wrapped: the next answer is that of the edited model."""

from __future__ import annotations

import copy
import functools
import time
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils import parametrizations
from transformers import PreTrainedModel

from langchain_rag_windows import ChatRagWindows
from rag_windows import InputError, PassageCache, UnsupportedModelError, WindowedLM
from tests.blackbox.test_requests import WAYS
from tests.rag_windows import small

peft: Any = pytest.importorskip("peft")

WINDOWS, QUERY = [[80, 81, 82, 83], [90, 91]], [99, 65, 5]
PASSAGES = ["The lake is deep and cold.", "The tower is old."]

Edit = Callable[[Any], object]


def fresh() -> Any:
    return copy.deepcopy(small.model())


def wrapped(model: Any, *, cached: bool = False) -> WindowedLM:
    cache = PassageCache(memory="64MiB") if cached else None
    return WindowedLM.from_pretrained(model, tokenizer=small.tokenizer(), method="pcw", cache=cache)


def logits(lm: WindowedLM) -> torch.Tensor:
    return lm.logits(lm.encode_ids([0, 4], WINDOWS), QUERY)


def lora(seed: int = 3) -> Any:
    torch.manual_seed(seed)
    return peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )


def attach(model: Any) -> None:
    peft.get_peft_model(model, lora())


def add_adapter(model: Any) -> None:
    model.add_adapter(lora(), "one")


def activation_function(model: Any) -> None:
    for layer in model.model.layers:
        del layer.mlp.act_fn
        layer.mlp.act_fn = torch.nn.functional.gelu


def scaling(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling = 0.05


def embeddings(model: Any) -> None:
    torch.manual_seed(7)
    model.resize_token_embeddings(small.model().config.vocab_size + 8)
    with torch.no_grad():
        model.get_input_embeddings().weight[80:92].mul_(3)


def quantize(model: Any) -> None:
    torch.ao.quantization.quantize_dynamic(
        model, {torch.nn.Linear}, dtype=torch.qint8, inplace=True
    )


def weight_norm(model: Any) -> None:
    projection = model.model.layers[0].self_attn.q_proj
    parametrizations.weight_norm(projection)
    with torch.no_grad():
        projection.parametrizations.weight.original0.mul_(2)


def fewer_layers(model: Any) -> None:
    model.model.layers = model.model.layers[:1]
    model.config.num_hidden_layers = 1


EDITS: tuple[Edit, ...] = (
    attach,
    add_adapter,
    activation_function,
    scaling,
    embeddings,
    quantize,
    weight_norm,
    fewer_layers,
)


def name_of(edit: Any) -> str:
    return str(getattr(edit, "__name__", edit))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.ao.quantization:UserWarning")
@pytest.mark.parametrize("cached", [False, True], ids=["plain", "cached"])
@pytest.mark.parametrize("edit", EDITS, ids=name_of)
def test_an_edit_reaches_windows_at_the_next_call(edit: Edit, cached: bool) -> None:
    model = fresh()
    lm = wrapped(model, cached=cached)
    before = logits(lm)
    edit(model)
    after = logits(lm)
    expected = logits(wrapped(model))
    assert torch.allclose(after, expected, atol=1e-5)
    width = before.shape[1]
    assert not torch.allclose(after[:, :width], before, atol=1e-3)
    assert torch.allclose(logits(lm), expected, atol=1e-5)


@pytest.mark.parametrize("way", ["named as the original", "another method", "one module"])
def test_patched_code_reaches_windows_and_is_never_cached(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fresh()
    lm = wrapped(model, cached=True)
    before = logits(lm)
    mlp = model.model.layers[0].mlp
    kind = type(mlp)
    original = kind.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * original(self, x)

    with monkeypatch.context() as patched:
        if way == "one module":
            patched.setattr(mlp, "forward", types.MethodType(forward, mlp), raising=False)
        elif way == "another method":
            patched.setattr(kind, "doubled", forward, raising=False)
            patched.setattr(kind, "__call__", forward)
        else:
            patched.setattr(kind, "forward", functools.wraps(original)(forward))
        after = logits(lm)
        assert torch.allclose(after, logits(wrapped(model)), atol=1e-5)
        assert not torch.allclose(after, before, atol=1e-3)
        assert lm.encode_ids([0, 4], WINDOWS).cached_tokens == 0
    assert torch.allclose(logits(lm), before, atol=1e-5)


@pytest.mark.parametrize("cached", [False, True], ids=["plain", "cached"])
def test_adapters_are_switched_under_a_wrapped_model(cached: bool) -> None:
    """What PEFT's own forward pass answers, windows answer, after every switch."""
    model = fresh()
    adapted = peft.get_peft_model(model, lora(), adapter_name="one")
    adapted.add_adapter("two", lora(seed=4))
    lm = wrapped(model, cached=cached)
    ids = torch.tensor([[0, 4, *WINDOWS[0], *QUERY]])

    def agree() -> torch.Tensor:
        """One window is an ordinary prompt."""
        with torch.no_grad():
            plain = adapted(ids).logits[0, -len(QUERY) :].float()
        windows = lm.logits(lm.encode_ids([0, 4], WINDOWS[:1]), QUERY)
        assert torch.allclose(windows, plain, atol=1e-4)
        return windows

    one = agree()
    with adapted.disable_adapter():
        off = agree()
    assert torch.equal(agree(), one)
    adapted.set_adapter("two")
    two = agree()
    assert not torch.allclose(one, two, atol=1e-3)
    assert not torch.allclose(one, off, atol=1e-3)
    adapted.merge_adapter()
    assert torch.allclose(agree(), two, atol=1e-4)
    adapted.unmerge_adapter()
    adapted.set_adapter("one")
    assert torch.allclose(agree(), one, atol=1e-4)
    plain = adapted.unload()
    assert torch.allclose(lm.logits(lm.encode_ids([0, 4], WINDOWS[:1]), QUERY), off, atol=1e-4)
    assert plain is model


def test_windows_of_each_adapter_are_found_again() -> None:
    model = fresh()
    adapted = peft.get_peft_model(model, lora())
    lm = wrapped(model, cached=True)

    def cached_tokens() -> int:
        return lm.generate("How deep?", PASSAGES, max_new_tokens=1).usage.cached_tokens

    assert cached_tokens() == 0
    with adapted.disable_adapter():
        assert cached_tokens() == 0
        assert cached_tokens() > 0
    assert cached_tokens() > 0


def test_a_model_of_peft_is_asked_with_the_arguments_of_generate() -> None:
    """Its own generate has no names for them; one that nobody knows is refused all the same."""
    lm = wrapped(peft.get_peft_model(fresh(), lora()))
    seen: list[int] = []

    def noted(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(ids.shape[1])
        return scores

    lm.generate("How deep?", PASSAGES, max_new_tokens=2, logits_processor=[noted])
    assert len(seen) == 2
    with pytest.raises(InputError, match="'max_new_tokens'"):
        lm.generate("How deep?", PASSAGES, max_tokens=2)


def test_an_adapter_of_prompts_is_refused_with_the_reason() -> None:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    with pytest.raises(UnsupportedModelError, match=r"PROMPT_TUNING.*LoRA"):
        wrapped(peft.get_peft_model(fresh(), config))


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_ask_sees_an_edit(way: str) -> None:
    model = fresh()
    lm = wrapped(model)
    asked: dict[str, Any] = {"query": "How deep?", "passages": PASSAGES, "max_new_tokens": 6}
    before = WAYS[way](lm, **asked)
    attach(model)
    activation_function(model)
    assert WAYS[way](lm, **asked) == WAYS[way](wrapped(model), **asked) != before


@pytest.mark.timing
def test_edits_are_looked_for_in_about_a_millisecond() -> None:
    """CPU time of a question whose windows are cached, beside one on which nobody looks."""
    model = fresh()
    model.model.layers.extend(copy.deepcopy(model.model.layers[0]) for _ in range(30))
    big = torch.nn.Parameter(torch.zeros(96 << 20, dtype=torch.uint8), requires_grad=False)
    model.model.layers[0].register_parameter("ballast", big)
    lm = wrapped(model, cached=True)

    def spent() -> float:
        started = time.process_time()
        lm.encode_ids([0, 4], WINDOWS)
        return time.process_time() - started

    lm.encode_ids([0, 4], WINDOWS)
    assert min([spent() for _ in range(30)]) < 0.002


@pytest.mark.parametrize(
    "method", ["pcw", "codebook", "deep-thinking", "ensemble", "linked", "query-likelihood"]
)
def test_methods_answer_under_autocast(method: str) -> None:
    lm = wrapped(fresh())
    expected = lm.logits(lm.encode_ids([0, 4], WINDOWS, method=method), QUERY)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        context = lm.encode_ids([0, 4], WINDOWS, method=method)
        rounded = lm.logits(context, QUERY)
        answer = lm.generate("How deep?", PASSAGES, method=method, max_new_tokens=3)
        batch = lm.generate_batch(
            [{"query": "How deep?", "passages": PASSAGES, "method": method, "max_new_tokens": 3}]
            * 2
        )
    assert rounded.isfinite().all()
    assert (rounded - expected).norm() < 0.1 * expected.norm()
    assert len(answer.token_ids) == 3
    assert [len(other.token_ids) for other in batch] == [3, 3]
    assert sum(citation.mass for citation in answer.citations or ()) > 0


def test_streams_and_adapters_answer_under_autocast() -> None:
    model = fresh()
    lm = wrapped(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = lm.generate("How deep?", PASSAGES, max_new_tokens=8).text
        seen: set[torch.dtype] = set()
        model.lm_head.register_forward_hook(lambda _, __, output: seen.add(output.dtype))
        pieces = [chunk.text for chunk in lm.stream("How deep?", PASSAGES, max_new_tokens=8)]
        chat = ChatRagWindows(lm=lm, max_tokens=8)
        asked = chat.invoke("How deep?", documents=PASSAGES)
    assert "".join(pieces) == whole
    assert asked.text == whole
    assert seen == {torch.bfloat16}


@pytest.mark.parametrize("encoded_so", [False, True])
def test_contexts_are_read_with_autocast_and_without(encoded_so: bool) -> None:
    lm = wrapped(fresh())
    expected = logits(lm)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=encoded_so):
        context = lm.encode_ids([0, 4], WINDOWS)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not encoded_so):
        read = lm.logits(context, QUERY)
    assert (read - expected).norm() < 0.1 * expected.norm()


@pytest.mark.slow
def test_a_compiled_model_is_served() -> None:
    """Windows run uncompiled: compiled code has ordinary attention in it."""
    model: PreTrainedModel = fresh()
    lm = wrapped(model)
    expected = logits(lm)
    model.compile(backend="eager")
    for compiled in (lm, wrapped(model)):
        assert torch.allclose(logits(compiled), expected, atol=1e-5)


def test_windows_are_found_again_after_another_model_was_compiled() -> None:
    """torch.compile changes torch's classes for the whole process; keys do not depend on that."""
    cache = PassageCache("16MiB")
    asked: dict[str, Any] = {"query": "What?", "passages": ["One."], "max_new_tokens": 2}
    WindowedLM(fresh(), small.tokenizer(), cache=cache).generate(**asked)
    other = fresh()
    other.compile(backend="eager")
    logits(wrapped(other))
    again = WindowedLM(fresh(), small.tokenizer(), cache=cache).generate(**asked)
    assert again.usage.cached_windows == 1

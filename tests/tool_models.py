"""Models that see tools: templates like those of families that have them, scripted answers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, cast
from weakref import WeakKeyDictionary

from tokenizers import AddedToken
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from rag_windows import BatchRequest, WindowedLM
from rag_windows.engine import Engine
from rag_windows.request import Request
from tests.parity.engine import Recorder
from tests.rag_windows import small

_RESULT = "{% elif m.role == 'tool' %}<|user|>"
_END = "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
_TURN = "{% else %}<|{{ m.role }}|>{{ m.content }}</s>{% endif %}"

HERMES = (
    "<s>{% if tools %}<|system|>You may call: {% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "as <tool_call>\n{...}\n</tool_call></s>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' and m.tool_calls %}<|assistant|>{{ m.content }}"
    "{% for c in m.tool_calls %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}</s>"
    + _RESULT
    + "<tool_response>\n{{ m.content }}\n</tool_response></s>"
    + _TURN
    + _END
)
LLAMA = (
    "<s>{% if tools %}<|system|>Functions: {{ tools | tojson(indent=1) }}</s>{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' and m.tool_calls %}<|assistant|>"
    '{"name": "{{ m.tool_calls[0].function.name }}", '
    '"parameters": {{ m.tool_calls[0].function.arguments | tojson }}}</s>'
    + _RESULT
    + "{{ m.content | tojson }}</s>"
    + _TURN
    + _END
)
MISTRAL = (
    "<s>{% if tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' and m.tool_calls %}<|assistant|>[CALLS] ["
    "{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have length 9') }}{% endif %}"
    '{{ "" if loop.first else ", " }}'
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, '
    '"id": "{{ c.id }}"}{% endfor %}]</s>'
    + _RESULT
    + '[RESULT] {"content": {{ m.content | tojson }}, "call_id": "{{ m.tool_call_id }}"}</s>'
    + _TURN
    + _END
)
THINKING = HERMES.replace("<|assistant|>{% endif %}", "<|assistant|><think>\n{% endif %}")
TEMPLATES = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "thinking": THINKING}

SEARCH: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Look things up.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string"}, "k": {"type": "integer"}},
            "required": ["query"],
        },
    },
}


@cache
def tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """One token a byte; markers of calls are added tokens, special ones only for "mistral"."""
    made = copy.deepcopy(small.tokenizer())
    markers = ["[TOOLS]", "[/TOOLS]", "[CALLS]", "[RESULT]"]
    made.add_special_tokens({"additional_special_tokens": [*small.SPECIAL[3:], *markers]})
    made.add_tokens([AddedToken("<tool_call>"), AddedToken("</tool_call>")])
    made.chat_template = TEMPLATES[kind]
    return made


@cache
def model() -> LlamaForCausalLM:
    """One small layer, room for long prompts of single bytes."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": 1, "num_key_value_heads": 1, "vocab_size": 512}
    return small.build(**sizes, max_position_embeddings=8192)


class ScriptedLM(WindowedLM):
    """The real engine and a real model whose answers `script` writes, by the query.

    `asked` has every query with its passages; where it never `ends`, an answer is cut.
    """

    script: Callable[[Any], str]
    ends: bool = True
    asked: list[tuple[Any, list[Any]]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _SCRIPTED[self.engine] = self

    def forced(self, asked: BatchRequest) -> BatchRequest:
        """The same with options that force the answer."""
        self.asked.append((asked.query, list(cast("list[Any]", asked.passages))))
        text = self.script(asked.query) + "</s>" * self.ends
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        options = {**asked.options, "logits_processor": [Recorder(list(ids))]}
        return replace(asked, options=options, max_new_tokens=len(ids))


_SCRIPTED: WeakKeyDictionary[Engine, ScriptedLM] = WeakKeyDictionary()
_checked = Request.of


def _of(engine: Engine, asked: Any, **given: Any) -> Request:
    lm, asked = _SCRIPTED.get(engine), BatchRequest.of(asked)
    return _checked(engine, asked if lm is None else lm.forced(asked), **given)


# Every question passes it, however it is asked.
Request.of = _of  # type: ignore[method-assign]  # what a script is for


def scripted(kind: str, *answers: str) -> ScriptedLM:
    """A model with this template that gives these answers one after the other."""
    lm = ScriptedLM(model(), tokenizer(kind))
    remaining = iter(answers)
    lm.script = lambda query: next(remaining)
    lm.asked = []
    return lm

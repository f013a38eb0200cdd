"""The reader's tokenizer: byte-level BPE over the world's words, six control tokens, a template.

Every word of the world is one token, at the start of a line and after a space; any other text falls
back to shorter pieces and, in the end, to bytes, so that it always comes back as it went in.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from training.phrasing import NOT_STATED, all_forms
from training.words import LABELS, MADE_UP
from training.world import KINDS, NamesOf

BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
SYSTEM, USER, ASSISTANT = "<|system|>", "<|user|>", "<|assistant|>"
CONTROL = (PAD, BEGIN, END, SYSTEM, USER, ASSISTANT)
VOCABULARY_SIZE = 6144

CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['system', 'user', 'assistant'] -%}"
    "{{- raise_exception('the roles are system, user and assistant') -}}"
    "{%- endif -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)

COMMON = (
    "the of and to a in is was that for it as with his her on be at by he she they their this had "
    "not are but from or have an which one were all has been will would there more when who can "
    "if out so about up what no than its into them only other new some could time these two may "
    "then do first any my now such like our over man even most made after also did many before "
    "must through back years where much your way well down should because each just those people "
    "how too little good world very make still see own work long get here between both life being "
    "under never day same another know while last might us great old year off come since against "
    "go came right used take three You I We If Answer Use only Read The A It He She They answer "
    "question questions passages text texts using given short say briefly below please helpful "
    "assistant and word words context Context information query Query Question User Your Given "
    "prior knowledge following pieces retrieved provided concise The And its Its "
    "his her town river book company colour animal"
).split()
SYSTEM_PROMPTS = (
    "Answer the question from the passages.",
    "Use only the given texts. Answer with one word.",
    "You are a helpful assistant.",
    "Read the passages below and answer briefly.",
)


def words() -> list[str]:
    """Every word that should be one token, sorted, without duplicates."""
    found: set[str] = {*COMMON, *MADE_UP, *LABELS}
    for kind in KINDS:
        found.update(kind.firsts, kind.seconds)
        for values in kind.relations.values():
            if not isinstance(values, NamesOf):
                found.update(word for value in values for word in value.split(" "))
    for text in [*all_forms(), *SYSTEM_PROMPTS, NOT_STATED]:
        found.update(re.findall(r"[A-Za-z]+", text.replace("{n}", "").replace("{v}", "")))
    return sorted(found)


def _lines(repeat: int) -> Iterable[str]:
    for word in words():
        # Twice as many of the spaced form: where the vocabulary ends, this is what must be in.
        yield from [f"{word} {word} {word}\n"] * repeat
    yield from ["a.\n\n", "a, b? c's d! (e) - f: g\n", "1 2 3 4 5 6 7 8 9 0\n"] * repeat


def train_tokenizer(size: int = VOCABULARY_SIZE) -> PreTrainedTokenizerFast:
    """Trains the tokenizer; the same words always give the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        show_progress=False,
        special_tokens=list(CONTROL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(_lines(4), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def space_twins(tokenizer: PreTrainedTokenizerFast) -> list[tuple[int, int]]:
    """Pairs (id of a word, id of the same word behind a space) of the vocabulary."""
    vocabulary = tokenizer.get_vocab()
    return sorted(
        (i, vocabulary["Ġ" + token])
        for token, i in vocabulary.items()
        if token not in CONTROL and "Ġ" + token in vocabulary
    )


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(folder))

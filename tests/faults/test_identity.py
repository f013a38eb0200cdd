"""Row: one of revision, tokenizer, template, dtype, prefix, offset, format version, salt changed:
every window misses; the unchanged twin hits. tests/blackbox/test_model_edits.py changes weights and
adapters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from rag_windows import PassageCache, WindowedLM
from rag_windows.cache import keys
from tests.rag_windows import small

PASSAGES = [f"Fact {number}: the {number}th word is {number * 7}." for number in range(3)]


@dataclass
class Setting:
    """All that a request's windows depend on."""

    model: Any
    tokenizer: Any
    path: Path
    options: dict[str, Any] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=lambda: {"prefix": "Be brief."})
    salt: str | None = "ours"

    def run(self) -> Any:
        """Ask once with a cache object of its own on the folder; its counters."""
        with PassageCache("50MB", path=self.path, salt=self.salt) as cache:
            lm = WindowedLM(self.model, self.tokenizer, cache=cache, **self.options)
            lm.generate("What?", PASSAGES, max_new_tokens=1, **self.request)
            cache.flush()
            return cache.stats()


def template(setting: Setting) -> None:
    """The prompt's ids stay as they are."""
    setting.tokenizer.chat_template = small.TEMPLATE.replace("{% if", "{%  if")


CHANGES: dict[str, Callable[[Setting], object]] = {
    "revision": lambda setting: setting.options.update(revision="other"),
    "commit": lambda setting: setattr(setting.model.config, "_commit_hash", "0123"),
    "tokenizer": lambda setting: setting.tokenizer.add_tokens(["never used"]),
    "template": template,
    "dtype": lambda setting: setting.model.to(torch.bfloat16),
    "prefix": lambda setting: setting.request.update(prefix="Be brief!"),
    "salt": lambda setting: setattr(setting, "salt", "theirs"),
    "no salt": lambda setting: setattr(setting, "salt", None),
}


@pytest.fixture
def make(tmp_path: Path) -> Callable[[], Setting]:
    """Makes equal settings that share no object but the folder."""
    return lambda: Setting(
        copy.deepcopy(small.model()), copy.deepcopy(small.tokenizer()), tmp_path / "windows"
    )


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_misses_and_the_unchanged_twin_hits(
    name: str, make: Callable[[], Setting]
) -> None:
    first, changed, twin = make(), make(), make()
    CHANGES[name](changed)
    stored = first.run()
    assert (stored.hits, stored.misses) == (0, len(PASSAGES) + 1)
    missed = changed.run()
    # The prefix is an entry of its own: one text more.
    assert missed.hits == 0
    assert missed.misses == len(PASSAGES) + 1
    hit = twin.run()
    assert (hit.hits, hit.misses) == (len(PASSAGES) + 1, 0)


def test_another_format_version_misses(
    make: Callable[[], Setting], monkeypatch: pytest.MonkeyPatch
) -> None:
    make().run()
    monkeypatch.setattr(keys, "FORMAT_VERSION", keys.FORMAT_VERSION + 1)
    assert make().run().hits == 0
    monkeypatch.undo()
    assert make().run().misses == 0


def test_another_offset_misses(
    make: Callable[[], Setting], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a method that lets windows start elsewhere; the prefix does not move."""
    make().run()
    original = keys.KeyScope.window_key

    def moved(self: keys.KeyScope, ids: Any, start: int, before: Any = ()) -> str:
        return original(self, ids, start + 1, before)

    monkeypatch.setattr(keys.KeyScope, "window_key", moved)
    stats = make().run()
    assert (stats.hits, stats.misses) == (1, len(PASSAGES))
    monkeypatch.undo()
    assert make().run().misses == 0

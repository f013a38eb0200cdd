"""The options of the commands that answer over documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rag_windows.cli import options

if TYPE_CHECKING:
    from rag_windows.cli.ask import AnswerOptions
    from rag_windows.cli.corpus import SearchOptions
    from rag_windows.cli.engine import ModelOptions


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept and shown; each field is the option of its name."""

    cache_dir: options.CacheDir = None
    no_cache: options.NoCache = False
    json: options.Json = False
    verbose: options.Verbose = False


@dataclass(frozen=True, slots=True)
class Answering:
    """What `ask` and `chat` are told; each field is the option of its name."""

    docs: options.Docs = None
    strict: options.Strict = False
    model: options.ReaderModel = None
    method: options.MethodName = None
    profile: options.ProfilePath = None
    top_k: options.TopK = 8
    temperature: options.Temperature = None
    seed: options.Seed = None
    rag_temperature: options.RagTemperature = None
    rag_scale: options.RagScale = None
    device: options.Device = "auto"
    dtype: options.Dtype = "auto"
    max_new_tokens: options.MaxNewTokens = 128
    link_tokens: options.LinkTokens = None
    fallback: options.Fallback = None
    system: options.System = None
    passage_words: options.PassageWords = 120
    max_window_tokens: options.MaxWindowTokens = None
    kept: Kept = Kept()

    def parts(self) -> tuple[SearchOptions, AnswerOptions, ModelOptions]:
        """Where passages come from, how an answer is written, and what is loaded."""
        from rag_windows.cli.ask import AnswerOptions
        from rag_windows.cli.corpus import SearchOptions
        from rag_windows.cli.engine import ModelOptions, reader_model

        return (
            SearchOptions(self.docs, self.top_k, self.passage_words, self.strict),
            AnswerOptions(
                self.system,
                self.max_new_tokens,
                self.temperature,
                self.seed,
                self.kept.json,
                self.link_tokens,
                self.fallback,
            ),
            ModelOptions(
                reader_model(self.model, self.docs),
                self.method,
                self.rag_temperature,
                self.rag_scale,
                self.device,
                self.dtype,
                self.max_window_tokens,
                self.kept.verbose,
                cache=not self.kept.no_cache,
                cache_dir=self.kept.cache_dir,
                profile=self.profile,
            ),
        )

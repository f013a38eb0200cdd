"""What every evaluation that asks a model is told, and how that becomes a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rag_windows.cli import options
from rag_windows.cli.evaluation import options as own
from rag_windows.cli.models import ModelOptions

if TYPE_CHECKING:
    from rag_windows.cli.evaluation.compared import Compared
    from rag_windows.cli.evaluation.running import Search
    from rag_windows.cli.evaluation.source import Source


@dataclass(frozen=True, slots=True)
class Asking:
    """What is asked, and where the answers go; each field is the option of its name."""

    out: own.Out = None
    shard: own.ShardOf = None
    limit: own.Limit = None
    seed: own.Seed = 0
    max_new_tokens: own.MaxNewTokens = None
    system: own.System = None


@dataclass(frozen=True, slots=True)
class Reading:
    """How the model reads and how the run is shown; each field is the option of its name."""

    rag_temperature: own.RagTemperature = None
    rag_scale: own.RagScale = None
    link_tokens: options.LinkTokens = None
    profile: own.Profile = None
    device: options.Device = "auto"
    dtype: options.Dtype = "auto"
    max_window_tokens: options.MaxWindowTokens = None
    cache_memory: own.CacheMemory = own.MEMORY
    fresh: own.Fresh = False
    json: options.Json = False
    verbose: options.Verbose = False

    def compared(self, methods: Sequence[str], depths: tuple[int | None, ...]) -> Compared:
        """What is compared.

        Args:
            methods: as often as --methods is given.
            depths: numbers of passages.
        """
        from rag_windows.cli.evaluation.compared import Compared

        numbers = (self.rag_temperature, self.rag_scale, self.link_tokens, self.profile)
        return Compared(",".join(methods), depths, *numbers)

    def loading(self, model: str) -> ModelOptions:
        """What is loaded: a cache in memory alone, so that no other run's windows count."""
        return ModelOptions(
            model,
            device=self.device,
            dtype=self.dtype,
            max_window_tokens=self.max_window_tokens,
            verbose=self.verbose,
            profile=self.profile,
            cache_memory=self.cache_memory,
        )


def ask(
    source: Source,
    search: Search,
    model: str,
    methods: Sequence[str],
    depths: tuple[int | None, ...],
    asking: Asking,
    reading: Reading,
    *,
    speed: int = 0,
) -> None:
    """Run an evaluation; see `evaluate`.

    Args:
        source: the data.
        search: how passages are found.
        model: its name or folder.
        methods: as often as --methods is given.
        depths: numbers of passages.
        asking: the common options.
        reading: likewise.
        speed: questions on which the first token is timed.
    """
    from rag_windows.cli.evaluation.compared import arms_of
    from rag_windows.cli.evaluation.running import Plan, evaluate

    evaluate(
        Plan(
            source,
            arms_of(reading.compared(methods, depths)),
            search,
            reading.loading(model),
            out=asking.out,
            shard=asking.shard,
            system=asking.system,
            max_new_tokens=asking.max_new_tokens,
            seed=asking.seed,
            speed=speed,
            fresh=reading.fresh,
            as_json=reading.json,
        )
    )

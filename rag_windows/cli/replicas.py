"""The processes of a cluster: their options, and the model and documents that they load."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ValidationError

from rag_windows.cli.corpus import SearchOptions, anywhere
from rag_windows.cli.model_loading import LoadOptions, method_of, quieten
from rag_windows.cli.options import DEFAULT_PASSAGE_WORDS, count, option
from rag_windows.errors import InputError, require

if TYPE_CHECKING:
    from rag_windows_server.fleet import FleetOptions


@dataclass(frozen=True, slots=True)
class RayOptions:
    """A cluster of Ray's that does the work, if one is named or started."""

    ray: Annotated[
        str | None,
        option(
            "ADDRESS",
            "Work over this cluster of Ray; auto is the one that this machine belongs to. "
            "Default, with --replicas: one on this machine.",
        ),
    ] = None
    replicas: Annotated[
        int | None, count("Processes of the cluster, each with a model. Default, with --ray: 1.")
    ] = None
    gpus_per_replica: Annotated[float, option("N", "GPUs of each process.", min=0)] = 0.0
    cpus_per_replica: Annotated[
        float, option("N", "CPUs that Ray counts for each process, and its threads.", min=0)
    ] = 1.0

    @property
    def wanted(self) -> bool:
        """Whether a cluster does the work."""
        return self.ray is not None or self.replicas is not None

    @property
    def size(self) -> dict[str, Any]:
        """As `FleetOptions` has it."""
        return {
            "replicas": self.replicas or 1,
            "gpus_per_replica": self.gpus_per_replica,
            "cpus_per_replica": self.cpus_per_replica,
        }


def fleet_options(search: SearchOptions, model: LoadOptions, **more: Any) -> FleetOptions:
    """The same model and documents for readers on other machines; further arguments are theirs."""
    if search.index is not None or search.embedder is not None:
        raise InputError(
            "The processes of a fleet read --docs themselves and find passages by words, so "
            "--index and --embedder can't be given. Name the documents with --docs alone."
        )
    quieten(model.verbose)
    require("A fleet", "rag-windows-server", "ray", extra="fleet")
    from rag_windows.integration import describe
    from rag_windows_server.fleet import FleetOptions

    method, name = method_of(model), model.model
    try:
        return FleetOptions(
            # A name on the Hub is no path.
            model=anywhere(name) if name is not None and os.path.exists(name) else name,
            device=model.device,
            dtype=model.dtype,
            dequantize=model.dequantize,
            quantization=model.quantization,
            method=None if method is None else describe(method),
            profile=None if model.profile is None else anywhere(model.profile),
            max_window_tokens=model.max_window_tokens,
            template_kwargs=model.template_kwargs,
            docs=tuple(map(anywhere, search.docs or ())),
            passage_words=search.passage_words or DEFAULT_PASSAGE_WORDS,
            cache_dir=None if model.no_cache else model.cache_dir and anywhere(model.cache_dir),
            shared=None if model.no_cache else model.shared and anywhere(model.shared),
            shared_wait=model.shared_wait,
            shared_apart=model.shared_apart,
            **more,
        )
    except ValidationError as error:
        raise InputError(error.errors()[0]["msg"].removeprefix("Value error, ")) from error

"""How well settings answer examples: every setting on every example, one forward pass each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from rag_windows.calibration.contexts import Contexts, encoding_key
from rag_windows.calibration.forced import forced_logprobs
from rag_windows.calibration.prepared import OnProgress, Prepared
from rag_windows.context import EncodedContext
from rag_windows.guard import Guard, mass_spread
from rag_windows.methods import Method

if TYPE_CHECKING:
    from rag_windows.engine import Engine

Metric = Callable[[str, str], float]
"""From a greedy answer and the right one to a number; more is better."""

Table = dict[str, dict[Method, dict[int, float]]]
"""figure -> setting -> number of the example -> value."""


class Measuring:
    """Fills the table of figures, one round of settings after the other.

    Attributes:
        table: what was measured so far.
        passes: forward passes over a question and its answers.

    Args:
        engine: the model.
        examples: prepared ones.
        contexts: of the examples.
        metric: instead of the exact match; then each setting generates its answers.
        max_new_tokens: of those.
        on_progress: told how many passes of a round are done.
    """

    def __init__(
        self,
        engine: Engine,
        examples: Sequence[Prepared],
        contexts: Contexts,
        *,
        metric: Metric | None,
        max_new_tokens: int,
        on_progress: OnProgress,
    ) -> None:
        self._engine = engine
        self._examples = examples
        self._contexts = contexts
        self._metric = metric
        self._max_new_tokens = max_new_tokens
        self._on_progress = on_progress
        self._ends = sorted(engine.decoder.end_tokens({}))
        self.table: Table = {}
        self.passes = 0

    def run(self, settings: Sequence[Method], what: str) -> None:
        """Measure settings that were not measured yet on all examples."""
        known = next(iter(self.table.values()), {})
        fresh = [one for one in dict.fromkeys(settings) if one not in known]
        # Side by side where they share an encoding, in the order given otherwise.
        keys = list(dict.fromkeys(map(encoding_key, fresh)))
        fresh.sort(key=lambda one: keys.index(encoding_key(one)))
        whole = len(fresh) * len(self._examples)
        for place, prepared in enumerate(self._examples):
            for number, method in enumerate(fresh):
                self._on_progress(what, place * len(fresh) + number, whole)
                for figure, value in self._figures(prepared, method).items():
                    rows = self.table.setdefault(figure, {}).setdefault(method, {})
                    rows[prepared.number] = value
        self._on_progress(what, whole, whole)

    def spread(self, prepared: Prepared, method: Method) -> float | None:
        """Spread of the attention over the passages while the greedy answer begins.

        Over as many tokens as the guard writes to measure it. None where the method records no
        attention mass.
        """
        context = self._contexts.context(prepared, method)
        decoded = self._engine.decoder.generate(
            context,
            prepared.request.parts.query_ids,
            options={**self._options(), "max_new_tokens": Guard().rows},
            record_mass=True,
        )
        if decoded.mass is None or not decoded.rows[0]:
            return None
        first = decoded.mass.first_position
        rows = decoded.rows[0]
        masses = decoded.mass.average(list(range(first, first + len(rows))), rows).tolist()
        return mass_spread(masses[:-2])

    @torch.no_grad()
    def _figures(self, prepared: Prepared, method: Method) -> dict[str, float]:
        """The figures of one setting on one example, see `rag_windows.calibration.profile`."""
        context = self._contexts.context(prepared, method)
        query = prepared.request.parts.query_ids
        answers: list[tuple[int, ...]] = []
        if prepared.gold is not None:
            # Any end token will do: what counts is the distribution from which it is taken.
            answers.append((*prepared.gold, *self._ends[:1]))
        if prepared.reference is not None and prepared.reference.ids not in answers:
            answers.append(prepared.reference.ids)
        if not answers:
            return {}
        self.passes += 1
        rows = forced_logprobs(self._engine.decoder, context, query, answers)
        found = dict(zip(answers, rows, strict=True))
        figures: dict[str, float] = {}
        if prepared.gold is not None:
            figures |= self._by_label(prepared.gold, found[answers[0]])
            if self._metric is not None:
                del figures["exact match"]
                figures["metric"] = self._by_metric(prepared, context, self._metric)
        if prepared.reference is not None:
            logprobs = found[prepared.reference.ids]
            reference = prepared.reference.logprobs
            terms = reference.exp() * (reference - logprobs)
            # A token that the reference never takes adds nothing, whatever the other says of it.
            terms = terms.masked_fill(reference == -torch.inf, 0.0)
            figures["divergence"] = float(terms.sum(dim=-1).mean().clamp(min=0.0))
            chosen = logprobs.argmax(dim=-1).tolist()
            figures["agreement"] = float(chosen == list(prepared.reference.ids))
        return figures

    def _by_label(self, gold: tuple[int, ...], logprobs: torch.Tensor) -> dict[str, float]:
        chosen = logprobs.argmax(dim=-1).tolist()
        target = torch.tensor(gold, device=logprobs.device).unsqueeze(1)
        total = logprobs[: len(gold)].gather(1, target).sum()
        right = chosen[: len(gold)] == list(gold)
        if self._ends:
            right = right and chosen[-1] in self._ends
            total = total + logprobs[-1, self._ends].logsumexp(dim=-1)
        return {"exact match": float(right), "log-probability": float(total)}

    def _by_metric(self, prepared: Prepared, context: EncodedContext, metric: Metric) -> float:
        decoded = self._engine.decoder.generate(
            context,
            prepared.request.parts.query_ids,
            options=self._options(),
        )
        text = self._engine.text.detokenizer.text(decoded.sequences[0], ())
        return float(metric(text.strip(), prepared.example.answer or ""))

    def _options(self) -> dict[str, object]:
        return {"max_new_tokens": self._max_new_tokens, "do_sample": False, "num_beams": 1}

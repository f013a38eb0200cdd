"""The passages of a sequence: which entities, which facts, in which words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from training.phrasing import BRIDGES, FORMS, draw_pair, later_name, state
from training.recipes import Recipe
from training.world import KINDS, Entity, Kind, NamesOf, Split, draw_entities, kind_named


@dataclass(frozen=True, slots=True)
class Context:
    """The entities of the passages and, for each, the statement form of its relations."""

    entities: Sequence[Entity]
    forms: Sequence[dict[str, int]]

    def passages(
        self, rng: np.random.Generator, recipe: Recipe
    ) -> tuple[tuple[str | None, str], ...]:
        """(title, text) of each passage."""
        return tuple(
            (entity.name, passage_text(rng, entity, forms, recipe))
            for entity, forms in zip(self.entities, self.forms, strict=True)
        )


def passage_text(
    rng: np.random.Generator, entity: Entity, forms: Mapping[str, int], recipe: Recipe
) -> str:
    """The sentences of one passage, in random order, by the statement forms given per relation."""
    relations = list(forms)
    rng.shuffle(relations)
    sentences = []
    for n, relation in enumerate(relations):
        form, name = forms[relation], None
        if n and rng.random() < recipe.pronouns:
            name = later_name(rng, entity, FORMS[entity.kind.name, relation].statements[form])
        if n and name is None and entity.kind.noun is None and rng.random() < recipe.surnames:
            name = entity.second
        sentences.append(state(entity, relation, form, name))
    return " ".join(sentences)


def draw_context(rng: np.random.Generator, recipe: Recipe, split: Split) -> Context:
    """Draws the entities of a sequence with their facts and statement forms."""
    if recipe.linked:
        return _finish(rng, _draw_linked(rng, recipe, split), split)
    entities: list[Entity] = []
    kinds, count = _kinds(rng, recipe), _facts(rng, recipe)
    for name in dict.fromkeys(kind.name for kind in kinds):
        same = sum(kind.name == name for kind in kinds)
        entities += _draw_kind(rng, recipe, split, kind_named(name), same, count)
    return _finish(rng, entities, split)


def _finish(rng: np.random.Generator, entities: Sequence[Entity], split: Split) -> Context:
    shuffled = [entities[i] for i in rng.permutation(len(entities))]
    forms = [{r: draw_pair(rng, e.kind, r, split)[0] for r in e.facts} for e in shuffled]
    return Context(shuffled, forms)


def _facts(rng: np.random.Generator, recipe: Recipe) -> int:
    if rng.random() < recipe.fewer:
        return int(rng.integers(1, recipe.facts + 1))
    return recipe.facts


def _kinds(rng: np.random.Generator, recipe: Recipe) -> list[Kind]:
    if recipe.entities > 1 and rng.random() < recipe.mixed:
        return [KINDS[int(k)] for k in rng.integers(len(KINDS), size=recipe.entities)]
    # Persons have the most relations and the longest lists of names: they come up more often.
    kind = KINDS[int(rng.choice(len(KINDS), p=[0.32, 0.17, 0.17, 0.17, 0.17]))]
    return [kind] * recipe.entities


def _draw_kind(
    rng: np.random.Generator,
    recipe: Recipe,
    split: Split,
    kind: Kind,
    count: int,
    facts: int,
    always: str | None = None,
) -> list[Entity]:
    names = [r for r in kind.relations if r != always]
    relations = [names[i] for i in rng.permutation(len(names))[: facts - (always is not None)]]
    if always is not None:
        relations.append(always)
    return draw_entities(
        rng, kind, count, relations, split=split, kin=recipe.kin, missing=recipe.missing
    )


def _draw_linked(rng: np.random.Generator, recipe: Recipe, split: Split) -> list[Entity]:
    """Half of the entities, rounded up, and others that name them by one relation."""
    links = list(BRIDGES)
    kind_name, relation = links[int(rng.integers(len(links)))]
    kind = kind_named(kind_name)
    values = kind.relations[relation]
    target = kind_named(values.kind if isinstance(values, NamesOf) else kind_name)
    reached = (recipe.entities + 1) // 2
    facts = max(2, _facts(rng, recipe))
    targets = _draw_kind(rng, recipe, split, target, reached, facts)
    sources = _draw_kind(
        rng, recipe, split, kind, recipe.entities - reached, facts, always=relation
    )
    order = rng.permutation(reached)
    for n, source in enumerate(sources):
        # Some links lead out of the passages: what lies behind them is not stated.
        if relation in source.facts and rng.random() < 0.9:
            linked = {**source.facts, relation: targets[order[n]].name}
            sources[n] = replace(source, facts=linked)
    return targets + sources

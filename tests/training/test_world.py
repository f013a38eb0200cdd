import numpy as np
import pytest

from training.phrasing import FORMS, draw_pair, is_held_out
from training.world import KINDS, Kind, draw_entities, draw_name


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_names_of_the_two_splits_are_disjoint(kind: Kind) -> None:
    rng = np.random.default_rng(0)
    trained = {draw_name(rng, kind, "train") for _ in range(3000)}
    held_out = {draw_name(rng, kind, "held-out") for _ in range(300)}
    assert not trained & held_out
    pairs = len(kind.firsts) * len(kind.seconds)
    share = sum(
        kind.is_held_out(i, j) for i in range(len(kind.firsts)) for j in range(len(kind.seconds))
    )
    assert share / pairs == pytest.approx(0.1, abs=0.02)


def test_every_relation_has_forms_and_every_statement_a_question_in_both_splits() -> None:
    assert {(kind.name, relation) for kind in KINDS for relation in kind.relations} == set(FORMS)
    for forms in FORMS.values():
        assert len(forms.statements) == 3
        assert len(forms.questions) == 4
        for statement in range(3):
            held_out = [is_held_out(statement, question) for question in range(4)]
            assert any(held_out)
            assert not all(held_out)


@pytest.mark.parametrize("split", ["train", "held-out"])
def test_pairs_of_forms_belong_to_their_split(split: str) -> None:
    rng = np.random.default_rng(0)
    for kind in KINDS:
        for relation in kind.relations:
            pair = draw_pair(rng, kind, relation, split)  # type: ignore[arg-type] # a Split
            assert is_held_out(*pair) == (split == "held-out")


def test_entities_of_one_context_share_relations_and_differ_in_name() -> None:
    rng = np.random.default_rng(3)
    entities = draw_entities(rng, KINDS[0], 40, ["home", "job"], kin=0.3)
    assert len({entity.name for entity in entities}) == 40
    assert all(set(entity.facts) == {"home", "job"} for entity in entities)
    words = [entity.first for entity in entities]
    assert len(set(words)) < len(words)


def test_missing_relations_leave_at_least_one() -> None:
    rng = np.random.default_rng(3)
    entities = draw_entities(rng, KINDS[1], 40, ["founded", "seat"], missing=0.9)
    assert all(entity.facts for entity in entities)
    assert any(len(entity.facts) < 2 for entity in entities)

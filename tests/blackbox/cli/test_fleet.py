"""What `serve` asks a fleet for; tests/integrations/fleet has a fleet that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import fsspec

from rag_windows_server import fleet
from tests.blackbox.cli.conftest import refused
from tests.blackbox.conftest import Run

KEPT = ("--cache-dir", "cache", "--shared", "store")
SERVE = ("serve", "--docs", "docs", "--replicas", "2")


@pytest.fixture
def asked(docs: Path, monkeypatch: pytest.MonkeyPatch) -> list[fleet.FleetOptions]:
    """The options of the fleets that would run."""
    made: list[fleet.FleetOptions] = []

    def noted(options: fleet.FleetOptions, *_: Any, **__: Any) -> None:
        made.append(options)

    monkeypatch.setattr(fleet, "run", noted)
    return made


def test_options_become_those_of_a_fleet(run: Run, asked: list[Any], tmp_path: Path) -> None:
    """Paths are found from other folders, too; addresses and names on the Hub stay."""
    fsspec.filesystem("memory").pipe_file("/fleet/notes.txt", b"Mara Olsen was born in Tirmouth.")
    more = ("--docs", "memory://fleet/notes.txt", "--model", "owner/name", "--rag-scale", "0.9")
    result = run(*SERVE, *more, *KEPT)
    assert result.exit_code == 0, result.output
    (made,) = asked
    assert made.docs == (str(tmp_path / "docs"), "memory://fleet/notes.txt")
    assert (made.model, made.replicas) == ("owner/name", 2)
    assert (made.cache_dir, made.shared) == (str(tmp_path / "cache"), str(tmp_path / "store"))
    assert made.method is not None
    assert (made.method["name"], made.method["scale"]) == ("ape", 0.9)
    assert made == fleet.FleetOptions.model_validate_json(made.model_dump_json())


def test_values_of_the_template_are_json_or_words(run: Run, asked: list[Any]) -> None:
    given = ["a=true", "b=3", "c=word", 'd="3"', "e=null", "f=None=x"]
    options = [part for one in given for part in ("--template-option", one)]
    result = run(*SERVE, "--model", "owner/name", *options)
    assert result.exit_code == 0, result.output
    expected = {"a": True, "b": 3, "c": "word", "d": "3", "e": None, "f": "None=x"}
    assert asked[0].template_kwargs == expected


def test_a_fleet_may_have_no_cache(run: Run, asked: list[Any]) -> None:
    result = run(*SERVE, "--model", "owner/name", "--no-cache", *KEPT)
    assert result.exit_code == 0, result.output
    assert asked[0].load_cache() is None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("--replicas", "3", "--max-replicas", "2"), "at least replicas=3, not 2"),
        (("--template-option", "a"), "must be a name and a value"),
    ],
)
def test_what_can_not_be_is_refused(
    run: Run, asked: list[Any], given: tuple[str, ...], told: str
) -> None:
    assert told in refused(run, *SERVE, "--model", "owner/name", *given)
    assert not asked

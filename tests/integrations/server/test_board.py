"""The Grafana board and the compose file beside the docs name what the server has."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from rag_windows import Passage, PassageCache, WindowedLM
from rag_windows_retrievers import BM25Retriever
from rag_windows_server import create_app
from tests.test_repository import ROOT

BOARD: dict[str, Any] = json.loads((ROOT / "docs/server/grafana.json").read_text(encoding="utf-8"))
EXPRESSIONS = [
    *(target["expr"] for panel in BOARD["panels"] for target in panel["targets"]),
    BOARD["templating"]["list"][1]["query"]["query"],
]


@pytest.fixture
async def metrics(tmp_path: Any) -> str:
    """What the server tells Prometheus behind one answer and one refusal."""
    cache = PassageCache(memory="64MiB", disk="64MiB", path=tmp_path)
    lm = WindowedLM.from_pretrained("tiny-reader", cache=cache)
    documents = BM25Retriever([Passage("The genre of Gentle Horizon is saga.", id="one")])
    asked = {"model": "tiny-reader", "messages": [{"role": "user", "content": "Which genre?"}]}
    transport = httpx.ASGITransport(create_app(lm, documents=documents))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.post("/v1/chat/completions", json=asked)).status_code == 200
        assert (await client.post("/v1/chat/completions", json={})).status_code == 400
        return (await client.get("/metrics")).text


def test_every_metric_and_label_of_the_board_is_told_by_the_server(metrics: str) -> None:
    told: dict[str, set[str]] = {}
    for name, labels in re.findall(r"^(rag_windows_\w+)(?:{(.*?)})? ", metrics, re.MULTILINE):
        told.setdefault(name, {"job"}).update(re.findall(r'(\w+)="', labels))
    used = set()
    for expression in EXPRESSIONS:
        names = re.findall(r"rag_windows_\w+", expression)
        assert names
        assert set(names) <= told.keys(), expression
        used.update(names)
        both = set.intersection(*(told[name] for name in names))
        grouped = re.findall(r"by \((\w+)\)", expression)
        selected = re.findall(r'(\w+)=~?"', expression)
        assert {*grouped, *selected} <= both or len(names) > 1, expression
    # The board leaves out no metric of the server itself.
    own = {re.sub("_(created|sum|count)$", "", name) for name in told if "_cache_" not in name}
    shown = {re.sub("_bucket$", "", name) for name in used}
    assert {re.sub("_(bucket|total)$", "", name) for name in own} <= {
        re.sub("_total$", "", name) for name in shown
    }


def test_panels_of_the_board_do_not_lie_over_each_other() -> None:
    taken = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in taken
                taken.add((x, y))
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])

"""The router of a fleet's readers; only this file uses interfaces that Ray Serve calls alpha."""

from __future__ import annotations

import time
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from rag_windows_server.fleet.routing import Held, Replica, resident, unpack

PUBLISH_S = 2.0
"""Seconds after which readers publish again what they hold."""


class Router(RequestRouter):
    """Ranks readers by the passages that they hold; see `resident`.

    A reader is taken to hold what it has published, and what questions that were passed to it since
    then have brought it. Requests that are no questions go to the least busy reader.
    """

    def initialize_state(self, **given: Any) -> None:
        """Take the arguments of a `RequestRouterConfig`.

        ``rows`` and ``full`` are the numbers of requests with which a reader has further ones wait
        in line, and refuses them.
        """
        self._steps = given["rows"], given["full"]
        self._published: dict[ReplicaID, bytes] = {}
        self._held: dict[ReplicaID, Held] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """All of them, the best one first."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
        loads = self.replica_queue_len_cache
        if unknown := [one for one in candidate_replicas if loads.get(one.replica_id) is None]:
            await self._probe_queue_lens(unknown, 0)
        question = None if pending_request is None else pending_request.kwargs.get("question")
        known = [self._known(one) for one in candidate_replicas]
        if question is None:
            order = sorted(range(len(known)), key=lambda index: known[index].load)
        else:
            # Encoding passages takes less time than a line: nobody waits while a reader is free.
            order = sorted(
                resident(question, known),
                key=lambda index: sum(known[index].load >= step for step in self._steps),
            )
        return [[candidate_replicas[index]] for index in order]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Note what a reader will hold before it publishes that."""
        if (question := pending_request.kwargs.get("question")) is not None:
            held = self._held.setdefault(replica_id, Held())
            held.sent(question.digests, time.monotonic())

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Forget readers that are gone."""
        super().update_replicas(replicas)
        for known in (self._published, self._held):
            for gone in known.keys() - self.curr_replicas.keys():
                del known[gone]

    def _known(self, replica: RunningReplica) -> Replica:
        name, packed = replica.replica_id, replica.routing_stats.get("held", b"")
        held, now = self._held.setdefault(name, Held()), time.monotonic()
        if self._published.get(name) != packed or held.late(now):
            held.published(unpack(packed), now)
            self._published[name] = packed
        load = self.replica_queue_len_cache.get(name)
        load = replica.max_ongoing_requests if load is None else load
        return Replica(name.unique_id, held.numbers, float(load))

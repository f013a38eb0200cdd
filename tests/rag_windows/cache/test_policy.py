"""The policy: its members and bytes agree with a plain dict, and what is worth most stays."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rag_windows.cache.policy import Policy

LIMIT = 100
KEYS = st.sampled_from("abcdefghij")
BYTES = st.integers(0, 120)
SECONDS = st.sampled_from([0.0, 0.01, 1.0, 30.0, float("inf"), float("nan"), -1.0])


class PolicyAgainstSizes(RuleBasedStateMachine):
    """The policy's members against a plain dict of sizes that follows what it says."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Policy(LIMIT)
        self.sizes: dict[str, int] = {}

    @rule(key=KEYS)
    def touch(self, key: str) -> None:
        self.policy.touch(key)

    @rule(held=st.dictionaries(KEYS, st.tuples(BYTES, SECONDS)))
    def sync(self, held: dict[str, tuple[int, float]]) -> None:
        victims = self.policy.sync((key, *some, 3) for key, some in held.items())
        assert len(set(victims)) == len(victims)
        assert set(victims) <= set(held)
        self.sizes = {key: max(held[key][0], 1) for key in held.keys() - victims}

    @rule(key=KEYS, nbytes=BYTES, cost_s=SECONDS)
    def offer(self, key: str, nbytes: int, cost_s: float) -> None:
        before = dict(self.sizes)
        victims = self.policy.admit(key, nbytes, cost_s)
        if victims is None:
            # Only what is too large, or would displace something, may be refused.
            free = LIMIT - sum(before.values()) + before.get(key, 0)
            assert max(nbytes, 1) > free
            return
        assert key not in victims
        assert len(set(victims)) == len(victims)
        for victim in victims:
            del self.sizes[victim]
        self.sizes[key] = max(nbytes, 1)

    @rule(key=KEYS)
    def forget(self, key: str) -> None:
        assert self.policy.forget(key) == (self.sizes.pop(key, None) is not None)

    @invariant()
    def agrees(self) -> None:
        assert self.policy.nbytes == sum(self.sizes.values()) <= LIMIT
        assert len(self.policy) == len(self.sizes)
        assert all((key in self.policy) == (key in self.sizes) for key in "abcdefghij")


TestPolicyAgainstSizes = PolicyAgainstSizes.TestCase
TestPolicyAgainstSizes.settings = settings(max_examples=40, stateful_step_count=20)


def filled(limit: int, **windows: tuple[int, float]) -> Policy:
    """A policy that holds these, each used once: bytes and seconds."""
    policy = Policy(limit)
    for key, (nbytes, seconds) in windows.items():
        policy.touch(key)
        assert policy.admit(key, nbytes, seconds) == []
    return policy


def test_a_window_asked_for_once_displaces_none_asked_for_often() -> None:
    policy = filled(30, a=(10, 1.0), b=(10, 1.0), c=(10, 1.0))
    for key in "abc" * 5:
        policy.touch(key)
    policy.touch("d")
    assert policy.admit("d", 10, 1.0) is None
    for _ in range(9):
        policy.touch("d")  # refused, yet its uses count
    assert policy.admit("d", 10, 1.0) == ["a"]


def test_what_takes_longer_to_encode_or_fewer_bytes_stays() -> None:
    policy = filled(20, a=(10, 5.0), b=(10, 1.0))
    policy.touch("c")
    assert policy.admit("c", 10, 3.0) == ["b"]
    policy = filled(100, a=(70, 1.0), b=(20, 1.0))
    policy.touch("c")
    assert policy.admit("c", 20, 1.0) == ["a"]


def test_one_large_newcomer_does_not_displace_many_that_are_worth_more_together() -> None:
    policy = filled(100, **dict.fromkeys("abcdefghij", (10, 1.0)))
    policy.touch("large")
    assert policy.admit("large", 100, 5.0) is None
    assert policy.admit("large", 100, 50.0) is not None
    assert len(policy) == 1

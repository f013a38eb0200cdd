"""What is kept under a limit in bytes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rag_windows import InputError
from rag_windows.cache.policy import History, Policy

LIMIT = 100
KEYS = st.sampled_from("abcdefghij")
BYTES = st.integers(0, 130)
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
        kept = held.keys() - victims
        self.sizes = {key: max(held[key][0], 1) for key in kept}

    @rule(key=KEYS, nbytes=BYTES, cost_s=SECONDS)
    def offer(self, key: str, nbytes: int, cost_s: float) -> None:
        before = dict(self.sizes)
        victims = self.policy.admit(key, nbytes, cost_s)
        if victims is None:
            assert self.sizes == before
            # Only what is too large, or would displace something, may be refused.
            free = LIMIT - sum(before.values()) + before.get(key, 0)
            assert max(nbytes, 1) > free
            return
        assert key not in victims
        assert len(set(victims)) == len(victims)
        assert set(victims) <= set(before)
        for victim in victims:
            del self.sizes[victim]
        self.sizes[key] = max(nbytes, 1)

    @rule(key=KEYS)
    def forget(self, key: str) -> None:
        assert self.policy.forget(key) == (self.sizes.pop(key, None) is not None)

    @precondition(lambda self: len(self.sizes) > 3)
    @rule()
    def clear(self) -> None:
        self.policy.clear()
        self.sizes.clear()

    @invariant()
    def agrees(self) -> None:
        assert self.policy.nbytes == sum(self.sizes.values()) <= LIMIT
        assert len(self.policy) == len(self.sizes)
        assert all((key in self.policy) == (key in self.sizes) for key in "abcdefghij")


TestPolicyAgainstSizes = PolicyAgainstSizes.TestCase
TestPolicyAgainstSizes.settings = settings(max_examples=60, stateful_step_count=30)


def fill(policy: Policy, keys: str, nbytes: int = 10, cost_s: float = 1.0) -> None:
    for key in keys:
        policy.touch(key)
        assert policy.admit(key, nbytes, cost_s) is not None


def test_it_drops_no_more_than_it_must() -> None:
    policy = Policy(30)
    fill(policy, "abc")
    policy.touch("d")
    policy.touch("d")
    victims = policy.admit("d", 10, 1.0)
    assert victims is not None
    assert len(victims) == 1


def test_a_window_asked_for_once_displaces_none_asked_for_often() -> None:
    policy = Policy(30)
    fill(policy, "abc")
    for key in "abc" * 5:
        policy.touch(key)
    policy.touch("d")
    assert policy.admit("d", 10, 1.0) is None
    for _ in range(9):
        policy.touch("d")  # refused, yet its uses count
    assert policy.admit("d", 10, 1.0) == ["a"]


def test_what_takes_longer_to_encode_stays() -> None:
    policy = Policy(20)
    fill(policy, "a", cost_s=5.0)
    fill(policy, "b", cost_s=1.0)
    policy.touch("c")
    assert policy.admit("c", 10, 3.0) == ["b"]


def test_what_takes_more_bytes_goes() -> None:
    policy = Policy(100)
    fill(policy, "a", nbytes=70)
    fill(policy, "b", nbytes=20)
    policy.touch("c")
    assert policy.admit("c", 20, 1.0) == ["a"]


def test_one_large_newcomer_does_not_displace_many_that_are_worth_more_together() -> None:
    policy = Policy(100)
    fill(policy, "abcdefghij")
    policy.touch("large")
    assert policy.admit("large", 100, 5.0) is None
    assert policy.admit("large", 100, 50.0) is not None
    assert len(policy) == 1


def test_cost_exponent_zero_ignores_seconds() -> None:
    policy = Policy(20, cost_exponent=0.0)
    fill(policy, "a", cost_s=1.0)
    fill(policy, "b", cost_s=500.0)
    policy.touch("c")
    assert policy.admit("c", 10, 1.0) == ["a"]


def test_a_refused_new_size_leaves_the_old_one() -> None:
    policy = Policy(20)
    fill(policy, "ab")
    assert policy.admit("a", 21, 1.0) is None
    assert "a" in policy
    assert policy.nbytes == 20
    assert policy.admit("a", 5, 1.0) == []
    assert policy.nbytes == 15


def test_what_was_used_often_before_a_restart_stays() -> None:
    policy = Policy(20)
    assert policy.sync([("often", 10, 1.0, 50), ("once", 10, 1.0, 1)]) == []
    policy.touch("new")
    assert policy.admit("new", 10, 1.0) == ["once"]


def test_a_hot_set_that_moved_is_followed() -> None:
    policy = Policy(200)
    rng = random.Random(0)

    def ask(keys: list[str], times: int) -> int:
        hits = 0
        for _ in range(times):
            key = rng.choice(keys)
            hits += key in policy
            policy.touch(key)
            if key not in policy:
                policy.admit(key, 10, 1.0)
        return hits

    ask([f"old {index}" for index in range(20)], 5000)
    ask([f"new {index}" for index in range(20)], 1000)
    assert ask([f"new {index}" for index in range(20)], 500) > 490


def test_equal_calls_give_equal_victims() -> None:
    def run() -> list[object]:
        policy, rng = Policy(300), random.Random(1)
        seen: list[object] = []
        for _ in range(3000):
            key = f"{int(rng.paretovariate(0.7)) % 200}"
            policy.touch(key)
            if key not in policy:
                seen.append(policy.admit(key, rng.randint(1, 30), rng.random()))
        return seen

    assert run() == run()


def test_bookkeeping_stays_small() -> None:
    policy = Policy(100)
    for index in range(34_000):
        key = str(index)
        policy.touch(key)
        policy.admit(key, 10, 1.0)
    assert len(policy._history) <= 32_768
    for ranking in (policy._held, *policy._trials):
        assert len(ranking) <= 10
        assert len(ranking._heap) < 200


@pytest.mark.parametrize(("limit", "exponent"), [(-1, 1.0), (1, -0.1), (1, 1.1)])
def test_numbers_outside_their_domain_are_refused(limit: int, exponent: float) -> None:
    with pytest.raises(InputError, match=r"at least 0|from 0 to 1"):
        Policy(limit, exponent)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=60))
def test_levels_are_decayed_sums_of_uses(uses: list[tuple[str, int]]) -> None:
    history = History([3.0], limit=10)
    for key, times in uses:
        history.use(key, period=1.0, times=times)
    for key in "abc":
        ages = [(len(uses) - 1 - at, n) for at, (k, n) in enumerate(uses) if k == key]
        if ages:
            expected = sum(n * 0.5 ** (age / 3.0) for age, n in ages)
            level = history.levels(key)[0] - history.clocks[0]
            assert 2.0**level == pytest.approx(expected)


def test_a_member_whose_uses_were_forgotten_is_still_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rag_windows.cache.policy.REMEMBERED", 5)
    policy = Policy(30)
    fill(policy, "abc")
    for _ in range(50):
        policy.touch("a")
    for index in range(20):
        policy.touch(str(index))
    policy.touch("a")  # its 50 uses are no longer known
    for _ in range(3):
        policy.touch("d")
    victims = policy.admit("d", 30, 1e6)
    assert victims is not None
    assert sorted(victims) == ["a", "b", "c"]


def test_the_keys_unused_for_longest_are_forgotten() -> None:
    history = History([1.0], limit=2)
    for key in "abac":
        history.use(key, period=1.0)
    assert list(history.by_key(0)) == ["a", "c"]

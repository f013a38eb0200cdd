"""The CUDA kernel, on a stand-in and on a GPU: numbers, what it asks for, when it steps aside."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rag_windows import RagWindowsError
from rag_windows.attention import cuda

from . import stand_in
from .asked import exact
from .asked import request as item

# Rounding to the dtype; scores and sums are fp32.
OUTPUT_TOLERANCE = {torch.float32: 5e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}
LSE_TOLERANCE = {"cpu": 1e-5, "cuda": 3e-4}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = (130, 1, 700, 16, 37)

BACKEND = cuda.CudaBackend()
EACH = pytest.mark.parametrize("device", DEVICES)


@pytest.fixture(autouse=True)
def varlen() -> Iterator[stand_in.Varlen]:
    """What serves the CPU."""
    made = stand_in.Varlen()
    with stand_in.serving(made):
        yield made


def draw(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed + sum(size)))


class Memory:
    """Storage of keys and one of values, NaN where no window stands: nobody may read that."""

    def __init__(
        self, like: Tensor, kv_heads: int, tokens: int = 1200, *, heads_first: bool = False
    ) -> None:
        shape = (kv_heads, tokens) if heads_first else (tokens, kv_heads)
        whole = like.new_full((2, *shape, like.shape[2]), torch.nan)
        self._planes = whole if heads_first else whole.transpose(1, 2)
        self._filled = 0

    def part(self, start: int, length: int, groups: int = 1) -> tuple[Tensor, Tensor]:
        """Keys and values (groups, kv heads, tokens, dim) from a token on."""
        own = self._planes[:, :, start : start + groups * length]
        if bool(own.isnan().any()):
            self._filled += 1
            own.copy_(draw(*own.shape, seed=self._filled))
        key, value = own.unflatten(2, (groups, length)).transpose(1, 2)
        return key, value

    def parts(self, lengths: Sequence[int], first: int = 3) -> list[tuple[Tensor, Tensor]]:
        """Windows in an order other than that in which they stand, with gaps between them."""
        starts = itertools.accumulate((length + 5 for length in lengths[:-1]), initial=first)
        made = [self.part(*one) for one in zip(starts, lengths, strict=True)]
        return made[1:] + made[:1]


def queries(
    device: str, tokens: int, heads: int, dim: int = 64, dtype: torch.dtype = torch.float16
) -> Tensor:
    return draw(tokens, heads, dim, seed=7).to(device, dtype)


def ask(items: Sequence[Any], query: Tensor) -> Any:
    assert all(BACKEND.serves(one, query) for one in items)
    return cuda.CudaCall(items, query)(query, per_part=True)


def compare(items: Sequence[Any], query: Tensor) -> None:
    found, right = ask(items, query), exact(items, query)
    tolerance = OUTPUT_TOLERANCE[query.dtype]
    assert found.output.dtype in (query.dtype, torch.float32)
    torch.testing.assert_close(found.output.double(), right.output, atol=tolerance, rtol=tolerance)
    assert found.parts is not None
    assert right.parts is not None
    for lses in zip([found.lse, *found.parts], [right.lse, *right.parts], strict=True):
        assert lses[0] is not None
        assert lses[0].dtype == torch.float32
        atol = LSE_TOLERANCE[query.device.type]
        torch.testing.assert_close(lses[0].double(), lses[1], atol=atol, rtol=2e-6)
    assert torch.equal(cuda.CudaCall(items, query)(query).output, found.output)


def test_the_specification_of_items() -> None:
    """What all is compared with: one softmax over keys, read off by hand."""
    query, memory = queries("cpu", 1, 1, dtype=torch.float32), Memory(draw(1, 1, 64), 1)
    parts = memory.parts((3, 2))
    keys, values = (torch.cat([part[i][0, 0] for part in parts]) for i in (0, 1))
    logits = (2.0 * torch.tanh(keys @ query[0, 0] * 0.1 / 2.0)) / 0.5
    found = exact([item(parts, softcap=2.0, temperature=0.5)], query, torch.float32)
    torch.testing.assert_close(found.output[0, 0], logits.softmax(0) @ values)
    torch.testing.assert_close(found.lse[0, 0], logits.logsumexp(0))
    assert found.parts is not None
    apart = torch.stack([one.logsumexp(0) for one in logits.split([2, 3])])
    assert found.parts[0] is not None
    torch.testing.assert_close(found.parts[0][:, 0, 0], apart)


@EACH
@pytest.mark.parametrize("dtype", stand_in.DTYPES, ids=str)
@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_windows_of_ragged_lengths(device: str, dim: int, groups: int, dtype: torch.dtype) -> None:
    """Of one token and of three, a temperature, parts told apart."""
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("no kernel takes fp32")
    query = queries(device, 3, 2 * groups, dim, dtype)
    parts = Memory(query, 2).parts(LENGTHS)
    compare([item(parts, [1], temperature=0.7)], query)
    compare([item(parts, [2, 0, 1])], query)


@EACH
def test_everything_together(device: str) -> None:
    """A context, a prefix, texts that see themselves, row caches: each with numbers of its own."""
    query = queries(device, 90, 8)
    memory, prefix, rows = Memory(query, 2), Memory(query, 2), Memory(query, 2, heads_first=True)
    between = torch.tensor([3, 0, 70]), torch.tensor([5, 80, 71])
    items = [
        item(memory.parts(LENGTHS), range(40), temperature=0.7),
        item([prefix.part(0, 50)], range(40)),
        item([prefix.part(60, 33)], range(50, 83), causal=True),
        item([prefix.part(100, 20, groups=2)], range(40, 80), causal=True),
        item([rows.part(8, 80, groups=3)], [83, 89, 84], between=between),
    ]
    compare(items, query)


@EACH
def test_many_windows(device: str, varlen: stand_in.Varlen) -> None:
    """As many as make it fold the heads of a lone token itself."""
    query = queries(device, 2, 8)
    parts = Memory(query, 2, 1500).parts([2 + i % 4 for i in range(cuda.BUSY // 2)])
    compare([item(parts, [1])], query)
    compare([item(parts[:3], [1])], query)
    if device == "cpu":
        assert [one["heads"] for one in varlen.calls][-4:] == [2, 2, 8, 8]


@EACH
def test_several_storages(device: str, varlen: stand_in.Varlen) -> None:
    """One call each; and one where keys and values do not stand equally far from the first."""
    query = queries(device, 4, 4)
    one, two = Memory(query, 2), Memory(query, 2, heads_first=True)
    apart = [(one.part(100, 9)[0], one.part(200, 9)[1])]
    parts = [*one.parts((5, 40)), *two.parts((7, 300, 2)), *apart]
    compare([item([parts[i] for i in (3, 0, 5, 2, 4, 1)], [3, 1])], query)
    if device == "cpu":
        assert sorted(len(call["used"]) for call in varlen.calls[-3:]) == [1, 2, 3]


def odd(tensor: Tensor) -> dict[str, Tensor]:
    """The same numbers as (1, kv heads, tokens, dim), laid so that no kernel can load them."""
    wide = tensor.new_zeros(1, tensor.shape[1], tensor.shape[2], tensor.shape[3] + 3)
    wide[..., 3:] = tensor
    flat = tensor.new_zeros(tensor.numel() + 1)
    flat[1:] = tensor.flatten()
    return {
        "strides": wide[..., 3:],
        "address": flat[1:].view(tensor.shape),
        "last stride": tensor.mT.contiguous().mT,
    }


@EACH
@pytest.mark.parametrize("kind", ["strides", "address", "last stride"])
def test_a_part_that_can_not_be_loaded_is_copied_alone(
    device: str, kind: str, varlen: stand_in.Varlen
) -> None:
    query = queries(device, 2, 4)
    memory = Memory(query, 2)
    parts = memory.parts((5, 40, 9))
    copied = odd(parts[1][0])[kind], odd(parts[1][1])[kind]
    compare([item([parts[0], copied, *parts[2:]], [1])], query)
    if device == "cpu":
        assert sorted(len(call["used"]) for call in varlen.calls[-2:]) == [1, 2]


@EACH
def test_equal_windows_are_one_sequence(device: str, varlen: stand_in.Varlen) -> None:
    """Questions that share windows read each once; one that has a window twice counts it twice."""
    query = queries(device, 6, 4)
    parts = Memory(query, 2).parts((5, 40, 9))
    items = [item(parts[:2], [0, 1]), item(parts, [4]), item([*parts[1:], parts[1]], [5, 2])]
    compare(items, query)
    if device == "cpu":
        readers = dict(
            zip(varlen.calls[-1]["used"], lengths(varlen.calls[-1]["rows"]), strict=True)
        )
        # Rows, of which each has the two heads of a kv head.
        assert {length: many // 2 for length, many in readers.items()} == {5: 3, 40: 3, 9: 7}


def lengths(ends: Sequence[int]) -> list[int]:
    return [two - one for one, two in itertools.pairwise(ends)]


@EACH
def test_what_overlaps_is_read_by_several_calls(device: str) -> None:
    query = queries(device, 60, 4)
    memory = Memory(query, 2)
    compare([item([memory.part(0, 30), memory.part(20, 30), memory.part(50, 9)], [0, 3])], query)
    text = [memory.part(60, 20)]
    compare([item(text, range(20), causal=True), item(text, range(20, 40), causal=True)], query)
    # Groups that all read the same keys.
    key, value = (one.expand(3, -1, -1, -1) for one in memory.part(90, 17))
    between = torch.tensor([0, 4, 0]), torch.tensor([17, 11, 2])
    compare([item([(key, value)], [2, 1, 0], between=between)], query)


@EACH
def test_temporary_memory_is_bounded(
    device: str, varlen: stand_in.Varlen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long queries over many windows go in steps; a token's rows, and a text's, stay together."""
    query = queries(device, 90, 4)
    memory, rows = Memory(query, 2), Memory(query, 2)
    between = torch.tensor([3, 0, 5, 1]), torch.tensor([5, 8, 7, 8])
    items = [
        item(memory.parts(LENGTHS), range(40)),
        item([rows.part(0, 30)], range(30), causal=True),
        item([rows.part(40, 8, groups=4)], range(60, 64), between=between),
    ]
    whole = ask(items, query)
    varlen.calls.clear()
    row = 4 * (64 * (3 * 2 + 4) + 16)
    monkeypatch.setattr(cuda, "MAX_BYTES", 12 * row)
    compare(items, query)
    cut = ask(items, query)
    assert whole.parts is not None
    assert cut.parts is not None
    for one, two in zip([whole.lse, *whole.parts], [cut.lse, *cut.parts], strict=True):
        torch.testing.assert_close(one, two, atol=LSE_TOLERANCE[device], rtol=2e-6)
    if device == "cpu":
        taken = {one["rows"][-1] * one["heads"] // 4 for one in varlen.calls}
        assert 30 in taken
        # At most a token's rows more than there is room for.
        assert max(taken - {30}) < 12 + len(LENGTHS)


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
def test_log_sum_exps_as_documented_or_as_kernels_have_them(heads_first: bool, groups: int) -> None:
    """Also where there are as many rows as heads, which shapes do not tell apart."""
    with stand_in.serving(stand_in.Varlen(heads_first=heads_first)):
        for tokens in (1, 2, 4, 8):
            query = queries("cpu", tokens, 4 * groups)
            memory = Memory(query, 4)
            compare([item(memory.parts((40, 7)), range(tokens))], query)
            compare([item([memory.part(100, tokens)], range(tokens), causal=True)], query)


def test_what_is_not_taken() -> None:
    query, whole = queries("cpu", 4, 4), Memory(queries("cpu", 4, 4), 2)
    one = item(whole.parts((5, 9)), [0, 3])
    assert BACKEND.serves(one, query)
    wide = queries("cpu", 4, 2, 264)
    wrong = [
        (one, query[:, :3]),
        (replace(one, parts=[(key, value[..., :32]) for key, value in one.parts]), query),
        (
            replace(one, parts=[(key[..., :36], value[..., :36]) for key, value in one.parts]),
            query[..., :36],
        ),
        (item(Memory(wide, 2).parts((5, 9))), wide),
    ]
    assert [BACKEND.serves(*each) for each in wrong] == [False] * len(wrong)


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    query = queries("cpu", 1, 4)
    parts = Memory(query, 2).parts((5, 9))
    for value, served in (("1", [True, False]), ("0", [False, False])):
        monkeypatch.setenv(cuda.VARIABLE, value)
        assert [BACKEND.serves(item(parts, softcap=cap), query) for cap in (None, 2.0)] == served


def test_another_query_than_it_was_made_for() -> None:
    query = queries("cpu", 3, 4)
    call = cuda.CudaCall([item(Memory(query, 2).parts((5, 9)), [2])], query)
    for wrong in (query[:2], query[:, :3], query[..., :32], query.float()):
        with pytest.raises(RagWindowsError, match="another query"):
            call(wrong)


def raising(*_: Any, **__: Any) -> Any:
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")


class Wrong(stand_in.Varlen):
    """Takes no notice of how many keys are in use."""

    def __call__(self, *asked: Any, **options: Any) -> tuple[Tensor, Tensor]:
        if "seqused_k" in options:
            options |= {"seqused_k": None, "max_k": 10_000}
        return super().__call__(*asked, **options)


@pytest.mark.parametrize(
    ("function", "said"), [(raising, "left out: FlashAttention only"), (Wrong(), "differs from")]
)
def test_it_steps_aside_with_one_warning(
    function: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    query = queries("cpu", 1, 4)
    one = item(Memory(query, 2).parts((5, 9)))
    with stand_in.serving(function):
        assert not any(BACKEND.serves(one, query) for _ in range(3))
    (record,) = caplog.records
    assert said in record.getMessage()


def test_no_memory_for_the_question_says_nothing_of_the_kernel() -> None:
    asked = []

    def full(*args: Any, **options: Any) -> Any:
        asked.append(args)
        if len(asked) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return stand_in.Varlen()(*args, **options)

    query = queries("cpu", 1, 4)
    one = item(Memory(query, 2).parts((5, 9)))
    with stand_in.serving(full):
        with pytest.raises(torch.OutOfMemoryError):
            BACKEND.serves(one, query)
        assert BACKEND.serves(one, query)


class Operators(TorchDispatchMode):
    """Which are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def test_a_call_copies_nothing_to_the_host_and_makes_no_places_again() -> None:
    """Layers whose keys lie alike share what is on the device; a token is a few operators."""

    def varlen(query: Tensor, *_: Any, **options: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(query), query.new_empty(query.shape[1::-1]).float()

    def made() -> cuda.CudaCall:
        prefix = item([Memory(query, 2).part(5, 20)], temperature=0.5)
        windows = item(Memory(query, 2).parts(LENGTHS))
        return cuda.CudaCall([windows, prefix], query, heads_first=True)

    query = queries("cpu", 1, 8)
    with stand_in.serving(varlen), Operators() as seen:
        prepared, layer = made(), made()
        assert prepared.plan(8) is layer.plan(8)
        seen.names.clear()
        prepared(query, per_part=True)
    waiting = ("_local_scalar_dense", "nonzero", "lift", "copy_.default")
    assert not [name for name in seen.names if any(word in name for word in waiting)]
    # Queries of the context, of the prefix, and the order of parts: rows lie as they are merged.
    assert seen.names.count("aten.index_select.default") == 3
    shapes = ("view", "strided", "transpose", "squeeze", "slice", "split", "alias", "t.default")
    launched = [name for name in seen.names if not any(word in name for word in shapes)]
    assert len(launched) <= 20


@EACH
def test_strides_of_what_is_lone_say_nothing(device: str, varlen: stand_in.Varlen) -> None:
    """A single kv head, as DLPack gives it, and windows of one token are read with the others."""
    query = queries(device, 2, 4)
    memory = Memory(query, 1)
    parts = memory.parts((1, 40, 1, 9))
    odd = [
        tuple(one.as_strided(one.shape, (3, 5, *one.stride()[2:])) for one in part)
        for part in parts
    ]
    compare([item([(key, value) for key, value in odd], [1])], query)
    if device == "cpu":
        assert len(varlen.calls[-1]["used"]) == 4

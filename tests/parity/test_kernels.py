"""Whole models whose attention a kernel for several segments answers wherever it can."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from rag_windows.attention import cuda
from rag_windows.attention.backends import (
    AttentionAnswer,
    AttentionRequest,
    Backend,
    PreparedCall,
)
from rag_windows.attention.native import kernel as native
from tests.rag_windows.attention import stand_in
from tests.rag_windows.attention.asked import request as one_request

from . import dense, engine, tolerances, zoo
from .cases import CASES, RULES, case, expected, expected_steps

# Grouped heads, a soft cap and sliding layers, attention sinks, learned positions, all layers
# sliding.
NAMES = ("llama", "gemma2", "gpt_oss", "gpt2", "mistral-sliding")

# All of them with one rule, one of them with the others.
PREFILLS = [*((name, "as used") for name in NAMES), ("llama", "pcw"), ("llama", "as printed")]


@dataclass
class Asked:
    """One reading that the kernel answered."""

    keys: int
    tokens: int
    softcap: float | None
    dtype: torch.dtype


def readings(request: AttentionRequest, query: Tensor) -> Iterator[Asked]:
    """Those of a request's groups."""
    tokens = len(request.places(query)) // request.groups
    whole = torch.tensor(request.keys).expand(request.groups)
    keys = whole if request.between is None else -torch.sub(*request.between)
    return (Asked(number, tokens, request.softcap, query.dtype) for number in keys.tolist())


@pytest.fixture(autouse=True, params=["native", "cuda"])
def asked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Asked]]:
    """What the kernel answers, however few keys there are; that for GPUs on its stand-in."""
    kernel: type[Backend] = cuda.CudaBackend if request.param == "cuda" else native.NativeBackend
    # It is compared with the reference first, with questions that are none of the models'.
    if request.param == "native" and not all(
        native.kernel(dtype, 16, 16) for dtype in (torch.float32, torch.bfloat16)
    ):
        pytest.skip("needs a C compiler, and PyTorch with OpenMP")
    served: list[Asked] = []
    prepare = kernel.prepare

    def recording(
        self: Backend, requests: Sequence[AttentionRequest], query: Tensor
    ) -> PreparedCall:
        call = prepare(self, requests, query)

        def recorded(query: Tensor, *, per_part: bool = False) -> AttentionAnswer:
            served.extend(one for asked in requests for one in readings(asked, query))
            return call(query, per_part=per_part)

        return recorded

    with stand_in.serving() if request.param == "cuda" else nullcontext():
        # The questions of its own are asked before.
        for dtype in (torch.float32, torch.bfloat16) if request.param == "cuda" else ():
            part = torch.zeros(1, 1, 1, 16, dtype=dtype)
            assert kernel().serves(one_request([(part, part)]), part[0])
        monkeypatch.setattr(native, "LEAST_KEYS", 1)
        monkeypatch.setattr(kernel, "prepare", recording)
        yield served


@pytest.fixture
def layers(name: str, request: pytest.FixtureRequest) -> int:
    """How many layers of the model the kernel answers: no sliding ones, on GPUs no soft caps."""
    on_gpu = request.node.callspec.params["asked"] == "cuda"
    return 0 if on_gpu and name == "gemma2" else zoo.BY_NAME[name].sliding.count(None)


def reads_windows(asked: list[Asked], windows: list[list[int]]) -> bool:
    """Whether some of it is a read of all windows together."""
    return any(one.keys == sum(map(len, windows)) for one in asked)


@pytest.mark.parametrize(("name", "ruled"), PREFILLS)
def test_prefill(name: str, ruled: str, asked: list[Asked], layers: int) -> None:
    one, rule = CASES["ragged"], RULES[ruled]
    tolerances.agree(engine.logits(name, one, engine.method(rule)), expected(name, one, rule))
    assert reads_windows(asked, one.windows) == bool(layers)
    assert {one.softcap for one in asked} <= ({2.0} if name == "gemma2" else {None})


@pytest.mark.parametrize("name", NAMES[:4])
def test_each_decoded_step(name: str, asked: list[Asked], layers: int) -> None:
    """A single row reads the windows, the prefix, and its own tokens."""
    rule, forced = RULES["as used"], zoo.ids(12, 99)
    one = case(5, (1, 7, 12), 3, seed=31)
    steps = engine.steps(name, one, engine.method(rule), forced)
    tolerances.agree(steps, expected_steps(name, one, rule, forced))
    read = [one.keys for one in asked]
    assert bool(read) == bool(layers)
    assert read.count(20) >= layers * len(forced)
    assert read.count(len(one.prefix)) >= layers * len(forced)
    for generated in range(1, len(forced)):
        assert read.count(len(one.query) + generated) >= layers


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("ruled", "query"), [("as used", 6), ("pcw", 20)])
def test_bf16(
    name: str,
    ruled: str,
    query: int,
    asked: list[Asked],
    layers: int,
    request: pytest.FixtureRequest,
) -> None:
    """Few rows, and as many as some processors have instructions of their own for."""
    entry, rule = zoo.BY_NAME[name], RULES[ruled]
    one = case(5, (1, 7, 12, 33), query)
    model = zoo.build(entry, dtype=torch.bfloat16)
    exact = copy.deepcopy(model).float()
    rows = engine.rows(engine.wrap(model), one, rule)
    kernel = native.kernel(torch.bfloat16, 16, 16)
    many = (kernel is not None and kernel.many) or request.node.callspec.params["asked"] == "cuda"
    if many or 2 * query <= native.MOST_ROWS:
        assert reads_windows(asked, one.windows) == bool(layers)
    assert {one.dtype for one in asked} <= {torch.bfloat16}
    reference = dense.logits(exact, entry.sliding, one.prefix, one.windows, one.query, rule)
    tolerances.agree_in_bf16(rows, reference, model, exact, one.flat)


def test_rows_of_a_batch(asked: list[Asked]) -> None:
    """They are folded into the rows that read the context, and come out in order."""
    lm, one = engine.shared("llama"), CASES["ragged"]
    context = engine.encoded("llama", one, engine.method(RULES["as used"]))
    answer = lm.generate_ids(context, one.query, max_new_tokens=4, num_beams=3)
    assert reads_windows([one for one in asked if one.tokens == 3], one.windows)
    with stand_in.forced("cpu"):
        assert lm.generate_ids(context, one.query, max_new_tokens=4, num_beams=3) == answer

"""Windows packed into one row, the shelf they stand on, and the pass that ends early."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rag_windows import WindowedLM
from rag_windows.adjacency import side_by_side
from rag_windows.encoding import Encoder
from rag_windows.shelf import Shelf
from rag_windows.windows import Window, pack
from tests.parity import zoo
from tests.rag_windows import small

LENGTHS = (7, 3, 7, 1, 12, 3)


def encoder(name: str = "llama") -> Encoder:
    return WindowedLM.from_pretrained(zoo.shared(name), tokenizer=None)._plain_encoder


def random_windows() -> list[Window]:
    generator = torch.Generator().manual_seed(0)

    def tensors(length: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(2, length, 4, generator=generator) for _ in range(3))

    return [Window(tuple(range(n)), 5, tensors(n), tensors(n)) for n in LENGTHS]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text-sliding", "gemma2"])
@pytest.mark.parametrize("prefixed", [True, False])
def test_a_packed_window_is_what_it_is_alone(name: str, prefixed: bool) -> None:
    made = encoder(name)
    ids = [zoo.ids(length, number) for number, length in enumerate(LENGTHS)]
    prefix = made.encode_prefix(zoo.ids(9, 50)) if prefixed else None
    start = 9 if prefixed else 0
    together = made.encode_windows(prefix, ids)
    for one, window in zip(ids, together, strict=True):
        alone = made.run([one], [start], prefix)[0]
        for a, b in zip((*alone.keys, *alone.values), (*window.keys, *window.values), strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_windows_on_a_shelf_are_packed_without_a_copy() -> None:
    windows = random_windows()
    shelf = Shelf(LENGTHS)
    order = [4, 0, 5, 1, 3, 2]
    put = {index: shelf.put(index, windows[index]) for index in order}
    stood = [put[index] for index in range(len(windows))]
    groups = torch.zeros(sum(LENGTHS), dtype=torch.int64)
    plain, packed = pack(windows, groups, 1), pack(stood, groups, 1)
    for a, b in zip((*plain.keys, *plain.values), (*packed.keys, *packed.values), strict=True):
        assert torch.equal(a, b)
    assert packed.keys[0].data_ptr() == stood[0].keys[0].data_ptr()
    # Another order, or a gap, is copied, and right.
    for chosen in (stood[::-1], [stood[0], stood[2]], stood[1:3], [stood[0], stood[0]]):
        right = torch.cat([window.keys[1] for window in chosen], dim=1)
        assert torch.equal(side_by_side([window.keys[1] for window in chosen]), right)


def test_encoding_in_several_passes_fills_one_shelf() -> None:
    made = Encoder(small.lm()._plain_encoder.twin, max_batch_tokens=10)
    windows = made.encode_windows(None, [[1] * 4, [2] * 9, [3] * 6, [4] * 2])
    rooms = {tensor.untyped_storage().data_ptr() for w in windows for tensor in (w.keys[0],)}
    assert len(rooms) == 1


def test_the_last_layer_is_left_as_soon_as_its_keys_are_there() -> None:
    """Its feed-forward runs for queries, not for windows."""
    lm = small.lm()
    last = lm._plain_encoder.model.base_model.layers[-1]
    ran: list[str] = []
    handles = [
        last.mlp.register_forward_hook(lambda *_: ran.append("mlp")),
        last.self_attn.register_forward_hook(lambda *_: ran.append("attention")),
    ]
    try:
        context = lm.encode_ids([1, 2], [[3, 4], [5]])
        assert ran == []
        lm.logits(context, [6])
        assert ran == ["attention", "mlp"]
    finally:
        for handle in handles:
            handle.remove()


def test_where_weights_are_moved_a_pass_runs_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small.model()

    class Hook:
        execution_device = torch.device("cpu")

    monkeypatch.setattr(model.base_model.layers[0], "_hf_hook", Hook(), raising=False)
    twin: Any = WindowedLM(model, small.tokenizer())._plain_encoder
    ran: list[bool] = []
    handle = twin.model.base_model.layers[-1].mlp.register_forward_hook(lambda *_: ran.append(True))
    try:
        twin.encode_windows(None, [[1, 2]])
    finally:
        handle.remove()
    assert ran == [True]

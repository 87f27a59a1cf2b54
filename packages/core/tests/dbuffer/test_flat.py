"""FlatBuffer: fixed views over memory that comes and goes."""

from __future__ import annotations

import pytest
import torch

from vescale_fsdp.dbuffer import memory, plain_tensors
from vescale_fsdp.dbuffer.buffer import FlatBuffer
from vescale_fsdp.planner import plan

from .helpers import CPU, OFFSETS, SHAPES, make_layout

# Both kinds of memory that a CPU has.
KINDS = pytest.mark.parametrize("can_map", [memory.CAN_MAP, False], ids=["default", "resized"])


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch, can_map: bool) -> None:
    monkeypatch.setattr(memory, "CAN_MAP", can_map)


def make_buffer(dtype: torch.dtype = torch.float32) -> FlatBuffer:
    return FlatBuffer(make_layout(2), SHAPES, dtype, CPU)


@KINDS
@pytest.mark.usefixtures("kind")
def test_there_is_no_memory_until_materialized_and_after_release() -> None:
    buffer = make_buffer()
    seen = [buffer.is_materialized]
    for change in (buffer.materialize, buffer.materialize, buffer.release, buffer.release):
        change()
        seen.append(buffer.is_materialized)
    assert seen == [False, True, True, False, False]


def test_storage_is_empty_after_release_where_memory_is_resized(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "CAN_MAP", False)
    buffer = make_buffer()
    sizes = [buffer.flat.untyped_storage().size()]
    for change in (buffer.materialize, buffer.release):
        change()
        sizes.append(buffer.flat.untyped_storage().size())
    assert sizes == [0, 160, 0]  # 40 elements of 4 bytes


@KINDS
@pytest.mark.usefixtures("kind")
def test_materialize_keeps_what_is_there() -> None:
    buffer = make_buffer()
    buffer.materialize()
    buffer.flat.fill_(3)
    buffer.materialize()
    assert buffer.flat.eq(3).all()


@KINDS
@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_alias_the_buffer_at_the_planned_addresses(dtype: torch.dtype) -> None:
    buffer = make_buffer(dtype)
    assert buffer.flat.shape == (40,)
    for _ in range(2):  # also after the memory has gone and come back
        buffer.materialize()
        base, size = buffer.flat.data_ptr(), buffer.flat.element_size()
        for view, offset, shape in zip(buffer.views, OFFSETS, SHAPES, strict=True):
            assert view.shape == shape
            assert view.dtype == dtype
            assert view.is_contiguous()
            assert view.storage_offset() == offset
            assert view.untyped_storage()._cdata == buffer.flat.untyped_storage()._cdata
            if view.numel():
                assert view.data_ptr() == base + offset * size
        buffer.flat.copy_(torch.arange(40))
        assert buffer.views[0].tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]
        assert buffer.views[3].tolist() == 36
        buffer.release()


@KINDS
@pytest.mark.usefixtures("kind")
def test_what_autograd_saved_is_found_again_after_release() -> None:
    buffer = make_buffer()
    view = buffer.views[1].requires_grad_()
    buffer.materialize()
    buffer.flat.fill_(2.0)
    loss = (view * view).sum()
    buffer.release()
    buffer.materialize()  # a gather in backward writes the parameters of that moment
    buffer.flat.fill_(5.0)
    loss.backward()
    assert view.grad is not None
    assert view.grad.tolist() == [10.0] * 7


def test_writes_to_the_buffer_do_not_count_as_writes_to_the_views() -> None:
    """An asynchronous gather bumps the version of the flat tensor, from its own thread."""
    buffer = make_buffer()
    buffer.materialize()
    before = [view._version for view in buffer.views]
    buffer.flat.fill_(1.0)
    buffer.flat[:20].fill_(2.0)
    assert [view._version for view in buffer.views] == before


def test_a_buffer_without_elements() -> None:
    buffer = FlatBuffer(plan([], 2), [], torch.float32, CPU)
    buffer.materialize()
    assert buffer.is_materialized
    assert buffer.flat.shape == (0,)
    assert buffer.views == []
    buffer.release()


def test_plain_tensors_can_be_made_in_inference_mode() -> None:
    with torch.inference_mode():
        assert torch.ones(1).is_inference()
        with plain_tensors():
            made = torch.ones(1)
            assert not torch.is_grad_enabled()
    assert not made.is_inference()
    made.mul_(torch.ones(1, requires_grad=True))  # autograd may save it

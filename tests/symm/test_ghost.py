"""Peers that are memory behind the host's link: where it lies, what streams do to its words, and what refuses."""

import sys
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl

import tileflux
from tileflux import FlagWrite
from tileflux.errors import PeerTimeout, TransportUnavailable
from tileflux.symm import ghost
from tileflux.symm.ghost import GhostTransport, stream_wait, stream_write
from tileflux.symm.group import Group
from tileflux.testing import run_ranks

GPU = torch.device("cuda", 0)


def test_without_a_gpu_there_are_no_ghosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(TransportUnavailable, match="a ghost world needs a GPU, and torch sees none") as caught:
        GhostTransport(2, GPU)
    assert caught.value.fix == "use a machine with a GPU"


def test_without_the_drivers_bindings_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(TransportUnavailable, match="cuda-bindings, which is not installed") as caught:
        GhostTransport(2, GPU)
    assert caught.value.fix == "pip install 'tileflux[cuda]'"


class FakeDriver:
    """Notes what is queued, and answers with ``result``."""

    CUstreamWaitValue_flags = SimpleNamespace(CU_STREAM_WAIT_VALUE_GEQ=11)
    CUstreamWriteValue_flags = SimpleNamespace(CU_STREAM_WRITE_VALUE_DEFAULT=12)

    def __init__(self, monkeypatch: pytest.MonkeyPatch, result: int = 0) -> None:
        self.calls: list[tuple[object, ...]] = []
        self.result = result
        monkeypatch.setattr(ghost, "_driver", lambda: self)
        monkeypatch.setattr(ghost, "_stream", lambda: 77)

    def cuStreamWaitValue32(self, *arguments: int) -> tuple[int]:  # noqa: N802 - the driver's name
        self.calls.append(("wait", *arguments))
        return (self.result,)

    def cuStreamWriteValue32(self, *arguments: int) -> tuple[int]:  # noqa: N802
        self.calls.append(("write", *arguments))
        return (self.result,)


@pytest.mark.parametrize(("value", "bits"), [(5, 5), (-1, 0xFFFFFFFF), (-(2**31), 1 << 31), (2**31 - 1, 2**31 - 1)])
def test_what_the_driver_is_asked_for(value: int, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(monkeypatch)
    words = torch.zeros(4, dtype=torch.int32)
    stream_wait(words[1:2], value)
    stream_write(words[2:3], value)
    first = words.data_ptr()
    assert driver.calls == [("wait", 77, first + 4, bits, 11), ("write", 77, first + 8, bits, 12)]


@pytest.mark.parametrize("queue", [stream_wait, stream_write])
def test_what_the_driver_refuses_is_an_error(queue: object, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDriver(monkeypatch, result=801)
    with pytest.raises(RuntimeError, match="the CUDA driver refused a stream memory operation: 801"):
        queue(torch.zeros(1, dtype=torch.int32), 1)  # type: ignore[operator]


def on_gpu(function: object) -> None:
    """In a process of its own, which can be stopped if a stream never ends."""
    run_ranks(function, 1, where="spawn", device="cuda:0", make_group=False, timeout_s=120)  # type: ignore[arg-type]


def _use_segments(rank: int, world_size: int) -> None:
    transport = GhostTransport(4, GPU, rank=1)
    assert (transport.rank, transport.world_size, transport.name) == (1, 4, "ghost")
    traits = transport.traits
    assert traits.links == ("PCIe", "self", "PCIe", "PCIe") and not traits.copies_need_sms and not traits.has_multicast
    assert traits.num_sms == torch.cuda.get_device_properties(GPU).multi_processor_count
    segment = transport.allocate(1 << 20)
    assert segment.nbytes == 1 << 20 and len(segment.views) == 4
    for peer, view in enumerate(segment.views):
        assert view.shape == (1 << 20,) and view.dtype == torch.uint8 and view.eq(0).all()
        assert view.is_cuda == (peer == 1) and view.is_pinned() == (peer != 1)
    transport.agree("anything", object())
    assert transport.barrier(0.001) == ()
    assert transport.alarm().is_pinned() and transport.alarm().item() == 0


@pytest.mark.gpu
def test_ones_own_memory_is_on_the_gpu_and_the_ghosts_is_pinned() -> None:
    on_gpu(_use_segments)


def _order_streams(rank: int, world_size: int) -> None:
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    data, seen = torch.zeros(1 << 20, device=GPU), torch.zeros(1 << 20, device=GPU)
    # What is loaded while a stream waits may never be loaded: everything once before.
    torch.cuda._sleep(1000)
    seen.copy_(data)
    data.fill_(1.0)
    assert data.eq(1.0).all()
    for pinned in (False, True):
        word = (
            torch.zeros(1, dtype=torch.int32, pin_memory=True) if pinned else torch.zeros(1, dtype=torch.int32).cuda()
        )
        for step, (there, wanted) in enumerate([(6, 7), (-2, -1), (2**31 - 1, -(2**31))]):
            number = 10.0 * step + pinned + 2
            word.fill_(there)
            torch.cuda.synchronize()
            with torch.cuda.stream(second):
                stream_wait(word, wanted)
                seen.copy_(data, non_blocking=True)
                done = second.record_event()
            with torch.cuda.stream(first):
                torch.cuda._sleep(20_000_000)
                data.fill_(number)
                assert not done.query(), f"{there} was taken for {wanted}"
                stream_write(word, wanted)
            second.synchronize()
            assert seen.eq(number).all() and word.item() == wanted
    # Past the largest number: reached, as epochs are.
    word = torch.full((1,), -(2**31), dtype=torch.int32, pin_memory=True)
    stream_wait(word, 2**31 - 1)
    torch.cuda.current_stream().synchronize()


@pytest.mark.gpu
def test_streams_wait_for_each_others_words() -> None:
    on_gpu(_order_streams)


@triton.jit
def _store_kernel(to, first, COUNT: tl.constexpr):
    places = tl.arange(0, COUNT)
    tl.store(to.to(tl.pointer_type(tl.int32)) + places, first + places)


def _store_to_ghosts(rank: int, world_size: int) -> None:
    with Group(GhostTransport(3, GPU), timeout_s=5.0) as group:
        region = group.region("data", 4096)
        for peer in range(3):
            _store_kernel[(1,)](region.address(peer), 1000 * (peer + 1), COUNT=1024)
        group.synchronize()
        for peer in range(3):
            expected = torch.arange(1024, dtype=torch.int32) + 1000 * (peer + 1)
            assert torch.equal(region.view(peer, torch.int32).cpu(), expected)
        # There by the copy engine, and back; the flag behind the bytes.
        flags = group.region("flags", 256)
        value = torch.tensor([9], dtype=torch.int32, pin_memory=True)
        source = torch.arange(1024, dtype=torch.int32, device=GPU)
        flag = flags.view(2, torch.int32)[3:4]
        group.copy_async(region.view(2, torch.int32), source, signal=FlagWrite(flag, value)).wait()
        back = torch.zeros_like(source)
        group.copy_async(back, region.view(2, torch.int32)).wait()
        group.synchronize()
        assert torch.equal(back, source) and flag.item() == 9


@pytest.mark.gpu
def test_stores_and_copies_reach_a_ghost() -> None:
    on_gpu(_store_to_ghosts)


def _nobody_plays(rank: int, world_size: int) -> None:
    group = Group(GhostTransport(2, GPU), timeout_s=0.5)
    tileflux.barrier(group=group)
    with pytest.raises(PeerTimeout) as caught:
        group.synchronize()
    assert (caught.value.op, caught.value.rank, caught.value.peer) == ("barrier", 0, 1)
    group.close()


@pytest.mark.gpu
def test_an_op_that_nobody_plays_for_ends_with_a_timeout() -> None:
    on_gpu(_nobody_plays)

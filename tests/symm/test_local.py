"""Virtual ranks: one thread may drive all of them, and differences between ranks are found without waiting."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import tileflux
from tileflux import CommConfig
from tileflux.errors import MismatchError
from tileflux.symm import local
from tileflux.symm.local import local_transports


def test_the_first_rank_allocates_for_all() -> None:
    first, second = local_transports(2, torch.device("cpu"))
    segment = first.allocate(1024)
    assert second.allocate(1024) is segment
    assert first.allocate(512) is not segment
    segment.views[0].fill_(1)
    assert segment.views[1].eq(0).all() and segment.address(1) == segment.views[1].data_ptr()


def test_agreement_is_by_position() -> None:
    first, second, third = local_transports(3, torch.device("cpu"))
    first.agree("size", 10)
    first.agree("name", "x")
    second.agree("size", 10)
    with pytest.raises(MismatchError, match="size: rank 2 has 11 but rank 0 has 10"):
        third.agree("size", 11)
    with pytest.raises(MismatchError, match="rank 1 is at 'other' while rank 0 is at 'name'"):
        second.agree("other", "x")


def test_settled_agreements_are_forgotten() -> None:
    transports = local_transports(2, torch.device("cpu"))
    for index in range(100):
        for transport in transports:
            transport.agree("call", index)
    assert not transports[0]._world.ledger


def test_claims_meet_only_where_both_know() -> None:
    first, second, third = local_transports(3, torch.device("cpu"))
    first.agree("sizes", None, {"0 to 1": 5, "0 to 2": 6})
    second.agree("sizes", None, {"0 to 1": 5, "1 to 2": 8})
    with pytest.raises(MismatchError, match="sizes, 0 to 2: rank 2 has 7 but rank 0 has 6"):
        third.agree("sizes", None, {"0 to 2": 7})


def test_a_barrier_that_nobody_else_joins_names_them() -> None:
    first, _, _ = local_transports(3, torch.device("cpu"))
    assert first.barrier(0.05) == [1, 2]


@pytest.mark.parametrize(("was_set", "is_started"), [(False, False), (False, True), (True, True)])
def test_queues_that_come_too_late_are_said(
    was_set: bool, is_started: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in (("CUDA_DEVICE_MAX_CONNECTIONS", "32"), ("CUDA_MODULE_LOADING", "EAGER")):
        monkeypatch.delenv(name, raising=False)
        if was_set:
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: is_started)
    monkeypatch.setattr(local, "LocalTransport", lambda world, rank: rank)
    assert local_transports(2, torch.device("cuda", 0)) == [0, 1]
    assert ("CUDA_DEVICE_MAX_CONNECTIONS=32" in caplog.text) == (is_started and not was_set)


def test_a_world_is_idle_when_all_its_streams_are() -> None:
    first, second = local_transports(2, torch.device("cpu"))
    busy = [True, False]
    first._world.streams += [SimpleNamespace(query=lambda rank=rank: not busy[rank]) for rank in range(2)]
    assert not first.is_idle() and not second.is_idle()
    busy[0] = False
    assert first.is_idle() and second.is_idle()


def test_more_ranks_than_streams_are_refused() -> None:
    with pytest.raises(ValueError, match="world_size=33: torch has 32 streams"):
        local_transports(33, torch.device("cuda", 0))


@pytest.mark.gpu
def test_more_lanes_than_sms_are_refused() -> None:
    with pytest.raises(ValueError, match="num_lanes=1000 programs of one rank"):
        tileflux.local_groups(2, "cuda", config=CommConfig(num_lanes=1000))


@pytest.mark.gpu
def test_every_rank_on_a_gpu_has_its_stream_and_share() -> None:
    transports = local_transports(4, torch.device("cuda", 0))
    assert len({transport.stream for transport in transports}) == 4
    traits = transports[1].traits
    assert traits.copies_need_sms and traits.links == ("same GPU", "self", "same GPU", "same GPU")
    assert traits.num_sms == torch.cuda.get_device_properties(0).multi_processor_count // 4

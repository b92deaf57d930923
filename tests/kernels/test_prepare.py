"""Everything a group may launch is loaded by its first call."""

from __future__ import annotations

import pytest
import torch

import tileflux
from tileflux.kernels import prepare as module
from tileflux.kernels.prepare import prepare


def test_nothing_to_do_on_the_cpu() -> None:
    (group,) = tileflux.local_groups(1)
    prepare(group)
    assert group not in module._prepared


@pytest.mark.gpu
def test_a_group_is_prepared_once_and_not_while_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    (group,) = tileflux.local_groups(1, "cuda")
    assert group.stream is not None
    x = torch.ones(4, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=group.stream):
        with pytest.raises(ValueError, match="make one before capturing"):
            tileflux.barrier(group=group)
        x.add_(1)
    with torch.cuda.stream(group.stream):
        prepare(group)
    assert group in module._prepared
    monkeypatch.setattr(module, "_launch_all", lambda group: pytest.fail("launched again"))
    prepare(group)
    group.close()

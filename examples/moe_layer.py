"""A layer of experts, tensor- and expert-parallel: router, ``moe_ag_gemm`` with SwiGLU, ``moe_gemm_rs``.

    torchrun --standalone --nproc-per-node 4 examples/moe_layer.py        # TP = 4
    torchrun --standalone --nproc-per-node 4 examples/moe_layer.py 2      # TP = 2 x EP = 2
    torchrun --standalone --nproc-per-node 4 examples/moe_layer.py 4      # EP = 4
    python examples/moe_layer.py                                          # one rank, no launcher

Between layers every rank holds a part of the tokens. Each rank has the experts of its set, or its part of each of them,
and multiplies whatever tokens, of whatever rank, have chosen one. It compares its own tokens with the whole layer,
computed in fp32 without the others; the first one says so.
"""

import sys

import torch
import torch.distributed as dist

import tileflux
from tileflux.testing import assert_close

TOKENS, HIDDEN, INNER, EXPERTS, TOP_K = 256, 64, 128, 8, 2


def moe_layer(
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    ep_size: int,
    sizes: list[int],
    group: tileflux.Group,
) -> torch.Tensor:
    """This rank's tokens to the same tokens of the result, with this rank's part of the weights."""
    weights, expert_ids = torch.softmax(x.float() @ router.t(), dim=1).topk(TOP_K, dim=1)
    routing = tileflux.route(expert_ids, weights, num_experts=EXPERTS, group=group, ep_size=ep_size, sizes=sizes)
    inner = tileflux.moe_ag_gemm(x, gate_up, routing, activation="swiglu")  # a row for every choice of an expert here
    return tileflux.moe_gemm_rs(inner, down, routing)  # [tokens / W, hidden]


def whole_layer(
    x: torch.Tensor, router: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """The same on one rank, in fp32."""
    x, gate, up, down = x.float(), gate.float(), up.float(), down.float()
    weights, expert_ids = torch.softmax(x @ router.t(), dim=1).topk(TOP_K, dim=1)
    y = torch.zeros_like(x)
    for expert in range(EXPERTS):
        rows, choices = torch.where(expert_ids == expert)
        inner = torch.nn.functional.silu(x[rows] @ gate[expert].t()) * (x[rows] @ up[expert].t())
        y.index_add_(0, rows, inner @ down[expert].t() * weights[rows, choices, None])
    return y


def main(group: tileflux.Group, ep_size: int) -> None:
    """Take this rank's part of everything, run the layer, compare."""
    rank, world_size = group.rank, group.world_size
    tp_size = world_size // ep_size
    torch.manual_seed(0)  # every rank draws everything, so that each can check itself
    shapes = ((TOKENS, HIDDEN), (EXPERTS, INNER, HIDDEN), (EXPERTS, INNER, HIDDEN), (EXPERTS, HIDDEN, INNER))
    x, gate, up, down = ((torch.randn(s) * s[-1] ** -0.5).to(group.device, torch.bfloat16) for s in shapes)
    router = torch.randn(EXPERTS, HIDDEN, device=group.device)
    rows, (place, part) = x.tensor_split(world_size), divmod(rank, tp_size)
    gate_up = [each.chunk(ep_size)[place].tensor_split(tp_size, dim=1)[part] for each in (gate, up)]
    own_down = down.chunk(ep_size)[place].tensor_split(tp_size, dim=2)[part]

    y = moe_layer(rows[rank], router, torch.cat(gate_up, dim=1), own_down, ep_size, [len(part) for part in rows], group)
    group.synchronize()

    assert_close(y, whole_layer(x, router, gate, up, down).tensor_split(world_size)[rank], reduction=INNER)
    if rank == 0:
        ranks = f"TP {tp_size} x EP {ep_size} ({group.transport}, {group.device.type})"
        print(f"moe_layer: {TOKENS} tokens, {TOP_K} of {EXPERTS} experts each, on {ranks}: agrees with fp32")


if __name__ == "__main__":
    under_torchrun = dist.is_torchelastic_launched()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with (
        tileflux.Group.from_env() if under_torchrun else tileflux.local_groups(1, device)[0] as own_group,
        torch.cuda.stream(own_group.stream),
    ):
        main(own_group, int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    if under_torchrun:
        dist.destroy_process_group()

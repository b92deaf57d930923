"""A tensor-parallel MLP: SwiGLU up-projection in ``ag_gemm``, down-projection in ``gemm_rs``.

    torchrun --standalone --nproc-per-node 4 examples/dense_mlp.py    # four ranks, with a GPU each where there are
    python examples/dense_mlp.py                                      # one rank, no launcher

Between layers every rank holds a part of the tokens, inside the MLP all tokens and a part of the inner features. Each
rank compares its rows with the whole MLP, computed in fp32 without the others; the first one says so.
"""

import torch
import torch.distributed as dist

import tileflux
from tileflux.testing import assert_close

TOKENS, HIDDEN, INNER = 512, 256, 1024


def mlp(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, sizes: list[int], group: tileflux.Group
) -> torch.Tensor:
    """This rank's rows of x to the same rows of the result, with this rank's part of the weights."""
    inner = tileflux.ag_gemm(x, gate_up, group=group, sizes=sizes, activation="swiglu")  # [tokens, inner / W]
    return tileflux.gemm_rs(inner, down, group=group, sizes=sizes)  # [tokens / W, hidden]


def whole_mlp(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The same on one rank, in fp32."""
    x, gate, up, down = x.float(), gate.float(), up.float(), down.float()
    return (torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def main(group: tileflux.Group) -> None:
    """Take this rank's part of everything, run the MLP, compare."""
    rank, world_size = group.rank, group.world_size
    torch.manual_seed(0)  # every rank draws everything, so that each can check itself
    shapes = ((TOKENS, HIDDEN), (INNER, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER))
    x, gate, up, down = ((torch.randn(s) * s[1] ** -0.5).to(group.device, torch.bfloat16) for s in shapes)
    rows = x.tensor_split(world_size)
    gate_up = torch.cat([each.tensor_split(world_size)[rank] for each in (gate, up)])  # [2 inner / W, hidden]
    own_down = down.tensor_split(world_size, dim=1)[rank]  # [hidden, inner / W]

    y = mlp(rows[rank], gate_up, own_down, [len(part) for part in rows], group)
    group.synchronize()

    assert_close(y, whole_mlp(x, gate, up, down).tensor_split(world_size)[rank], reduction=INNER)
    if rank == 0:
        how = tileflux.explain("ag_gemm", TOKENS, INNER // world_size, HIDDEN, group=group).strategy
        ranks = f"{world_size} rank{'s' if world_size > 1 else ''} ({group.transport}, {group.device.type})"
        print(f"dense_mlp: {TOKENS} x {HIDDEN} -> {INNER} -> {HIDDEN} on {ranks}, {how}: agrees with fp32")


if __name__ == "__main__":
    under_torchrun = dist.is_torchelastic_launched()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with (
        tileflux.Group.from_env() if under_torchrun else tileflux.local_groups(1, device)[0] as own_group,
        torch.cuda.stream(own_group.stream),
    ):
        main(own_group)
    if under_torchrun:
        dist.destroy_process_group()

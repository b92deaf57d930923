"""What the dense ops share: checking the caller's tensors, and turning them into operands."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from tileflux.config import GemmConfig, GemmProblem
from tileflux.kernels.again import Again, Launched, make_again
from tileflux.kernels.groups import Groups
from tileflux.kernels.operands import ELEMENTS, Operands
from tileflux.ops._call import check_out, check_tensor, stopped
from tileflux.symm.group import Group
from tileflux.tune.lookup import STRATEGIES, Choice, lookup, num_readings, once_routed

__all__ = [
    "ACTIVATIONS",
    "FLOATS",
    "Decided",
    "Inputs",
    "Known",
    "as_lists",
    "as_scale",
    "call_again",
    "call_key",
    "check_dense",
    "check_strategy",
    "choose",
    "config_from",
    "config_text",
    "has_numbers",
    "make_inputs",
    "make_operands",
    "out_type",
    "product",
    "refuse_gradient",
]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
ACTIVATIONS = ("relu", "gelu", "silu", "swiglu")
_FP8_CAPABILITY = (8, 9)
_INT8_DEPTH = 2**31 // 128**2 - 1
_ALONE = ("gemm", "grouped_gemm")  # ops of one rank
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_log = logging.getLogger("tileflux")


class Inputs(NamedTuple):
    """The tensors of a product, in the order in which every dense op takes them."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    scale_x: torch.Tensor | None
    scale_weight: torch.Tensor | None


class Decided(NamedTuple):
    """What follows from a call's shapes and types."""

    problem: GemmProblem
    choice: Choice
    out_dtype: torch.dtype


@dataclasses.dataclass(slots=True)
class Known:
    """What is kept of a call for the next one with the same ``call_key``."""

    decided: Decided
    rows: tuple[int, ...] = ()
    takes_numbers: bool = False
    """A scale is given as a number, and becomes another tensor in every call."""
    again: Again | None = None
    """What makes it once more past all decisions, if that is possible."""

    def keep(self, launched: Launched | None, group: Group | None, inputs: Inputs, operands: Operands) -> None:
        """What was launched for ``inputs``, which have become ``operands``."""
        self.again = None if self.takes_numbers else make_again(launched, group, inputs, operands)


def has_numbers(*scales: object) -> bool:
    """Whether any of them is a number."""
    return any(isinstance(scale, (int, float)) for scale in scales)


def make_inputs(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale_x: torch.Tensor | float | None,
    scale_weight: torch.Tensor | float | None,
) -> Inputs:
    """With scales that are numbers made tensors."""
    return Inputs(x, weight, bias, as_scale(scale_x, x), as_scale(scale_weight, x))


def call_key(tensors: Iterable[Any], group: Any, *options: object) -> tuple[object, ...] | None:
    """What checks and choice of a call depend on: with the same key it needs neither again, and no dispatcher.

    None for a call that the dispatcher must see: traced, transformed, with a gradient, or with something in the place
    of a tensor that is none. A scale given as a number is checked by its type alone.
    """
    if torch.compiler.is_compiling() or not _is_eager() or not (group is None or isinstance(group, Group)):
        return None
    needs_gradient = torch.is_grad_enabled()
    key: list[object] = [None if group is None else group.name, num_readings(), *options]
    for tensor in tensors:
        kind = type(tensor)
        if kind in _PLAIN:
            if tensor.layout is not torch.strided or tensor.is_neg() or (needs_gradient and tensor.requires_grad):
                return None
            key += (tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        elif tensor is None or kind is float or kind is int:
            key.append(kind)
        else:
            return None
    return tuple(key)


def _is_eager() -> bool:
    """Whether nothing stands between a call and its kernels: no mode, no transform, no tracer."""
    return (
        torch._C._len_torch_dispatch_stack() == 0
        and torch._C._len_torch_function_stack() == 0
        and not torch._C._are_functorch_transforms_active()
        and torch._C._get_tracing_state() is None
        and forward_ad._current_level < 0
    )


def call_again(
    op: str, known: Known | None, group: Group | None, tensors: tuple[Any, ...], out: Any
) -> torch.Tensor | None:
    """The result of a call that is known, by what an earlier one launched; None if it must go the long way.

    ``tensors`` are x, the weight, the bias and both scales.
    """
    again = None if known is None else known.again
    if again is None:
        return None
    x, weight, *_ = tensors
    if (group is not None and group.check_calls) or not again.fits(x, weight, out):
        return None
    result = check_out(op, out, again.shape, x, dtype=again.dtype, others=tensors[1:])
    if group is None:
        again.launch(None, tensors, result)
        return result
    group.ensure_usable()
    group.order_stream()
    try:
        again.launch(group, tensors, result)
    except BaseException as error:
        stopped(group, error)
        raise
    return result


def check_dense(
    op: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    scale_x: torch.Tensor | float | None,
    scale_weight: torch.Tensor | float | None,
    activation: str | None,
    group: Group | None = None,
) -> None:
    """Refuse what no kernel takes, with what would be right. Without a group, for ops of one rank."""
    _check_place(op, x, weight, bias, group)
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dim() != 2:
            raise ValueError(f"{op}: {name} should be two-dimensional, not {tuple(tensor.shape)}; flatten the others")
    if x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"{op}: x {tuple(x.shape)} and weight {tuple(weight.shape)} differ in K; weight is [N, K], "
            "so pass w.t() for one kept as [K, N]"
        )
    if 1 not in weight.stride() and weight.numel() > 1:
        raise ValueError(
            f"{op}: weight has strides {weight.stride()}; one of its dimensions must be contiguous: "
            "pass weight.contiguous()"
        )
    _check_types(op, x, weight, scale_x is not None or scale_weight is not None)
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"{op}: activation={activation!r} should be None or one of {', '.join(ACTIVATIONS)}")
    if activation == "swiglu" and weight.shape[0] % 2:
        raise ValueError(f"{op}: swiglu wants gate and up packed as [2 F, K]; weight has {weight.shape[0]} rows")
    if bias is not None and (tuple(bias.shape) != (weight.shape[0],) or bias.dtype not in FLOATS):
        raise ValueError(
            f"{op}: bias should have shape ({weight.shape[0]},) and type float32, float16 or bfloat16, "
            f"not {tuple(bias.shape)} {bias.dtype}"
        )
    _check_scale(op, "scale_x", scale_x, x)
    _check_scale(op, "scale_weight", scale_weight, weight)


def _check_place(op: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: Any) -> None:
    tensors = {"x": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    for name, tensor in tensors.items():
        if op not in _ALONE:
            check_tensor(op, name, tensor, group)
        elif not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{op}: {name} should be a tensor, not {type(tensor).__name__}")
        elif tensor.layout != torch.strided:
            raise ValueError(f"{op}: {name} has layout {tensor.layout}; only dense tensors are multiplied")
        elif tensor.device != x.device:
            raise ValueError(f"{op}: {name} is on {tensor.device} but x is on {x.device}; move it there")


def _check_types(op: str, x: torch.Tensor, weight: torch.Tensor, has_scales: bool) -> None:
    if x.dtype not in ELEMENTS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in ELEMENTS)
        raise ValueError(f"{op}: x is {x.dtype}; what can be multiplied is {names}")
    if x.dtype != weight.dtype and not (x.dtype in FP8 and weight.dtype in FP8):
        raise ValueError(f"{op}: x is {x.dtype} and weight {weight.dtype}; they must be of one type, or both fp8")
    if has_scales and x.dtype in FLOATS:
        raise ValueError(f"{op}: scales belong to fp8 and int8; x is {x.dtype}, so multiply it beforehand")
    if x.dtype == torch.int8 and x.shape[1] > _INT8_DEPTH:
        raise ValueError(f"{op}: K={x.shape[1]} products of int8 may overflow int32; at most {_INT8_DEPTH} are exact")
    if x.dtype in FP8 and x.is_cuda and torch.cuda.get_device_capability(x.device) < _FP8_CAPABILITY:
        raise ValueError(f"{op}: {x.dtype} needs a GPU of compute capability 8.9 or later; convert to bfloat16")


def _check_scale(op: str, name: str, scale: torch.Tensor | float | None, scaled: torch.Tensor) -> None:
    if not isinstance(scale, torch.Tensor):
        if scale is not None and not isinstance(scale, (int, float)):
            raise ValueError(f"{op}: {name} should be a number or a float32 tensor, not {type(scale).__name__}")
        return
    fits = scale.dim() == 0 or tuple(scale.shape) == (scaled.shape[0],)
    if not fits or scale.dtype != torch.float32 or scale.device != scaled.device:
        raise ValueError(
            f"{op}: {name} should be float32 on {scaled.device}, a scalar or of shape ({scaled.shape[0]},), "
            f"not {tuple(scale.shape)} {scale.dtype} on {scale.device}"
        )


def as_lists(op: str, weights: Sequence[torch.Tensor], single: bool, **given: Any) -> dict[str, list[Any]]:
    """What goes with each of several weights, by name; an empty list for what is not given."""
    if not weights:
        raise ValueError(f"{op}: weight is an empty sequence; give at least one")
    found: dict[str, list[Any]] = {}
    for name, values in given.items():
        if values is None:
            found[name] = []
            continue
        if not single and not isinstance(values, (list, tuple)):
            raise ValueError(f"{op}: weight is a sequence, so {name} should be a list too, not {type(values).__name__}")
        found[name] = [values] if single else list(values)
        if len(found[name]) != len(weights) or any(value is None for value in found[name]):
            raise ValueError(f"{op}: {name} should be None or one for each of the {len(weights)} weights")
    return found


def check_strategy(op: str, strategy: str, config: GemmConfig | None) -> None:
    """Refuse unknown strategies, and configurations of another kind."""
    if strategy not in STRATEGIES:
        raise ValueError(f"{op}: strategy={strategy!r} is not one of {', '.join(STRATEGIES)}")
    if config is not None and not isinstance(config, GemmConfig):
        raise ValueError(f"{op}: config should be a tileflux.GemmConfig, not {type(config).__name__}")


def out_type(op: str, x: torch.Tensor, wanted: torch.dtype | None) -> torch.dtype:
    """Type of the result: that of x, or bf16 for fp8 and int8, or what is asked for."""
    if wanted is not None and wanted not in FLOATS:
        raise ValueError(f"{op}: out_dtype={wanted} should be torch.float32, torch.float16 or torch.bfloat16")
    return wanted or (x.dtype if x.dtype in FLOATS else torch.bfloat16)


def as_scale(scale: torch.Tensor | float | None, like: torch.Tensor) -> torch.Tensor | None:
    """A scale as a tensor on the device; a number becomes one without a copy from the host."""
    if scale is None or isinstance(scale, torch.Tensor):
        return scale
    return torch.full((), float(scale), dtype=torch.float32, device=like.device)


def _row_major(x: torch.Tensor) -> torch.Tensor:
    """``x`` with contiguous rows; its rows may lie apart."""
    return x if x.stride(1) == 1 and x.stride(0) >= x.shape[1] else x.contiguous()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """As memory has it: what is negated when it is read would come to a kernel with the wrong sign.

    The dispatcher sees to that, too, but a call with ``out=`` does not pass it.
    """
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    return tensor.detach() if tensor.requires_grad else tensor


def refuse_gradient(op: str, x: torch.Tensor, activation: str | None, *others: torch.Tensor | float | None) -> None:
    """Refuse a call whose result would silently have no gradient."""
    why = f"activation={activation!r}" if activation else "" if x.dtype in FLOATS else f"products of {x.dtype}"
    tensors = (x, *others)
    needed = any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors)
    if why and needed and torch.is_grad_enabled():
        raise ValueError(f"{op}: there is no gradient through {why}; do that outside the call, or use torch.no_grad()")


def choose(problem: GemmProblem, strategy: str, config: GemmConfig | None, num_rows: int | None = None) -> Choice:
    """The looked-up choice, with what the caller insists on put in its place.

    ``num_rows``: of an op of experts, as many as this rank's have.
    """
    choice = lookup(problem)
    if strategy == "auto" and num_rows is not None:
        choice = once_routed(choice, problem, num_rows)
    if strategy == "auto" and choice.strategy != "fused" and problem.world_size > 1:
        _say_once(problem.op, choice.strategy, choice.reason)
    return choice if strategy == "auto" and config is None else _insist(choice, strategy, config)


@functools.lru_cache(maxsize=1024)
def _insist(choice: Choice, strategy: str, config: GemmConfig | None) -> Choice:
    if strategy != "auto":
        choice = dataclasses.replace(choice, strategy=strategy, reason="asked for")
    return choice if config is None else dataclasses.replace(choice, config=config)


@functools.cache
def _say_once(op: str, strategy: str, reason: str) -> None:
    _log.info("%s runs %s: %s", op, strategy, reason)


_CONFIG_FIELDS = [field.name for field in dataclasses.fields(GemmConfig)]
_SWITCHES = [field.name for field in dataclasses.fields(GemmConfig) if field.default is False]


def config_text(config: GemmConfig | None) -> str:
    """A configuration as torch's dispatcher takes it; empty for None. An empty list would pass for one of tensors."""
    return "" if config is None else " ".join(str(int(value or 0)) for value in dataclasses.astuple(config))


@functools.lru_cache(maxsize=1024)
def config_from(text: str) -> GemmConfig | None:
    """The inverse of ``config_text``."""
    if not text:
        return None
    given: dict[str, Any] = dict(zip(_CONFIG_FIELDS, map(int, text.split()), strict=True))
    switches = {name: bool(given[name]) for name in _SWITCHES}
    return GemmConfig(**{**given, **switches, "num_sms": given["num_sms"] or None})


def make_operands(
    inputs: Inputs, out: torch.Tensor, activation: str = "", adds_bias: bool = True, groups: Groups | None = None
) -> Operands:
    """Operands as kernels want them: contiguous rows and vectors, nothing to negate or that requires a gradient."""
    x, weight, bias, scale_x, scale_weight = inputs
    return Operands(
        _plain(_row_major(x)),
        _plain(weight),
        out,
        bias=None if bias is None else _plain(bias).contiguous(),
        scale_x=None if scale_x is None else _plain(scale_x).contiguous(),
        scale_weight=None if scale_weight is None else _plain(scale_weight).contiguous(),
        activation=activation or None,
        adds_bias=adds_bias,
        groups=groups,
    )  # fmt: skip


def product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``a @ b`` for gradients: torch's, in fp32 on the CPU, where it is quicker and more exact."""
    if a.is_cuda:
        return torch.mm(a, b).to(dtype)
    return torch.mm(a.float(), b.float()).to(dtype)

"""Public ops, one per file: docstring with shapes, the function, its fake, its gradient, its reference."""

from tileflux.ops.ag_gemm import ag_gemm as ag_gemm
from tileflux.ops.ag_gemm import ag_gemm_reference as ag_gemm_reference
from tileflux.ops.all_gather import all_gather as all_gather
from tileflux.ops.all_gather import all_gather_reference as all_gather_reference
from tileflux.ops.all_reduce import all_reduce as all_reduce
from tileflux.ops.all_reduce import all_reduce_reference as all_reduce_reference
from tileflux.ops.all_to_all import all_to_all as all_to_all
from tileflux.ops.all_to_all import all_to_all_reference as all_to_all_reference
from tileflux.ops.barrier import barrier as barrier
from tileflux.ops.barrier import barrier_reference as barrier_reference
from tileflux.ops.broadcast import broadcast as broadcast
from tileflux.ops.broadcast import broadcast_reference as broadcast_reference
from tileflux.ops.ep_combine import ep_combine as ep_combine
from tileflux.ops.ep_combine import ep_combine_reference as ep_combine_reference
from tileflux.ops.ep_dispatch import Dispatched as Dispatched
from tileflux.ops.ep_dispatch import ep_dispatch as ep_dispatch
from tileflux.ops.ep_dispatch import ep_dispatch_reference as ep_dispatch_reference
from tileflux.ops.gemm import gemm as gemm
from tileflux.ops.gemm import gemm_reference as gemm_reference
from tileflux.ops.gemm_ar import gemm_ar as gemm_ar
from tileflux.ops.gemm_ar import gemm_ar_reference as gemm_ar_reference
from tileflux.ops.gemm_rs import gemm_rs as gemm_rs
from tileflux.ops.gemm_rs import gemm_rs_reference as gemm_rs_reference
from tileflux.ops.grouped_gemm import grouped_gemm as grouped_gemm
from tileflux.ops.grouped_gemm import grouped_gemm_reference as grouped_gemm_reference
from tileflux.ops.moe_ag_gemm import moe_ag_gemm as moe_ag_gemm
from tileflux.ops.moe_ag_gemm import moe_ag_gemm_reference as moe_ag_gemm_reference
from tileflux.ops.moe_gemm_ar import moe_gemm_ar as moe_gemm_ar
from tileflux.ops.moe_gemm_ar import moe_gemm_ar_reference as moe_gemm_ar_reference
from tileflux.ops.moe_gemm_rs import moe_gemm_rs as moe_gemm_rs
from tileflux.ops.moe_gemm_rs import moe_gemm_rs_reference as moe_gemm_rs_reference
from tileflux.ops.reduce_scatter import reduce_scatter as reduce_scatter
from tileflux.ops.reduce_scatter import reduce_scatter_reference as reduce_scatter_reference
from tileflux.ops.routing import Routing as Routing
from tileflux.ops.routing import route as route

__all__ = [
    "gemm_rs",
    "gemm_rs_reference",
    "gemm_ar",
    "gemm_ar_reference",
    "gemm",
    "gemm_reference",
    "grouped_gemm",
    "grouped_gemm_reference",
    "moe_ag_gemm",
    "moe_ag_gemm_reference",
    "moe_gemm_ar",
    "moe_gemm_ar_reference",
    "moe_gemm_rs",
    "moe_gemm_rs_reference",
    "Dispatched",
    "Routing",
    "ep_combine",
    "ep_combine_reference",
    "ep_dispatch",
    "ep_dispatch_reference",
    "route",
    "ag_gemm",
    "ag_gemm_reference",
    "all_gather",
    "all_gather_reference",
    "all_reduce",
    "all_reduce_reference",
    "all_to_all",
    "all_to_all_reference",
    "barrier",
    "barrier_reference",
    "broadcast",
    "broadcast_reference",
    "reduce_scatter",
    "reduce_scatter_reference",
]

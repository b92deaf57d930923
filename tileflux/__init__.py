"""Tileflux hides communication inside computation for tensor-, sequence- and expert-parallel models on GPUs.

This package exports; it does nothing. Importing it touches no GPU.
"""

from tileflux.config import CommConfig as CommConfig
from tileflux.config import GemmConfig as GemmConfig
from tileflux.errors import CapacityExceeded as CapacityExceeded
from tileflux.errors import GroupBroken as GroupBroken
from tileflux.errors import GroupClosed as GroupClosed
from tileflux.errors import MismatchError as MismatchError
from tileflux.errors import PeerTimeout as PeerTimeout
from tileflux.errors import RegionError as RegionError
from tileflux.errors import TilefluxError as TilefluxError
from tileflux.errors import TransportUnavailable as TransportUnavailable
from tileflux.ops import Dispatched as Dispatched
from tileflux.ops import Routing as Routing
from tileflux.ops import ag_gemm as ag_gemm
from tileflux.ops import all_gather as all_gather
from tileflux.ops import all_reduce as all_reduce
from tileflux.ops import all_to_all as all_to_all
from tileflux.ops import barrier as barrier
from tileflux.ops import broadcast as broadcast
from tileflux.ops import ep_combine as ep_combine
from tileflux.ops import ep_dispatch as ep_dispatch
from tileflux.ops import gemm as gemm
from tileflux.ops import gemm_ar as gemm_ar
from tileflux.ops import gemm_rs as gemm_rs
from tileflux.ops import grouped_gemm as grouped_gemm
from tileflux.ops import moe_ag_gemm as moe_ag_gemm
from tileflux.ops import moe_gemm_ar as moe_gemm_ar
from tileflux.ops import moe_gemm_rs as moe_gemm_rs
from tileflux.ops import reduce_scatter as reduce_scatter
from tileflux.ops import route as route
from tileflux.symm.base import FlagWrite as FlagWrite
from tileflux.symm.group import Group as Group
from tileflux.symm.group import local_groups as local_groups
from tileflux.tune.explain import Explanation as Explanation
from tileflux.tune.explain import explain as explain

__version__ = "0.1.0"

__all__ = [
    "CapacityExceeded",
    "CommConfig",
    "Dispatched",
    "Explanation",
    "FlagWrite",
    "GemmConfig",
    "Group",
    "GroupBroken",
    "GroupClosed",
    "MismatchError",
    "PeerTimeout",
    "RegionError",
    "TilefluxError",
    "TransportUnavailable",
    "__version__",
    "ag_gemm",
    "ep_combine",
    "ep_dispatch",
    "explain",
    "gemm",
    "gemm_ar",
    "gemm_rs",
    "grouped_gemm",
    "moe_ag_gemm",
    "moe_gemm_ar",
    "moe_gemm_rs",
    "route",
    "Routing",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "local_groups",
    "reduce_scatter",
]

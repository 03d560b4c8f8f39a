"""How the two legs of a SPLIT find each other, one file a protocol: what a leg must carry, and what P answers."""

from __future__ import annotations

from types import MappingProxyType

from .legs import KvProtocol
from .lmcache import LmCache
from .mooncake import Mooncake
from .moriio import Moriio, MoriioRead
from .nixl import Nixl
from .nixl_push import NixlPush
from .none import NoTransfers
from .offload_p2p import OffloadPeers
from .p2p_nccl import P2pNccl
from .sglang import Sglang
from .trtllm import TrtLlm, TrtLlmEarly

PROTOCOLS: MappingProxyType[str, KvProtocol] = MappingProxyType(
    {
        "nixl": Nixl(),
        "nixl_push": NixlPush(),
        "mooncake": Mooncake(),
        "p2p_nccl": P2pNccl(),
        "moriio": Moriio(),
        "moriio_read": MoriioRead(),
        "offload_p2p": OffloadPeers(),
        "lmcache": LmCache(),
        "sglang": Sglang(),
        "trtllm": TrtLlm(),
        "trtllm_gen_first": TrtLlmEarly(),
        "none": NoTransfers(),
    }
)

"""``import bagua_compat.torch_api as bagua``: what a Bagua script imports."""

from bagua_compat.torch_api import algorithms, checkpoint, communication, contrib, data_parallel
from bagua_compat.torch_api.communication import (
    ReduceOp,
    allgather,
    allgather_inplace,
    allreduce,
    allreduce_inplace,
    alltoall,
    alltoall_inplace,
    alltoall_v,
    alltoall_v_inplace,
    barrier,
    broadcast,
    gather,
    gather_inplace,
    get_backend,
    init_process_group,
    recv,
    reduce,
    reduce_inplace,
    reduce_scatter,
    reduce_scatter_inplace,
    scatter,
    scatter_inplace,
    send,
)
from bagua_compat.torch_api.env import get_local_rank, get_local_size, get_rank, get_world_size
from bagua_compat.torch_api.model_parallel import moe
from bagua_compat.torch_api.module import BaguaModule, install
from bagua_compat.torch_api.tensor import BaguaTensor

communication.patch_process_group()
install()

__all__ = [
    "BaguaModule",
    "BaguaTensor",
    "ReduceOp",
    "algorithms",
    "allgather",
    "allgather_inplace",
    "allreduce",
    "allreduce_inplace",
    "alltoall",
    "alltoall_inplace",
    "alltoall_v",
    "alltoall_v_inplace",
    "barrier",
    "broadcast",
    "checkpoint",
    "communication",
    "contrib",
    "data_parallel",
    "gather",
    "gather_inplace",
    "get_backend",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "moe",
    "recv",
    "reduce",
    "reduce_inplace",
    "reduce_scatter",
    "reduce_scatter_inplace",
    "scatter",
    "scatter_inplace",
    "send",
]

"""Bagua's communication functions beside numpy: every function, operation, dtype and kind of
communicator."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.distributed as dist

import bagua_compat.torch_api as bagua
from bagua_compat.torch_api import ReduceOp, communication
from bagua_compat.torch_api.communication import Communicator
from tests.ranks import RankPool

pytestmark = pytest.mark.slow

Array = npt.NDArray[Any]
DTYPES = (np.float32, np.float16, np.uint8, np.int64)
PART = 6
"""Elements of each rank's part."""


def _values(rank: int, dtype: type, elements: int, salt: int = 0) -> Array:
    """Small whole numbers, with which all sums, products and means are exact in any order."""
    return np.random.default_rng([rank, salt]).integers(1, 5, elements).astype(dtype)


def _reduced(op: ReduceOp, arrays: Sequence[Array]) -> Array:
    fold: dict[ReduceOp, Callable[[Any, Any], Any]] = {
        ReduceOp.SUM: np.add,
        ReduceOp.AVG: np.add,
        ReduceOp.PRODUCT: np.multiply,
        ReduceOp.MIN: np.minimum,
        ReduceOp.MAX: np.maximum,
        ReduceOp.BOR: np.bitwise_or,
        ReduceOp.BAND: np.bitwise_and,
        ReduceOp.BXOR: np.bitwise_xor,
    }
    found = reduce(fold[op], arrays)
    if op == ReduceOp.AVG:
        dtype = found.dtype
        found = found // len(arrays) if dtype.kind in "ui" else found / dtype.type(len(arrays))
        found = found.astype(dtype)
    return np.asarray(found)


class _Case:
    """One communicator and dtype: what every rank sends, and what this one has received."""

    def __init__(self, comm: Communicator, dtype: type) -> None:
        self.comm, self.dtype = comm, dtype
        self.me, self.n = comm.rank(), comm.nranks()
        self.odd: list[str] = []

    def sent(self, elements: int) -> list[Array]:
        return [_values(rank, self.dtype, elements) for rank in range(self.n)]

    def own(self, elements: int) -> torch.Tensor:
        return torch.from_numpy(_values(self.me, self.dtype, elements).copy())

    def empty(self, elements: int) -> torch.Tensor:
        """Not a contiguous one, so that what is written must arrive there all the same."""
        wide = torch.full((elements, 2), 7, dtype=self.own(1).dtype)
        return wide[:, 0]

    def expect(self, what: str, found: torch.Tensor, expected: Array) -> None:
        if not np.array_equal(found.numpy(), expected):
            self.odd.append(f"{what} {self.dtype.__name__}: {found.tolist()}, not {expected}")

    def untouched(self, elements: int) -> Array:
        return self.empty(elements).numpy()


def _ops(dtype: type) -> list[ReduceOp]:
    bitwise = (ReduceOp.BOR, ReduceOp.BAND, ReduceOp.BXOR)
    return [op for op in ReduceOp if np.issubdtype(dtype, np.integer) or op not in bitwise]


def _check_reductions(case: _Case) -> None:
    comm, n, me = case.comm, case.n, case.me
    for op, root in itertools.product(_ops(case.dtype), (0, n - 1)):
        expected = _reduced(op, case.sent(PART))
        found = case.empty(PART)
        bagua.reduce(case.own(PART), found, root, op, comm)
        case.expect(f"reduce {op.name}", found, expected if me == root else case.untouched(PART))
        own = case.own(PART)
        bagua.reduce_inplace(own, root, op, comm)
        case.expect(
            f"reduce_inplace {op.name}", own, expected if me == root else case.sent(PART)[me]
        )
    for op in _ops(case.dtype):
        expected = _reduced(op, case.sent(PART))
        found = case.empty(PART)
        bagua.allreduce(case.own(PART), found, op, comm)
        case.expect(f"allreduce {op.name}", found, expected)
        matrix = case.own(PART).view(2, PART // 2)
        bagua.allreduce_inplace(matrix, op, comm)
        case.expect(f"allreduce_inplace {op.name}", matrix, expected.reshape(2, -1))
        whole = _reduced(op, case.sent(PART * n))
        found = case.empty(PART)
        bagua.reduce_scatter(case.own(PART * n), found, op, comm)
        case.expect(f"reduce_scatter {op.name}", found, whole.reshape(n, -1)[me])
        own = case.own(PART * n)
        bagua.reduce_scatter_inplace(own, op, comm)
        rest = case.sent(PART * n)[me][PART:]
        case.expect(
            f"reduce_scatter_inplace {op.name}",
            own,
            np.concatenate([whole.reshape(n, -1)[me], rest]),
        )


def _check_gathers(case: _Case) -> None:
    comm, n, me = case.comm, case.n, case.me
    gathered = np.concatenate(case.sent(PART))
    own_parts = np.concatenate([a.reshape(n, -1)[r] for r, a in enumerate(case.sent(PART * n))])
    found = case.empty(PART * n)
    bagua.allgather(case.own(PART), found, comm)
    case.expect("allgather", found, gathered)
    own = case.own(PART * n)
    bagua.allgather_inplace(own, comm)
    case.expect("allgather_inplace", own, own_parts)
    for root in (0, n - 1):
        found = case.empty(PART * n)
        bagua.gather(case.own(PART), found, root, comm)
        case.expect("gather", found, gathered if me == root else case.untouched(PART * n))
        mine = case.own(PART)
        if me == root:
            mine = torch.cat([mine if rank == me else mine * 0 for rank in range(n)])
        bagua.gather_inplace(mine, PART, root, comm)
        case.expect("gather_inplace", mine, gathered if me == root else case.sent(PART)[me])
        found = case.empty(PART)
        parts = case.sent(PART * n)[root].reshape(n, -1)
        bagua.scatter(case.own(PART * n), found, root, comm)
        case.expect("scatter", found, parts[me])
        own = case.own(PART * n if me == root else PART)
        bagua.scatter_inplace(own, PART, root, comm)
        case.expect("scatter_inplace", own, parts.reshape(-1) if me == root else parts[me])
        own = case.own(PART)
        bagua.broadcast(own, root, comm)
        case.expect("broadcast", own, case.sent(PART)[root])


def _check_exchanges(case: _Case) -> None:
    comm, n, me = case.comm, case.n, case.me
    swapped = np.concatenate([a.reshape(n, -1)[me] for a in case.sent(PART * n)])
    found = case.empty(PART * n)
    bagua.alltoall(case.own(PART * n), found, comm)
    case.expect("alltoall", found, swapped)
    own = case.own(PART * n)
    bagua.alltoall_inplace(own, comm)
    case.expect("alltoall_inplace", own, swapped)
    # Rank r sends r + i + 1 elements to rank i, from places with a gap of one between them.
    size = 2 * n * n + n
    counts = [me + rank + 1 for rank in range(n)]
    places = [rank * 2 * n + rank for rank in range(n)]
    expected = case.untouched(size).copy()
    inplace = case.sent(size)[me].copy()
    for source, array in enumerate(case.sent(size)):
        part = array[me * 2 * n + me :][: counts[source]]
        expected[places[source] : places[source] + counts[source]] = part
        inplace[places[source] : places[source] + counts[source]] = part
    found = case.empty(size)
    bagua.alltoall_v(case.own(size), counts, places, found, counts, [*places, size], comm)
    case.expect("alltoall_v", found, expected)
    own = case.own(size)
    bagua.alltoall_v_inplace(own, counts, places, comm)
    case.expect("alltoall_v_inplace", own, inplace)
    if n % 2 == 0:  # Around a ring; in a pair of ranks one sends while the other receives.
        found = case.empty(PART)
        if me % 2 == 0:
            bagua.send(case.own(PART), (me + 1) % n, comm)
        bagua.recv(found, (me - 1) % n, comm)
        if me % 2 == 1:
            bagua.send(case.own(PART), (me + 1) % n, comm)
        case.expect("recv", found, case.sent(PART)[me - 1])


def _check_coalesced(case: _Case) -> None:
    whole = case.own(PART)
    pieces = [whole[:2].clone(), whole[2:].clone().view(2, 2)]
    communication.allreduce_coalesced_inplace(pieces, comm=case.comm)
    total = _reduced(ReduceOp.SUM, case.sent(PART))
    case.expect("allreduce_coalesced", torch.cat([p.reshape(-1) for p in pieces]), total)
    pieces = [whole[:2].clone(), whole[2:].clone().view(2, 2)]
    communication.broadcast_coalesced(pieces, case.n - 1, case.comm)
    last = case.sent(PART)[-1]
    case.expect("broadcast_coalesced", torch.cat([p.reshape(-1) for p in pieces]), last)


def _communicators() -> Iterator[Any]:
    """Of all ranks, of the last two, of every second one, of nodes; also those without this one."""
    world = dist.get_world_size()
    group = communication._get_default_group()
    yield group.get_global_communicator()
    for ranks in ([world - 2, world - 1], list(range(0, world, 2))):
        yield communication.new_group(ranks).get_global_communicator()
        yield communication.from_torch_group(dist.new_group(ranks)).get_global_communicator()
    yield group.get_inter_node_communicator()
    yield group.get_intra_node_communicator()


def _differences() -> tuple[int, list[str]]:
    bagua.init_process_group()
    odd, members = [], 0
    for comm in _communicators():
        if comm is communication.CommMember.NON_COMM_MEMBER:
            bagua.allreduce_inplace(torch.ones(1), comm=comm)  # Would wait for nobody.
            assert communication.broadcast_object("own", comm=comm) == "own"
            continue
        members += 1
        for dtype in DTYPES:
            case = _Case(comm, dtype)
            _check_reductions(case)
            _check_gathers(case)
            _check_exchanges(case)
            _check_coalesced(case)
            odd += case.odd
        obj = communication.broadcast_object({"from": comm.rank()}, comm.nranks() - 1, comm)
        assert obj == {"from": comm.nranks() - 1}
        communication.barrier(comm)
    return members, odd


@pytest.mark.parametrize("ranks", ["three_ranks", "four_ranks"])
def test_every_function_does_what_numpy_says(ranks: str, request: pytest.FixtureRequest) -> None:
    pool: RankPool = request.getfixturevalue(ranks)
    outcomes = pool.run(_differences)
    assert [odd for _, odd in outcomes] == [[]] * pool.world_size
    assert sum(members for members, _ in outcomes) >= 3 * pool.world_size


def _of_unusual_shapes() -> list[list[float]]:
    """Of tensors without elements and without dimensions, of views, and of parameters."""
    bagua.init_process_group()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    group = communication.new_group(range(1, ranks)).get_global_communicator()
    parameter = torch.nn.Parameter(torch.tensor([float(rank)]))
    across = torch.arange(4.0).view(2, 2).t()
    none, one, all_ones = torch.zeros(0), torch.tensor(1.0 + rank), torch.zeros(ranks)
    for call in (bagua.broadcast, bagua.allreduce_inplace, bagua.allgather_inplace):
        call(none)
    for call in (bagua.alltoall_inplace, bagua.reduce_scatter_inplace, bagua.broadcast):
        call(none)
    bagua.gather(none, none, 0)
    bagua.scatter(none, none, 0)
    bagua.alltoall_v_inplace(none, [0] * ranks, [0] * ranks)
    bagua.allgather(one, all_ones)
    bagua.allreduce_inplace(one)
    bagua.broadcast(parameter, ranks - 1)
    bagua.allreduce_inplace(across)
    inside = torch.tensor(float(rank))
    bagua.broadcast(inside, 0, group)
    assert parameter.requires_grad
    return [all_ones.tolist(), [float(one), float(parameter), float(inside)], across.tolist()]


def test_tensors_may_have_any_shape(three_ranks: RankPool) -> None:
    n = three_ranks.world_size
    for rank, (gathered, single, across) in enumerate(three_ranks.run(_of_unusual_shapes)):
        assert gathered == [1.0 + i for i in range(n)]
        # Rank 0 of the group without the job's rank 0 is the job's rank 1.
        assert single == [sum(gathered), n - 1.0, min(rank, 1.0)]
        assert across == [[0.0, 2.0 * n], [1.0 * n, 3.0 * n]]


def _freed() -> tuple[bool, bool]:
    """Rank 1 waits for an operation that rank 0 never enters."""
    bagua.init_process_group()
    comm = communication._get_default_group().get_global_communicator()
    for _ in range(comm.rank()):
        threading.Timer(0.5, comm.abort).start()
        bagua.allreduce_inplace(torch.ones(1))
    was_aborted = comm.check_abort()
    comm.abort()
    bagua.allreduce_inplace(torch.ones(1))
    # Another communicator of the same ranks is not concerned.
    other = communication.new_group().get_global_communicator()
    value = torch.ones(1)
    bagua.allreduce_inplace(value, comm=other)
    return was_aborted, float(value) == comm.nranks()


def test_abort_frees_a_rank_that_is_stuck(two_ranks: RankPool) -> None:
    assert two_ranks.run(_freed, timeout_seconds=30) == [(False, True), (True, True)]


def _refusals() -> list[str]:
    """What is said of arguments that cannot be, before any rank communicates."""
    found = []
    t = torch.ones(3)
    for call in (
        lambda: bagua.allreduce(t, t),
        bagua.init_process_group,
        bagua.init_process_group,
        lambda: communication.new_group([0, 9]),
        lambda: bagua.allreduce(t, torch.ones(4)),
        lambda: bagua.allgather(t, t),
        lambda: bagua.alltoall_inplace(t),
        lambda: bagua.alltoall_v_inplace(t, [1], [0]),
        lambda: bagua.alltoall_v_inplace(t, [1, 3], [0, 1]),
        lambda: bagua.broadcast(t, 2),
        lambda: bagua.allreduce_inplace(t, ReduceOp.BOR),
        lambda: bagua.allreduce_inplace(t, 4),
        lambda: bagua.reduce_inplace(t.long(), 2, ReduceOp.BOR),
        lambda: bagua.allgather(t, torch.ones(6).long()),
        lambda: bagua.alltoall(torch.ones(2), torch.ones(2).long()),
        lambda: communication.allreduce_coalesced_inplace([t, t.long()]),
        lambda: bagua.allreduce_inplace(t, comm=dist.group.WORLD),
        lambda: bagua.allreduce_inplace(t, comm=communication._get_default_group()),
    ):
        try:
            call()
        except (TypeError, ValueError, RuntimeError) as error:
            found.append(str(error))
        else:
            found.append("")
    return found


def test_arguments_that_cannot_be_are_errors_that_say_why(two_ranks: RankPool) -> None:
    expected = [
        "call init_process_group first",
        "",
        "init_process_group was called before",
        "the job's ranks are 0 to 1, not 9",
        "has 4 elements and must have 3",
        "has 3 elements and must have 6",
        "3 elements does not divide by 2 ranks",
        "counts and send_displs need 2 entries",
        "name elements 1 to 4 of a tensor that has 3",
        "the communicator's ranks are 0 to 1, not 2",
        "BOR is for integers, not for torch.float32",
        "4 is not a valid ReduceOp",
        "the communicator's ranks are 0 to 1, not 2",
        "is of torch.int64, the other of torch.float32",
        "is of torch.int64, the other of torch.float32",
        "must have one dtype, not torch.float32, torch.int64",
        "comm must be a communicator, not <torch",
        "get_global_communicator()",
    ]
    for found in two_ranks.run(_refusals):
        for part, text in zip(expected, found, strict=True):
            assert part in text
            assert bool(part) == bool(text)


def _patched() -> list[Any]:
    bagua.init_process_group()
    group: Any = dist.new_group([0])
    if not isinstance(group, dist.ProcessGroup):
        outside = communication.from_torch_group(group)
        assert communication._rank_not_in_group(outside)
        return []
    assert group.bagua_patch() is group
    found = [group.bagua_pg.ranks, group.bagua_get_global_communicator().nranks()]
    assert len(communication._torch_to_bagua_pg_map) == 1
    return found


def test_torch_s_groups_have_bagua_s_methods(two_ranks: RankPool) -> None:
    assert two_ranks.run(_patched) == [[[0], 1], []]

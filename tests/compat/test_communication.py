"""Bagua's communication functions beside numpy: every function, operation, dtype and kind of
communicator."""

from __future__ import annotations

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

    def expect(self, function: Any, found: torch.Tensor, expected: Array) -> None:
        if not np.array_equal(found.numpy(), expected):
            what = f"{function.__name__} {self.dtype.__name__}"
            self.odd.append(f"{what}: {found.tolist()}, not {expected}")

    def check(self, function: Any, sent: int, expected: Array, *arguments: Any) -> None:
        """From a tensor of so many elements to another."""
        found = self.empty(len(expected))
        function(self.own(sent), found, *arguments, self.comm)
        self.expect(function, found, expected)

    def check_inplace(
        self, function: Any, tensor: torch.Tensor, expected: Array, *arguments: Any
    ) -> None:
        function(tensor, *arguments, comm=self.comm)
        self.expect(function, tensor, expected)

    def untouched(self, elements: int) -> Array:
        return self.empty(elements).numpy()


def _ops(dtype: type) -> list[ReduceOp]:
    bitwise = (ReduceOp.BOR, ReduceOp.BAND, ReduceOp.BXOR)
    return [op for op in ReduceOp if np.issubdtype(dtype, np.integer) or op not in bitwise]


def _check_reductions(case: _Case) -> None:
    n, me = case.n, case.me
    own, untouched = case.sent(PART)[me], case.untouched(PART)
    for op in _ops(case.dtype):
        expected = _reduced(op, case.sent(PART))
        for root in (0, n - 1):
            is_root = me == root
            case.check(bagua.reduce, PART, expected if is_root else untouched, root, op)
            left = expected if is_root else own
            case.check_inplace(bagua.reduce_inplace, case.own(PART), left, root, op)
        case.check(bagua.allreduce, PART, expected, op)
        matrix = case.own(PART).view(2, -1)
        case.check_inplace(bagua.allreduce_inplace, matrix, expected.reshape(2, -1), op)
        part = _reduced(op, case.sent(PART * n)).reshape(n, -1)[me]
        case.check(bagua.reduce_scatter, PART * n, part, op)
        left = np.concatenate([part, case.sent(PART * n)[me][PART:]])
        case.check_inplace(bagua.reduce_scatter_inplace, case.own(PART * n), left, op)


def _check_gathers(case: _Case) -> None:
    n, me = case.n, case.me
    gathered = np.concatenate(case.sent(PART))
    own_parts = np.concatenate([a.reshape(n, -1)[r] for r, a in enumerate(case.sent(PART * n))])
    case.check(bagua.allgather, PART, gathered)
    case.check_inplace(bagua.allgather_inplace, case.own(PART * n), own_parts)
    for root in (0, n - 1):
        is_root = me == root
        case.check(bagua.gather, PART, gathered if is_root else case.untouched(PART * n), root)
        mine = case.own(PART)
        if is_root:
            mine = torch.cat([mine if rank == me else mine * 0 for rank in range(n)])
        left = gathered if is_root else case.sent(PART)[me]
        case.check_inplace(bagua.gather_inplace, mine, left, PART, root)
        parts = case.sent(PART * n)[root].reshape(n, -1)
        case.check(bagua.scatter, PART * n, parts[me], root)
        own = case.own(PART * n if is_root else PART)
        left = parts.reshape(-1) if is_root else parts[me]
        case.check_inplace(bagua.scatter_inplace, own, left, PART, root)
        case.check_inplace(bagua.broadcast, case.own(PART), case.sent(PART)[root], root)


def _check_exchanges(case: _Case) -> None:
    comm, n, me = case.comm, case.n, case.me
    swapped = np.concatenate([a.reshape(n, -1)[me] for a in case.sent(PART * n)])
    case.check(bagua.alltoall, PART * n, swapped)
    case.check_inplace(bagua.alltoall_inplace, case.own(PART * n), swapped)
    # Rank r sends r + i + 1 elements to rank i, from places with a gap of one between them.
    size = 2 * n * n + n
    counts = [me + rank + 1 for rank in range(n)]
    places = [rank * 2 * n + rank for rank in range(n)]
    expected, inplace = case.untouched(size).copy(), case.sent(size)[me].copy()
    for source, array in enumerate(case.sent(size)):
        part = array[me * 2 * n + me :][: counts[source]]
        for written in (expected, inplace):
            written[places[source] : places[source] + counts[source]] = part
    found = case.empty(size)
    bagua.alltoall_v(case.own(size), counts, places, found, counts, [*places, size], comm)
    case.expect(bagua.alltoall_v, found, expected)
    case.check_inplace(bagua.alltoall_v_inplace, case.own(size), inplace, counts, places)
    if n % 2 == 0:  # Around a ring; in a pair of ranks one sends while the other receives.
        found = case.empty(PART)
        if me % 2 == 0:
            bagua.send(case.own(PART), (me + 1) % n, comm)
        bagua.recv(found, (me - 1) % n, comm)
        if me % 2 == 1:
            bagua.send(case.own(PART), (me + 1) % n, comm)
        case.expect(bagua.recv, found, case.sent(PART)[me - 1])


def _check_coalesced(case: _Case) -> None:
    total, last = _reduced(ReduceOp.SUM, case.sent(PART)), case.sent(PART)[-1]
    for function, arguments, expected in (
        (communication.allreduce_coalesced_inplace, [ReduceOp.SUM], total),
        (communication.broadcast_coalesced, [case.n - 1], last),
    ):
        whole = case.own(PART)
        pieces = [whole[:2].clone(), whole[2:].clone().view(2, 2)]
        function(pieces, *arguments, comm=case.comm)  # type: ignore[operator]
        case.expect(function, torch.cat([piece.reshape(-1) for piece in pieces]), expected)


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


def _refusals() -> list[tuple[str, str]]:
    """What is said of arguments that cannot be, before any rank communicates, and what should."""
    t = torch.ones(3)
    ranks = "the communicator's ranks are 0 to 1, not 2"
    dtypes = "is of torch.int64, the other of torch.float32"
    calls: list[tuple[str, Callable[[], object]]] = [
        ("call init_process_group first", lambda: bagua.allreduce(t, t)),
        ("", bagua.init_process_group),
        ("init_process_group was called before", bagua.init_process_group),
        ("the job's ranks are 0 to 1, not 9", lambda: communication.new_group([0, 9])),
        ("has 4 elements and must have 3", lambda: bagua.allreduce(t, torch.ones(4))),
        ("has 3 elements and must have 6", lambda: bagua.allgather(t, t)),
        ("3 elements does not divide by 2 ranks", lambda: bagua.alltoall_inplace(t)),
        ("counts and send_displs need 2", lambda: bagua.alltoall_v_inplace(t, [1], [0])),
        ("name elements 1 to 4 of a tensor", lambda: bagua.alltoall_v_inplace(t, [1, 3], [0, 1])),
        (ranks, lambda: bagua.broadcast(t, 2)),
        ("not for torch.float32", lambda: bagua.allreduce_inplace(t, ReduceOp.BOR)),
        ("4 is not a valid ReduceOp", lambda: bagua.allreduce_inplace(t, 4)),
        (ranks, lambda: bagua.reduce_inplace(t.long(), 2, ReduceOp.BOR)),
        (dtypes, lambda: bagua.allgather(t, torch.ones(6).long())),
        (dtypes, lambda: bagua.alltoall(torch.ones(2), torch.ones(2).long())),
        (
            "must have one dtype, not torch.float32, torch.int64",
            lambda: communication.allreduce_coalesced_inplace([t, t.long()]),
        ),
        ("not <torch", lambda: bagua.allreduce_inplace(t, comm=dist.group.WORLD)),
        (
            "get_global_communicator()",
            lambda: bagua.allreduce_inplace(t, comm=communication._get_default_group()),
        ),
    ]
    found = []
    for expected, call in calls:
        try:
            call()
        except (TypeError, ValueError, RuntimeError) as error:
            found.append((str(error), expected))
        else:
            found.append(("", expected))
    return found


def test_arguments_that_cannot_be_are_errors_that_say_why(two_ranks: RankPool) -> None:
    for found in two_ranks.run(_refusals):
        for said, expected in found:
            assert expected in said
            assert bool(expected) == bool(said)


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

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bagua_autotune.costs import Layouts
from bagua_autotune.views.layouts import buckets, make_layouts
from bagua_wire.configuration import Configuration
from bagua_wire.cutting import Tensor


def tensor(index: int, size: int, group: str) -> Tensor:
    return Tensor(name=f"t{index}", elements=size, bytes=size, dtype=group, group=group)


MODELS = st.lists(st.tuples(st.integers(0, 5000), st.sampled_from("ab")), min_size=1, max_size=40)


@given(MODELS, st.integers(1, 20_000), st.data())
def test_the_buckets_hold_every_tensor_once(
    model: list[tuple[int, str]], size: int, data: st.DataObject
) -> None:
    tensors = [tensor(index, *found) for index, found in enumerate(model)]
    configuration = {"bucket_bytes": size, "first_bucket_bytes": data.draw(st.integers(0, size))}
    if data.draw(st.booleans()):
        ends = data.draw(st.sets(st.integers(1, len(tensors))))
        cuts = sorted(ends | {len(tensors)})
        counts = tuple(b - a for a, b in zip([0, *cuts], cuts, strict=False))
        configuration["buckets"] = counts
    layouts = Layouts(tensors)
    found = buckets(layouts, Configuration(configuration))
    assert sum(bucket.tensors for bucket in found) == len(tensors)
    assert sum(bucket.bytes for bucket in found) == sum(t.bytes for t in tensors)
    cut = layouts.cut(Configuration(configuration))
    assert [bucket.bytes for bucket in found] == cut.sizes_bytes.tolist()
    assert [bucket.last for bucket in found] == [f"t{last}" for last in cut.last.tolist()]
    group_of = {t.name: t.group for t in tensors}
    if "buckets" not in configuration:
        assert all(group_of[b.first] == group_of[b.last] for b in found)


def test_roles_come_in_words() -> None:
    tensors = [tensor(index, 400, "a") for index in range(10)]
    default = Configuration(bucket_bytes=4096, hierarchical="off")
    best = Configuration(bucket_bytes=1000, hierarchical="leaders")
    found = make_layouts(Layouts(tensors), {"default": default, "incumbent": best})
    assert (found.tensors, found.bytes) == (10, 4000)
    assert [(shown.role, shown.words, len(shown.buckets)) for shown in found.layouts] == [
        ("default", "bucket 4 KiB, flat", 1),
        ("incumbent", "bucket 1000 B, hierarchical", 4),
    ]
    last = found.layouts[1].buckets[-1]
    assert (last.bytes, last.tensors, last.first, last.last) == (400, 1, "t9", "t9")

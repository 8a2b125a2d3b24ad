"""The queue of keys against a naive model, and its memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.keyed_heap import KeyedHeap

keys = st.sampled_from("abcdef")
operations = st.lists(
    st.one_of(st.tuples(st.just("put"), keys, st.integers(0, 4)), st.tuples(st.just("discard"), keys, st.just(0)))
)


@given(operations)
def test_the_first_key_is_the_lowest_and_among_equals_the_oldest(steps: list[tuple[str, str, int]]) -> None:
    heap, model = KeyedHeap[str](), dict[str, tuple[float, int]]()
    for serial, (operation, key, priority) in enumerate(steps):
        if operation == "put":
            heap.put(key, priority)
            model[key] = (priority, serial)
        else:
            heap.discard(key)
            model.pop(key, None)
        first = min(model, key=lambda each: model[each], default=None)
        assert heap.first() == (None if first is None else (first, model[first][0]))
        assert len(heap) == len(model)
        assert ("a" in heap) == ("a" in model)


def test_removed_entries_do_not_pile_up_behind_a_first_that_stays() -> None:
    heap = KeyedHeap[str]()
    heap.put("first", 0.0)
    for number in range(10_000):
        heap.put(str(number), 1.0)
        heap.discard(str(number))
    assert heap.num_entries < 200

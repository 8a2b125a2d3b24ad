"""Copies of a world for explorations of every state, of which copying is most: as `copy.deepcopy`, in half the time.

How instances of a class are copied is found once. What cannot change (numbers, words, enumerations, and tuples, frozen sets and
frozen dataclasses of nothing else) is shared and known again in later copies. What is of no kind here is left to `copy.deepcopy`.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from itertools import count
from typing import Any, Final, TypeVar

import numpy as np

T = TypeVar("T")
_Memo = dict[int, Any]  # the id of an original -> its copy
_How = Callable[[Any, _Memo], Any]

_ATOMS: Final = frozenset(
    {int, float, bool, str, bytes, type(None), type, types.FunctionType, types.BuiltinFunctionType}
)
_PLAIN: Final = object.__reduce_ex__
_UNSET: Final = object()


class Copier:
    """Copies one thing after the other."""

    def __init__(self) -> None:
        self._shared: dict[int, Any] = {}  # by id, which is theirs for as long as they are here
        self._hows: dict[type, _How] = {
            dict: self._dict,
            list: self._list,
            set: self._set,
            deque: self._deque,
            tuple: self._tuple,
            frozenset: self._frozenset,
            Counter: self._counter,
            OrderedDict: self._ordered,
            types.MethodType: self._method,
            count: lambda thing, _memo: copy.copy(thing),
            np.ndarray: lambda thing, memo: memo.setdefault(id(thing), thing.copy()),
        }

    def copied(self, thing: T) -> T:
        """A copy that shares nothing with it that can change."""
        copied: T = self._any(thing, {})
        return copied

    def _any(self, thing: Any, memo: _Memo) -> Any:
        kind = thing.__class__
        if kind in _ATOMS:
            return thing
        number = id(thing)
        if number in self._shared:
            return thing
        if number in memo:
            return memo[number]
        how = self._hows.get(kind)
        if how is None:
            how = self._hows[kind] = self._find(kind)
        return how(thing, memo)

    def _find(self, kind: type) -> _How:
        if issubclass(kind, (enum.Enum, type)):
            return self._share
        if issubclass(kind, tuple) and hasattr(kind, "_make") and not hasattr(kind, "__deepcopy__"):
            return self._named_tuple
        is_ours = not hasattr(kind, "__deepcopy__") and not hasattr(kind, "__getnewargs__")
        if not is_ours or kind.__reduce_ex__ is not _PLAIN or kind.__reduce__ is not object.__reduce__:
            return _deepcopy
        if issubclass(kind, (tuple, list, dict, set, frozenset, deque, int, str, bytes)):
            return _deepcopy
        slots = tuple(dict.fromkeys(name for each in kind.__mro__ for name in _slots_of(each)))
        is_frozen = dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
        return self._frozen(slots) if is_frozen else self._instance(slots)

    def _share(self, thing: Any, _memo: _Memo) -> Any:
        self._shared[id(thing)] = thing
        return thing

    def _instance(self, slots: tuple[str, ...]) -> _How:
        def instance(thing: Any, memo: _Memo) -> Any:
            kind = thing.__class__
            made = memo[id(thing)] = kind.__new__(kind)
            for name in slots:
                value = getattr(thing, name, _UNSET)
                if value is not _UNSET:
                    if value.__class__ not in _ATOMS:
                        value = self._any(value, memo)
                    object.__setattr__(made, name, value)
            if (attributes := getattr(thing, "__dict__", None)) is not None:
                there = made.__dict__
                for name, value in attributes.items():
                    there[name] = value if value.__class__ in _ATOMS else self._any(value, memo)
            return made

        return instance

    def _frozen(self, slots: tuple[str, ...]) -> _How:
        copy_it = self._instance(slots)

        def frozen(thing: Any, memo: _Memo) -> Any:
            made = copy_it(thing, memo)
            values = [getattr(thing, name) for name in slots if hasattr(thing, name)]
            values += getattr(thing, "__dict__", {}).values()
            if all(each.__class__ in _ATOMS or id(each) in self._shared for each in values):
                memo[id(thing)] = thing
                return self._share(thing, memo)
            return made

        return frozen

    def _dict(self, thing: dict[Any, Any], memo: _Memo) -> Any:
        made: dict[Any, Any] = {}
        memo[id(thing)] = made
        for key, value in thing.items():
            made[self._any(key, memo)] = value if value.__class__ in _ATOMS else self._any(value, memo)
        return made

    def _list(self, thing: list[Any], memo: _Memo) -> Any:
        made: list[Any] = []
        memo[id(thing)] = made
        made += [each if each.__class__ in _ATOMS else self._any(each, memo) for each in thing]
        return made

    def _set(self, thing: set[Any], memo: _Memo) -> Any:
        made = memo[id(thing)] = {self._any(each, memo) for each in thing}
        return made

    def _deque(self, thing: deque[Any], memo: _Memo) -> Any:
        made: deque[Any] = deque(maxlen=thing.maxlen)
        memo[id(thing)] = made
        made.extend([self._any(each, memo) for each in thing])
        return made

    def _tuple(self, thing: tuple[Any, ...], memo: _Memo) -> Any:
        made = [self._any(each, memo) for each in thing]
        if all(old is new for old, new in zip(thing, made, strict=True)):
            return self._share(thing, memo)
        return memo.setdefault(id(thing), tuple(made))

    def _named_tuple(self, thing: Any, memo: _Memo) -> Any:
        made = self._tuple(thing, memo)
        if made is thing:
            return thing
        named = memo[id(thing)] = type(thing)._make(made)
        return named

    def _frozenset(self, thing: frozenset[Any], memo: _Memo) -> Any:
        made = frozenset([self._any(each, memo) for each in thing])
        if {id(each) for each in thing} == {id(each) for each in made}:
            return self._share(thing, memo)
        return memo.setdefault(id(thing), made)

    def _counter(self, thing: Counter[Any], memo: _Memo) -> Any:
        made = memo[id(thing)] = Counter()
        for key, value in thing.items():
            made[self._any(key, memo)] = value
        return made

    def _ordered(self, thing: OrderedDict[Any, Any], memo: _Memo) -> Any:
        made = memo[id(thing)] = OrderedDict()
        for key, value in thing.items():
            made[self._any(key, memo)] = self._any(value, memo)
        return made

    def _method(self, thing: types.MethodType, memo: _Memo) -> Any:
        return types.MethodType(thing.__func__, self._any(thing.__self__, memo))


def _deepcopy(thing: Any, memo: _Memo) -> Any:
    return copy.deepcopy(thing, memo)


def _slots_of(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    private = (f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") else name for name in names)
    return tuple(name for name in private if name not in ("__dict__", "__weakref__"))

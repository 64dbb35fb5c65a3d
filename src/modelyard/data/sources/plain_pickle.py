"""Reads pickles of arrays and basic types without Python's unpickler.

A pickle is a program. Even with a short list of allowed names, Python's unpickler can be made to fill the memory or to
damage it: NumPy trusts the state of a pickled dtype, and one operation may ask for 16 GB. Here, the operations that
such files need are carried out on plain values only; arrays are made last, from bytes whose number is right.
"""

from __future__ import annotations

import io
import math
import pickletools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from modelyard.errors import DataError

_MOST_OPERATIONS = 2_000_000
"""The largest official file, CIFAR-100's train, has about 200,000."""
_DTYPES = frozenset(
    f"{kind}{size}" for kind, sizes in (("iu", "1248"), ("f", "248")) for kind in kind for size in sizes
)
_NAMES = {
    (module, name): name
    for module, name in (
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
    )
}
_MARK = object()


class _RefusedError(Exception):
    """The reason why a pickle is refused."""


def load_plain_pickle(raw: bytes, name: str) -> Any:
    """Returns the content of a pickle of numeric arrays, text, bytes, numbers, lists, tuples and dictionaries.

    Texts of Python 2 are bytes.

    Raises:
        DataError: if it is damaged or holds anything else.
    """
    try:
        return _Machine().run(raw)
    except _RefusedError as error:
        raise DataError(f"{name} was refused: {error}.") from error
    # The errors of `pickletools`, and of a stack with other values than the operation needs.
    except (ValueError, TypeError, IndexError, KeyError, AttributeError, OverflowError, MemoryError) as error:
        raise DataError(f"{name} was refused: it is damaged or not a pickle of arrays ({error!s:.200}).") from error


class _Global:
    """One of the four names that a pickle of arrays needs."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class _DType:
    """The type of an array, as ``numpy.dtype('u1')`` names it, and its byte order."""

    __slots__ = ("order", "text")

    def __init__(self, text: str) -> None:
        self.text, self.order = text, "|"


class _Array:
    """An array: empty until its state is set. `value` is None before."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: NDArray[Any] | None = None


class _Machine:
    """Carries out the operations of one pickle."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, raw: bytes) -> Any:
        for number, (operation, argument, _) in enumerate(pickletools.genops(io.BytesIO(raw))):
            if number > _MOST_OPERATIONS:
                raise _RefusedError(f"it has more than {_MOST_OPERATIONS:,} operations")
            name = operation.name
            if name in _VALUES:
                self.stack.append(_VALUES[name](argument))
            elif name in _OPERATIONS:
                _OPERATIONS[name](self, argument)
            elif name == "STOP":
                return _whole(self.pop())
            else:
                raise _RefusedError(f"it has the operation {name}, which a file of arrays does not need")
        raise _RefusedError("it is cut off")

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise _RefusedError("it is damaged: a value is missing")
        return value

    def top(self, kind: type) -> Any:
        """Returns the value on top, which stays there."""
        if not self.stack or type(self.stack[-1]) is not kind:
            raise _RefusedError(f"it is damaged: a {kind.__name__} is missing")
        return self.stack[-1]

    def pop_to_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while at >= 0 and self.stack[at] is not _MARK:
            at -= 1
        if at < 0:
            raise _RefusedError("it is damaged: a mark is missing")
        values = self.stack[at + 1 :]
        del self.stack[at:]
        return values

    # -- operations ---------------------------------------------------------------------------------------------------

    def mark(self, _: Any) -> None:
        self.stack.append(_MARK)

    def get(self, number: int) -> None:
        self.stack.append(self.memo[number])

    def put(self, number: int) -> None:
        value = self.pop()
        self.memo[number] = value
        self.stack.append(value)

    def memoize(self, _: Any) -> None:
        self.put(len(self.memo))

    def make_tuple(self, _: Any) -> None:
        self.stack.append(tuple(self.pop_to_mark()))

    def make_list(self, _: Any) -> None:
        self.stack.append(self.pop_to_mark())

    def make_dict(self, _: Any) -> None:
        items = self.pop_to_mark()
        self.stack.append({})
        self.add_items(items)

    def append(self, _: Any) -> None:
        value = self.pop()
        self.top(list).append(value)

    def appends(self, _: Any) -> None:
        values = self.pop_to_mark()
        self.top(list).extend(values)

    def set_item(self, _: Any) -> None:
        value = self.pop()
        self.add_items([self.pop(), value])

    def set_items(self, _: Any) -> None:
        self.add_items(self.pop_to_mark())

    def add_items(self, items: list[Any]) -> None:
        into = self.top(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            # The hash of a tuple of tuples may take forever, or more stack than there is.
            if type(key) not in (bytes, str, int):
                raise _RefusedError(f"it has a dictionary with a {type(key).__name__} as a key")
            into[key] = value

    def find_name(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self.stack.append(_name(module, name))

    def find_name_on_stack(self, _: Any) -> None:
        name, module = self.pop(), self.pop()
        self.stack.append(_name(module, name))

    def call(self, _: Any) -> None:
        arguments, function = self.pop(), self.pop()
        if type(function) is not _Global or type(arguments) is not tuple:
            raise _RefusedError("it calls something that is not a function of arrays")
        if function.name == "dtype" and arguments and _is_dtype(arguments[0]):
            self.stack.append(_DType(_text(arguments[0])))
        elif function.name == "_reconstruct" and arguments and _is_ndarray(arguments[0]):
            self.stack.append(_Array())
        else:
            raise _RefusedError(f"it calls {function.name} for something that is not a numeric array")

    def build(self, _: Any) -> None:
        state = self.pop()
        target = self.stack[-1] if self.stack else None
        if type(state) is not tuple:
            raise _RefusedError("it sets a state that is not one of an array")
        if type(target) is _DType:
            _set_byte_order(target, state)
        elif type(target) is _Array:
            _fill(target, state)
        else:
            raise _RefusedError("it sets the state of something that is not an array")


def _name(module: Any, name: Any) -> _Global:
    if type(module) is not str or type(name) is not str:
        raise _RefusedError("it is damaged: a name is missing")
    if (module, name) not in _NAMES:
        raise _RefusedError(f"it names {module}.{name}, which a file of arrays does not need")
    return _Global(_NAMES[module, name])


def _text(value: bytes | str) -> str:
    return value.decode("ascii", "replace") if isinstance(value, bytes) else value


def _is_dtype(value: Any) -> bool:
    return type(value) in (bytes, str) and _text(value) in _DTYPES


def _is_ndarray(value: Any) -> bool:
    return type(value) is _Global and value.name == "ndarray"


def _set_byte_order(dtype: _DType, state: tuple[Any, ...]) -> None:
    """Takes the byte order from the state of a dtype; all else in it is for types with fields."""
    order = _text(state[1]) if len(state) >= 2 and type(state[1]) in (bytes, str) else ""
    if order not in ("<", ">", "|", "=") or any(part not in (None, -1, 0) for part in state[2:]):
        raise _RefusedError("it holds an array of something else than numbers")
    dtype.order = order


def _fill(array: _Array, state: tuple[Any, ...]) -> None:
    """Makes an array from its state: version, shape, type, whether columns come first, and the bytes."""
    if len(state) != 5 or type(state[1]) is not tuple or type(state[2]) is not _DType:
        raise _RefusedError("it is damaged: an array has no shape or no type")
    _, shape, found, by_column, content = state
    if type(content) is not bytes or len(shape) > 8 or any(type(size) is not int or size < 0 for size in shape):
        raise _RefusedError("it is damaged: an array has no shape or no values")
    dtype = np.dtype(found.text).newbyteorder(found.order)
    if math.prod(shape) * dtype.itemsize != len(content):
        raise _RefusedError(f"an array of {math.prod(shape)} numbers has {len(content)} bytes")
    array.value = np.frombuffer(content, dtype).reshape(shape, order="F" if by_column else "C")


def _whole(value: Any) -> Any:
    """Returns the result: what files of arrays hold is at the top, or in a list or dictionary there."""
    if type(value) is dict:
        return {key: _finished(inner) for key, inner in value.items()}
    return _finished(value)


def _finished(value: Any) -> Any:
    if type(value) is _Array:
        if value.value is None:
            raise _RefusedError("it is damaged: an array has no values")
        return value.value
    if type(value) in (_Global, _DType):
        raise _RefusedError("it holds something that is not an array")
    return value


def _integer(value: Any) -> int:
    if type(value) is bool:
        return value
    if not -(1 << 63) <= value < 1 << 63:
        raise _RefusedError("it holds a number of more than 64 bits")
    return int(value)


def _as_bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("latin-1")


def _same(value: Any) -> Any:
    return value


_VALUES: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"), _integer),
    **dict.fromkeys(("FLOAT", "BINFLOAT"), _same),
    **dict.fromkeys(("STRING", "BINSTRING", "SHORT_BINSTRING"), _as_bytes),  # texts of Python 2
    **dict.fromkeys(("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _same),
    **dict.fromkeys(("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"), _same),
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "EMPTY_LIST": lambda _: [],
    "EMPTY_TUPLE": lambda _: (),
    "EMPTY_DICT": lambda _: {},
}
"""Operations that put a value on the stack."""

_OPERATIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "MARK": _Machine.mark,
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), _Machine.get),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), _Machine.put),
    "MEMOIZE": _Machine.memoize,
    "TUPLE": _Machine.make_tuple,
    "TUPLE1": lambda machine, _: machine.stack.append((machine.pop(),)),
    "TUPLE2": lambda machine, _: machine.stack.append((machine.pop(), machine.pop())[::-1]),
    "TUPLE3": lambda machine, _: machine.stack.append((machine.pop(), machine.pop(), machine.pop())[::-1]),
    "LIST": _Machine.make_list,
    "DICT": _Machine.make_dict,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.appends,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_items,
    "GLOBAL": _Machine.find_name,
    "STACK_GLOBAL": _Machine.find_name_on_stack,
    "REDUCE": _Machine.call,
    "BUILD": _Machine.build,
}

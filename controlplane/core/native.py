"""How compiled code keeps the objects that every request makes; to the interpreter it says nothing.

`@native(free_list_len=1)` keeps the memory of the last one that went for the next one, `acyclic=True` leaves a class
out of the search for cycles: only for classes whose objects never refer back to what refers to them. `i64` is an int
that fits 64 bits: compiled code keeps it bare. `vec` is a sequence of such numbers, bare as well, of a length that it
keeps: make it as `vec[i64]([value] * length)`, write it by place, and read it all through the buffer protocol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from librt.vecs import vec
    from mypy_extensions import i64
    from mypy_extensions import mypyc_attr as native
else:
    from array import array

    i64 = int

    class vec:
        """What stands in for it in the interpreter."""

        def __class_getitem__(cls, item: type) -> Any:
            return lambda values: array("q", values)

    def native(**_: Any) -> Any:
        return lambda cls: cls


__all__ = ["i64", "native", "vec"]

"""Number formats of a pool's elements, as far as a case needs them: their size, their NaN, and how to stay finite."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFormat:
    """One element type, named as torch names it. Bit patterns are little-endian bytes of one element.

    Attributes:
        size: Bytes per element.
        nan: A NaN, or None if the format has none.
        clear, set: Bits that every number of the embedded model has clear, and set. They make it finite and not zero,
            and keep it finite when one of its bits flips, or all of them: a flipped bit is a case about content.
    """

    size: int
    nan: bytes | None
    clear: bytes
    set: bytes

    def number_like(self, octets: bytes) -> bytes:
        """Arbitrary bytes (of whole elements) made into numbers of the embedded model."""
        count = len(octets) // self.size
        clear, set_ = (int.from_bytes(bits * count, "little") for bits in (self.clear, self.set))
        return (int.from_bytes(octets, "little") & ~clear | set_).to_bytes(len(octets), "little")


def _floating(size: int, *, nan: int, clear: int, set_: int) -> NumberFormat:
    nan_bits, clear_bits, set_bits = (value.to_bytes(size, "little") for value in (nan, clear, set_))
    return NumberFormat(size=size, nan=nan_bits, clear=clear_bits, set=set_bits)


_INTEGER = NumberFormat(size=1, nan=None, clear=b"\x00", set=b"\x01")

# Clear are the highest bit of the exponent and the lowest (of e4m3fn, where only all ones are NaN: the lowest bit of
# the mantissa); set is the second highest.
DTYPES = {
    "float32": _floating(4, nan=0x7FC0_0000, clear=0x4080_0000, set_=0x2000_0000),
    "float16": _floating(2, nan=0x7E00, clear=0x4400, set_=0x2000),
    "bfloat16": _floating(2, nan=0x7FC0, clear=0x4080, set_=0x2000),
    "float8_e4m3fn": _floating(1, nan=0x7F, clear=0x41, set_=0x20),
    "float8_e5m2": _floating(1, nan=0x7E, clear=0x44, set_=0x20),
    "int8": _INTEGER,
    "uint8": _INTEGER,
}

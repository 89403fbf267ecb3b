"""Convert blocks of elements to another type, rounding to nearest even as torch does.

torch is not used, because its import takes longer and more memory than merging a model of a few GB. Chunks fit into the
processor's cache and all arrays are reused, which makes the conversion faster than a disk.
"""

import numpy as np

from shardmake.checkpoint.formats.dtypes import ITEM_SIZE
from shardmake.consolidate.blocks import Block, page_aligned

_VIEW = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
_CHUNK = 1 << 18
"""Elements; with fewer, threads wait for each other between numpy calls longer than a call takes."""


class Converter:
    """Converts blocks of at most ``elements`` elements; not shared by threads, because it owns the result."""

    def __init__(self, elements: int) -> None:
        self._out = page_aligned(elements * 4)
        self._bits = np.empty(_CHUNK, np.uint32)
        self._wide = np.empty(_CHUNK, np.float32)

    def convert(self, block: Block, source: str, target: str, shift: int = 0) -> Block:
        """Convert the bytes ``block`` (uint8) of elements of type ``source`` to bytes of type ``target``.

        The result starts ``shift`` bytes behind a page boundary and is valid until the next call.
        """
        values = block.view(_VIEW[source])
        out = self._out[shift : shift + values.size * ITEM_SIZE[target]].view(_VIEW[target])
        for begin in range(0, values.size, _CHUNK):
            chunk = slice(begin, begin + _CHUNK)
            self._narrow(self._widen(values[chunk], source), out[chunk], target)
        return out.view(np.uint8)

    def add(self, block: Block, source: str, target: str, delta: Block, shift: int = 0) -> Block:
        """Add ``delta`` (float32, one value per element) to ``block`` in float32 and convert the sum."""
        wide = self.convert(block, source, "F32").view(np.float32) + delta
        return self.convert(wide.view(np.uint8), "F32", target, shift)

    def _widen(self, values: Block, source: str) -> Block:
        """Return the values as float32."""
        if source == "F32":
            return values
        if source == "F16":
            self._wide[: values.size] = values
            return self._wide[: values.size]
        bits = self._wide[: values.size].view(np.uint32)
        bits[:] = values
        bits <<= 16
        return bits.view(np.float32)

    def _narrow(self, values: Block, out: Block, target: str) -> None:
        if target == "F32":
            out[:] = values
        elif target == "F16":
            with np.errstate(over="ignore"):  # overflow becomes infinity, which verification reports by tensor
                out[:] = values
        else:
            self._to_bf16(values, out)

    def _to_bf16(self, values: Block, out: Block) -> None:
        """Round the upper half of the bits to nearest even (IEEE 754); NaN becomes the quiet NaN."""
        bits, rounded = values.view(np.uint32), self._bits[: values.size]
        np.right_shift(bits, 16, out=rounded)
        np.bitwise_and(rounded, 1, out=rounded)
        np.add(rounded, 0x7FFF, out=rounded)
        np.add(rounded, bits, out=rounded)
        np.right_shift(rounded, 16, out=rounded)
        out[:] = rounded
        nan = np.isnan(values)
        if nan.any():
            out[nan] = 0x7FC0

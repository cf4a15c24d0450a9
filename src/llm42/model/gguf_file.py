"""Reading a GGUF file: its keys, its tensor table, and tensors as float32 rows.

Every length and offset is checked against the size of the file before it is used, so a truncated or corrupt file is a
`ModelError` naming the file and the key or tensor, never a crash half-way. The layout is the GGUF specification
(version 2 and 3, little-endian) of the ggml project; blocks are dequantized by the `gguf` package. Its own reader is
not used: it makes one array object per string, which takes seconds for a vocabulary, and it checks no bounds.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Final, TypeVar

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from llm42.errors import ModelError

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    import numpy.typing as npt
    from typing_extensions import Self

T = TypeVar("T")

MAGIC: Final = b"GGUF"
_DEFAULT_ALIGNMENT: Final = 32
_MAX_DIMENSIONS: Final = 4
_MAX_ARRAY_DEPTH: Final = 3
_SCALARS: Final[dict[int, str]] = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "|b1",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies: `shape` has the outermost dimension first (as in PyTorch), `offset` counts from byte 0."""

    name: str
    type: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class _HeaderReader:
    """A cursor over the header that refuses to read past the end of the file."""

    def __init__(self, file: BinaryIO, path: Path, size: int) -> None:
        self._file = file
        self._path = path
        self._size = size
        self.offset = 0

    def fail(self, what: str) -> ModelError:
        return ModelError(f"{self._path}: {what}; the file is truncated or corrupt, get it again")

    def take(self, count: int, what: str) -> bytes:
        if count > self._size - self.offset:
            raise self.fail(f"{what} at byte {self.offset} needs {count} bytes, but the file has {self._size}")
        self.offset += count
        return self._file.read(count)

    def uint32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def uint64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def string(self, what: str) -> str:
        raw = self.take(self.uint64(what), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8 ({error.reason} in {raw[:32]!r})") from error

    def value(self, raw_type: int, what: str, depth: int = 0) -> Any:
        try:
            value_type = GGUFValueType(raw_type)
        except ValueError as error:
            raise self.fail(f"{what} has the unknown value type {raw_type}") from error
        if value_type is GGUFValueType.STRING:
            return self.string(what)
        if value_type is GGUFValueType.ARRAY:
            return self._array(what, depth + 1)
        dtype = np.dtype(_SCALARS[value_type])
        return np.frombuffer(self.take(dtype.itemsize, what), dtype)[0].item()

    def _array(self, what: str, depth: int) -> list[Any]:
        raw_type, count = self.uint32(what), self.uint64(what)
        if raw_type in _SCALARS:
            dtype = np.dtype(_SCALARS[raw_type])
            return list(np.frombuffer(self.take(dtype.itemsize * count, what), dtype).tolist())
        if depth > _MAX_ARRAY_DEPTH or count > self._size:
            raise self.fail(f"{what} is an array of {count} entries nested {depth} deep")
        return [self.value(raw_type, what, depth) for _ in range(count)]


class GGUFFile:
    """An open GGUF file: `metadata` (key -> Python value), `tensors` (name -> `TensorInfo`), and `rows`.

    Opening reads the header only. Raises `ModelError` for anything that is not a complete, readable GGUF file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror}); give the path of a .gguf file") from error
        try:
            self._size = path.stat().st_size
            header = _HeaderReader(self._file, path, self._size)
            self.metadata, self.tensors = self._read_header(header)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _read_header(self, header: _HeaderReader) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        if (magic := header.take(4, "the GGUF header")) != MAGIC:
            raise ModelError(f"{self.path}: not a GGUF file (it starts with {magic!r}, not {MAGIC!r})")
        version = header.uint32("the GGUF version")
        if version not in (2, 3):
            raise ModelError(f"{self.path}: GGUF version {version} is not supported (little-endian 2 and 3 are)")
        num_tensors, num_keys = header.uint64("the tensor count"), header.uint64("the key count")
        metadata: dict[str, Any] = {}
        for index in range(num_keys):
            key = header.string(f"key {index} of {num_keys}")
            if key in metadata:
                raise header.fail(f"the key {key!r} occurs twice")
            metadata[key] = header.value(header.uint32(f"the type of {key!r}"), f"the value of {key!r}")
        table = [self._read_tensor_info(header, index, num_tensors) for index in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise header.fail(f"general.alignment is {alignment!r}, not a power of two")
        data_start = -(-header.offset // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for info in table:
            if info.name in tensors:
                raise header.fail(f"the tensor {info.name!r} occurs twice")
            placed = TensorInfo(info.name, info.type, info.shape, data_start + info.offset, info.num_bytes)
            if (end := placed.offset + placed.num_bytes) > self._size:
                raise header.fail(f"tensor {info.name!r} ends at byte {end}, but the file at {self._size}")
            tensors[info.name] = placed
        return metadata, tensors

    def _read_tensor_info(self, header: _HeaderReader, index: int, count: int) -> TensorInfo:
        name = header.string(f"the name of tensor {index} of {count}")
        num_dimensions = header.uint32(f"tensor {name!r}")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise header.fail(f"tensor {name!r} has {num_dimensions} dimensions")
        raw_shape = header.take(8 * num_dimensions, f"the shape of tensor {name!r}")
        shape = tuple(reversed(struct.unpack(f"<{num_dimensions}Q", raw_shape)))  # GGUF stores the innermost first
        raw_type, offset = header.uint32(f"tensor {name!r}"), header.uint64(f"tensor {name!r}")
        try:
            tensor_type = GGMLQuantizationType(raw_type)
        except ValueError as error:
            raise ModelError(
                f"{self.path}: tensor {name!r} has the unknown type {raw_type}; re-quantize the model to a type of the"
                " installed gguf package, for example Q8_0"
            ) from error
        block_size, block_bytes = GGML_QUANT_SIZES[tensor_type]
        if 0 in shape or shape[-1] % block_size:
            raise header.fail(f"tensor {name!r} has shape {shape}, not whole {tensor_type.name} blocks")
        num_bytes = math.prod(shape) // block_size * block_bytes
        return TensorInfo(name, tensor_type, shape, offset, num_bytes)

    def optional(self, key: str, kind: type[T]) -> T | None:
        """The value of `key` as `kind`, or None when the key is absent.

        A per-layer list whose entries are all equal counts as that one value. Raises `ModelError` for another type.
        """
        value = self.metadata.get(key)
        if value is None:
            return None
        if kind is not list and isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            shown = f"{value!r}"
            shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
            raise ModelError(f"{self.path}: {key} is {shown}, not {_KIND_NAMES[kind]}")
        return value

    def require(self, key: str, kind: type[T]) -> T:
        """The value of `key` as `kind`; raises `ModelError` when it is absent or of another type."""
        value = self.optional(key, kind)
        if value is None:
            raise ModelError(f"{self.path}: the key {key} is missing; convert the model again with a current llama.cpp")
        return value

    def rows(self, info: TensorInfo, start: int, stop: int) -> npt.NDArray[np.float32]:
        """Rows [start, stop) of a tensor, dequantized: float32 [stop - start, shape[-1]]. A vector is one row."""
        raw = self.raw_rows(info, start, stop)
        values: npt.NDArray[np.float32] = dequantize(raw, info.type)
        return values

    def raw_rows(self, info: TensorInfo, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Rows [start, stop) as stored: uint8 [stop - start, bytes per row]."""
        num_rows = math.prod(info.shape[:-1])
        row_bytes = info.num_bytes // num_rows
        self._file.seek(info.offset + start * row_bytes)
        raw = self._file.read((stop - start) * row_bytes)
        if len(raw) != (stop - start) * row_bytes:
            raise ModelError(f"{self.path}: tensor {info.name!r} ended early while it was read; the file has changed")
        return np.frombuffer(raw, np.uint8).reshape(stop - start, row_bytes)


_KIND_NAMES: Final[dict[type, str]] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    list: "an array",
}


def dequantize(raw: npt.NDArray[np.uint8], tensor_type: GGMLQuantizationType) -> npt.NDArray[np.float32]:
    """Stored rows (uint8 [n, bytes per row]) as float32 [n, columns]; NotImplementedError for an unknown type."""
    if tensor_type is GGMLQuantizationType.F64:
        return raw.view(np.float64).astype(np.float32)
    with np.errstate(all="ignore"):  # damaged scales give NaN, which whoever uses the values refuses by name
        values: npt.NDArray[np.float32] = gguf.dequantize(raw, tensor_type)
    return values

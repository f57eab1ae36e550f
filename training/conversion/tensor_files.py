"""Folders of safetensors files, read and written one tensor at a time.

The library maps whole files into memory and wants a whole file's tensors at once to write it, which a limit on the
address space and a checkpoint of hundreds of gigabytes do not allow. The format itself is 8 bytes of length, a JSON
header and the tensors' bytes; tests read and write it with the library on the other side.
"""

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ...model.hf import ConversionError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
LENGTH_BYTES = 8


@dataclass(frozen=True)
class Entry:
    """Where a tensor lies."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """First byte in the file."""
    num_bytes: int


class TensorFolder:
    """The tensors of a Hugging Face folder, by name.

    Raises ConversionError for a folder without safetensors files, a file cut short, a name in two files, and an index
    that names a file or a tensor that is not there, or leaves one out.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ConversionError(
                f"{path} has no *.safetensors file. Formats that are pickle inside run code when they are read and are "
                "not supported: save the model with safetensors."
            )
        self.entries: dict[str, Entry] = {}
        for file in files:
            for name, entry in _read_header(file):
                if name in self.entries:
                    raise ConversionError(f"{name} is in {self.entries[name].file.name} and in {file.name}.")
                self.entries[name] = entry
        if (index := path / INDEX).is_file():
            self._compare(json.loads(index.read_text())["weight_map"])
        elif len(files) > 1:
            raise ConversionError(f"{path} has {len(files)} files and no {INDEX}: some may be missing.")

    def _compare(self, weight_map: dict[str, str]) -> None:
        problems = []
        for name, file in weight_map.items():
            if name not in self.entries or self.entries[name].file.name != file:
                problems.append(f"{name} should be in {file} and is not.")
        problems += [f"{name} is in {self.entries[name].file.name} only." for name in self.entries.keys() - weight_map]
        if problems:
            raise ConversionError(f"{INDEX} and the files of {self.path} differ:", sorted(problems))

    def read(self, name: str) -> Tensor:
        entry = self.entries[name]
        raw = torch.empty(entry.num_bytes, dtype=torch.uint8)
        with open(entry.file, "rb", buffering=0) as file:
            file.seek(entry.start)
            view, done = raw.numpy().data, 0
            while done < entry.num_bytes:  # Linux reads 2 GiB at most in one call
                count = file.readinto(view[done:])
                if not count:
                    raise ConversionError(f"{entry.file} ends inside {name}.")
                done += count
        return raw.view(entry.dtype).reshape(entry.shape)


def _read_header(file: Path) -> Iterable[tuple[str, Entry]]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if not 0 < length <= size - LENGTH_BYTES:
            raise ConversionError(f"{file} is not a safetensors file, or is cut short.")
        header: dict[str, Any] = json.loads(stream.read(length))
    data = LENGTH_BYTES + length
    for name, value in header.items():
        if name == "__metadata__":
            continue
        if value["dtype"] not in DTYPES:
            raise ConversionError(f"{file}: {name} has dtype {value['dtype']}, which is not known here.")
        dtype, shape, (start, stop) = DTYPES[value["dtype"]], tuple(value["shape"]), value["data_offsets"]
        if data + stop > size:
            raise ConversionError(f"{file} is cut short: {name} ends at byte {data + stop} of {size}.")
        if stop - start != torch.Size(shape).numel() * dtype.itemsize:
            raise ConversionError(f"{file}: {name} has {stop - start} bytes, which is not {dtype} {shape}.")
        yield name, Entry(file, dtype, shape, data + start, stop - start)


@dataclass(frozen=True)
class Planned:
    """A tensor that a file will hold."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_header(stream: BinaryIO, tensors: Iterable[Planned]) -> None:
    """The head of a file whose tensors follow, in this order and without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in tensors:
        stop = start + tensor.num_bytes
        header[tensor.name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)  # the tensors start at a multiple of 8
    stream.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)


def write_tensor(stream: BinaryIO, tensor: Tensor) -> None:
    stream.write(bytes_of(tensor))


def bytes_of(tensor: Tensor) -> memoryview:
    """A contiguous CPU tensor's memory, without a copy."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data


def partial_name(final: Path) -> Path:
    """Where `final` is written until it is complete."""
    return final.with_name(final.name + ".partial")


def check_space(final: Path, num_bytes: int) -> None:
    """Raise ConversionError unless the disk has room for so many bytes, those of an unfinished conversion counted."""
    disk = next(parent for parent in final.absolute().parents if parent.is_dir())
    free = shutil.disk_usage(disk).free + sum(file.stat().st_size for file in partial_name(final).glob("*"))
    if num_bytes > free:
        raise ConversionError(f"{final} takes {num_bytes:,} bytes and the disk has {free:,}. Choose another --to.")


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)

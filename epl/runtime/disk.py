"""Tensors whose memory is a file: they take room in memory only while they are used.

Each file is opened without a name (so nothing is left, however the process ends), gets its blocks at once (so a full disk
is an error here, and not a SIGBUS at some later write), and is mapped, shared, into memory. A large tensor has a file to
itself, which the system takes back with the tensor; small ones are cut from files of 16 MiB, since a process may have only
some 65 thousand mappings (``vm.max_map_count``).

Why the mapping is made through ctypes: a ``mmap.mmap`` keeps a descriptor open for as long as it lives (before Python 3.13
and its ``trackfd``), and a process may have 1024 of them; its ``close()`` takes the memory from under tensors, as
``torch.frombuffer`` does not tell it of them. ``torch.UntypedStorage.from_file`` needs no descriptor, but reports the file
to torch's profiler as memory. What is mapped here goes with the last tensor in it, and never before.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from math import prod
from threading import Lock
from typing import Any

import torch

from epl.errors import RunError
from epl.units import size_text

__all__ = ["DiskSpace"]

_ALIGNMENT = 64  # as torch's own allocator on the CPU
_OWN_FILE = 4 << 20  # the size from which a tensor has a file to itself
_SHARED_FILE = 16 << 20
_ZEROS = 8 << 20  # written at once where the system cannot reserve blocks
_UNSUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = _LIBC.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MS_SYNC = 4 if os.uname().sysname == "Linux" else 16  # <sys/mman.h>; Python does not name it


class DiskSpace:
    """Room in a folder for tensors.

    Args:
        folder: Where the files are; they are never seen there.
        limit_bytes: The most that they may take; None for what is free there.

    Raises:
        RunError: no files can be made in the folder.

    Example:
        >>> space = DiskSpace("/tmp")
        >>> space.tensor((2, 3), torch.float32)
        tensor([[0., 0., 0.],
                [0., 0., 0.]])
    """

    def __init__(self, folder: str, limit_bytes: int | None = None) -> None:
        self.folder, self.limit_bytes = folder, limit_bytes
        self._files: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # mappings, by address
        self._storages: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()
        self._open: tuple[Any, int] | None = None  # the file that small tensors are cut from, and from where
        self._is_closed = False
        self._lock = Lock()
        os.close(self._descriptor())

    @property
    def used_bytes(self) -> int:
        """What the files take now."""
        return sum(map(len, self._mappings()))

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of zeros; its memory is given back when it and all its views are gone.

        Args:
            shape: Its shape.
            dtype: The type of its elements.

        Raises:
            RunError: the limit would be exceeded, the disk is full, or the space is closed.
        """
        size_bytes = max(prod(shape), 1) * dtype.itemsize
        with self._lock:
            if self._is_closed:
                raise RunError("the space for tensors on disk is closed; make a new one")
            if size_bytes >= _OWN_FILE:
                memory, start = self._file(size_bytes), 0
            else:
                memory, start = self._cut(size_bytes)
            flat = torch.frombuffer(memory, dtype=dtype, count=max(prod(shape), 1), offset=start)
            storage = flat.untyped_storage()
            self._storages[storage.data_ptr()] = storage
        stride = torch.empty(tuple(shape), device="meta").stride()
        return torch.empty(0, dtype=dtype).set_(storage, 0, tuple(shape), stride)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Is the tensor's memory in these files?"""
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            return False
        return tensor.untyped_storage().data_ptr() in self._storages

    def give_back_pages(self, *tensors: torch.Tensor) -> None:
        """Write to disk what has changed and take no room in memory until the next use; without tensors, for all.

        Raises:
            RunError: the disk does not take what is written.
        """
        spans = [_span(tensor) for tensor in tensors if self.holds(tensor)]
        files = [] if tensors else self._mappings()  # references: nothing may be unmapped meanwhile
        for start, size_bytes in _pages([*spans, *((ctypes.addressof(memory), len(memory)) for memory in files)]):
            if _LIBC.msync(start, size_bytes, _MS_SYNC):
                raise RunError(
                    f"offload.path: {self.folder!r} did not take {size_text(size_bytes)} of changes: "
                    f"{os.strerror(ctypes.get_errno())}. What is on disk is lost; look after the disk and start again"
                )
            _LIBC.madvise(start, size_bytes, mmap.MADV_DONTNEED)  # advice: nothing is lost if it is not taken

    def close(self) -> None:
        """Make no more tensors; those there are keep their memory until they die."""
        with self._lock:
            self._open, self._is_closed = None, True

    def _mappings(self) -> list[Any]:
        # not ``values()``, which fails when another thread adds one meanwhile
        return [memory for each in self._files.valuerefs() if (memory := each()) is not None]

    def _cut(self, size_bytes: int) -> tuple[Any, int]:
        """Room in a file of several tensors: the file's memory and where in it. Room is used once, so it is zeros."""
        if self._open is None or self._open[1] + size_bytes > len(self._open[0]):
            left = shutil.disk_usage(self.folder).free
            if self.limit_bytes is not None:
                left = min(left, self.limit_bytes - self.used_bytes)
            self._open = self._file(max(size_bytes, min(left, _SHARED_FILE))), 0
        memory, start = self._open
        self._open = memory, -(-(start + size_bytes) // _ALIGNMENT) * _ALIGNMENT
        return memory, start

    def _file(self, size_bytes: int) -> Any:
        """The memory of a new file, as an object that unmaps it when no tensor has it any more."""
        used = self.used_bytes
        if self.limit_bytes is not None and used + size_bytes > self.limit_bytes:
            raise RunError(
                f"offload.size_limit is {size_text(self.limit_bytes)}, {size_text(used)} are in use, and "
                f"{size_text(size_bytes)} more are needed; raise the limit, or offload fewer weights "
                "(offload.parameters)"
            )
        descriptor = self._descriptor()
        try:
            _reserve(descriptor, size_bytes)
            kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
            address = _LIBC.mmap(None, size_bytes, *kind, descriptor, 0)
            if address == ctypes.c_void_p(-1).value:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
        except OSError as error:
            raise RunError(self._refusal(error, size_bytes)) from error
        finally:
            os.close(descriptor)
        memory = (ctypes.c_char * size_bytes).from_address(address)
        end = weakref.finalize(memory, _LIBC.munmap, address, size_bytes)
        end.atexit = False  # tensors may outlive the interpreter's last steps
        self._files[address] = memory
        return memory

    def _descriptor(self) -> int:
        try:
            # without a name from the start where the system can do that, else without one from here on
            with tempfile.TemporaryFile(dir=self.folder) as file:
                return os.dup(file.fileno())
        except OSError as error:
            raise RunError(
                f"offload.path: no file can be made in {self.folder!r}: {error.strerror}. Set offload.path to a "
                "folder that is there on every host and that this user may write to"
            ) from error

    def _refusal(self, error: OSError, size_bytes: int) -> str:
        if error.errno == errno.ENOMEM:
            return (
                f"a file of {size_text(size_bytes)} cannot be mapped into memory; raise vm.max_map_count or ulimit -v"
            )
        free = size_text(shutil.disk_usage(self.folder).free)
        first = "raise ulimit -f, " if error.errno == errno.EFBIG else ""
        return (
            f"offload.path: {self.folder!r} has no room for {size_text(size_bytes)} more: {error.strerror}; {free} are "
            f"free there, {size_text(self.used_bytes)} are in use by this rank. To go on, {first}set offload.path to a "
            "folder on a larger disk, make room on this one, or offload fewer weights (offload.parameters)"
        )


def _reserve(descriptor: int, size_bytes: int) -> None:
    """Blocks for the whole file, so that no later write can fail for lack of them."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
            return
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
    zeros = bytes(min(size_bytes, _ZEROS))
    done = 0
    while done < size_bytes:
        done += os.pwrite(descriptor, zeros[: size_bytes - done], done)
    os.fsync(descriptor)  # some file systems find out only now that they are full


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """(address, bytes) from a tensor's first element to its last; of a view not what else is in its memory."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (steps + 1) * tensor.itemsize if tensor.numel() else 0


def _pages(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pages under these (address, bytes), with neighbours as one; a page's other tensors lose nothing."""
    found: list[tuple[int, int]] = []
    for start, size_bytes in sorted(spans):
        if not size_bytes:
            continue
        first, last = start // mmap.PAGESIZE * mmap.PAGESIZE, -(-(start + size_bytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(last, found[-1][1])
        else:
            found.append((first, last))
    return [(first, last - first) for first, last in found]

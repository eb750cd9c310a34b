"""Tensors in files: they count, train and save as any other, take room only while they are used, and leave nothing.

A mistake shows as a file that stays, a process that dies of SIGBUS when the disk is full, or memory that never falls.
"""

from __future__ import annotations

import copy
import errno
import gc
import io
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from epl.errors import RunError
from epl.runtime.disk import DiskSpace

MIB = 1 << 20


def resident_bytes() -> int:
    """What this process has of files in memory."""
    text = Path("/proc/self/status").read_text()
    (line,) = (
        line for line in text.splitlines() if line.startswith(("RssFile", "VmRSS")) and line.startswith("RssFile")
    )
    shared = next(line for line in text.splitlines() if line.startswith("RssShmem"))
    return sum(int(each.split()[1]) << 10 for each in (line, shared))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (7,), (5, 3), (2100, 1000)])
def test_a_tensor_is_zeros_of_its_shape_and_has_memory_of_its_own(
    tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    space = DiskSpace(str(tmp_path))
    one, other = space.tensor(shape, dtype), space.tensor(shape, dtype)
    assert one.shape == shape
    assert one.dtype is dtype
    assert one.is_contiguous()
    assert not one.float().any()
    assert one.data_ptr() % 64 == 0
    one.fill_(1)
    assert not other.float().any()
    assert space.holds(one)
    assert space.holds(one[..., None])
    assert not space.holds(one.clone())
    assert one.untyped_storage().nbytes() == max(one.numel(), 1) * dtype.itemsize
    assert os.listdir(tmp_path) == []


def test_thousands_of_small_tensors_share_files(tmp_path: Path) -> None:
    space = DiskSpace(str(tmp_path))

    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def mappings() -> int:
        return sum(str(tmp_path) in line for line in Path("/proc/self/maps").read_text().splitlines())

    before = files()
    kept = [space.tensor((1000,), torch.float32).fill_(place) for place in range(5000)]
    kept += [space.tensor((MIB,), torch.float32) for _ in range(20)]
    assert files() == before
    assert mappings() <= 22
    assert all(float(tensor[0]) == place == float(tensor[-1]) for place, tensor in enumerate(kept[:5000]))


def test_memory_is_given_back_when_tensors_die_and_not_before(tmp_path: Path) -> None:
    space = DiskSpace(str(tmp_path))
    large, small = space.tensor((2 * MIB,), torch.float32).fill_(2), space.tensor((8,), torch.float32).fill_(3)
    assert space.used_bytes == 24 * MIB
    view = large[5:]
    del large
    gc.collect()
    assert space.used_bytes == 24 * MIB
    assert float(view[-1]) == 2
    del view
    assert space.used_bytes == 16 * MIB
    space.close()
    assert float(small.sum()) == 24
    with pytest.raises(RunError, match="is closed"):
        space.tensor((1,), torch.float32)
    del space
    gc.collect()
    assert float(small.sum()) == 24
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    del small
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_resident_memory_falls_when_pages_are_given_back_and_nothing_is_lost(tmp_path: Path) -> None:
    space = DiskSpace(str(tmp_path))
    one, other = (space.tensor((8 * MIB,), torch.float32) for _ in range(2))
    small = [space.tensor((1000,), torch.float32).fill_(place) for place in range(100)]
    before = resident_bytes()
    one.fill_(1)
    other.fill_(2)
    assert resident_bytes() >= before + 63 * MIB
    space.give_back_pages(one, small[3], torch.ones(3))
    assert resident_bytes() <= before + 33 * MIB
    other.fill_(2)
    space.give_back_pages(other[: 4 * MIB], other.view(8, -1)[:, -1:][5:6], other[:0])
    assert before + 15 * MIB <= resident_bytes() <= before + 18 * MIB
    space.give_back_pages()
    assert resident_bytes() <= before + MIB
    assert float(one.sum()) == 8 * MIB
    assert float(other.sum()) == 16 * MIB
    assert all(float(tensor.sum()) == 1000 * place for place, tensor in enumerate(small))


def test_pages_may_be_given_back_while_another_thread_drops_tensors(tmp_path: Path) -> None:
    space = DiskSpace(str(tmp_path))
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            space.tensor((MIB + 5,), torch.float32)[:5].fill_(1)

    thread = threading.Thread(target=churn)
    thread.start()
    memory = [torch.full((MIB,), 7.0) for _ in range(8)]
    for _ in range(20):
        space.give_back_pages()
        memory.append(torch.full((MIB,), 7.0))
    stop.set()
    thread.join()
    assert all(bool((tensor == 7).all()) for tensor in memory)


def test_torch_saves_copies_and_changes_them_as_any_other(tmp_path: Path) -> None:
    space = DiskSpace(str(tmp_path))
    for size in (100, 2 * MIB):
        tensor = space.tensor((size,), torch.float32).uniform_()
        file = io.BytesIO()
        torch.save(tensor, file)
        assert len(file.getvalue()) < 4 * size + 4096
        file.seek(0)
        copies = (torch.load(file), copy.deepcopy(tensor), tensor.clone())
        assert all(torch.equal(each, tensor) and not space.holds(each) for each in copies)
        torch._foreach_mul_([tensor], 2.0)
        tensor.sqrt_().add_(1)
        assert torch.equal(tensor, copies[2].mul(2.0).sqrt().add(1))


# --------------------------------------------------------------------------------------------------------- wrong uses


def test_more_than_the_limit_is_refused_with_what_to_do(tmp_path: Path) -> None:
    space = DiskSpace(str(tmp_path), limit_bytes=12 * MIB)
    first = space.tensor((2 * MIB,), torch.float32)
    with pytest.raises(RunError, match=r"offload.size_limit is 12.0 MiB, 8.0 MiB are in use, and 8.0 MiB more"):
        space.tensor((2 * MIB,), torch.float32)
    small = space.tensor((MIB - 1,), torch.float32)  # the file of small ones takes no more than is left
    assert space.used_bytes == 12 * MIB
    with pytest.raises(RunError, match=r"offload.size_limit"):
        space.tensor((5,), torch.float32)
    del first
    space.tensor((2 * MIB,), torch.float32)
    assert float(small.sum()) == 0


def test_a_folder_in_which_no_file_can_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"offload.path: no file can be made in .*missing.*: No such file"):
        DiskSpace(str(tmp_path / "missing"))
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"offload.path: no file can be made in .*: Not a directory"):
        DiskSpace(str(tmp_path / "file"))


@contextmanager
def _files_up_to(size_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_larger_than_this_process_may_write_is_an_error_at_once(tmp_path: Path) -> None:
    space = DiskSpace(str(tmp_path))
    with (
        _files_up_to(6 * MIB),
        pytest.raises(RunError, match=r"no room for 8.0 MiB more: File too large; .* free there.*ulimit -f"),
    ):
        space.tensor((2 * MIB,), torch.float32)
    assert space.used_bytes == 0


def test_a_full_disk_is_an_error_at_once(tmp_path: Path) -> None:
    """Without blocks from the start, the write to the tensor would end the process with SIGBUS."""
    mount = ["mount", "-t", "tmpfs", "-o", "size=20m", "epl-test", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system of 20 MB, to fill it up, takes root: run as root to test a full disk")
    try:
        space = DiskSpace(str(tmp_path))
        kept = space.tensor((3 * MIB,), torch.float32).fill_(1)
        with pytest.raises(RunError, match=r"no room for 12.0 MiB more: No space left on device; 8.0 MiB are free"):
            space.tensor((3 * MIB,), torch.float32)
        assert float(kept[-1]) == 1
        small = space.tensor((10,), torch.float32).fill_(2)  # less than a whole file of small ones is left
        assert float(small.sum()) == 20
        del kept, small
        space.close()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_where_blocks_cannot_be_reserved_zeros_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    space = DiskSpace(str(tmp_path))
    tensor = space.tensor((5 * MIB + 3,), torch.float32)
    assert not tensor.any()
    with Path("/proc/self/maps").open() as maps:
        (line,) = (line for line in maps if str(tmp_path) in line)
    start, end = (int(each, 16) for each in line.split()[0].split("-"))
    assert end - start >= tensor.nbytes
    with _files_up_to(6 * MIB), pytest.raises(RunError, match=r"no room for 20.0 MiB more: File too large"):
        space.tensor((5 * MIB,), torch.float32)


KILLED = """
import os, signal, sys, torch
from epl.runtime.disk import DiskSpace
space = DiskSpace(sys.argv[1])
kept = [space.tensor((1 << 20,), torch.float32).fill_(1), space.tensor((5,), torch.float32)]
print(os.listdir(sys.argv[1]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout == "[]\n"
    assert os.listdir(tmp_path) == []

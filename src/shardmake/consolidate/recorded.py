"""Compare a checkpoint with the record that Shardmake wrote beside it, before the first byte of a merge is written.

The record has the CRC-32 of every file. The CRC-32 of a ``torch.save`` file follows from its zip directory, which has
the CRC-32 of every tensor's bytes, and from the few other bytes of the file. So the tensors are not read for it. The
copy compares those that the model needs with the zip directory. Files of other kinds are read completely.
"""

import os
import struct
import zipfile
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from isal.isal_zlib import crc32, crc32_combine

from shardmake.checkpoint.formats.torch_zip_reader import LOCAL_HEADER, FileRange, content_offset
from shardmake.checkpoint.record import RECORD_NAME, CheckpointRecord, file_problem, is_unfinished, read_record
from shardmake.core.errors import CheckpointError
from shardmake.core.fingerprint import BLOCK, FileEntry, fingerprint

_READ = 1 << 20
"""Bytes; smaller records of an archive are read, because the plan of the merge depends on them."""
_LARGE = 64 << 20
"""Bytes; of larger files that are not archives and that the merge does not need, only the size is compared."""


def check_recorded(folders: Collection[Path], used: Collection[Path], workers: int) -> CheckpointRecord | None:
    """Compare every file of a checkpoint of Shardmake with its record; return None for any other checkpoint.

    Args:
        folders: The checkpoint's folders.
        used: The files that the merge reads.
        workers: Threads.

    Raises:
        CheckpointError: The record is damaged, or files differ from it; the message names each.
    """
    checkpoint = next((folder for folder in folders if not is_unfinished(folder)), None)
    if checkpoint is None:
        return None
    record = read_record(checkpoint)
    if record is None:
        raise CheckpointError(f"{checkpoint / RECORD_NAME} is damaged. Use an older checkpoint, or copy it again.")
    files = {path.resolve() for path in used}
    with ThreadPoolExecutor(workers) as pool:
        entries = ((checkpoint / name, entry) for name, entry in record.files.items())
        found = pool.map(lambda item: _problem(item[0], item[1], item[0].resolve() in files), entries)
        problems = [problem for problem in found if problem]
    recorded = {(checkpoint / name).resolve() for name in record.files}
    inside = (path for path in sorted(files - recorded) if path.is_relative_to(checkpoint.resolve()))
    problems += [f"{path} was added after the save" for path in inside]
    if problems:
        lines = "\n".join(f"  {problem}." for problem in problems)
        raise CheckpointError(
            f"The files in {checkpoint} are not those that were saved, as {RECORD_NAME} lists them:\n{lines}\n"
            "Use an older checkpoint, or copy this one again."
        )
    return record


def _problem(path: Path, expected: FileEntry, is_used: bool) -> str:
    if problem := file_problem(path, expected, checksums=False):
        return problem
    from_directory = archive_crc32(path)
    if from_directory is None and expected.size > _LARGE and not is_used:
        return ""
    if from_directory is not None and f"{from_directory:08x}" == expected.crc32:
        return ""
    return "" if fingerprint(path).crc32 == expected.crc32 else f"{path} has another content"


def archive_crc32(path: Path) -> int | None:
    """Return the CRC-32 of a file of one or several zip archives, as their directories imply it.

    The file has this CRC-32 if every large record has the one in the directory. Return None for any other file.
    """
    with path.open("rb") as file:
        records = _large_records(file.fileno(), path.stat().st_size)
        if records is None:
            return None
        crc = at = 0
        for offset, size, expected in sorted(records):
            if offset < at:
                return None
            crc = crc32_combine(crc32_of(file.fileno(), at, offset, crc), expected, size)
            at = offset + size
        return crc32_of(file.fileno(), at, path.stat().st_size, crc)


def crc32_of(file: int, begin: int, end: int, crc: int = 0) -> int:
    """Return ``crc``, extended by the bytes ``[begin, end)`` of ``file``."""
    while begin < end:
        content = os.pread(file, min(BLOCK, end - begin), begin)
        if not content:
            break
        crc, begin = crc32(content, crc), begin + len(content)
    return crc


def _large_records(file: int, end: int) -> list[tuple[int, int, int]] | None:
    """Return offset, size and CRC-32 of each large record; None if the file is not made of archives of torch."""
    found: list[tuple[int, int, int]] = []
    try:
        while end:  # the directory of an archive is at its end, so the archives are read backwards
            entries = zipfile.ZipFile(FileRange(file, 0, end)).infolist()
            if not entries or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                return None
            for entry in entries:
                if entry.file_size > _READ:
                    header = LOCAL_HEADER.unpack(os.pread(file, LOCAL_HEADER.size, entry.header_offset))
                    found.append((content_offset(entry, header), entry.file_size, entry.CRC))
            end = min(entry.header_offset for entry in entries)
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error):
        return None
    return found

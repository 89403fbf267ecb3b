import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmake.core.errors import PushError
from shardmake.core.manifest import FileRecord, differences, format_sums, parse_sums, read_folder

DIGESTS = st.binary(min_size=32, max_size=32).map(bytes.hex)
NAMES = st.text(st.characters(exclude_categories=["C", "Z"]), min_size=1)
MANIFESTS = st.dictionaries(NAMES, st.builds(FileRecord, st.integers(min_value=0), DIGESTS))


@given(MANIFESTS)
def test_sums_are_equal_after_writing_and_reading(manifest: dict[str, FileRecord]) -> None:
    assert parse_sums(format_sums(manifest)) == {name: entry.sha256 for name, entry in manifest.items()}


@given(MANIFESTS, MANIFESTS)
def test_no_difference_means_equal_files(expected: dict[str, FileRecord], found: dict[str, FileRecord]) -> None:
    assert (differences(expected, found) == []) == (expected.items() <= found.items())


def test_sums_equal_those_of_coreutils(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a b").write_bytes(b"1")
    (tmp_path / "sub" / "c").write_bytes(b"2" * 100_000)
    theirs = subprocess.run(["sha256sum", "a b", "sub/c"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert format_sums(read_folder(tmp_path)) == theirs.stdout


@pytest.mark.parametrize("text", ["a file of mine\n", "0" * 64 + " one-space\n", "{}"])
def test_a_foreign_file_of_this_name_is_rejected(text: str) -> None:
    with pytest.raises(PushError, match="SHA256SUMS that was not written by Shardmake"):
        parse_sums(text)

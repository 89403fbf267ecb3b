"""The demo's data set: real documentation, parsed and never imported, split without a leak."""

from pathlib import Path

import pytest

from shardmake.demo.docstrings import DocstringEntry, collect, split

SOURCE = '''
"""Module text is no answer."""
raise RuntimeError("imported")

def area(width, height=1):
    """Return the area of a rectangle.

    Both sides are lengths in metres.
    """
    def inner():
        """Not to be found from outside."""

async def wait(seconds: float) -> None:
    """Sleep without blocking the event loop."""

def twin():
    """Return the area of a rectangle.

    Both sides are lengths in metres.
    """

def short():
    """Too short."""

def _private():
    """Return something that nobody should use."""

class Shape:
    """The base class of all shapes there are."""

    def scale(self, factor):
        """Make the shape larger by a factor."""

def wordy(aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa, bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb, ccccccccccccccc):
    """{first}

    {second}
    """
'''


@pytest.fixture
def library(tmp_path: Path) -> Path:
    source = SOURCE.replace("{first}", "a" * 300 + ".").replace("{second}", "b" * 300)
    (tmp_path / "geometry").mkdir()
    (tmp_path / "geometry" / "__init__.py").write_text(source)
    (tmp_path / "geometry" / "_hidden.py").write_text(source.replace("rectangle", "circle"))
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_geometry.py").write_text("def (")
    return tmp_path


def test_public_documented_names_are_found_once(library: Path) -> None:
    assert collect(library) == [
        DocstringEntry("geometry.Shape", "class", "", "The base class of all shapes there are."),
        DocstringEntry("geometry.Shape.scale", "method", "(self, factor)", "Make the shape larger by a factor."),
        DocstringEntry(
            "geometry.area",
            "function",
            "(width, height=1)",
            "Return the area of a rectangle.\n\nBoth sides are lengths in metres.",
        ),
        DocstringEntry("geometry.wait", "function", "(seconds: float)", "Sleep without blocking the event loop."),
        DocstringEntry("geometry.wordy", "function", "", "a" * 300 + "."),
    ]


def test_a_question_and_its_answer() -> None:
    messages = DocstringEntry("shutil.copy", "function", "(src, dst)", "Copy data and mode bits.").conversation()[
        "messages"
    ]
    assert [message["role"] for message in messages] == ["user", "assistant"]
    assert "shutil.copy(src, dst)" in messages[0]["content"]
    assert messages[1]["content"] == "Copy data and mode bits."


def test_the_standard_library_gives_thousands_and_the_splits_share_nothing() -> None:
    entries = collect()
    train, evaluation = split(entries, seed=0)
    assert len(train) > 3000 and len(evaluation) > 150
    assert not {entry.name for entry in train} & {entry.name for entry in evaluation}
    assert not {entry.answer for entry in train} & {entry.answer for entry in evaluation}
    assert sorted(entry.name for entry in train + evaluation) == [entry.name for entry in entries]
    assert split(entries, seed=0) == (train, evaluation) != split(entries, seed=1)
    assert len({entry.conversation()["messages"][0]["content"].split()[0] for entry in train}) > 4

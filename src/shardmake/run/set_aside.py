"""What a run left under other settings: put aside, and taken back when it has those settings again."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path


def stash_and_restore(folder: Path, theirs: str, ours: str, tell: Callable[[str], None]) -> None:
    """Put aside ``folder``, made under the recipe ``theirs``, and take back what was once made there under ``ours``."""
    aside = next(place for place in _places(folder, theirs) if not place.exists())
    tell(f"{folder.name} belongs to other settings; it is now {aside.name}.")
    folder.rename(aside)
    own = next(_places(folder, ours))
    if own.exists():
        tell(f"Taking back {own.name}, which belongs to these settings.")
        own.rename(folder)


def _places(folder: Path, recipe: str) -> Iterator[Path]:
    """Where what was made under a recipe may lie, in order."""
    yield folder.with_name(f"{folder.name}-of-{recipe}")
    for number in itertools.count(2):
        yield folder.with_name(f"{folder.name}-of-{recipe}-{number}")

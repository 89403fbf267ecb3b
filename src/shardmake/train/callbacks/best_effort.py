"""Write files whose loss must not end training."""

import contextlib
import logging
from collections.abc import Iterator

from shardmake.core.errors import LinkError

logger = logging.getLogger(__name__)


class BestEffortWriter:
    """Writes that may fail, for example because other users have filled the file system."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._reported = False

    @contextlib.contextmanager
    def write(self) -> Iterator[None]:
        """Ignore what cannot be written, and log the first error."""
        try:
            yield
        except (OSError, LinkError) as error:
            if not self._reported:
                logger.warning("%s cannot be written: %s. Training continues without them.", self.what, error)
            self._reported = True

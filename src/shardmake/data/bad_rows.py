"""Rows that cannot be learned: causes, by which they are counted, and cures."""

from collections.abc import Sequence
from typing import Final

from shardmake.core.errors import DataError
from shardmake.data.placeholders import Piece, excerpt

LOST: Final = "a part that the chat template does not render"
_CURES: Final = {
    "content": "Use a role that the template renders (data.format: sharegpt reads names such as human and gpt), or "
    "name a template that does with data.chat_template.",
    "reasoning": "Remove the reasoning, or name a template that renders it with data.chat_template.",
    "call": "Name a template that renders calls of tools with data.chat_template.",
    "tools": "Name a template that renders tools with data.chat_template.",
}
_PARTS: Final = {"content": "the text", "reasoning": "the reasoning", "call": "a call of a tool", "tools": "the tools"}


class BadRowError(DataError):
    """A row that cannot be learned; rows with the same ``cause`` are counted together."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.cause, str(self))


def may_be_a_number(error: BadRowError, pieces: Sequence[Piece]) -> bool:
    """Return whether ``error`` may be about a number of a call, which a template may write in its own form."""
    return _PARTS["call"] in str(error) and any(piece.stand_in.startswith("77") for piece in pieces)


def lost(piece: Piece, role: str) -> BadRowError:
    """Return the error for a ``piece`` of a message with this ``role`` that is not in the rendered text."""
    where = f" of message {piece.message + 1} (role {role!r})" if piece.message >= 0 else ""
    return BadRowError(
        LOST,
        f"the chat template does not render {_PARTS[piece.kind]}{where}: {excerpt(piece.text)!r}. {_CURES[piece.kind]}",
    )


def closed_thought(piece: Piece, mark: str) -> BadRowError:
    """Return the error for a reasoning after the ``mark`` that ends it."""
    return BadRowError(
        "reasoning after its end",
        f"before the reasoning of message {piece.message + 1} ({excerpt(piece.text)!r}), the chat template writes "
        f"{mark}, which ends it. Write the reasoning under reasoning_content and not in the text, and let the "
        "generation prompt open it with data.template_arguments, such as enable_thinking: true.",
    )

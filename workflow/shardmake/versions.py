"""Versions of the libraries that a training and its checkpoints depend on."""

from importlib.metadata import version

LIBRARIES = ("torch", "transformers", "accelerate", "deepspeed", "shardmake")


def library_versions() -> dict[str, str]:
    """Versions that decide whether a checkpoint can be read again, and whether nodes can train together."""
    return {name: version(name) for name in LIBRARIES}

"""How the files of a model or an adapter are called."""

from dataclasses import dataclass
from typing import Literal

Format = Literal["safetensors", "bin"]


@dataclass(frozen=True)
class Naming:
    """The names of one kind of weights: one file, or several with an index."""

    stem: str
    suffix: Format

    @property
    def single(self) -> str:
        """The file of weights that are in one."""
        return f"{self.stem}.{self.suffix}"

    @property
    def index(self) -> str:
        """The file that says which tensor is in which file."""
        return f"{self.single}.index.json"

    def file(self, number: int, count: int) -> str:
        """File ``number`` (from 0 on) of ``count``."""
        return self.single if count == 1 else f"{self.stem}-{number + 1:05d}-of-{count:05d}.{self.suffix}"


MODEL = Naming("model", "safetensors")
MODEL_BIN = Naming("pytorch_model", "bin")
ADAPTER = Naming("adapter_model", "safetensors")
ADAPTER_BIN = Naming("adapter_model", "bin")

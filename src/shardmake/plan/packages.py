"""Optional packages of a run that have to be installed."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from packaging.version import Version

from shardmake.config.models import Run
from shardmake.memory.optimizer_trial import optimizer_spec


def missing_packages(run: Run) -> list[tuple[str, str]]:
    """Return each setting of ``run`` whose optional package is not installed, with the package's name."""
    wanted = {
        "loss: fused": "liger-kernel" if run.loss == "fused" else "",
        f"optimizer: {run.optimizer}": optimizer_spec(run.optimizer).package,
        f"method: {run.method}": run.method_spec.package,
    }
    return [
        (setting, package)
        for setting, package in wanted.items()
        if package and find_spec(package.replace("-", "_")) is None
    ]


def has_flash_attention_2() -> bool:
    """Return True if flash-attn 2 is installed; flash-attn 4 has the same import name and is another package.

    transformers accepts the same versions, but only where it finds a GPU. The nodes ask it, and import the package.
    """
    try:
        return find_spec("flash_attn") is not None and (2, 3, 3) <= Version(version("flash-attn")).release < (3,)
    except PackageNotFoundError:
        return False


def wrong_packages(run: Run) -> Iterator[str]:
    """Yield the missing packages, without which the ranks would fail or fall back."""
    for setting, package in missing_packages(run):
        yield f"{setting} needs the package {package}, which is not installed. Run: pip install {package}"
    if run.attention == "flash" and not run.script and not has_flash_attention_2():
        yield (
            "attention: flash needs the package flash-attn 2 (2.3.3 or newer), which is not installed. "
            "Take attention: varlen, which is a part of torch, or run: pip install flash-attn --no-build-isolation"
        )

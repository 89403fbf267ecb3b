"""How much a node's GPUs are used while its ranks run."""

import threading

from shardmake.launch.gpu_status import list_gpus, visible_gpus
from shardmake.run.attempt import GpuUse


class GpuSampler(threading.Thread):
    """Asks nvidia-smi every ``seconds`` until ``ended`` is set; GPUs that it does not answer for have no mean.

    ``visible`` is ``CUDA_VISIBLE_DEVICES``.
    """

    def __init__(self, visible: str | None, seconds: float = 30.0) -> None:
        super().__init__(daemon=True)
        self.ended = threading.Event()
        self._visible, self._seconds = visible, seconds
        self._sums: dict[str, tuple[int, float, float | None]] = {}

    def run(self) -> None:
        """Add up the samples."""
        while not self.ended.wait(self._seconds):
            for gpu in visible_gpus(list_gpus() or [], self._visible):
                if gpu.percent is not None:
                    count, percent, watts = self._sums.get(gpu.number, (0, 0.0, 0.0))
                    watts = None if watts is None or gpu.watts is None else watts + gpu.watts
                    self._sums[gpu.number] = (count + 1, percent + gpu.percent, watts)

    def means(self) -> list[GpuUse]:
        """Return the means so far, by GPU."""
        return [
            GpuUse(number=number, percent=percent / count, watts=None if watts is None else watts / count)
            for number, (count, percent, watts) in self._sums.copy().items()
        ]

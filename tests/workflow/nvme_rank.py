"""One rank of a training with offload to NVMe: `shardmake.train` behind `tests.aio_at_once`."""

import tests.aio_at_once  # noqa: F401
from shardmake.train.__main__ import main

main()

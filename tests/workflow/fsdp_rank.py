"""One rank of a training under FSDP on the CPU: `shardmake.train` behind the test-only shim."""

import tests.fsdp_on_cpu  # noqa: F401
from shardmake.train.__main__ import main

main()

"""Run `shardmake.train` for one rank under FSDP on the CPU, with the test-only shim."""

import tests.fsdp_on_cpu  # noqa: F401
from shardmake.train.__main__ import main

main()

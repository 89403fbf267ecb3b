"""TRL's command `trl sft` as a script."""

import runpy

runpy.run_module("trl.scripts.sft", run_name="__main__")

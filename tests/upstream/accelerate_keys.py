"""Accelerate ignores keys of its configuration file, silently."""

import tempfile
from pathlib import Path

from accelerate.commands.launch import _validate_launch_command, launch_command_parser

file = Path(tempfile.mkdtemp()) / "accelerate.yaml"
text = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: 'no'\n"
file.write_text(f"{text}enable_cpu_affinity: true\nsame_network: true\n")
arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(file), "train.py"]))
for key, written in {"enable_cpu_affinity": True, "same_network": True, "num_processes": 2}.items():
    print(f"{key}: {written} in the file, {getattr(arguments, key)} in the launcher")

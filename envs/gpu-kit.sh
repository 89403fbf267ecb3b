#!/bin/sh
# On a GPU machine: install the wheels of `make gpu-kit` beside what it has, without a network, and run the prepared
# cases. Options go to `python -m benchmarks.gpu_kit`. KIT names the folder and PYTHON the interpreter with torch.
set -e
cd "$(dirname "$0")/.."
kit=${KIT:-build/gpu-kit} python=${PYTHON:-python3}
if [ -d "$kit/wheels" ] && [ ! -d "$kit/site" ]; then
  "$python" -m pip install -q --no-index --no-deps --no-compile --target "$kit/site.new" "$kit"/wheels/*.whl
  mv "$kit/site.new" "$kit/site"
fi
site=$(realpath -m "$kit/site")
"$python" -m compileall -q -j 0 src "$site" > /dev/null 2>&1 &  # else each of the first processes does it
export PATH="$site/bin:$PATH" PYTHONPATH="$PWD/src:$PWD:$site${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m benchmarks.gpu_kit "$kit" "$@"

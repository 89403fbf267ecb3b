#!/usr/bin/env bash
# Install the system packages that Shardmake needs: a compiler for `system.sh demo`, also Slurm for `system.sh test`.
# As root on Debian or Ubuntu the script installs them; otherwise it reports what is missing.
set -euo pipefail
purpose=${1:?usage: system.sh demo|test}
python=${PYTHON:-python3}

case $PWD in
*[\"\$\`\\]*)
  echo "Cannot install in $PWD. The shell would run parts of this path in the scripts of .venv/bin, which pip writes." \
    "Move the folder to a path without \", \$, \` and \\." >&2
  exit 1
  ;;
esac

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "$python is older than Python 3.11. Name a later one: make $purpose PYTHON=python3.12" >&2; exit 1; }

required=()
command -v g++ >/dev/null || required+=(g++) # DeepSpeed compiles its collectives for the CPU when it is first started
"$python" -c 'import ensurepip, venv' 2>/dev/null || required+=(python3-venv)
[ -f "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] || required+=(python3-dev)

cluster=()
if [ "$purpose" = test ]; then
  command -v slurmctld >/dev/null || cluster+=(slurmctld)
  command -v slurmd >/dev/null || cluster+=(slurmd slurm-wlm-basic-plugins)
  command -v sinfo >/dev/null || cluster+=(slurm-client)
  command -v munged >/dev/null || cluster+=(munge)
  command -v ip >/dev/null || cluster+=(iproute2)
  command -v slurmdbd >/dev/null || cluster+=(slurmdbd mariadb-server)
  [ -f /usr/include/libaio.h ] || cluster+=(libaio-dev) # for DeepSpeed's offload to NVMe
fi

missing=("${required[@]}" "${cluster[@]}")
[ ${#missing[@]} -eq 0 ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo "Installing ${missing[*]}"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq
  apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null
  exit 0
fi
[ ${#cluster[@]} -eq 0 ] ||
  echo "Missing: ${cluster[*]}. The tests of Slurm and NVMe offload are skipped. On Debian: sudo apt-get install ${cluster[*]}" >&2
[ ${#required[@]} -eq 0 ] ||
  { echo "Missing: ${required[*]}. On Debian: sudo apt-get install ${required[*]}" >&2; exit 1; }

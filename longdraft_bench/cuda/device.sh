#!/usr/bin/env bash
# Use a visit to a machine with a CUDA device in full. It needs no network and installs nothing but longdraft itself.
#
#   longdraft_bench/cuda/device.sh OUTPUT [SLICES] [PREVIOUS]
#
#   OUTPUT    folder of the results: one JSON document for each slice, log.txt, compiled kernels
#   SLICES    "first length kernels families whole" by default; each ends in time by itself (330, 330, 360, 480
#             and 540 s). "decide" stands alone (570 s): what a visit of ten minutes should measure
#   PREVIOUS  folder of an earlier visit, which is continued
#
# LONGDRAFT_CUDA_OFF turns parts of the code off (longdraft/kernels/switches.py), for example
# LONGDRAFT_CUDA_OFF="DRAFTS_LAYERS WRITES_AHEAD". A part that fails is tried once more with all of them off.
# PYTHON is the interpreter that has PyTorch for CUDA (default: python3). Further arguments of `longdraft bench cuda` can
# be given in ARGUMENTS, for example ARGUMENTS="--prompt-file novel.txt". A rehearsal without a device:
#   ARGUMENTS=--interpret longdraft_bench/cuda/device.sh /tmp/rehearsal first
set -uo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
output=$(realpath -m "${1:?name a folder for the results}")
slices=${2:-first length kernels families whole}
previous=${3:+--previous $(realpath "$3")}
cd "$root" || exit 1
mkdir -p "$output"
if ! timeout 200 make --no-print-directory install-offline PYTHON="$python" >"$output/install.txt" 2>&1; then
    echo "longdraft was not installed (see $output/install.txt): it runs from its folder, without compiled CPU kernels"
    export PYTHONPATH=$root
fi
# shellcheck disable=SC2086
exec "$python" -m longdraft bench cuda --output "$output" --slices "$slices" $previous ${ARGUMENTS:-}

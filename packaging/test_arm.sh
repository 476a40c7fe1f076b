#!/bin/bash
# The kernels for ARM processors (make test-arm, make test-arm-all): on such a machine natively, elsewhere cross-compiled and in
# an emulator. It builds in build/arm. Exit code 77: something is missing, which a line names.
#
#   packaging/test_arm.sh PYTHON [all]
#
#   PYTHON  of a set-up with longdraft's tools for tests
#   all     also the kernels' tests and the equality tests
set -euo pipefail
python=$(cd "$(dirname "$1")" && pwd)/$(basename "$1") extent=${2:-short} folder=build/arm
skip() { echo "ARM is not tested: $1"; exit 77; }

is_native=$([[ $(uname -m) =~ ^(aarch64|arm64)$ ]] && echo yes || true)
if [ ! "$is_native" ]; then
    missing=()
    for tool in aarch64-linux-gnu-g++ qemu-aarch64-static apt-get dpkg; do command -v $tool > /dev/null || missing+=($tool); done
    [ ${#missing[@]} -eq 0 ] || skip "${missing[*]} missing; on Debian: apt install g++-aarch64-linux-gnu qemu-user-static"
fi
mkdir -p $folder
"$python" -m pip install --quiet --disable-pip-version-check cmake nanobind ninja || skip "its build tools cannot be installed"
PATH="$(dirname "$python"):$PATH"
short=(tests/unit/test_kernel_bits.py)
all=("${short[@]}" tests/unit/test_kernels.py tests/unit/test_groups.py tests/unit/test_int4.py tests/unit/test_int8.py
     tests/unit/test_gpt_oss.py tests/promise/test_equality.py)
[ "$extent" = all ] && tests=("${all[@]}") || tests=("${short[@]}")

build() { cmake -S . -B $folder/build -G Ninja -DCMAKE_BUILD_TYPE=Release -DLONGDRAFT_CHECK=ON -DPython_EXECUTABLE="$python" "$@" > $folder/log; }

if [ "$is_native" ]; then
    build && ninja -C $folder/build kernel_check
    $folder/build/kernel_check
    exec "$python" -m pytest -m "not full" "${tests[@]}"
fi

[ -x $folder/python ] || packaging/emulated_python.sh $folder "$python" || skip "the emulated Python needs Debian's and PyPI's packages"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
root=$PWD/$folder/root
[ -d "$root/usr/include/python$version" ] || skip "Debian's Python is not $version; make clean, then give one that is with PYTHON=..."
build -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
    -DCMAKE_CXX_FLAGS="-isystem $root/usr/include" -DPython_INCLUDE_DIR="$root/usr/include/python$version" \
    -DSKBUILD_SOABI="cpython-${version/./}-aarch64-linux-gnu"
ninja -C $folder/build
cp $folder/build/_cpu.*aarch64*.so longdraft/kernels/cpu/
rm -rf $folder/site/longdraft-*.dist-info  # its entry points are commands, `bench` among them
cp -r "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"/longdraft-*.dist-info $folder/site/
for processor in max cortex-a76 cortex-a72; do  # with bfloat16, with dot products, without both
    qemu-aarch64-static -L "$root" -cpu $processor $folder/build/kernel_check
done
few=(-p no:cacheprovider -p no:xdist --timeout 3600 --most-examples 4 -m "not full")
$folder/python -m pytest "${few[@]}" "${tests[@]}"

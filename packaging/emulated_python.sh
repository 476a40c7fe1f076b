#!/bin/bash
# A Python for ARM processors with PyTorch, which runs in an emulator on this machine. Nothing is installed in the system:
# Debian's packages are unpacked in FOLDER, and wheels go there too. It takes 2 GB and a few minutes, once.
#
#   packaging/emulated_python.sh FOLDER PYTHON    then: FOLDER/python -m pytest tests/unit/test_kernels.py
#
#   PYTHON  of this machine, for pip; it has the version of Debian's Python
#
# QEMU_CPU selects the processor: max (default), cortex-a76 (without bfloat16), cortex-a72 (without dot products).
set -euo pipefail
mkdir -p "$1"
folder=$(realpath "$1") python=$2

# Debian's packages, by an apt with lists and settings of its own.
mkdir -p "$folder"/apt/{lists/partial,cache/archives/partial} "$folder/root"
: > "$folder/apt/status"
cat > "$folder/apt/apt.conf" <<SETTINGS
Dir::State::Lists "$folder/apt/lists"; Dir::State::status "$folder/apt/status"; Dir::Cache "$folder/apt/cache";
APT::Architecture "arm64"; APT::Architectures "arm64"; APT::Install-Recommends "0";
SETTINGS
export APT_CONFIG="$folder/apt/apt.conf"
apt-get update -qq
apt-get install -y -qq --download-only python3 python3-venv libpython3-dev libgomp1 libstdc++6 libc6 libgfortran5 > "$folder/apt/log"
for package in "$folder"/apt/cache/archives/*.deb; do dpkg -x "$package" "$folder/root"; done
unset APT_CONFIG

# Wheels. 2.9.1 is the last PyTorch for Linux on ARM at PyPI that needs no CUDA.
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
wheels=(--quiet --disable-pip-version-check --target "$folder/site" --upgrade --implementation cp --python-version "$version"
        --only-binary=:all:)
for glibc in 2_17 2_26 2_27 2_28; do wheels+=(--platform "manylinux_${glibc}_aarch64"); done
wheels+=(--platform manylinux2014_aarch64)
export PIP_CONSTRAINT=
"$python" -m pip install "${wheels[@]}" --no-deps torch==2.9.1
"$python" -m pip install "${wheels[@]}" filelock fsspec huggingface-hub hypothesis jinja2 networkx numpy pytest pytest-timeout rich \
    safetensors scipy sympy tokenizers transformers typer typing-extensions

cat > "$folder/python" <<RUN
#!/bin/bash
exec qemu-aarch64-static -L "$folder/root" -cpu "\${QEMU_CPU:-max}" -E OMP_NUM_THREADS=1 -E PYTHONDONTWRITEBYTECODE=1 \\
    -E PYTHONPATH="$folder/site:\$PWD:\$PWD/tests" "$folder/root/usr/bin/python$version" "\$@"
RUN
chmod +x "$folder/python"
"$folder/python" -c 'import numpy, platform; print("Python", platform.python_version(), platform.machine())'

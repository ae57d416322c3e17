#!/usr/bin/env bash
# Build Horovod into the Python environment that is active: scripts/install_horovod.sh
#
# PYTHON=... picks another interpreter. HOROVOD_SDIST=horovod-0.28.1.tar.gz builds from that file, without a network.
# Needs g++ and make; MPI is built in where mpicxx is found (Debian: openmpi-bin libopenmpi-dev), and NCCL where nvcc
# is found (in CUDA_HOME, by default /usr/local/cuda), with or without a GPU: a login node seldom has one.
# HOROVOD_GPU_OPERATIONS=NCCL insists on it, HOROVOD_GPU_OPERATIONS= leaves it out. Takes about three minutes on two
# cores, also with NCCL for one kind of GPU: HOROVOD_BUILD_CUDA_CC_LIST=90 is H100. All kinds take longer.
#
# HOROVOD_WHEELS=FOLDER keeps the wheel there, and the next time takes it instead of a build: in an image, or on a
# machine with the same Python, torch and MPI. It has MPI and NCCL if the build had them.
#
# 0.28.1 (2023) is the newest Horovod, and there is no wheel. It does not build unchanged:
#   - CMake 4 rejects the minimum version that its bundled gloo names: CMAKE_POLICY_VERSION_MINIMUM;
#   - the headers of torch 2.15 need C++20 (those of 2.11 accept it), and Horovod sets 14;
#   - g++ 13 misses an include of <string>, and g++ 14 refuses to assign to a const member (Horovod's issue 3957);
#   - with a CUDA build of torch and an nvcc it looks for the whole CUDA toolkit, even to build without NCCL.
#
# Two mistakes are mended:
#   - with Gloo, a second hvd.init() after hvd.shutdown() can abort: when all ranks have left one group (global, local or
#     cross), horovodrun forgets who has left the others, and then hands out the addresses of ranks that are gone;
#   - Open MPI 5 refuses horovodrun's -bind-to and -map-by. Open MPI 4 takes two dashes as well.
#
# One more thing is changed: with Gloo, a rank that waits for the others sleeps 50 us between two looks, after the first
# millisecond. Unchanged, it polls, and so takes the core of one that computes (docs/cpu.md). With MPI it still polls:
# asleep, four ranks that srun had started on two busy cores were stuck in their first all-reduce for 15 s. (With sleep
# a run whose rank on another node is stopped failed 3 of 3 times on busy cores, without it 0 of 5.)
set -euo pipefail

PYTHON=${PYTHON:-python3}
VERSION=0.28.1
SHA256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$PYTHON" -c 'import torch' || { echo "install torch first: pip install -r requirements.txt" >&2; exit 2; }
wheels=${HOROVOD_WHEELS:-}
# A wheel fits one torch.
[ -z "$wheels" ] || wheels=$wheels/torch-$("$PYTHON" -c 'import torch; print(torch.__version__)')
if compgen -G "$wheels/horovod-$VERSION-*.whl" > /dev/null; then
    "$PYTHON" -m pip install --quiet --no-deps --force-reinstall "$wheels"/horovod-$VERSION-*.whl
    "$PYTHON" -m pip install --quiet 'setuptools<81' packaging psutil cloudpickle pyyaml cffi
    "$PYTHON" -c 'import horovod.torch'
    exec "$PYTHON" -m horovod.runner.launch --check-build
fi
command -v "${CXX:-g++}" > /dev/null || { echo "Horovod needs a C++ compiler: apt-get install g++" >&2; exit 2; }
command -v make > /dev/null || { echo "Horovod needs make: apt-get install make" >&2; exit 2; }
# pip and the compiler say nothing until they end. (Not `sleep` in a loop, which would outlive this script.)
"$PYTHON" -c '
import time
for minutes in range(60):
    print(f"building Horovod: {minutes} min so far; it takes 3 on two cores, for all kinds of GPUs 12 and more", flush=True)
    time.sleep(60)' &
trap 'kill $! 2> /dev/null || true; rm -rf "$work"' EXIT
"$PYTHON" -m pip install --quiet 'setuptools<81' wheel packaging psutil cloudpickle pyyaml cffi cmake
PATH=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("scripts"))'):$PATH
MAKEFLAGS=-j$(nproc)  # and not those of a make that started this script
export MAKEFLAGS

sdist=${HOROVOD_SDIST:-$work/horovod-$VERSION.tar.gz}
# pip compares the hash before it runs the setup.py of what it has fetched.
echo "horovod==$VERSION --hash=sha256:$SHA256" > "$work/horovod.txt"
[ -n "${HOROVOD_SDIST:-}" ] || "$PYTHON" -m pip download --quiet --no-deps --no-binary :all: --no-build-isolation \
    --require-hashes --requirement "$work/horovod.txt" --dest "$work"
echo "$SHA256  $sdist" | sha256sum --check --quiet
tar -xzf "$sdist" -C "$work"
cd "$work/horovod-$VERSION"

patch_line() {  # FILE OLD NEW: replace OLD by NEW, and stop if OLD is not there
    grep -q -- "$2" "$1" || { echo "$1 does not contain '$2': is this Horovod $VERSION?" >&2; exit 1; }
    sed -i "s/$2/$3/" "$1"
}
patch_line setup.py RelWithDebInfo Release  # debugging symbols take a third of the time
patch_line CMakeLists.txt 'CMAKE_CXX_STANDARD 14' 'CMAKE_CXX_STANDARD 20'
patch_line horovod/torch/CMakeLists.txt 'CMAKE_CXX_STANDARD 14' 'CMAKE_CXX_STANDARD 20'
patch_line horovod/common/ops/cuda/CMakeLists.txt 'CMAKE_CUDA_STANDARD 11' 'CMAKE_CUDA_STANDARD 17'  # for g++ 14
patch_line horovod/common/group_table.h '#include <queue>' '#include <queue>\n#include <string>'
patch_line third_party/flatbuffers/include/flatbuffers/stl_emulation.h 'pointer const data_;' 'pointer data_;'
patch_line third_party/flatbuffers/include/flatbuffers/stl_emulation.h 'const size_type count_;' 'size_type count_;'
patch_line horovod/torch/mpi_ops_v2.cc 'void WaitAndClear(int handle) {' \
    '&\n  auto patience = std::chrono::steady_clock::now() + std::chrono::milliseconds(1);'
patch_line horovod/torch/mpi_ops_v2.cc 'std::this_thread::yield();' \
    'if (horovod_mpi_enabled() || std::chrono::steady_clock::now() < patience) &'\
'\n      else std::this_thread::sleep_for(std::chrono::microseconds(50));'
patch_line horovod/runner/http/http_server.py 'server.finished_list.clear()' 'server.finished_list[scope].clear()'
patch_line horovod/runner/mpi_run.py "'-bind-to none', '-map-by slot'" "'--bind-to none', '--map-by slot'"

export CMAKE_POLICY_VERSION_MINIMUM=3.5
export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1
if command -v mpicxx > /dev/null; then
    export HOROVOD_WITH_MPI=1
else
    export HOROVOD_WITHOUT_MPI=1
    echo "mpicxx not found: building with gloo only" >&2
fi
# torch brings NCCL as libnccl.so.2 (the linker wants a libnccl.so) and its header; CUDA and torch must match
CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
nccl=$("$PYTHON" -c 'import nvidia.nccl; print(list(nvidia.nccl.__path__)[0])' 2> /dev/null || true)
if [ -x "$CUDA_HOME/bin/nvcc" ] && [ -n "$nccl" ]; then found=NCCL; else found=; fi
if [ "${HOROVOD_GPU_OPERATIONS-$found}" = NCCL ]; then
    test -x "$CUDA_HOME/bin/nvcc" || { echo "no $CUDA_HOME/bin/nvcc: set CUDA_HOME to a CUDA toolkit" >&2; exit 2; }
    if [ -n "$nccl" ]; then
        mkdir "$work/nccl"
        ln -s "$nccl/lib/libnccl.so.2" "$work/nccl/libnccl.so"
        export HOROVOD_NCCL_INCLUDE=$nccl/include HOROVOD_NCCL_LIB=$work/nccl
    fi
    export HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED
    # torch, CMake and Horovod each look for the toolkit in a place of their own, and an nvcc on the PATH can mislead them
    export CUDA_HOME CUDAToolkit_ROOT=$CUDA_HOME HOROVOD_CUDA_HOME=$CUDA_HOME PATH=$CUDA_HOME/bin:$PATH
else
    unset HOROVOD_GPU_OPERATIONS
    patch_line cmake/Modules/FindPytorch.cmake 'print(True if ((torch.version.cuda .*)' 'print(False)'
    echo "building without NCCL, which needs $CUDA_HOME/bin/nvcc and the NCCL of torch's packages" >&2
fi

"$PYTHON" -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir "$work/wheel" .
"$PYTHON" -m pip install --quiet --no-deps --force-reinstall "$work"/wheel/*.whl
[ -z "$wheels" ] || { mkdir -p "$wheels" && cp "$work"/wheel/*.whl "$wheels"; }
cd /
"$PYTHON" -m horovod.runner.launch --check-build

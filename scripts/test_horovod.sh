#!/usr/bin/env bash
# Run Horovod's own tests of torch with the Horovod that is installed, on two processes: with Gloo, and then with MPI.
#
#     git clone --branch v0.28.1 https://github.com/horovod/horovod
#     pip install pytest mock
#     scripts/test_horovod.sh horovod
#     scripts/test_horovod.sh horovod -k allgather
#
# What follows the folder is for pytest. (The source on PyPI has no tests.)
#
# Left out:
#   - the optimizer Muon, which takes matrices only. Three tests give a model with biases to each optimizer of torch:
#     test_broadcast_state, test_broadcast_state_options, test_force_allreduce;
#   - test_horovod_join_broadcast: it names a GPU also where there is none. With NCCL built in, that rank fails, and the
#     other waits for it.
set -euo pipefail

tests=${1:-}/test/parallel
[ -f "$tests/test_torch.py" ] || { echo "test_horovod.sh: give a folder with the source of Horovod v0.28.1" >&2; exit 2; }
python -c 'import mock, pytest' || { echo "test_horovod.sh: pip install pytest mock" >&2; exit 2; }
cd "$tests"

# The tests find the optimizers by the name of their module.
code='
import sys, pytest, torch
if hasattr(torch.optim, "Muon"):
    torch.optim.Muon.__module__ = "left out"
sys.exit(pytest.main(sys.argv[1:]))'
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export OMPI_MCA_mpi_yield_when_idle=1  # a rank that waits for MPI frees its core, as in hvd.py
left_out=test_torch.py::TorchTests::test_horovod_join_broadcast
controllers=(--gloo)
if python -c 'import horovod.torch as hvd; exit(not hvd.mpi_built())'; then controllers+=(--mpi); fi
for controller in "${controllers[@]}"; do
    echo "horovodrun $controller"
    horovodrun "$controller" -np 2 python -c "$code" -q -p no:cacheprovider --deselect "$left_out" \
        test_torch.py "${@:2}"
done

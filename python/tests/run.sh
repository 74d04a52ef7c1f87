#!/bin/sh
# run.sh NAME: runs NAME.py here, or the examples in the package's docstrings, with the environment that ./dev makes.
set -eu
cd -- "$(dirname -- "$0")/.."
python=../build/python-venv/bin/python
if [ ! -e ../build/python-venv/requirements.txt ]; then
    echo "skipped: there is no build/python-venv"
    exit 77
fi
unset PYTHONDONTWRITEBYTECODE
export PYTHONPATH="$PWD" PYTHONPYCACHEPREFIX="$PWD/../build/pycache"
case $1 in
# These need PyTorch; `./dev test torch` runs the examples of tensorbus.engine.
docstrings) exec "$python" -m pytest -q -p no:cacheprovider --doctest-modules tensorbus \
    --ignore tensorbus/etha --ignore tensorbus/engine --ignore tensorbus/vllm \
    --ignore tensorbus/sglang --ignore tensorbus/verl.py ;;
*) exec "$python" -m pytest -q -p no:cacheprovider "tests/$1.py" ;;
esac

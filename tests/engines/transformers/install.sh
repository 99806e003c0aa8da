#!/bin/bash
# transformers 5.24 for CPUs, and what its suite needs: install.sh FOLDER makes a virtual environment of about 1 GB.
set -euo pipefail

folder=${1:?usage: install.sh FOLDER}
recipe="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

python3.11 -m venv "$folder"
pip() { "$folder/bin/python" -m pip "$@"; }
pip install --quiet --upgrade pip==24.0
# First and pinned: without a version, pip takes a build with 5 GB of CUDA libraries.
pip install --quiet torch==2.13.0
pip install --quiet --requirement "$recipe/requirements.txt"

"$folder/bin/python" -W ignore -c \
    "import torch, transformers; print('transformers', transformers.__version__, 'with torch', torch.__version__)"

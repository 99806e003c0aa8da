#!/bin/bash
# SGLang 0.5.23 for CPUs, and what its suite needs: install.sh FOLDER makes a virtual environment of about 1.7 GB.
#
# The engine's wheel asks for CUDA packages. None of them is needed for text models on the torch_native attention backend:
# they are left out, and the two that are imported all the same, sgl_kernel and torchvision, are stood in for by stubs/.
set -euo pipefail

folder=${1:?usage: install.sh FOLDER}
recipe="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
version=0.5.23

python3.11 -m venv "$folder"
pip() { "$folder/bin/python" -m pip "$@"; }
pip install --quiet --upgrade pip==24.0
# First and pinned: without a version, pip takes a build with 5 GB of CUDA libraries.
pip install --quiet torch==2.13.0
pip install --quiet --requirement "$recipe/requirements.txt"
pip install --quiet --no-deps xgrammar==0.2.9 "sglang==$version"

site=$("$folder/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
cp -r "$recipe"/stubs/* "$site/"
# The engine asks which version of the distribution sglang-kernel is installed.
info="$site/sglang_kernel-0.4.10.dist-info"
mkdir "$info"
printf 'Metadata-Version: 2.1\nName: sglang-kernel\nVersion: 0.4.10\n' >"$info/METADATA"

SGLANG_USE_CPU_ENGINE=1 "$folder/bin/python" -W ignore -c \
    "import sglang, torch; import sglang.srt.mem_cache.memory_pool; print('sglang', sglang.__version__, 'with torch', torch.__version__)"

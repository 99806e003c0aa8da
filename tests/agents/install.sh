#!/bin/bash
# Web servers with worker processes, and the other agents that are put into a process from outside: install.sh FOLDER
# makes a virtual environment of about 110 MB. No torch: the suite uses stand-in engines.
set -euo pipefail

folder=${1:?usage: install.sh FOLDER}
recipe="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

python3.11 -m venv "$folder"
"$folder/bin/python" -m pip install --quiet --requirement "$recipe/requirements.txt"

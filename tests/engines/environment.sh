#!/bin/bash
# A virtual environment with a real engine in it: environment.sh ENGINE prints its folder, building it first if need be.
# ENGINE may also be the path of another recipe from here, as ../agents is.
#
# The recipe is ENGINE/install.sh, ENGINE/requirements.txt and ENGINE/stubs beside this script. Each state of the recipe
# has a folder of its own in the cache, so a changed recipe never meets an old environment. Two callers at once build it
# once; a build that was interrupted is begun anew.
set -euo pipefail

engine=${1:?usage: environment.sh ENGINE (a folder beside this script with an install.sh)}
recipe="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/$engine"
if [[ ! -f "$recipe/install.sh" ]]; then
    echo "environment.sh: no recipe for engine '$engine': $recipe/install.sh does not exist" >&2
    exit 2
fi

cache="${XDG_CACHE_HOME:-$HOME/.cache}/kvcanary-agent"
shopt -s nullglob
hash=$(cat "$recipe/install.sh" "$recipe/requirements.txt" "$recipe"/stubs/*/*.py | sha256sum | cut -c1-12)
folder="$cache/$(basename "$engine")-$hash"
finished="$folder/finished"

mkdir -p "$cache"
exec {lock}>"$folder.lock"
flock "$lock"
if [[ ! -f "$finished" ]]; then
    # Virtual environments hold their own path, so it is built in place, and marked when it is whole.
    rm -rf "$folder"
    bash "$recipe/install.sh" "$folder" </dev/null >&2
    touch "$finished"
fi
echo "$folder"

#!/bin/sh
# Install Azurite, the Azure Blob emulator that tests/kit/servers.py starts. Needs node and npm.
set -eu
exec npm install --no-audit --no-fund --prefix "$HOME/.cache/cloudtrain-azurite" azurite@3.35.0
